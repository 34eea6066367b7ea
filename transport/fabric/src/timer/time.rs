//! The time that timers and clocks go by.

use std::time::{Duration, Instant};

/// The age of a reused time after which the clock is read again.
pub(super) const MAX_AGE: Duration = Duration::from_millis(20);

/// tokio's clock, also for the kernel's timers: where a test has stopped it, deadlines are told by
/// it.
pub(super) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
