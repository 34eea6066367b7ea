//! The landing budget where the process may pin less than its pools would.
//!
//! Each pool is made to fit into RLIMIT_MEMLOCK as it finds it, and pins later. Where several share
//! a process, or the limit falls, one may find that it can pin no more. It then works with what it
//! has leased: waits for memory, and copies out what lands where readers hold on to it, as in a
//! smaller pool. It leaves alone what its own control budget has not pinned yet, so that it turns
//! no connection away for what its others land.
//!
//! | a pool's landing budget is | from | to, by |
//! |---|---|---|
//! | as configured | the start | short: a chunk was wanted and the process may not pin it |
//! | short | | as configured: a pool of the process has deregistered memory, or the limit allows a chunk that is wanted |

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::landing_waiters::LandingWaiters;

/// The landing budget of a pool, and those that it wakes when it grows.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    /// As configured.
    configured: usize,
    /// As it is now, in bytes.
    bytes: AtomicUsize,
    pub(crate) waiters: LandingWaiters,
}

/// The budgets of the process that are short.
static SHORT: Mutex<Vec<Weak<LandingBudget>>> = Mutex::new(Vec::new());
/// Whether there are any, for those that free.
static ANY_SHORT: AtomicBool = AtomicBool::new(false);

impl LandingBudget {
    pub(crate) fn new(bytes: usize) -> Self {
        LandingBudget {
            configured: bytes,
            bytes: AtomicUsize::new(bytes),
            waiters: LandingWaiters::default(),
        }
    }

    /// The budget as it is now.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(SeqCst)
    }

    /// The budget is as configured again.
    pub(crate) fn restore(&self) {
        self.bytes.store(self.configured, SeqCst);
    }

    /// The budget is short until memory is deregistered in this process. After this the caller must
    /// look once more what the process may pin.
    pub(crate) fn lower(self: &Arc<Self>, bytes: usize) {
        let mut short = SHORT.lock().unwrap_or_else(PoisonError::into_inner);
        if !short.iter().any(|budget| budget.as_ptr() == Arc::as_ptr(self)) {
            short.push(Arc::downgrade(self));
        }
        self.bytes.store(bytes.min(self.configured), SeqCst);
        ANY_SHORT.store(true, SeqCst);
        fence(SeqCst);
    }
}

/// Part of a pool, behind all that it has registered.
#[derive(Debug)]
pub(crate) struct NotifyOnDrop;

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        deregistered();
    }
}

/// Memory has been deregistered: pools that were short may look again.
pub(crate) fn deregistered() {
    fence(SeqCst);
    if !ANY_SHORT.load(SeqCst) {
        return;
    }
    let budgets = {
        let mut short = SHORT.lock().unwrap_or_else(PoisonError::into_inner);
        ANY_SHORT.store(false, SeqCst);
        std::mem::take(&mut *short)
    };
    for budget in budgets.iter().filter_map(Weak::upgrade) {
        budget.restore();
        budget.waiters.budget_freed();
    }
}
