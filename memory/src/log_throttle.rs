//! A limit on how often a peer can cause a log line, so that logs do not fill the disk.
//!
//! Libraries of this workspace log above DEBUG through [`throttled!`](crate::throttled) only.
//! `tests/source-rules` checks this rule.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::process::PerProcess;

/// Logs a line through a [`LogThrottle`](crate::LogThrottle). The field `suppressed` gives the
/// number of lines suppressed since the last logged line.
///
/// The level is `warn`, `error` or `info`. The other arguments are passed to the `tracing` macro of
/// that name. `in` names a throttle. Without `in` the line has its own throttle, which the whole
/// process shares.
///
/// ```
/// use tonic_rdma_memory::{LogThrottle, throttled};
///
/// let throttle = LogThrottle::new();
/// throttled!(in throttle, warn, peer = 7, "the peer broke the protocol");
/// throttled!(error, "the device has failed");
/// ```
#[macro_export]
macro_rules! throttled {
    (in $throttle:expr, $level:ident, $($line:tt)+) => {
        if let Some(suppressed) = $throttle.pass() {
            tracing::$level!(suppressed, $($line)+);
        }
    };
    ($level:ident, $($line:tt)+) => {{
        static THROTTLE: $crate::LogThrottle = $crate::LogThrottle::new();
        $crate::throttled!(in THROTTLE, $level, $($line)+);
    }};
}

/// A limit on lines of one kind: 20 at once, then one a second. Suppressed lines are counted.
#[derive(Debug)]
pub struct LogThrottle(PerProcess<Mutex<ThrottleState>>);

#[derive(Debug, Default)]
struct ThrottleState {
    /// The number of lines of the burst that have been used.
    used: u32,
    /// The time up to which elapsed periods have been taken off `used`.
    since: Option<Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// The number of lines that may be logged at once, after a pause.
    pub const BURST: u32 = 20;
    /// After the burst, one line is allowed in each period.
    pub const PERIOD: Duration = Duration::from_secs(1);

    /// Makes a throttle that has not let any line pass.
    pub const fn new() -> LogThrottle {
        LogThrottle(PerProcess::new(Mutex::default))
    }

    /// If a line may be logged now, returns the number of lines suppressed since the last logged
    /// line.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *state.since.get_or_insert(now);
        let periods =
            (now.saturating_duration_since(since).as_nanos() / Self::PERIOD.as_nanos()) as u64;
        match u32::try_from(periods).ok().filter(|periods| *periods < state.used) {
            Some(periods) => {
                state.used -= periods;
                state.since = Some(since + Self::PERIOD * periods);
            }
            None => (state.used, state.since) = (0, Some(now)),
        }
        if state.used >= Self::BURST {
            state.suppressed += 1;
            return None;
        }
        state.used += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

impl Default for LogThrottle {
    fn default() -> Self {
        LogThrottle::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_thins_out_and_is_counted() {
        let (throttle, start) = (LogThrottle::new(), Instant::now());
        // A thousand lines each second.
        let at = |n: u32| start + Duration::from_millis(1) * n;
        let lines: Vec<u64> = (0..10_000).filter_map(|n| throttle.pass_at(at(n))).collect();
        assert_eq!(lines.len(), 20 + 9);
        assert_eq!((lines[..20].iter().sum::<u64>(), lines[20], lines[21]), (0, 980, 999));
        // After a rest the whole burst is available again.
        let rested = at(60_000);
        assert_eq!(throttle.pass_at(rested), Some(999));
        assert_eq!(
            (0..100).filter_map(|_| throttle.pass_at(rested)).collect::<Vec<_>>(),
            vec![0; 19]
        );
    }
}
