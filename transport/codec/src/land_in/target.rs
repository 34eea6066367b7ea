//! The application buffer of a call, and how the call claims it and reports the outcome.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Extensions;
use tonic::Status;
use tonic_rdma_memory::{NamedBuffer, NamedLease};

use super::{Outcome, WhyCopied, WhyEmpty};

/// The buffer and its outcome, which a request carries in its extensions.
#[derive(Clone, Debug)]
pub struct Target {
    pub buffer: NamedBuffer,
    outcome: Arc<Mutex<Option<Outcome>>>,
}

impl Target {
    pub fn new(buffer: NamedBuffer) -> Self {
        Target { buffer, outcome: Arc::default() }
    }

    pub fn outcome(&self) -> Outcome {
        let none = || Outcome::Empty { why: WhyEmpty::NoMessage };
        lock(&self.outcome).clone().unwrap_or_else(none)
    }

    /// Claims the buffer that a request names. `why` is the reason that is reported if the field is
    /// copied.
    pub fn claim(extensions: &Extensions, why: WhyCopied) -> Option<Arc<Claimed>> {
        extensions.get::<Target>()?.claim_for(why)
    }

    pub fn claim_for(&self, why: WhyCopied) -> Option<Arc<Claimed>> {
        let lease = self.buffer.claim()?;
        *lock(&self.outcome) = None;
        Some(Arc::new(Claimed {
            lease,
            why: Mutex::new(why),
            copied: Arc::default(),
            outcome: self.outcome.clone(),
        }))
    }
}

/// A buffer that belongs to a call.
#[derive(Debug)]
pub struct Claimed {
    pub lease: NamedLease,
    why: Mutex<WhyCopied>,
    /// Bytes that were copied and not counted yet.
    copied: Arc<AtomicU64>,
    outcome: Arc<Mutex<Option<Outcome>>>,
}

impl Claimed {
    /// Sets the reason that is reported if the field is copied.
    pub fn will_be_copied(&self, why: WhyCopied) {
        *lock(&self.why) = why;
    }

    pub fn has_landed(&self, len: usize) {
        self.set(Outcome::Landed { len });
    }

    pub fn was_copied(&self, len: usize) {
        self.copied.fetch_add(len as u64, Relaxed);
        let why = lock(&self.why).clone();
        self.set(Outcome::Copied { len, why });
    }

    pub fn stays_empty(&self, why: WhyEmpty) {
        self.set(Outcome::Empty { why });
    }

    /// Whether a field of this length fits the buffer.
    pub fn fits(&self, field: usize) -> bool {
        field <= self.lease.capacity()
    }

    /// Leaves the buffer empty, because a field of this length does not fit. Returns the status of
    /// the failed call.
    pub fn too_long(&self, field: usize) -> Status {
        let why = WhyEmpty::TooLong { field, buffer: self.lease.capacity() };
        let status = Status::out_of_range(format!("{why}, which it was to land in"));
        self.stays_empty(why);
        status
    }

    /// The number of bytes copied to the buffer since a reader last reset this number to 0.
    pub fn copied(&self) -> Arc<AtomicU64> {
        self.copied.clone()
    }

    fn set(&self, outcome: Outcome) {
        // Keep the first outcome, because only the first message lands.
        lock(&self.outcome).get_or_insert(outcome);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
