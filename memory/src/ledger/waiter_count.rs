//! How many wait: the rule by which no wake-up is lost.
//!
//! | who waits | who frees |
//! |---|---|
//! | [`WaiterCount::enter`] | makes the memory free |
//! | looks for memory once more | [`WaiterCount::any_after_free`] |
//! | found none: waits | if so, wakes or serves |
//!
//! Between the two steps of each lies a sequentially consistent fence, so that at least one of them
//! sees the other.
//!
//! Checked with loom: tests/loom.rs compiles this file over loom's atomics.

use crate::atomics::{AtomicUsize, Ordering, fence};

/// The count, read without a lock.
#[derive(Debug, Default)]
pub(crate) struct WaiterCount(AtomicUsize);

impl WaiterCount {
    /// One more waits. It must look for memory once more after this.
    pub(crate) fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// One that waited does so no more.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// How many wait.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Whether anyone waits for what has just been made free.
    pub(crate) fn any_after_free(&self) -> bool {
        fence(Ordering::SeqCst);
        self.count() > 0
    }
}
