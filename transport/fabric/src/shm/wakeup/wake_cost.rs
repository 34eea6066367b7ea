//! Learns how long a wake-up takes, from the wake-ups of one link.

use std::time::Duration;

/// The assumed cost before any wake-up has been measured.
pub(crate) const UNKNOWN: Duration = Duration::from_micros(20);
/// The minimum cost: the time of two system calls.
const MIN_COST: Duration = Duration::from_micros(1);
/// A longer wake-up is ignored, because the processor was busy.
const MAX_COST: Duration = Duration::from_millis(4);
/// Number of wake-ups in the moving average.
const AVERAGED: u32 = 8;
/// This many wake-ups count in full. Each later wake-up counts as at most twice the average, so
/// that a busy processor changes the average little.
const UNCLAMPED: u32 = 3;

/// Counts the wake-ups in the average of one link. The average is not shared between links, because
/// the peer can influence it.
#[derive(Debug, Default)]
pub(crate) struct WakeCost {
    seen: u32,
}

impl WakeCost {
    /// Returns the new cost after a wake-up that took `took`. `known` is the old cost.
    #[inline]
    pub(crate) fn learn(&mut self, known: Duration, took: Duration) -> Duration {
        if took > MAX_COST {
            return known;
        }
        let max = if self.seen < UNCLAMPED { MAX_COST } else { known * 2 };
        self.seen = (self.seen + 1).min(AVERAGED);
        (known * (self.seen - 1) + took.clamp(MIN_COST, max)) / self.seen
    }
}

/// Whether the peer has to wake this end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    No,
    /// The peer has to wake this end, but the time is not measured: a peer on the same processor
    /// shows nothing about wake-ups.
    Unmeasured,
    /// The peer has to wake this end, which has waited since this time (CLOCK_MONOTONIC, in
    /// nanoseconds).
    Since(u64),
}

impl Waiting {
    /// The state of an end that is about to wait.
    pub(crate) fn begin(on_other_processor: bool) -> Waiting {
        match on_other_processor {
            true => Waiting::Since(monotonic()),
            false => Waiting::Unmeasured,
        }
    }
}

/// Returns how long ago the peer woke this end, which has waited since `since`. Returns `None` if
/// the peer did not wake this end in that time, or if the peer reads another clock.
pub(crate) fn wake_up(since: u64, woken_at: u64, now: u64) -> Option<Duration> {
    (since..=now).contains(&woken_at).then(|| Duration::from_nanos(now - woken_at))
}

/// Nanoseconds of CLOCK_MONOTONIC, which is the same for all processes of a time namespace. 0 on
/// systems without this clock.
pub(crate) fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Uses the C library, because rustix would call the kernel's vDSO, which does not exist under
    // valgrind.
    // SAFETY: `now` is written to until the call returns, and no longer; this rests on no rule.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    match result {
        0 => seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.unwrap_or(0)),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(times: impl IntoIterator<Item = u64>) -> u64 {
        let mut cost = WakeCost::default();
        let learn = |known, micros| cost.learn(known, Duration::from_micros(micros));
        times.into_iter().fold(UNKNOWN, learn).as_micros().try_into().unwrap()
    }

    #[test]
    fn the_first_wake_ups_tell_it() {
        assert_eq!(learnt([]), 20);
        assert_eq!(learnt([80]), 80);
        assert_eq!(learnt([80, 100, 120]), 100);
    }

    #[test]
    fn it_follows_the_wake_ups() {
        for (before, after) in [(80, 10), (10, 100), (100, 3), (3, 1000), (1, 4)] {
            let found = learnt([before; 20].into_iter().chain([after; 100]));
            assert!(found.abs_diff(after) <= after / 20 + 1, "{before} to {after}: {found}");
        }
    }

    #[test]
    fn a_few_that_met_a_busy_processor_change_little() {
        let found = learnt([10; 8].into_iter().chain([3000, 3900]));
        assert!(found < 15, "{found}");
        assert_eq!(learnt([10, 5000, 10]), 10, "no measure");
    }

    /// A peer may claim that it woke this end just now.
    #[test]
    fn no_time_at_all_counts_as_the_cheapest() {
        assert_eq!(learnt([0; 100]), 1);
        assert!(learnt([0; 100].into_iter().chain([50; 100])) > 45);
    }

    #[test]
    fn only_what_the_peer_rang_during_the_sleep_is_a_wake_up() {
        assert_eq!(wake_up(100, 150, 180), Some(Duration::from_nanos(30)));
        assert_eq!(wake_up(100, 100, 100), Some(Duration::ZERO));
        assert_eq!(wake_up(100, 99, 180), None, "before it slept");
        assert_eq!(wake_up(100, 181, 180), None, "later than now");
        assert_eq!(wake_up(100, 0, 180), None, "never");
        assert_eq!(wake_up(100, u64::MAX, 180), None);
    }

    #[test]
    fn the_clock_goes_forward() {
        let times: Vec<u64> = (0..100).map(|_| monotonic()).collect();
        assert!(times[0] > 0 && times.is_sorted());
    }
}
