//! State that all tasks of a run share.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tonic_rdma::Channel;

use crate::oracle::CallLog;
use crate::plan::Plan;
use crate::wire_checker::WireChecker;

/// State that all tasks of a run share.
pub(crate) struct World {
    pub(crate) plan: Arc<Plan>,
    pub(crate) started: Instant,
    pub(crate) checker: Arc<WireChecker>,
    call_log: Mutex<CallLog>,
    /// The bytes that readers retain, and until when.
    retained: Mutex<Vec<(Instant, Bytes)>>,
    channels: Mutex<Vec<Option<Channel>>>,
    /// The number of servers' buffers that have not come back yet, or are still watched.
    watched: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(crate) fn new(plan: Arc<Plan>, checker: Arc<WireChecker>) -> Arc<Self> {
        let started = Instant::now();
        Arc::new(World {
            call_log: Mutex::new(CallLog::new(plan.calls.len(), started)),
            retained: Mutex::default(),
            channels: Mutex::default(),
            watched: AtomicUsize::new(0),
            plan,
            started,
            checker,
        })
    }

    pub(crate) fn call_log(&self) -> MutexGuard<'_, CallLog> {
        lock(&self.call_log)
    }

    pub(crate) fn wrong(&self, what: String) {
        self.checker.note(|| format!("WRONG {what}"));
        self.call_log().wrong(what);
    }

    pub(crate) fn check(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.wrong(what);
        }
    }

    /// Retains bytes that were read, for `time`.
    pub(crate) fn keep(&self, bytes: Bytes, time: Duration) {
        if !time.is_zero() {
            lock(&self.retained).push((Instant::now() + time, bytes));
        }
    }

    /// Releases retained bytes when their time is over. Does not return.
    pub(crate) async fn release_retained(&self) {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = Instant::now();
            let old: Vec<_> = {
                let mut retained = lock(&self.retained);
                retained.extract_if(.., |(until, _)| *until <= now).collect()
            };
            drop(old);
        }
    }

    pub(crate) fn retains_nothing(&self) -> bool {
        lock(&self.retained).is_empty() && self.watched.load(Relaxed) == 0
    }

    /// Records that a server's buffer is watched from now on, or no longer.
    pub(crate) fn watches(&self, watches: bool) {
        match watches {
            true => self.watched.fetch_add(1, Relaxed),
            false => self.watched.fetch_sub(1, Relaxed),
        };
    }

    pub(crate) fn set_channels(&self, channels: Vec<Option<Channel>>) {
        let old = std::mem::replace(&mut *lock(&self.channels), channels);
        drop(old);
    }

    pub(crate) fn channel(&self, n: usize) -> Option<Channel> {
        lock(&self.channels).get(n).cloned().flatten()
    }

    pub(crate) fn drop_channel(&self, n: usize) {
        let old = lock(&self.channels).get_mut(n).and_then(Option::take);
        drop(old);
    }
}
