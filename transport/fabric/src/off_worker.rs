//! Runs work that blocks for milliseconds off the runtime's workers.

use std::io;
use std::thread;

/// Runs work on a thread that may block.
///
/// # Errors
/// The system refuses a thread (EAGAIN), or the runtime shuts down.
///
/// # Panics
/// The work panics.
///
/// # Cancel safety
/// If the future is dropped, the work continues, and its result is dropped on the same thread.
pub async fn off_worker<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    // tokio panics if it cannot start a thread, so a trial thread is started first. Its stack is
    // then free for tokio's thread.
    let _ = thread::Builder::new().name("tonic-rdma-try".to_owned()).spawn(|| ())?.join();
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(io::Error::other("the tokio runtime is shutting down")),
        },
    }
}
