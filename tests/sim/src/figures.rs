//! The figures of many runs.

use std::collections::BTreeMap;
use std::fmt;

use crate::plan::Theme;
use crate::run::Report;

/// Sums over runs.
#[derive(Debug, Default, Clone)]
pub struct Figures {
    /// Runs.
    pub seeds: u64,
    /// Runs by theme.
    pub themes: BTreeMap<Theme, u64>,
    /// Calls that ended.
    pub calls: u64,
    /// Calls over the fast path.
    pub fast: u64,
    /// Calls that ended with OK.
    pub well: u64,
    /// Calls that ended with the status that the plan gave their handler.
    pub as_planned: u64,
    /// Calls that failed because a buffer was too short, as planned.
    pub too_long: u64,
    /// Calls that their callers dropped.
    pub dropped: u64,
    /// Calls that their deadlines ended.
    pub late: u64,
    /// Calls that a fault ended.
    pub failed: u64,
    /// Faults, by name.
    pub faults: BTreeMap<&'static str, u64>,
    /// Events on the fabric.
    pub events: u64,
    /// SENDs of all connections.
    pub sends: u64,
    /// WRITEs of all connections.
    pub writes: u64,
    /// The total length of these WRITEs.
    pub write_bytes: u64,
    /// Leases given to peers.
    pub leases: u64,
    /// The number of these leases whose memory was itself lent by a peer.
    pub lent_on: u64,
    /// Connections.
    pub links: u64,
}

impl Figures {
    /// Adds a run.
    pub fn add(&mut self, report: &Report) {
        self.seeds += 1;
        *self.themes.entry(report.theme).or_default() += 1;
        let counts = &report.counts;
        self.calls += counts.calls;
        self.well += counts.well;
        self.as_planned += counts.as_planned;
        self.too_long += counts.too_long;
        self.dropped += counts.dropped;
        self.late += counts.late;
        self.failed += counts.failed;
        self.fast += report.fast;
        for (name, count) in &report.faults {
            *self.faults.entry(name).or_default() += count;
        }
        self.events += report.events;
        self.sends += report.fabric.sends;
        self.writes += report.fabric.writes;
        self.write_bytes += report.fabric.write_bytes;
        self.leases += report.fabric.leases;
        self.lent_on += report.fabric.lent_on;
        self.links += report.fabric.links / 2;
    }

    /// Faults of all kinds.
    pub fn all_faults(&self) -> u64 {
        self.faults.values().sum()
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seeds            {}", self.seeds)?;
        let themes: Vec<String> =
            self.themes.iter().map(|(theme, n)| format!("{theme:?} {n}")).collect();
        writeln!(f, "  themes         {}", themes.join(", "))?;
        writeln!(f, "calls            {} ({} over the fast path)", self.calls, self.fast)?;
        writeln!(
            f,
            "  ended          {} well, {} with a status as planned, {} because a buffer was too short, {} dropped by callers, {} by deadlines, {} by faults",
            self.well, self.as_planned, self.too_long, self.dropped, self.late, self.failed
        )?;
        writeln!(f, "faults           {}", self.all_faults())?;
        for (name, count) in &self.faults {
            writeln!(f, "  {name:<30} {count}")?;
        }
        writeln!(f, "fabric           {} connections, {} events", self.links, self.events)?;
        write!(
            f,
            "  carried        {} SENDs, {} WRITEs of {:.1} MiB together, {} leases, {} of them of what was lent",
            self.sends,
            self.writes,
            self.write_bytes as f64 / f64::from(1 << 20),
            self.leases,
            self.lent_on
        )
    }
}
