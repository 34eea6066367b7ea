//! Gives all connections of a runtime the time without reading the clock for each message.
//!
//! Without a vDSO, reading the clock is a system call. The protocol's time-outs are seconds long,
//! and an old time only makes the protocol send a PING sooner.
//!
//! | from | on | to |
//! |---|---|---|
//! | Read | a caller gets the current time | Read; Reused at the [`READS`]th call |
//! | Reused | a caller gets the time that was last read | Reused |
//! | Reused | the runtime's timer, [`MAX_AGE`] after that time | Read |

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::timer::time::{MAX_AGE, now};

/// Number of clock reads between two expiries of the timer. So a nearly idle runtime needs no timer
/// for its clock.
const READS: u32 = 8;

/// The value of `reused` while no time is reused.
const NONE: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct CoarseClock {
    /// The origin of the reused time.
    epoch: Instant,
    /// The reused time in nanoseconds since `epoch`. No other data depends on this value.
    reused: AtomicU64,
    reads: AtomicU32,
}

impl CoarseClock {
    pub(super) fn new(epoch: Instant) -> Self {
        CoarseClock { epoch, reused: AtomicU64::new(NONE), reads: AtomicU32::new(0) }
    }

    /// Returns the time. If later calls reuse this time, also returns when [`expire`](Self::expire)
    /// has to be called.
    #[inline]
    pub(super) fn now(&self) -> (Instant, Option<Instant>) {
        match self.reused.load(Ordering::Relaxed) {
            NONE => self.read(),
            nanos => (self.epoch + Duration::from_nanos(nanos), None),
        }
    }

    #[cold]
    fn read(&self) -> (Instant, Option<Instant>) {
        let now = now();
        // Only one thread makes the last of these reads.
        if self.reads.fetch_add(1, Ordering::Relaxed) + 1 != READS {
            return (now, None);
        }
        match u64::try_from(now.saturating_duration_since(self.epoch).as_nanos()) {
            Ok(NONE) | Err(_) => (now, None), // After 584 years.
            Ok(nanos) => {
                self.reused.store(nanos, Ordering::Relaxed);
                (now, Some(now + MAX_AGE))
            }
        }
    }

    /// Stops reusing the time, which is too old.
    pub(super) fn expire(&self) {
        self.reads.store(0, Ordering::Relaxed);
        self.reused.store(NONE, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_read_serves_all_until_it_is_too_old() {
        let clock = CoarseClock::new(now());
        for round in 0..3 {
            for n in 1..=READS {
                advance(MAX_AGE / 10).await;
                let reused = (n == READS).then(|| now() + MAX_AGE);
                assert_eq!(clock.now(), (now(), reused), "{round}: a few need no timer");
            }
            let last = now();
            for _ in 0..10 {
                advance(MAX_AGE / 10).await;
                assert_eq!(clock.now(), (last, None));
            }
            clock.expire();
        }
    }

    #[test]
    fn of_several_threads_one_sets_the_timer() {
        for _ in 0..100 {
            let clock = CoarseClock::new(now());
            let set: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| (0..READS).filter(|_| clock.now().1.is_some()).count()))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(set, 1);
        }
    }
}
