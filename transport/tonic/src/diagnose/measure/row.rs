//! The transfers to measure, and their statistics.

use std::time::Duration;

use crate::diagnose::peer_report::Direction;

/// Number of timed round trips per round.
pub(super) const CALLS: usize = 25;
/// Payload of a timed round trip in bytes, in each direction.
pub(super) const SMALL: usize = 64;

/// A transfer to measure over TCP, over the fast path, and over a connection without calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) direction: Direction,
    pub(super) bytes: usize,
    pub(super) in_flight: usize,
}

pub(super) const fn row(direction: Direction, bytes: usize, in_flight: usize) -> Row {
    Row { direction, bytes, in_flight }
}

/// A way to transfer bytes.
pub(super) trait Mover {
    /// Performs a row's transfer `count` times. Returns false if this way does not support the
    /// transfer.
    fn run(&mut self, row: Row, count: usize) -> impl Future<Output = Result<bool, String>> + Send;
}

/// Durations of round trips.
#[derive(Debug, Clone, Default)]
pub(super) struct Latencies(Vec<Duration>);

impl Latencies {
    pub(super) fn push(&mut self, took: Duration) {
        self.0.push(took);
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// A percentile in microseconds. 0 without round trips.
    pub(super) fn percentile_us(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(index).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    }
}
