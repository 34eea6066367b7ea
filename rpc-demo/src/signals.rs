//! What ends a client's command early.

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// The limit on file sizes was met. The number is that of every Linux but MIPS and PA-RISC, and of
/// the BSDs.
const SIGXFSZ: i32 = 25;

/// From here on a write past the limit on file sizes is an error of that write, and not the end of
/// the process.
pub(crate) fn survive_file_size_limit() -> Result<(), Failure> {
    // Once there is a handler it stays.
    signal(SignalKind::from_raw(SIGXFSZ)).map(drop).map_err(no_signals)
}

/// Drops the command on SIGINT and SIGTERM, so that it cleans up.
pub(crate) async fn until_signal<T>(
    command: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    tokio::select! {
        done = command => done,
        _ = interrupt.recv() => Err(interrupted("SIGINT")),
        _ = terminate.recv() => Err(interrupted("SIGTERM")),
    }
}

pub(crate) fn no_signals(error: std::io::Error) -> Failure {
    Failure::io("cannot handle signals", &error)
}

fn interrupted(signal: &str) -> Failure {
    let cure = "repeat the command; put, get and cp go on with --resume";
    Failure::new("interrupted", format!("{signal} came"), cure)
}
