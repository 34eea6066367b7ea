//! Signals that end a client's command.

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// The signal for a write beyond the limit on file sizes. Linux uses this number on all
/// architectures except MIPS and PA-RISC, and so do the BSDs.
const SIGXFSZ: i32 = 25;

/// Makes a write beyond the limit on file sizes return an error instead of ending the process.
pub(crate) fn survive_file_size_limit() -> Result<(), Failure> {
    // The handler stays installed.
    signal(SignalKind::from_raw(SIGXFSZ)).map(drop).map_err(no_signals)
}

/// Drops the command on SIGINT and SIGTERM, so that its destructors clean up.
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
    let cure = "repeat the command; put, get and cp continue with --resume";
    Failure::new("interrupted", format!("{signal} came"), cure)
}
