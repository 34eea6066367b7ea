//! The results, as a table and as JSON.

use std::fmt;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::pass::Pass;
use crate::cli::size_shown;
use crate::net::Route;

/// The results of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) jobs: u16,
    pub(super) figures: Vec<Figures>,
    pub(super) sent: Route,
    pub(super) received: Route,
}

/// One pass over all objects of one size.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    /// `write` or `read`.
    operation: &'static str,
    /// `sequential` or `random`.
    order: &'static str,
    object_bytes: u64,
    objects: usize,
    seconds: f64,
    bytes_per_second: f64,
    objects_per_second: f64,
    /// Median of the time for a whole object, in milliseconds.
    p50_ms: f64,
    /// 99th percentile of this time.
    p99_ms: f64,
}

impl Figures {
    /// `times` are the durations of single objects, and `all` is the duration of the pass.
    pub(super) fn new(pass: Pass, size: u64, mut times: Vec<Duration>, all: Duration) -> Figures {
        times.sort_unstable();
        let seconds = all.as_secs_f64().max(1e-9);
        let objects = times.len();
        Figures {
            operation: if pass.writes() { "write" } else { "read" },
            order: if pass.at_random() { "random" } else { "sequential" },
            object_bytes: size,
            objects,
            seconds,
            bytes_per_second: size as f64 * objects as f64 / seconds,
            objects_per_second: objects as f64 / seconds,
            p50_ms: percentile(&times, 50),
            p99_ms: percentile(&times, 99),
        }
    }
}

/// A percentile in milliseconds. `times` must be sorted.
fn percentile(times: &[Duration], percent: usize) -> f64 {
    let rank = (times.len() * percent).div_ceil(100).saturating_sub(1);
    times.get(rank).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let numbers = ["size", "objects", "seconds", "MB/s", "objects/s", "p50 ms", "p99 ms"];
        table.set_header(["operation", "order"].into_iter().chain(numbers));
        for row in &self.figures {
            table.add_row([
                row.operation.to_owned(),
                row.order.to_owned(),
                size_shown(row.object_bytes),
                row.objects.to_string(),
                format!("{:.3}", row.seconds),
                format!("{:.1}", row.bytes_per_second / 1e6),
                format!("{:.0}", row.objects_per_second),
                format!("{:.3}", row.p50_ms),
                format!("{:.3}", row.p99_ms),
            ]);
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for line in table.lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        writeln!(f, "jobs: {}", self.jobs)?;
        writeln!(f, "writes: {}", self.sent)?;
        write!(f, "reads: {}", self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_times() {
        let times: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile(&times, 50), 100.0);
        assert_eq!(percentile(&times, 99), 198.0);
        assert_eq!(percentile(&times[..1], 99), 1.0);
        assert_eq!(percentile(&[], 50), 0.0);
        let figures = Figures::new(Pass::WriteAtRandom, 1000, times, Duration::from_secs(2));
        assert_eq!((figures.bytes_per_second, figures.objects_per_second), (100_000.0, 100.0));
        assert_eq!((figures.operation, figures.order), ("write", "random"));
    }
}
