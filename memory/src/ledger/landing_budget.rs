//! A pool's landing budget, which is lowered while RLIMIT_MEMLOCK leaves fewer bytes.
//!
//! A pool is sized by the limit when it is made, but pins memory later. If several pools share a
//! process, or the limit is lowered, a pool may find that it cannot pin more. The pool then works
//! with the memory that it has leased, like a smaller pool: connections wait for memory, and landed
//! data is copied out if readers keep it for long. A pool that has leased nothing waits for memory
//! that [other pools](super::pinning_pools) of the process return. The part of the control budget
//! that is not pinned yet stays reserved, so landing memory never prevents a new connection.
//!
//! | a landing budget is | from | to, by |
//! |---|---|---|
//! | as configured | the start | lowered: a chunk was needed and the process may not pin it |
//! | lowered | | as configured: a pool of the process deregisters memory, or the limit allows a chunk again |
//! | any | | paused, at what is leased: the limit allows a chunk, but the device has refused one, because other pools were faster |
//! | paused | | lowered: a connection has [waited](crate::Landing::waited) for a while |
//! | paused | | as configured: a pool of the process deregisters memory |
//!
//! # The wait for other pools
//!
//! [`OthersWait`] limits how long a pool without landing memory waits for other pools to return
//! memory.
//!
//! Other pools may keep their memory for ever. So when the wait is over, a request for landing
//! memory fails, as if no other pool held memory.
//!
//! | the wait | on | next |
//! |---|---|---|
//! | none | a connection has waited | running |
//! | running | a pool of the process has returned memory | running, restarted |
//! | running | no connection has reported for [`MAX_WAIT`] that it waits | running, restarted |
//! | running | [`MAX_WAIT`] has passed | over |
//! | over | a pool of the process has returned memory | none |

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::budgets::Budgets;
use super::landing_waiters::LandingWaiters;

/// The landing budget of a pool, and the waiters that are woken when the budget grows.
#[derive(Debug)]
pub(crate) struct LandingBudget {
    /// The configured budget in bytes.
    configured: usize,
    /// The current budget in bytes, at most `configured`.
    bytes: AtomicUsize,
    /// Whether the pool makes no chunk for now, even if the limit leaves room for a chunk.
    is_paused: AtomicBool,
    pub(crate) waiters: LandingWaiters,
    /// The memory that the pool has mapped.
    pub(super) budgets: Arc<Budgets>,
    /// The wait for other pools.
    pub(super) others_wait: OthersWait,
}

/// False only while no pool's budget is lowered. A thread that deregisters memory then does not
/// look for lowered budgets.
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

    /// Lowers the budget to `bytes`. The budget is restored when this process deregisters memory,
    /// or when the limit allows a chunk again. After this call, the caller must check again how
    /// much the process may pin.
    pub(crate) fn lower(&self, bytes: usize) {
        self.bytes.store(bytes.min(self.configured), SeqCst);
        // Set the flag after lowering the budget. So a thread that deregisters memory either sees
        // the lower budget and the flag, or has deregistered the memory before the caller's check,
        // which then finds this memory free.
        ANY_LOWERED.store(true, SeqCst);
        fence(SeqCst);
    }
}

/// Maximum wait for other pools. Connections that end, for example those of a replaced server,
/// return their memory within this time even on a busy machine.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The wait of a pool. A pool has no clock, so connections pass the time with each report.
#[derive(Debug, Default)]
pub(crate) struct OthersWait(Mutex<Option<Wait>>);

#[derive(Debug)]
struct Wait {
    since: Instant,
    /// The time of the last report that a connection waits.
    told: Instant,
    /// The number of times that pools had returned memory when the wait began.
    returns: usize,
    is_over: bool,
}

impl OthersWait {
    fn wait(&self) -> MutexGuard<'_, Option<Wait>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a connection waits at `now`. Pools have returned memory `returns` times so far.
    pub(super) fn waited(&self, now: Instant, returns: usize) {
        let mut wait = self.wait();
        let passed = |since: Instant| now.saturating_duration_since(since) >= MAX_WAIT;
        match &mut *wait {
            Some(wait) if wait.returns == returns && (wait.is_over || !passed(wait.told)) => {
                wait.is_over |= passed(wait.since);
                wait.told = now;
            }
            _ => *wait = Some(Wait { since: now, told: now, returns, is_over: false }),
        }
    }

    pub(super) fn is_over(&self, returns: usize) -> bool {
        self.wait().as_ref().is_some_and(|wait| wait.is_over && wait.returns == returns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows the module's table of the wait.
    #[test]
    fn it_lasts_until_nothing_has_been_returned_for_long() {
        let (wait, begin) = (OthersWait::default(), Instant::now());
        let tell = |periods: u32, returns| {
            wait.waited(begin + MAX_WAIT / 4 * periods, returns);
            wait.is_over(returns)
        };
        assert!(!wait.is_over(7));
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|n| tell(n, 7)),
            [false, false, false, false, true, true]
        );
        assert!(tell(500, 7), "it stays over");
        assert!(!wait.is_over(8), "until memory is returned");
        assert_eq!(
            [501, 502, 503, 504, 505].map(|n| tell(n, 8)),
            [false, false, false, false, true]
        );
        // Memory that is returned during the wait restarts it.
        let told = [(600, 9), (603, 9), (603, 10), (606, 10), (607, 10)];
        assert_eq!(told.map(|(n, r)| tell(n, r)), [false, false, false, false, true]);
        // A pause also restarts it, because what follows is another wait.
        let told = [(700, 11), (703, 11), (707, 11), (710, 11), (711, 11)];
        assert_eq!(told.map(|(n, r)| tell(n, r)), [false, false, false, false, true]);
    }
}
