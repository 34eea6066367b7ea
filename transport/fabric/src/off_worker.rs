//! Work that blocks for milliseconds, off the runtime's workers.

use std::io;
use std::thread;

/// Runs work on a thread that may block.
///
/// # Errors
/// The system gives no thread (EAGAIN), or the runtime shuts down.
///
/// # Panics
/// The work panics.
///
/// # Cancel safety
/// Given up, the work goes on, and what it returns is dropped on its thread.
pub async fn off_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    // tokio panics where it can make no thread. The stack of this one is free again for it.
    let _ = thread::Builder::new().name("tonic-rdma-try".to_owned()).spawn(|| ())?.join();
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(io::Error::other("the tokio runtime is shutting down")),
        },
    }
}
