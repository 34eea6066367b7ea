//! The processor time that unsuccessful polls of all links of a process may take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tonic_rdma_memory::PerProcess;

/// Unsuccessful polls may take `1 / DIVISOR` of the time of one processor.
pub(super) const DIVISOR: u32 = 8;
/// Time for unsuccessful polls that is available at first, and after a pause.
pub(super) const BURST: Duration = Duration::from_millis(2);

static START: PerProcess<Instant> = PerProcess::new(Instant::now);
static SPENT: PerProcess<Budget> = PerProcess::new(|| Budget(AtomicU64::new(0)));

/// Whether there is budget left.
pub(super) fn may_poll(now: Instant) -> bool {
    SPENT.is_left(since_start(now))
}

/// Charges an unsuccessful poll that took this time.
pub(super) fn charge(now: Instant, time: Duration) {
    SPENT.take(since_start(now), time);
}

fn since_start(now: Instant) -> u64 {
    nanos(now.saturating_duration_since(*START))
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The time until which the budget is used up, in nanoseconds since the start.
#[derive(Debug, Default)]
pub(super) struct Budget(AtomicU64);

impl Budget {
    pub(super) fn is_left(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now.saturating_add(nanos(BURST * DIVISOR))
    }

    pub(super) fn take(&self, now: u64, time: Duration) {
        // An end whose last poll was successful may go into debt, by one poll for each kind of
        // wait. It begins no other poll before the debt is paid.
        let add = |used: u64| Some(used.max(now).saturating_add(nanos(time * DIVISOR)));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsuccessful_polls_keep_to_their_budget() {
        let budget = Budget(AtomicU64::new(0));
        let time = Duration::from_micros(100);
        let mut spent = Duration::ZERO;
        for step in 1..=100_000_u64 {
            let now = step * nanos(time);
            if budget.is_left(now) {
                budget.take(now, time);
                spent += time;
            }
        }
        let all = time * 100_000 / DIVISOR;
        assert!(spent >= all && spent <= all + 2 * BURST, "{spent:?} of {all:?}");
    }

    #[test]
    fn a_debt_is_paid_in_full() {
        let budget = Budget(AtomicU64::new(0));
        (0..100).for_each(|_| budget.take(0, Duration::from_millis(1)));
        let paid = nanos(Duration::from_millis(100) * DIVISOR - BURST * DIVISOR);
        assert!(!budget.is_left(paid - 1) && budget.is_left(paid));
    }
}
