//! A pool's landing budget, which shrinks while RLIMIT_MEMLOCK leaves fewer bytes.
//!
//! A pool is sized by the limit when it is made, but pins memory later. If several pools share a
//! process, or the limit is lowered, a pool may find that it cannot pin more. The pool then works
//! with the memory that it has leased, like a smaller pool: connections wait for memory, and landed
//! data is copied out if readers hold on to it. A pool that has leased nothing waits for memory
//! that [other pools](super::pinning_pools) of the process return. The part of the control budget
//! that is not pinned yet stays reserved, so landing memory never prevents a new connection.
//!
//! | a landing budget is | from | to, by |
//! |---|---|---|
//! | as configured | the start | lowered: a chunk was needed and the process may not pin it |
//! | lowered | | as configured: a pool of the process deregisters memory, or the limit allows a chunk again |
//! | any | | paused: the limit allows a chunk, but the device has refused one, because other pools were faster |
//! | paused | what is leased | lowered: a connection has [waited](crate::Landing::waited) for a while |
//! | paused | | as configured: a pool of the process deregisters memory |

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};

use super::budgets::Budgets;
use super::landing_waiters::LandingWaiters;
use super::others_wait::OthersWait;

/// The landing budget of a pool, and the waiters that are woken when the budget grows.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    /// The configured budget in bytes.
    configured: usize,
    /// The current budget in bytes, at most `configured`.
    bytes: AtomicUsize,
    /// Whether no chunk is attempted for now, whatever the limit leaves.
    is_paused: AtomicBool,
    pub(crate) waiters: LandingWaiters,
    /// The memory that the pool has mapped.
    pub(super) budgets: Arc<Budgets>,
    /// The wait for other pools.
    pub(super) others_wait: OthersWait,
}

/// True if the budget of any pool may be lowered. If it is false, a thread that deregisters memory
/// does not look for lowered budgets.
pub(super) static ANY_LOWERED: AtomicBool = AtomicBool::new(false);

impl LandingBudget {
    pub(super) fn new(bytes: usize, budgets: Arc<Budgets>) -> Self {
        LandingBudget {
            configured: bytes,
            bytes: AtomicUsize::new(bytes),
            is_paused: AtomicBool::new(false),
            waiters: LandingWaiters::default(),
            budgets,
            others_wait: OthersWait::default(),
        }
    }

    /// The current budget in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(SeqCst)
    }

    pub(super) fn is_lowered(&self) -> bool {
        self.bytes() < self.configured
    }

    /// Restores the configured budget.
    pub(crate) fn restore(&self) {
        self.resume();
        self.bytes.store(self.configured, SeqCst);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(SeqCst)
    }

    pub(super) fn pause(&self, bytes: usize) {
        self.is_paused.store(true, SeqCst);
        self.lower(bytes);
    }

    pub(super) fn resume(&self) {
        self.is_paused.store(false, SeqCst);
    }

    /// Lowers the budget until memory is deregistered in this process. The caller must then check
    /// again how much the process may pin.
    pub(crate) fn lower(&self, bytes: usize) {
        self.bytes.store(bytes.min(self.configured), SeqCst);
        // Set the flag after lowering the budget. Either a thread that deregisters memory then sees
        // both, or the caller's check finds that thread's memory.
        ANY_LOWERED.store(true, SeqCst);
        fence(SeqCst);
    }
}
