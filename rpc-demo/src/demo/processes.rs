//! The processes of the demonstration, which all run this program: one server, and one client at a
//! time.
//!
//! | state of a process | on | next |
//! |---|---|---|
//! | none | `start`, `transfer` | runs |
//! | runs | it ends by itself, or `stop` (the server) | none |
//! | runs | `kill`: a failure or a signal | none, and it is reaped, so no process writes files |

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::report::Run;
use crate::cli::Demo;
use crate::costs::Costs;
use crate::failure::Failure;
use crate::names::Shown;
use crate::serve::{LISTENING, Spent};

/// Time limit for the server to start, to answer and to stop.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum of the default number of parallel transfers.
const JOBS_MAX: u16 = 8;

/// The name of the TCP path.
pub(super) const TCP: &str = "tcp";

/// The path that a client uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The best path that the environment allows.
    Best,
    Tcp,
}

#[derive(Default)]
pub(super) struct Processes {
    server: Option<Server>,
    client: Option<Child>,
}

struct Server {
    url: String,
    child: Child,
    /// Closing this pipe stops the server. The server answers each line with its costs so far.
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

/// A client's summary, as `--json` prints it.
#[derive(Debug, Deserialize)]
struct Said {
    bytes: u64,
    seconds: f64,
    costs: Costs,
    route: SaidRoute,
}

#[derive(Debug, Deserialize)]
struct SaidRoute {
    path: String,
    shown: String,
    write_bytes: u64,
    lent_bytes: u64,
    send_bytes: u64,
    tcp_bytes: u64,
    copied_bytes: u64,
}

/// A successful transfer.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) run: Run,
    /// The path's name: `tcp`, `shm`, `verbs`.
    pub(super) path: String,
    /// The path with its device, or with the reason for TCP.
    pub(super) shown: String,
    /// The fraction of the payload that was carried by WRITEs, 0.0 to 1.0.
    pub(super) write_share: f64,
    /// The fraction of the payload that the receiver read in the sender's memory, 0.0 to 1.0.
    pub(super) lent_share: f64,
}

impl Processes {
    /// Starts the server. Returns its URL and its process ID.
    pub(super) async fn start(
        &mut self,
        program: &Path,
        root: &Path,
        args: &Demo,
    ) -> Result<(String, u32), Failure> {
        let mut child = Command::new(program)
            .arg("serve")
            .args(args.lend.then_some("--lend"))
            .arg("--until-eof")
            .arg("--root")
            .arg(root)
            .arg("--addr")
            .arg(args.addr.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Failure::io("cannot start the demo's server", &error))?;
        let pid = child.id().unwrap_or_default();
        let failed = |why: &str| {
            Failure::new(
                "the demo's server did not start",
                why.to_owned(),
                "see its messages above",
            )
        };
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes"));
        };
        let stdout = BufReader::new(stdout);
        let server = self.server.insert(Server { url: String::new(), child, stdin, stdout });
        let line = server.line().await.map_err(|why| failed(&why))?;
        let Some(addr) = line.strip_prefix(LISTENING).and_then(|rest| rest.split(',').next())
        else {
            return Err(failed(&format!("it said {}", Shown(line.trim_end()))));
        };
        server.url = format!("http://{addr}");
        Ok((server.url.clone(), pid))
    }

    /// Runs a client, `verb from to`, until it ends.
    pub(super) async fn transfer(
        &mut self,
        program: &Path,
        args: &Demo,
        way: Way,
        [verb, from, to]: [&OsStr; 3],
    ) -> Result<Done, Failure> {
        let before = self.spent().await?;
        let server = self.server.as_ref().map(|server| server.url.as_str()).unwrap_or_default();
        let mut command = Command::new(program);
        command.arg(verb).arg("--json").arg("--server").arg(server);
        if let Some(bytes) = args.chunks.chunk_size {
            command.arg("--chunk-size").arg(bytes.to_string());
        }
        command.arg("--jobs").arg(args.jobs.unwrap_or_else(jobs).to_string());
        command.args(args.lend.then_some("--lend"));
        match way {
            Way::Tcp => {
                command.env("TONIC_RDMA", "off");
            }
            Way::Best => {
                command.args(args.require.require_rdma.then_some("--require-rdma"));
                command.args(args.require.require_fast_path.then_some("--require-fast-path"));
            }
        }
        command.arg(from).arg(to).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        let what = format!("the demo's {}", Shown(&verb.to_string_lossy()));
        let failed =
            |why: String| Failure::new(format!("{what} failed"), why, "see its messages above");
        let cannot = |error: std::io::Error| Failure::io(format!("cannot run {what}"), &error);
        let client = self.client.insert(command.spawn().map_err(cannot)?);
        let mut text = String::new();
        if let Some(mut stdout) = client.stdout.take() {
            stdout.read_to_string(&mut text).await.map_err(cannot)?;
        }
        let status = client.wait().await.map_err(cannot)?;
        self.client = None;
        if !status.success() {
            return Err(failed(status.to_string()));
        }
        let said: Said = parse(&text).map_err(failed)?;
        let spent = self.spent().await?;
        Ok(said.done(&before, &spent))
    }

    async fn spent(&mut self) -> Result<Spent, Failure> {
        let failed = |why| Failure::new("the demo's server failed", why, "see its messages above");
        let server = self.server.as_mut().ok_or_else(|| failed("it does not run".to_owned()))?;
        server.stdin.write_all(b"\n").await.map_err(|error| failed(error.to_string()))?;
        let line = server.line().await.map_err(failed)?;
        parse(&line).map_err(failed)
    }

    /// Stops the server gracefully, and checks its exit.
    pub(super) async fn stop(&mut self) -> Result<(), Failure> {
        let Some(Server { mut child, stdin, .. }) = self.server.take() else { return Ok(()) };
        drop(stdin);
        let ended = tokio::time::timeout(SERVER_TIMEOUT, child.wait()).await;
        match ended {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => {
                Err(Failure::new("the demo's server failed", status, "see its messages above"))
            }
            Ok(Err(error)) => Err(Failure::io("cannot wait for the demo's server", &error)),
            Err(_) => {
                end(child).await;
                Err(Failure::new("the demo's server did not stop", "it had a minute", ""))
            }
        }
    }

    /// Kills the processes that still run. Afterwards no process writes files.
    pub(super) async fn kill(&mut self) {
        if let Some(client) = self.client.take() {
            end(client).await;
        }
        if let Some(server) = self.server.take() {
            end(server.child).await;
        }
    }
}

/// The default number of parallel transfers. Both ends share this host's processors. Each transfer
/// waits most of the time, for a peer thread or for its own reads. In a measurement with one more
/// transfer than processors, a sixth of the processor time was idle.
fn jobs() -> u16 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(processors * 4).unwrap_or(u16::MAX).min(JOBS_MAX)
}

/// Kills a process and waits until it has ended.
async fn end(mut child: Child) {
    let ended = async {
        // The process may have ended by itself.
        let _ = child.start_kill();
        child.wait().await
    };
    match tokio::time::timeout(KILL_TIMEOUT, ended).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!("a process of the demo cannot be waited for: {error}"),
        Err(_) => tracing::warn!("a process of the demo does not end although it was killed"),
    }
}

impl Server {
    /// Reads the next line that the process prints.
    async fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        match tokio::time::timeout(SERVER_TIMEOUT, self.stdout.read_line(&mut line)).await {
            Ok(Ok(0)) => Err("it ended".to_owned()),
            Ok(Ok(_)) => Ok(line),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it was silent for a minute".to_owned()),
        }
    }
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("it said {}: {error}", Shown(text.trim_end())))
}

impl Said {
    /// `before` and `after` are the server's costs around the transfer.
    fn done(self, before: &Spent, after: &Spent) -> Done {
        let Said { bytes, seconds, costs, route } = self;
        let server = after.costs - before.costs;
        let files =
            [costs, server].map(|of| of.file_read_bytes + of.file_written_bytes + of.settled_bytes);
        let transport = route.copied_bytes + after.copied_bytes.saturating_sub(before.copied_bytes);
        Done {
            run: Run {
                bytes,
                seconds,
                cpu_seconds: costs.cpu_seconds + server.cpu_seconds,
                copied_bytes: files[0] + files[1] + transport + route.between(),
            },
            write_share: route.share(route.write_bytes),
            lent_share: route.share(route.lent_bytes),
            path: route.path,
            shown: route.shown,
        }
    }
}

impl SaidRoute {
    /// Returns `bytes` as a fraction of the payload, 0.0 to 1.0.
    fn share(&self, bytes: u64) -> f64 {
        let all = self.write_bytes + self.lent_bytes + self.send_bytes + self.tcp_bytes;
        bytes as f64 / (all as f64).max(1.0)
    }

    /// Bytes that processors copied between the two ends. A WRITE to shared memory is one copy.
    /// Over TCP the kernel copies into one socket and out of the other. A device's WRITE is not a
    /// copy, and lent data is not copied.
    fn between(&self) -> u64 {
        let written = if self.path == "shm" { self.write_bytes } else { 0 };
        written + 2 * self.tcp_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(path: &str, write_bytes: u64, lent_bytes: u64, tcp_bytes: u64) -> Said {
        let text = format!(
            r#"{{"command": "put", "bytes": 1000, "seconds": 2.0,
                "costs": {{"cpu_seconds": 0.5, "file_read_bytes": 1000, "file_written_bytes": 0}},
                "route": {{"path": "{path}", "shown": "{path} (x)", "write_bytes": {write_bytes},
                    "lent_bytes": {lent_bytes}, "send_bytes": 10, "tcp_bytes": {tcp_bytes}, "copied_bytes": 7}}}}"#
        );
        parse(&text).unwrap()
    }

    fn spent(cpu_seconds: f64, written: u64, copied_bytes: u64) -> Spent {
        let costs = Costs { cpu_seconds, file_written_bytes: written, ..Costs::default() };
        Spent { costs, copied_bytes }
    }

    #[test]
    fn both_ends_and_the_way_between_count() {
        let (before, after) = (spent(1.0, 50, 5), spent(2.0, 1050, 25));
        let shm = said("shm", 990, 0, 0).done(&before, &after);
        // The bytes that were read, written, copied by the transport at each end, and copied by
        // WRITEs.
        assert_eq!(shm.run.copied_bytes, 1000 + 1000 + 7 + 20 + 990);
        assert_eq!((shm.run.bytes, shm.run.seconds, shm.run.cpu_seconds), (1000, 2.0, 1.5));
        assert_eq!(
            (shm.path.as_str(), shm.shown.as_str(), shm.write_share),
            ("shm", "shm (x)", 0.99)
        );
        let lent = said("shm", 90, 900, 0).done(&before, &after);
        assert_eq!(lent.run.copied_bytes, 1000 + 1000 + 7 + 20 + 90);
        assert_eq!((lent.write_share, lent.lent_share), (0.09, 0.9));
        let verbs = said("verbs", 990, 0, 0).done(&before, &after);
        assert_eq!(verbs.run.copied_bytes, 1000 + 1000 + 7 + 20);
        let tcp = said("tcp", 0, 0, 990).done(&before, &after);
        assert_eq!(tcp.run.copied_bytes, 1000 + 1000 + 7 + 20 + 2 * 990);
        assert_eq!(tcp.write_share, 0.0);
    }

    #[test]
    fn what_cannot_be_understood_is_shown() {
        let error = parse::<Spent>("oh\u{7} no\n").unwrap_err();
        assert!(error.starts_with("it said oh") && !error.contains('\u{7}'), "{error}");
    }
}
