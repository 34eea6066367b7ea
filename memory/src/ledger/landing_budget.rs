//! The landing budget of a pool, which shrinks while RLIMIT_MEMLOCK leaves less than it.
//!
//! A pool is sized by the limit when it is made, but pins memory later. If several pools share a
//! process, or the limit is lowered, a pool may find that it cannot pin more. It then works with
//! what it has leased, like a smaller pool: connections wait for memory, and landed data is copied
//! out if readers hold on to it. The part of the control budget that is not pinned yet stays
//! reserved, so landing memory never prevents a new connection.
//!
//! | a landing budget is | from | to, by |
//! |---|---|---|
//! | as configured | the start | lowered: a chunk was needed and the process may not pin it |
//! | lowered | | as configured: a pool of the process deregisters memory, or the limit allows a chunk again |

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::landing_waiters::LandingWaiters;

/// The landing budget of a pool, and the waiters that it wakes when it grows.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    /// The configured budget in bytes.
    configured: usize,
    /// The current budget in bytes, at most `configured`.
    bytes: AtomicUsize,
    pub(crate) waiters: LandingWaiters,
}

/// The lowered budgets of this process.
static LOWERED: Mutex<Vec<Weak<LandingBudget>>> = Mutex::new(Vec::new());
/// Whether `LOWERED` has entries, so that deregistering memory need not take its lock.
static ANY_LOWERED: AtomicBool = AtomicBool::new(false);

impl LandingBudget {
    pub(crate) fn new(bytes: usize) -> Self {
        LandingBudget {
            configured: bytes,
            bytes: AtomicUsize::new(bytes),
            waiters: LandingWaiters::default(),
        }
    }

    /// The current budget in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(SeqCst)
    }

    /// Sets the budget back to the configured one.
    pub(crate) fn restore(&self) {
        self.bytes.store(self.configured, SeqCst);
    }

    /// Lowers the budget until memory is deregistered in this process. The caller must then check
    /// once more what the process may pin.
    pub(crate) fn lower(self: &Arc<Self>, bytes: usize) {
        let mut lowered = LOWERED.lock().unwrap_or_else(PoisonError::into_inner);
        if !lowered.iter().any(|budget| budget.as_ptr() == Arc::as_ptr(self)) {
            lowered.push(Arc::downgrade(self));
        }
        self.bytes.store(bytes.min(self.configured), SeqCst);
        ANY_LOWERED.store(true, SeqCst);
        fence(SeqCst);
    }
}

/// Calls [`deregistered`] when dropped. The last field of a ledger, so that it is dropped after the
/// registrations.
#[derive(Debug)]
pub(crate) struct NotifyOnDrop;

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        deregistered();
    }
}

/// Restores lowered budgets and wakes their waiters: memory has been deregistered in this process.
pub(crate) fn deregistered() {
    fence(SeqCst);
    if !ANY_LOWERED.load(SeqCst) {
        return;
    }
    let budgets = {
        let mut lowered = LOWERED.lock().unwrap_or_else(PoisonError::into_inner);
        ANY_LOWERED.store(false, SeqCst);
        std::mem::take(&mut *lowered)
    };
    for budget in budgets.iter().filter_map(Weak::upgrade) {
        budget.restore();
        budget.waiters.budget_freed();
    }
}
