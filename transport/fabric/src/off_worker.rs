//! Runs work that blocks for milliseconds off the runtime's workers.

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
/// If the future is dropped, the work goes on, and its result is dropped on its thread.
pub async fn off_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    // tokio panics if it cannot start a thread. The stack of this trial thread is then free for
    // tokio's.
    let _ = thread::Builder::new().name("tonic-rdma-try".to_owned()).spawn(|| ())?.join();
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(io::Error::other("the tokio runtime is shutting down")),
        },
    }
}
