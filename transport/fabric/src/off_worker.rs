//! Runs work that blocks for milliseconds off the runtime's workers.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::{io, thread};

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
    match run(Box::new(|| Box::new(work()))).await?.downcast() {
        Ok(done) => Ok(*done),
        Err(_) => Err(io::Error::other("the work has another result")),
    }
}

/// The work on its way, with a result of any type.
type Running = Pin<Box<dyn Future<Output = io::Result<Box<dyn Any + Send>>> + Send>>;

/// Neither work nor result have a type here, so that tokio's task is compiled only once.
fn run(work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>) -> Running {
    Box::pin(async {
        // tokio panics if it cannot start a thread, so a trial thread is started first. Its stack
        // is then free for tokio's thread.
        let _ = thread::Builder::new().name("tonic-rdma-try".to_owned()).spawn(|| ())?.join();
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => Ok(done),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(io::Error::other("the tokio runtime is shutting down")),
            },
        }
    })
}
