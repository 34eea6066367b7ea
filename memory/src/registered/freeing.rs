//! The thread that deregisters and drops application memory. The thread ends when no work is left.

use std::any::Any;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::process::PerProcess;

/// The value to drop, and the number of its bytes that are pinned.
type Job = (usize, Box<dyn Any + Send>);

#[derive(Default)]
struct DropQueue {
    jobs: Vec<Job>,
    /// Whether a thread takes the jobs.
    runs: bool,
}

static QUEUE: PerProcess<Mutex<DropQueue>> = PerProcess::new(Mutex::default);
static BYTES: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

fn queue() -> MutexGuard<'static, DropQueue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of bytes that are still to be unpinned.
pub(crate) fn bytes() -> usize {
    BYTES.load(SeqCst)
}

/// Drops a value on the thread, or on the caller's thread if no thread can be started.
pub(crate) fn free(len: usize, held: impl Send + 'static) {
    BYTES.fetch_add(len, SeqCst);
    let mut state = queue();
    state.jobs.push((len, Box::new(held)));
    if std::mem::replace(&mut state.runs, true) {
        return;
    }
    drop(state);
    if let Err(error) = thread::Builder::new().name("tonic-rdma-unpin".into()).spawn(run) {
        tracing::debug!(%error, "no thread to deregister memory");
        run();
    }
}

fn run() {
    loop {
        let mut state = queue();
        let Some((len, held)) = state.jobs.pop() else {
            state.runs = false;
            return;
        };
        drop(state);
        // A panic in an owner's Drop ends only this job.
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(held)));
        BYTES.fetch_sub(len, SeqCst);
        if dropped.is_err() {
            crate::throttled!(
                warn,
                len,
                "the owner of registered memory panicked when it was dropped"
            );
        }
    }
}
