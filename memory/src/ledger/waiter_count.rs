//! The number of waiters, and the protocol that loses no wake-up.
//!
//! | step | the waiting side | the freeing side |
//! |---|---|---|
//! | 1 | calls [`WaiterCount::enter`] | frees the memory |
//! | 2 | checks for memory once more | calls [`WaiterCount::any_after_free`] |
//! | 3 | waits if it found none | wakes or serves the waiters if there are any |
//!
//! A sequentially consistent fence separates steps 1 and 2 on both sides, so at least one side sees
//! the other's step 1.
//!
//! The code is checked with loom: tests/loom.rs compiles this file with loom's atomics.

use crate::atomics::{AtomicUsize, Ordering, fence};

/// The number of waiters, which can be read without a lock.
#[derive(Debug, Default)]
pub(crate) struct WaiterCount(AtomicUsize);

impl WaiterCount {
    /// Adds a waiter, which must then check for memory again.
    pub(crate) fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Removes a waiter.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// The number of waiters.
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Whether anyone waits for memory that the caller has just freed.
    pub(crate) fn any_after_free(&self) -> bool {
        fence(Ordering::SeqCst);
        self.count() > 0
    }
}
