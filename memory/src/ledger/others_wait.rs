//! Limits how long a pool without landing memory waits for other pools to return memory.
//!
//! Other pools may keep their memory for ever. So after a while a message is refused, as if no
//! other pool held memory.
//!
//! | the wait | on | next |
//! |---|---|---|
//! | none | a connection has waited | running |
//! | running | a pool of the process has returned memory | running, restarted |
//! | running | no connection has reported for [`MAX_WAIT`] that it waits | running, restarted |
//! | running | [`MAX_WAIT`] has passed | over |
//! | over | a pool of the process has returned memory | none |

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum wait for other pools. Connections that end, for example of a replaced server, return
/// their memory within this time even on a busy machine.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The wait of a pool. Connections pass the time to it, because a pool has no clock.
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

    /// Follows the table of the module.
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
