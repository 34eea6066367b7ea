//! What polls in vain may take: of all links of the process together.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Of the time of one processor, polls in vain take one part in so many.
pub(super) const SHARE: u32 = 8;
/// Polls in vain that are free at first, and after a pause.
pub(super) const BURST: Duration = Duration::from_millis(2);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
static VAIN: Share = Share(AtomicU64::new(0));

/// Whether polls in vain have not used up their share.
pub(super) fn may_poll(now: Instant) -> bool {
    VAIN.is_left(since_start(now))
}

/// A poll has taken so long in vain.
pub(super) fn charge(now: Instant, time: Duration) {
    VAIN.take(since_start(now), time);
}

fn since_start(now: Instant) -> u64 {
    nanos(now.saturating_duration_since(*START))
}

pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Until when it is used up, in nanoseconds since a start.
#[derive(Debug, Default)]
pub(super) struct Share(AtomicU64);

impl Share {
    pub(super) fn is_left(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now.saturating_add(nanos(BURST * SHARE))
    }

    pub(super) fn take(&self, now: u64, time: Duration) {
        // Ends whose last poll found something go into debt, by one poll of each
        // habit: they begin no other before the debt is paid.
        let add = |used: u64| Some(used.max(now).saturating_add(nanos(time * SHARE)));
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_in_vain_take_their_share() {
        let share = Share(AtomicU64::new(0));
        let time = Duration::from_micros(100);
        let mut vain = Duration::ZERO;
        for step in 1..=100_000_u64 {
            let now = step * nanos(time);
            if share.is_left(now) {
                share.take(now, time);
                vain += time;
            }
        }
        let all = time * 100_000 / SHARE;
        assert!(vain >= all && vain <= all + 2 * BURST, "{vain:?} of {all:?}");
    }

    #[test]
    fn a_debt_is_paid_in_full() {
        let share = Share(AtomicU64::new(0));
        (0..100).for_each(|_| share.take(0, Duration::from_millis(1)));
        let paid = nanos(Duration::from_millis(100) * SHARE - BURST * SHARE);
        assert!(!share.is_left(paid - 1) && share.is_left(paid));
    }
}
