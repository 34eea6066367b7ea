//! `rpc-demo demo` runs this program as a server and as clients, in separate processes. The clients
//! send one tree over TCP and over the best path. The costs are compared with those of a plain
//! copy.
//!
//! | module | what |
//! |---|---|
//! | `place` | the working directory, in memory if three trees fit there |
//! | `generate` | the tree |
//! | `processes` | server and clients, and a transfer's cost at both ends |
//! | `plain` | the plain copy |
//! | `compare` | compares the fetched tree with the original |
//! | `report` | the table |

mod compare;
mod generate;
mod place;
mod plain;
mod processes;
mod report;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use std::{fs, io};

use generate::Plan;
use place::{Backing, Chosen, SIZE_MIN};
use processes::{Done, Processes, TCP, Way};
use report::{Path as Measured, Report};
use tempfile::TempDir;

use crate::cli::{Demo, size_shown};
use crate::failure::Failure;
use crate::net::Listener;
use crate::output;
use crate::signals::until_signal;
use crate::tree::shown;

/// Trees below this size in bytes are sent more often, so that each measurement covers enough data.
const SMALL: u64 = 256 << 20;
/// The default number of rounds, and the number for a small tree.
const ROUNDS: u16 = 3;
const ROUNDS_SMALL: u16 = 9;

/// Runs the demonstration. On every exit, the demonstration's processes have ended, and its files
/// are removed unless `--keep` is set.
pub(crate) async fn run(args: Demo) -> Result<(), Failure> {
    if let Some(size) = args.size.filter(|size| *size < SIZE_MIN) {
        return Err(Failure::usage(
            format!("--size {size} is too small"),
            "it must be 1MiB at least",
            "",
        ));
    }
    let stop = Arc::<AtomicBool>::default();
    let mut processes = Processes::default();
    // `place` outlives the steps, because the directory cannot be removed while a process writes to
    // it.
    let mut place = None;
    let done = until_signal(steps(&args, &stop, &mut processes, &mut place)).await;
    // A thread that still runs ends soon after `stop` is set. The thread or this function,
    // whichever drops its handle to the directory last, removes the directory.
    stop.store(true, Ordering::Relaxed);
    processes.kill().await;
    drop(place);
    done
}

async fn steps(
    args: &Demo,
    stop: &Arc<AtomicBool>,
    processes: &mut Processes,
    kept_place: &mut Option<Arc<WorkDirectory>>,
) -> Result<(), Failure> {
    // An unusable address is reported here rather than after the tree has been generated.
    drop(Listener::bind(args.addr)?);
    let chosen = place::choose(args.dir.as_deref(), args.size)?;
    let rounds = args.rounds.unwrap_or(if chosen.size < SMALL { ROUNDS_SMALL } else { ROUNDS });
    let place = kept_place.insert(Arc::new(WorkDirectory::new(&chosen, args.keep, stop)?)).clone();
    if let (Some(why), None) = (&chosen.why, &args.dir) {
        let what = match chosen.backing {
            Backing::Memory => format!("a smaller tree, of {}", size_shown(chosen.size)),
            Backing::Disk => "files on a disk, so the disk counts".to_owned(),
        };
        output::line(format_args!("demo: {what}: {why}"))?;
    }
    let kept = if args.keep { ", which is kept" } else { "" };
    output::line(format_args!("demo: working in {}{kept}", shown(&place.path())))?;
    let mut run =
        Demonstration { args, place, processes, program: program()?, report: Report::default() };
    run.generate(Plan::new(chosen.size, args.seed)).await?;
    run.serve().await?;
    let mut last = None;
    for round in 1..=rounds {
        last = Some(run.round(round, rounds).await?);
    }
    run.processes.stop().await?;
    output::line(format_args!("{}", run.report))?;
    match last {
        Some(last) => output::line(format_args!("{last}")),
        None => Ok(()),
    }
}

fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::io("cannot find this program's file", &error))
}

struct Demonstration<'a> {
    args: &'a Demo,
    place: Arc<WorkDirectory>,
    processes: &'a mut Processes,
    program: PathBuf,
    report: Report,
}

impl Demonstration<'_> {
    async fn generate(&self, plan: Plan) -> Result<(), Failure> {
        let (began, to) = (Instant::now(), self.place.path().join("source"));
        let (bytes, files) = (plan.bytes(), plan.files());
        self.place.blocking(move |stop| plan.write(&to, stop)).await?;
        let seconds = began.elapsed().as_secs_f64();
        output::line(format_args!("demo: generated {bytes} bytes in {files} files, {seconds:.3} s"))
    }

    async fn serve(&mut self) -> Result<(), Failure> {
        let root = self.place.path().join("root");
        fs::create_dir(&root)
            .map_err(|error| Failure::io(format!("cannot make {}", shown(&root)), &error))?;
        let (url, pid) = self.processes.start(&self.program, &root, self.args).await?;
        output::line(format_args!("demo: server at {url}, process {pid}"))
    }

    /// Makes a plain copy, and sends and fetches the tree over the best path and, if that is not
    /// TCP, also over TCP. Returns a line that describes the best path.
    async fn round(&mut self, round: u16, rounds: u16) -> Result<String, Failure> {
        let (source, copy) = (self.place.path().join("source"), self.place.path().join("copy"));
        let plain = self.place.blocking(move |stop| plain::copy(&source, &copy, stop)).await?;
        self.report.plain.push(plain);
        self.remove(&["copy"]).await?;
        let count = format!("{round} of {rounds}");
        output::line(format_args!("demo: round {count}: cp -r: {:.2} GB/s", plain.rate()))?;

        let [put, get] = self.there_and_back(&count, Way::Best).await?;
        let best = put.path.clone();
        let said = if best == TCP {
            format!("demo: no better path than TCP here: path {}", put.shown)
        } else {
            let shares = |of: fn(&Done) -> f64| {
                let [up, down] = [&put, &get].map(|done| of(done) * 100.0);
                format!("{up:.1} % of put and {down:.1} % of get")
            };
            let written = shares(|done| done.write_share);
            let lent = match put.lent_share + get.lent_share > 0.0 {
                true => format!("{} lent, ", shares(|done| done.lent_share)),
                false => String::new(),
            };
            format!("demo: {lent}{written} by WRITE, path {}", put.shown)
        };
        if best == TCP {
            self.report.tcp.add(put.run, get.run);
        } else {
            let report = self.report.best.get_or_insert_with(|| Measured::new(&best));
            report.add(put.run, get.run);
            self.remove(&["copy", "root/demo"]).await?;
            let [put, get] = self.there_and_back(&count, Way::Tcp).await?;
            self.report.tcp.add(put.run, get.run);
        }
        // The trees of the last round stay, because `--keep` may ask for them.
        if round < rounds {
            self.remove(&["copy", "root/demo"]).await?;
        }
        Ok(said)
    }

    /// Puts the tree, gets it, and compares the result with the original.
    async fn there_and_back(&mut self, count: &str, way: Way) -> Result<[Done; 2], Failure> {
        let (source, copy) = (self.place.path().join("source"), self.place.path().join("copy"));
        let name = OsStr::new("demo");
        let Demonstration { processes, program, args, .. } = self;
        let put = processes
            .transfer(program, args, way, ["put".as_ref(), source.as_os_str(), name])
            .await?;
        let get = processes
            .transfer(program, args, way, ["get".as_ref(), name, copy.as_os_str()])
            .await?;
        self.place.blocking(move |stop| compare::trees(&source, &copy, stop)).await?;
        output::line(format_args!(
            "demo: round {count}: {}: put {:.2} GB/s, get {:.2} GB/s, came back identical",
            put.path,
            put.run.rate(),
            get.run.rate(),
        ))?;
        Ok([put, get])
    }

    /// Removes directories in the working directory, if they exist.
    async fn remove(&self, names: &'static [&'static str]) -> Result<(), Failure> {
        let dir = self.place.path();
        self.place
            .blocking(move |_| {
                for name in names {
                    let path = dir.join(name);
                    match fs::remove_dir_all(&path) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => {
                            return Err(Failure::io(
                                format!("cannot remove {}", shown(&path)),
                                &error,
                            ));
                        }
                        _ => {}
                    }
                }
                Ok(())
            })
            .await
    }
}

/// The working directory, and a flag that stops the work in it. Dropping the last handle removes
/// the directory, unless `keep` is set.
struct WorkDirectory {
    dir: Option<TempDir>,
    keep: bool,
    stop: Arc<AtomicBool>,
}

impl WorkDirectory {
    fn new(chosen: &Chosen, keep: bool, stop: &Arc<AtomicBool>) -> Result<WorkDirectory, Failure> {
        let dir = tempfile::Builder::new().prefix("rpc-demo-").tempdir_in(&chosen.path);
        let dir = dir.map_err(|error| {
            let what = format!("cannot work in {}", shown(&chosen.path));
            Failure::new(what, error, "name another directory with --dir")
        })?;
        Ok(WorkDirectory { dir: Some(dir), keep, stop: stop.clone() })
    }

    fn path(&self) -> PathBuf {
        self.dir.as_ref().map(|dir| dir.path().to_owned()).unwrap_or_default()
    }

    /// Runs `work` on a thread, which keeps the directory alive.
    async fn blocking<T: Send + 'static>(
        self: &Arc<WorkDirectory>,
        work: impl FnOnce(&AtomicBool) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let place = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&place.stop)).await;
        done.map_err(|error| Failure::new("the demo failed", error, ""))?
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        let path = shown(&self.path());
        let Some(dir) = self.dir.take() else { return };
        if self.keep {
            let _ = dir.keep();
        } else if let Err(error) = dir.close() {
            tracing::warn!("{path} could not be removed: {error}; remove it by hand");
        }
    }
}
