//! Remembers which rails of this host have failed lately, and the number of the next channel's
//! first rail.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Identifies a rail by this host's address, if that address was chosen, and by the server's
/// address. The port is left out, because it may change when the server starts again.
pub(crate) type RailKey = (Option<IpAddr>, Option<IpAddr>);

/// How long a rail that has failed is tried only after all other rails: the time after the first
/// failure, and the maximum. The time doubles with each further failure.
const AVOIDED: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// Maximum number of failed rails that are remembered.
const MAX_FAILED: usize = 256;

/// A rail that has failed.
#[derive(Debug)]
struct Failed {
    until: Instant,
    /// How long the rail is avoided.
    pause: Duration,
}

/// The health of rails, shared by all channels of a context.
#[derive(Debug, Default)]
pub(crate) struct RailHealth {
    failed: Mutex<HashMap<RailKey, Failed>>,
    turns: OnceLock<AtomicUsize>,
}

impl RailHealth {
    fn failed(&self) -> MutexGuard<'_, HashMap<RailKey, Failed>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a failed rail. Either no connection could be made over this rail while another rail
    /// worked, or the rail's connection was soon lost. If all rails fail, the server is the cause,
    /// and the caller records no rail.
    pub(crate) fn has_failed(&self, rail: RailKey) {
        let (mut failed, now) = (self.failed(), Instant::now());
        let pause = match failed.get(&rail) {
            Some(before) => (before.pause * 2).min(AVOIDED.1),
            None => AVOIDED.0,
        };
        if failed.len() >= MAX_FAILED {
            failed.retain(|_, known| known.until > now);
        }
        if failed.len() < MAX_FAILED {
            failed.insert(rail, Failed { until: now + pause, pause });
        }
    }

    /// Records that a connection over the rail has held.
    pub(crate) fn works(&self, rail: &RailKey) {
        self.failed().remove(rail);
    }

    /// Whether the rail has failed lately.
    pub(crate) fn is_avoided(&self, rail: &RailKey) -> bool {
        self.failed().get(rail).is_some_and(|known| known.until > Instant::now())
    }

    /// Returns the next channel's number. The first number is `first()`.
    pub(super) fn turn(&self, first: impl FnOnce() -> usize) -> usize {
        let turns = self.turns.get_or_init(|| AtomicUsize::new(first()));
        turns.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(number: u16) -> RailKey {
        let [high, low] = number.to_be_bytes();
        (None, Some([10, 0, high, low].into()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_rail_is_avoided_for_a_while_or_until_it_works() {
        let health = RailHealth::default();
        health.has_failed(rail(1));
        health.has_failed(rail(2));
        health.works(&rail(2));
        assert!(health.is_avoided(&rail(1)) && !health.is_avoided(&rail(2)));
        tokio::time::advance(AVOIDED.0).await;
        assert!(!health.is_avoided(&rail(1)));
        for (again, seconds) in [120, 240, 480, 960, 1920, 3600, 3600].into_iter().enumerate() {
            health.has_failed(rail(1));
            tokio::time::advance(Duration::from_secs(seconds - 1)).await;
            assert!(health.is_avoided(&rail(1)), "{again}");
            tokio::time::advance(Duration::from_secs(1)).await;
            assert!(!health.is_avoided(&rail(1)), "{again}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_failures_is_bounded_and_forgets_the_old_ones() {
        let health = RailHealth::default();
        for number in 0..2 * MAX_FAILED as u16 {
            health.has_failed(rail(number));
        }
        assert_eq!(health.failed.lock().unwrap().len(), MAX_FAILED);
        tokio::time::advance(AVOIDED.0).await;
        health.has_failed(rail(9999));
        assert_eq!(health.failed.lock().unwrap().len(), 1);
    }

    #[test]
    fn turns_go_up_from_the_first() {
        let health = RailHealth::default();
        assert_eq!([health.turn(|| 7), health.turn(|| 0), health.turn(|| 0)], [7, 8, 9]);
    }
}
