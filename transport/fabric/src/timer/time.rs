//! The time that timers and clocks use.

use std::time::{Duration, Instant};

/// The age of a reused time after which the clock is read again.
pub(super) const MAX_AGE: Duration = Duration::from_millis(20);

/// Reads tokio's clock. Kernel timers also read tokio's clock, because tests that stop this clock
/// set deadlines on it.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
