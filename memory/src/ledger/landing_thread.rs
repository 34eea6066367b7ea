//! A pool's landing thread, which makes and frees landing memory, and registers application buffers
//! in which messages land. So no task waits for this work.
//!
//! Mapping, zeroing and registering a chunk takes milliseconds, and freeing a chunk also takes
//! milliseconds. Connections ask for chunks on a runtime's workers, while the connection is locked.
//! So these jobs run on a thread of the pool if the [registrar is slow](crate::Registrar::is_slow).
//!
//! | the thread | on | next |
//! |---|---|---|
//! | not started | the first job is to run | waits; if no thread can be started, stays not started and the job runs on the caller's thread |
//! | waits | a job is queued | works on one job after the other, in the order in which they were queued |
//! | works | the queue is empty | waits |
//! | waits, works | the ledger is dropped, and with it the sender of the queue | ended, after the jobs in the queue |
//!
//! Jobs may keep the ledger alive. The thread itself does not keep the ledger alive, and no code
//! waits for the thread to end. So the last job may drop the ledger on the thread itself.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// A job that the thread runs once.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The queue of the thread, if the thread has started.
#[derive(Debug, Default)]
pub(crate) struct LandingThread(Mutex<Option<Sender<Job>>>);

impl LandingThread {
    fn queue(&self) -> MutexGuard<'_, Option<Sender<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_started(&self) -> bool {
        self.queue().is_some()
    }

    /// Queues a job, and starts the thread for the first job. Runs the job on the caller's thread
    /// if no thread can be started.
    pub(crate) fn run(&self, job: Job) {
        let mut queue = self.queue();
        if queue.is_none() {
            *queue = start();
        }
        let rejected = match &*queue {
            Some(sender) => sender.send(job).err().map(|error| error.0),
            None => Some(job),
        };
        drop(queue);
        if let Some(job) = rejected {
            job();
        }
    }
}

fn start() -> Option<Sender<Job>> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let (sender, jobs) = mpsc::channel();
    let thread = thread::Builder::new().name("tonic-rdma-land".to_owned());
    match thread.spawn(|| work(jobs)) {
        Ok(_) => Some(sender),
        Err(error) => {
            if !WARNED.swap(true, Relaxed) {
                crate::throttled!(warn, %error, "no thread to register landing memory: calls wait for it");
            }
            None
        }
    }
}

fn work(jobs: Receiver<Job>) {
    for job in jobs {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            crate::throttled!(error, "a job of the landing thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn jobs_run_in_their_order_and_a_panic_ends_only_its_own() {
        let thread = LandingThread::default();
        assert!(!thread.is_started());
        let (done, told) = mpsc::channel();
        for n in 0..100 {
            let done = done.clone();
            thread.run(Box::new(move || {
                done.send((n, thread::current().name().map(str::to_owned))).unwrap();
                assert!(n % 10 != 0, "asked to");
            }));
        }
        assert!(thread.is_started());
        for n in 0..100 {
            let name = Some("tonic-rdma-land".to_owned());
            assert_eq!(told.recv_timeout(TIMEOUT), Ok((n, name)));
        }
    }

    /// The last job drops the owner of the thread, on the thread itself.
    #[test]
    fn the_thread_ends_with_its_owner() {
        struct Told(mpsc::Sender<()>);
        impl Drop for Told {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
            }
        }
        thread_local! {
            static ENDS: std::cell::RefCell<Option<Told>> = const { std::cell::RefCell::new(None) };
        }
        let (done, told) = mpsc::channel();
        let owner = Arc::new(LandingThread::default());
        let (go, wait) = mpsc::channel::<()>();
        let last = owner.clone();
        owner.run(Box::new(move || {
            ENDS.set(Some(Told(done)));
            wait.recv().unwrap();
            drop(last);
        }));
        drop(owner);
        assert!(told.try_recv().is_err());
        go.send(()).unwrap();
        told.recv_timeout(TIMEOUT).unwrap();
    }
}
