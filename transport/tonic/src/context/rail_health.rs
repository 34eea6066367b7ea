//! Which rails of this host have failed lately, and whose turn it is.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Identifies a rail: this host's address, if it was chosen, and the server's. Ports change with
/// each start of a server.
pub(crate) type RailKey = (Option<IpAddr>, Option<IpAddr>);

/// How long a rail that has failed is tried behind the others.
const AVOIDED: Duration = Duration::from_secs(60);

/// Maximum number of failed rails remembered.
const MAX_FAILED: usize = 256;

/// Shared by all channels of a context.
#[derive(Debug, Default)]
pub(crate) struct RailHealth {
    failed: Mutex<HashMap<RailKey, Instant>>,
    turns: OnceLock<AtomicUsize>,
}

impl RailHealth {
    /// A connection over the rail failed, or could not be made.
    pub(crate) fn has_failed(&self, rail: RailKey) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.len() >= MAX_FAILED {
            failed.retain(|_, at| at.elapsed() < AVOIDED);
        }
        if failed.len() < MAX_FAILED {
            failed.insert(rail, Instant::now());
        }
    }

    /// A connection over the rail was made.
    pub(crate) fn works(&self, rail: &RailKey) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).remove(rail);
    }

    /// Whether the rail has failed lately.
    pub(crate) fn is_avoided(&self, rail: &RailKey) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(rail).is_some_and(|at| at.elapsed() < AVOIDED)
    }

    /// The next number, from `first` on.
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
        tokio::time::advance(AVOIDED).await;
        assert!(!health.is_avoided(&rail(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_failures_is_bounded_and_forgets_the_old_ones() {
        let health = RailHealth::default();
        for number in 0..2 * MAX_FAILED as u16 {
            health.has_failed(rail(number));
        }
        assert_eq!(health.failed.lock().unwrap().len(), MAX_FAILED);
        tokio::time::advance(AVOIDED).await;
        health.has_failed(rail(9));
        assert_eq!(health.failed.lock().unwrap().len(), 1);
    }

    #[test]
    fn turns_go_up_from_the_first() {
        let health = RailHealth::default();
        assert_eq!([health.turn(|| 7), health.turn(|| 0), health.turn(|| 0)], [7, 8, 9]);
    }
}
