//! Lines of the log that strangers cause, and that are not to fill the disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines at once, after a while without any.
const BURST: u32 = 20;
/// Then one for each of these.
const PERIOD: Duration = Duration::from_secs(1);

/// Thins out lines of one kind: 20 at once, and then one for each second. Those that are left out
/// are counted.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Lines of the burst that have been used.
    used: u32,
    /// Since when `used` has not become less.
    since: Option<Instant>,
    suppressed: u64,
}

impl LogThrottle {
    /// Nothing has been logged.
    pub const fn new() -> LogThrottle {
        LogThrottle(Mutex::new(State { used: 0, since: None, suppressed: 0 }))
    }

    /// Whether a line may be written now, and how many were left out since the last: for the line
    /// to say.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = *state.since.get_or_insert(now);
        let periods = (now.saturating_duration_since(since).as_nanos() / PERIOD.as_nanos()) as u64;
        match u32::try_from(periods).ok().filter(|periods| *periods < state.used) {
            Some(periods) => {
                state.used -= periods;
                state.since = Some(since + PERIOD * periods);
            }
            None => (state.used, state.since) = (0, Some(now)),
        }
        if state.used >= BURST {
            state.suppressed += 1;
            return None;
        }
        state.used += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_thins_out_and_is_counted() {
        let (throttle, start) = (LogThrottle::new(), Instant::now());
        // A thousand each second.
        let at = |n: u32| start + Duration::from_millis(1) * n;
        let lines: Vec<u64> = (0..10_000).filter_map(|n| throttle.pass_at(at(n))).collect();
        assert_eq!(lines.len(), 20 + 9);
        assert_eq!((lines[..20].iter().sum::<u64>(), lines[20], lines[21]), (0, 980, 999));
        // After a rest it is as at the beginning.
        let rested = at(60_000);
        assert_eq!(throttle.pass_at(rested), Some(999));
        assert_eq!(
            (0..100).filter_map(|_| throttle.pass_at(rested)).collect::<Vec<_>>(),
            vec![0; 19]
        );
    }
}
