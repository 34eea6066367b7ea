//! When to try for the fast path again.

use crate::reason::ReasonCode;
use rand::Rng;
use std::time::Duration;

/// First pause after a cause that may pass by itself, and the longest.
const FAST: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// First pause after a cause that somebody has to mend, and the longest.
const SLOW: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));
/// After a loss so many attempts, of about half a minute together, are made in quick succession whatever is in the way:
/// what there was before may come back soon.
const QUICK: u32 = 7;
/// A fast path that held this long starts the pauses anew.
pub(crate) const STABLE: Duration = Duration::from_secs(10);

/// Doubling pauses, each drawn from the upper half of its length so that clients of one server do
/// not come back in step.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    attempts: u32,
    /// Attempts of a lost path that are left of the quick ones.
    quick: u32,
}

impl Backoff {
    pub(crate) fn reset(&mut self) {
        self.attempts = 0;
    }

    /// A path that was up is lost.
    pub(crate) fn lost(&mut self) {
        self.quick = QUICK;
    }

    /// The pause before the next attempt, after one that ended with `code`.
    pub(crate) fn next(&mut self, code: ReasonCode, rng: &mut impl Rng) -> Duration {
        let (first, longest) = if mends_itself(code) || self.quick > 0 { FAST } else { SLOW };
        self.quick = self.quick.saturating_sub(1);
        let pause = first.saturating_mul(1 << self.attempts.min(16)).min(longest);
        self.attempts = self.attempts.saturating_add(1);
        pause.mul_f64(rng.random_range(0.5..=1.0))
    }
}

fn mends_itself(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::LinkLost
            | ReasonCode::GoAway
            | ReasonCode::NoRoute
            | ReasonCode::HandshakeTimeout
            | ReasonCode::HandshakeRejected
            | ReasonCode::PoolExhausted
            | ReasonCode::Pending
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::StdRng};

    #[test]
    fn what_was_there_is_tried_for_quickly() {
        let (mut rng, mut backoff) = (StdRng::seed_from_u64(1), Backoff::default());
        backoff.lost();
        let pauses: Vec<_> = (0..=QUICK).map(|_| backoff.next(ReasonCode::NoActivePort, &mut rng)).collect();
        let (last, quick) = pauses.split_last().unwrap();
        assert!(quick.iter().all(|pause| *pause <= FAST.1) && *last > FAST.1, "{pauses:?}");
    }

    #[test]
    fn pauses_double_up_to_a_limit_with_jitter() {
        let mut rng = StdRng::seed_from_u64(1);
        for (code, (first, longest)) in [(ReasonCode::LinkLost, FAST), (ReasonCode::NoDevice, SLOW)] {
            let mut backoff = Backoff::default();
            for n in 0..100_u32 {
                let full = first.saturating_mul(1 << n.min(20)).min(longest);
                let pause = backoff.next(code, &mut rng);
                assert!(pause >= full / 2 && pause <= full, "{n}: {pause:?} of {full:?}");
            }
            backoff.reset();
            assert!(backoff.next(code, &mut rng) <= first);
        }
    }
}
