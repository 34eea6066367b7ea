//! The counters of a pool.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use crate::stats::{PoolStats, Use};

/// The counters behind [`PoolStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) send: AtomicUsize,
    pub(crate) control: AtomicUsize,
    pub(crate) granted: AtomicUsize,
    pub(crate) filled: AtomicUsize,
    /// The part of `filled` that the application holds.
    pub(crate) held: AtomicUsize,
    /// The total size of the chunks in which held pieces lie.
    pub(crate) pinned: AtomicUsize,
    /// Registered application memory, in bytes.
    pub(crate) application: AtomicUsize,
    /// The part of `send` that is lent to peers.
    pub(crate) lent: AtomicUsize,
    /// Lent memory outside the pool. Memory that is lent several times counts each time.
    pub(crate) lent_application: AtomicUsize,
    pub(crate) registrations: AtomicU64,
    pub(crate) waits: AtomicU64,
}

impl Counters {
    pub(crate) fn of(&self, usage: Use) -> &AtomicUsize {
        match usage {
            Use::Send => &self.send,
            Use::Landing => &self.granted,
            Use::Control => &self.control,
        }
    }

    pub(crate) fn snapshot(&self) -> PoolStats {
        PoolStats {
            send: self.send.load(Relaxed),
            control: self.control.load(Relaxed),
            granted: self.granted.load(Relaxed),
            filled: self.filled.load(Relaxed),
            held: self.held.load(Relaxed),
            application: self.application.load(Relaxed),
            lent: self.lent.load(Relaxed),
            lent_application: self.lent_application.load(Relaxed),
            registrations: self.registrations.load(Relaxed),
            waits: self.waits.load(Relaxed),
            ..PoolStats::default()
        }
    }
}
