//! Runs work that blocks for milliseconds on a thread of its own, instead of a worker of the
//! runtime.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::{io, thread};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Runs work on a thread that may block.
///
/// # Errors
/// The system refuses a thread (EAGAIN).
///
/// # Panics
/// If the work panics, this function panics with the same payload.
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

/// Running work, with a result of any type.
type Running = Pin<Box<dyn Future<Output = io::Result<Box<dyn Any + Send>>> + Send>>;

/// The types of the work and of its result are erased, so that the future is compiled only once.
fn run(work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>) -> Running {
    Box::pin(async {
        let (done, result) = oneshot::channel();
        let runtime = Handle::try_current();
        run_on_thread("rdma-work", move || {
            // The work may register descriptors with the runtime.
            let _entered = runtime.as_ref().map(Handle::enter);
            // If no caller waits for the result, the result is dropped here.
            drop(done.send(catch_unwind(AssertUnwindSafe(work))));
        })?;
        match result.await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => Err(io::Error::other("the thread ended without a result")),
        }
    })
}

/// Runs work on a separate thread. The threads of tokio's pool are no alternative: tokio panics if
/// it cannot start a thread, and a runtime that shuts down waits for these threads.
///
/// # Errors
/// The system refuses a thread (EAGAIN). The work is then dropped on the calling thread.
pub(crate) fn run_on_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}
