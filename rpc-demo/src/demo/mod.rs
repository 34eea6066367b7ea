//! `rpc-demo demo`: a server and a client, as two processes of this very program.

mod compare;
mod generate;

use crate::cli::Demo;
use crate::failure::Failure;
use crate::names::Shown;
use crate::net::Listener;
use crate::output;
use crate::serve::LISTENING;
use crate::tree::shown;
use generate::Plan;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// How long the server has to begin, and to end.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);
/// The smallest tree that has all its parts, in bytes.
const SIZE_MIN: u64 = 1 << 20;

/// Runs the demonstration.
pub(crate) async fn run(args: Demo) -> Result<(), Failure> {
    if args.size < SIZE_MIN {
        return Err(Failure::usage(
            format!("--size {} is too small", args.size),
            "it must be 1MiB at least",
            "",
        ));
    }
    // Rather now than when the tree is made.
    drop(Listener::bind(args.addr)?);
    let place = Arc::new(Place::new(&args)?);
    let dir = place.path();
    let plan = Arc::new(Plan::new(args.size, args.seed));
    if args.keep {
        output::line(format_args!("demo: working in {}, which is kept", shown(&dir)))?;
    }
    // When this future is dropped, work on a thread ends; the last to let go of the place removes it.
    let _stop = StopOnDrop(place.stop.clone());
    steps(&args, &place, &dir, &plan).await
}

async fn steps(args: &Demo, place: &Arc<Place>, dir: &Path, plan: &Arc<Plan>) -> Result<(), Failure> {
    let (source, root, copy) = (dir.join("source"), dir.join("root"), dir.join("copy"));
    let began = Instant::now();
    let generate = (plan.clone(), source.clone());
    place.blocking(move |stop| generate.0.write(&generate.1, stop)).await?;
    output::line(format_args!(
        "demo: generated {} bytes in {} files, {:.3} s",
        plan.bytes(),
        plan.files(),
        began.elapsed().as_secs_f64()
    ))?;

    std::fs::create_dir(&root)
        .map_err(|error| Failure::io(format!("cannot make {}", shown(&root)), &error))?;
    let program =
        std::env::current_exe().map_err(|error| Failure::io("cannot find this program's file", &error))?;
    let mut server = Server::start(&program, &root, args).await?;
    output::line(format_args!("demo: server at {}, process {}", server.url, server.pid))?;
    server.client(&program, args, "put", source.as_os_str(), OsStr::new("demo")).await?;
    server.client(&program, args, "get", OsStr::new("demo"), copy.as_os_str()).await?;
    server.stop().await?;

    let began = Instant::now();
    let compared = place.blocking(move |stop| compare::trees(&source, &copy, stop)).await?;
    output::line(format_args!(
        "demo: {} bytes in {} files and {} directories came back identical, compared in {:.3} s",
        compared.bytes,
        compared.files,
        compared.directories,
        began.elapsed().as_secs_f64()
    ))
}

/// The directory that the demonstration works in, and the word to stop.
struct Place {
    dir: TempDir,
    stop: Arc<AtomicBool>,
}

impl Place {
    fn new(args: &Demo) -> Result<Place, Failure> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let what = || format!("cannot work in {}", shown(&parent));
        let cure = "name another directory with --dir, or a smaller tree with --size";
        let stat = rustix::fs::statvfs(&parent).map_err(|error| Failure::new(what(), error, cure))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        // The tree, the server's copy, the copy that comes back; and a little for directories.
        let need = args.size.saturating_mul(3).saturating_add(args.size / 32).saturating_add(8 << 20);
        if stat.f_blocks > 0 && free < need {
            let why = format!("three trees need {need} bytes, and {free} are free");
            return Err(Failure::new(what(), why, cure));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix("rpc-demo-").disable_cleanup(args.keep);
        let dir = builder.tempdir_in(&parent).map_err(|error| Failure::new(what(), error, cure))?;
        Ok(Place { dir, stop: Arc::default() })
    }

    fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Runs `work` on a thread; the directory outlives it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Place>,
        work: impl FnOnce(&AtomicBool) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let place = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&place.stop)).await;
        done.map_err(|error| Failure::new("the demo failed", error, ""))?
    }
}

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The server's process. It ends when this is dropped.
struct Server {
    child: Child,
    url: String,
    pid: u32,
}

impl Server {
    async fn start(program: &Path, root: &Path, args: &Demo) -> Result<Server, Failure> {
        let mut child = Command::new(program)
            .arg("serve")
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
            Failure::new("the demo's server did not start", why.to_owned(), "see what it said above")
        };
        let stdout = child.stdout.take().ok_or_else(|| failed("it has no stdout"))?;
        let mut line = String::new();
        let mut stdout = BufReader::new(stdout);
        match tokio::time::timeout(SERVER_TIMEOUT, stdout.read_line(&mut line)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(failed(&error.to_string())),
            Err(_) => return Err(failed("it was silent for a minute")),
        }
        let addr = line.strip_prefix(LISTENING).and_then(|rest| rest.split(',').next());
        let Some(addr) = addr else {
            let said = line.trim_end();
            return Err(failed(&if said.is_empty() {
                "it ended".into()
            } else {
                format!("it said {}", Shown(said))
            }));
        };
        Ok(Server { url: format!("http://{addr}"), child, pid })
    }

    /// Runs a client's process to its end.
    async fn client(
        &mut self,
        program: &Path,
        args: &Demo,
        verb: &str,
        from: &OsStr,
        to: &OsStr,
    ) -> Result<(), Failure> {
        let mut command = Command::new(program);
        command
            .arg(verb)
            .arg("--server")
            .arg(&self.url)
            .arg("--chunk-size")
            .arg(args.chunks.chunk_size.to_string());
        if args.require_rdma {
            command.arg("--require-rdma");
        }
        let mut client = command
            .arg(from)
            .arg(to)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Failure::io("cannot start the demo's client", &error))?;
        let status =
            client.wait().await.map_err(|error| Failure::io("cannot wait for the demo's client", &error))?;
        if status.success() {
            return Ok(());
        }
        Err(Failure::new(format!("the demo's {verb} failed"), status, "see what it said above"))
    }

    /// Lets the server end in good order, and sees that it does.
    async fn stop(mut self) -> Result<(), Failure> {
        drop(self.child.stdin.take());
        match tokio::time::timeout(SERVER_TIMEOUT, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(Failure::new("the demo's server failed", status, "see what it said above")),
            Ok(Err(error)) => Err(Failure::io("cannot wait for the demo's server", &error)),
            Err(_) => Err(Failure::new("the demo's server did not stop", "it had a minute", "")),
        }
    }
}
