//! Pauses between attempts at the fast path.
//!
//! | after | first pause | longest |
//! |---|---|---|
//! | a failed attempt, if the cause may resolve itself | 250 ms | 30 s |
//! | a failed attempt, if an operator has to fix the cause | 30 s | 10 min |
//! | one of the first [`QUICK`] attempts after a loss, if an operator has to fix the cause | 250 ms | 30 s |
//! | the loss of a fast path | 250 ms | 2 s |
//! | the loss of a fast path that may drop long packets, while calls take TCP | 250 ms | 2 min |
//!
//! Pauses double. An established fast path resets the pauses of the first three rows, so a server
//! that fails often but returns each time does not get the long pauses of an absent server. The
//! pauses of the last two rows are reset in two cases: the server cannot be reached, which means
//! that the server has ended, or the fast path has held for [`STABLE`]. If every established fast
//! path reset the pauses of the last two rows, a path that connects but loses long packets would
//! fail one call after each short pause.

use std::time::Duration;

use crate::path::reason::ReasonCode;

const FAILED: (Duration, Duration) = (FIRST, Duration::from_secs(30));
const BROKEN: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));
const LOST: (Duration, Duration) = (FIRST, Duration::from_secs(2));
const LOST_BY_NETWORK: (Duration, Duration) = (FIRST, Duration::from_secs(120));
const FIRST: Duration = Duration::from_millis(250);
/// Number of attempts after a loss that use short pauses regardless of the cause. Together these
/// pauses take about half a minute. A path that worked before may soon work again.
const QUICK: u32 = 7;

/// A fast path that has held for this long resets the pauses.
pub(crate) const STABLE: Duration = Duration::from_secs(10);

/// Generates random numbers for pauses (SplitMix64). The numbers need not be secret.
#[derive(Debug)]
pub(crate) struct Jitter(u64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Self {
        Jitter(seed)
    }

    /// Returns a number from `low` up to, but not including, 1.
    fn from(&mut self, low: f64) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // An f64 represents the upper 53 bits exactly as a fraction.
        low + (1.0 - low) * ((mixed >> 11) as f64 / (1_u64 << 53) as f64)
    }
}

/// Doubling pauses. Each pause is drawn at random from the upper four fifths of its length, so that
/// clients that lost a server at the same moment do not all retry at once.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Attempts that have failed since the last established fast path.
    failed: u32,
    /// How often the pause after the next loss is doubled.
    lost: u32,
    /// The number of short pauses that are left after the last loss.
    quick: u32,
}

impl Backoff {
    /// Records a successful attempt.
    pub(crate) fn up(&mut self) {
        self.failed = 0;
    }

    /// The pause after a fast path that was up for `held`. `by_network` says that the network may
    /// be the cause and that calls can do without the path.
    pub(crate) fn lost(
        &mut self,
        held: Duration,
        by_network: bool,
        jitter: &mut Jitter,
    ) -> Duration {
        if held >= STABLE {
            self.lost = 0;
        }
        self.quick = QUICK;
        let pauses = if by_network { LOST_BY_NETWORK } else { LOST };
        pause(pauses, &mut self.lost, jitter)
    }

    /// The pause after an attempt that ended with `code`.
    pub(crate) fn failed(&mut self, code: ReasonCode, jitter: &mut Jitter) -> Duration {
        if code == ReasonCode::PeerUnreachable {
            // Reset the count of losses, because the server has ended and the path did not fail.
            self.lost = 0;
        }
        let soon = code.is_transient() || self.quick > 0;
        self.quick = self.quick.saturating_sub(1);
        pause(if soon { FAILED } else { BROKEN }, &mut self.failed, jitter)
    }
}

fn pause((first, longest): (Duration, Duration), times: &mut u32, jitter: &mut Jitter) -> Duration {
    let pause = first.saturating_mul(1 << (*times).min(16)).min(longest);
    *times = times.saturating_add(1);
    pause.mul_f64(jitter.from(0.2))
}

/// A random pause of 10 to 50 ms before the next try, after a temporary limit was reached. The
/// pause prevents all refused clients from returning at once.
pub(crate) fn again(jitter: &mut Jitter) -> Duration {
    Duration::from_millis(50).mul_f64(jitter.from(0.2))
}

/// A random pause for channels that learn at the same moment that their server is back, so that
/// they do not all ask for the fast path at once.
pub(crate) fn spread(jitter: &mut Jitter) -> Duration {
    Duration::from_secs(1).mul_f64(jitter.from(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_is_tried_for_quickly() {
        let (mut jitter, mut backoff) = (Jitter::new(1), Backoff::default());
        backoff.lost(Duration::ZERO, false, &mut jitter);
        let pauses: Vec<_> =
            (0..=QUICK).map(|_| backoff.failed(ReasonCode::NoActivePort, &mut jitter)).collect();
        let (last, quick) = pauses.split_last().unwrap();
        assert!(quick.iter().all(|pause| *pause <= FAILED.1) && *last > FAILED.1, "{pauses:?}");
    }

    #[test]
    fn pauses_double_up_to_a_limit_with_jitter() {
        let mut jitter = Jitter::new(1);
        for (code, (first, longest)) in
            [(ReasonCode::LinkLost, FAILED), (ReasonCode::NoDevice, BROKEN)]
        {
            let mut backoff = Backoff::default();
            for n in 0..100_u32 {
                let full = first.saturating_mul(1 << n.min(20)).min(longest);
                let pause = backoff.failed(code, &mut jitter);
                assert!(pause >= full / 5 && pause <= full, "{n}: {pause:?} of {full:?}");
            }
            backoff.up();
            assert!(backoff.failed(code, &mut jitter) <= first);
        }
    }

    #[test]
    fn a_server_that_dies_often_is_not_waited_for_long() {
        let mut jitter = Jitter::new(2);
        let mut backoff = Backoff::default();
        for _ in 0..100 {
            // The server was away twice, briefly each time.
            for _ in 0..3 {
                assert!(backoff.failed(ReasonCode::PeerUnreachable, &mut jitter) <= FIRST * 4);
            }
            backoff.up();
            assert!(backoff.lost(Duration::from_secs(1), true, &mut jitter) <= FIRST);
        }
    }

    /// The path connects, and fails with the first long message.
    #[test]
    fn a_path_that_never_holds_is_tried_less_and_less() {
        let (mut jitter, mut backoff) = (Jitter::new(4), Backoff::default());
        let mut live = |held, by_network| {
            backoff.up();
            backoff.lost(held, by_network, &mut jitter)
        };
        let pauses: Vec<_> = (0..12).map(|_| live(STABLE / 2, true)).collect();
        let (first, last, longest) = (pauses[0], pauses[11], LOST_BY_NETWORK.1);
        assert!(first <= FIRST && last >= longest / 5 && last <= longest, "{pauses:?}");
        assert!(live(STABLE / 2, false) <= LOST.1, "nothing else carries calls");
        assert!(live(STABLE, true) <= FIRST, "it held");
    }

    #[test]
    fn the_first_pauses_of_many_are_spread() {
        let mut jitter = Jitter::new(3);
        let mut in_tenths = [0; 10];
        for _ in 0..1000 {
            let pause = Backoff::default().lost(Duration::ZERO, false, &mut jitter);
            in_tenths[(pause.as_micros() * 10 / FIRST.as_micros()).min(9) as usize] += 1;
        }
        assert_eq!(in_tenths[..2], [0, 0]);
        assert!(in_tenths[2..].iter().all(|n| (60..200).contains(n)), "{in_tenths:?}");
    }
}
