//! The command `rpc-demo serve`.

use std::io::BufRead;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::cli::Serve;
use crate::costs::Costs;
use crate::disk;
use crate::failure::{Failure, causes};
use crate::metrics::{self, Metrics};
use crate::names::Shown;
use crate::net::{Copies, Listener};
use crate::output;
use crate::service::Service;
use crate::store::{Options, Store};

/// Prefix of the line that reports the listening address.
pub(crate) const LISTENING: &str = "rpc-demo: listening on ";

/// Costs of a server so far. With `--until-eof`, the server answers each line on stdin with these
/// costs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Spent {
    #[serde(flatten)]
    pub(crate) costs: Costs,
    /// Payload bytes that the transport has copied.
    pub(crate) copied_bytes: u64,
}

/// Serves until stopped.
pub(crate) async fn run(args: Serve) -> Result<(), Failure> {
    let mut stops = Stops::new().map_err(crate::signals::no_signals)?;

    args.files.apply();
    let root = args.root.clone();
    let keep_uploads = Duration::from_secs(args.keep_uploads * 3600);
    let options = Options { sync: !args.no_sync, keep_uploads };
    let store = tokio::task::spawn_blocking(move || Store::open(&root, options))
        .await
        .map_err(|error| Failure::new("cannot start", error, ""))?
        .map_err(|error| Failure::new("cannot serve", error, ""))?;
    // The recorder is installed before the transport starts, because earlier events are lost.
    let metrics = match args.metrics {
        Some(addr) => Some(Metrics::start(addr).await?),
        None => None,
    };
    let listener = Listener::bind(args.addr)?;
    if args.until_eof {
        let eof = stdin_ends(listener.copies())
            .map_err(|error| Failure::io("cannot read stdin", &error))?;
        stops.eof = Some(eof);
    }
    output::line(format_args!(
        "{LISTENING}{}, root {}",
        listener.addr,
        Shown(&args.root.to_string_lossy())
    ))?;
    if let Some(metrics) = &metrics {
        output::line(format_args!("rpc-demo: metrics at http://{}/metrics", metrics.addr))?;
    }

    let (stop, stopped) = oneshot::channel::<()>();
    if args.no_sync {
        tracing::warn!("--no-sync: a crash of this host may lose acknowledged data");
    }
    match disk::check() {
        Ok(()) => tracing::info!("large files are read and written with O_DIRECT where possible"),
        Err(reason) => {
            tracing::info!("files are read and written through the page cache: {reason}")
        }
    }
    let service = Service::new(store, args.max_reads, args.max_writes);
    let sweep = service.sweep();
    let serve = listener.serve(service, args.channelz, async {
        let _ = stopped.await;
    });
    let grace_over = async {
        stops.next().await;
        tracing::info!("stopping; transfers in flight have {} s to finish", args.grace);
        let _ = stop.send(());
        tokio::select! {
            () = stops.next() => {}
            () = tokio::time::sleep(Duration::from_secs(args.grace)) => {}
        }
    };
    tokio::select! {
        served = serve => served.map_err(|error| Failure::new("the server failed", causes(&error), "")),
        () = sweep => Ok(()),
        failed = metrics::serve(metrics) => Err(failed),
        () = grace_over => Err(Failure::new("stopped with transfers in flight", "they did not finish in time", "")),
    }
}

/// The conditions that stop a server.
struct Stops {
    terminate: Signal,
    interrupt: Signal,
    /// The receiver gets its message when stdin ends, if `--until-eof` is given.
    eof: Option<oneshot::Receiver<()>>,
}

impl Stops {
    fn new() -> std::io::Result<Stops> {
        Ok(Stops {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            eof: None,
        })
    }

    async fn next(&mut self) {
        let eof = async {
            match self.eof.as_mut() {
                Some(eof) => {
                    let _ = eof.await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = eof => self.eof = None,
        }
    }
}

/// Waits for the end of stdin on a detached thread, because a read from stdin cannot be cancelled.
/// The thread answers each line.
fn stdin_ends(copies: Copies) -> std::io::Result<oneshot::Receiver<()>> {
    let (ended, wait) = oneshot::channel();
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut line = Vec::new();
        while matches!(stdin.read_until(b'\n', &mut line), Ok(1..)) {
            line.clear();
            let spent = Spent { costs: Costs::now(), copied_bytes: copies.bytes() };
            if output::json(&spent).is_err() {
                break;
            }
        }
        let _ = ended.send(());
    })?;
    Ok(wait)
}
