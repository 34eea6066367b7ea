//! The figures of a record, by row, contender and name.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, bail};

use crate::report::median;
use crate::scale::record::{BulkRound, Connections, Ends, Load, Run, Streams};

/// A row of a run, for each contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Row {
    /// The row with this number of clients.
    Bulk(usize),
    /// The row with this number of connections.
    Connections(usize),
    /// The row with this number of streams.
    Streams(usize),
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bulk(count) => write!(f, "bulk-{count}"),
            Self::Connections(count) => write!(f, "connections-{count}"),
            Self::Streams(count) => write!(f, "streams-{count}"),
        }
    }
}

impl FromStr for Row {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let form = || format!("{text} is not a row: bulk-N, connections-N or streams-N");
        let (kind, count) = text.split_once('-').with_context(form)?;
        let count = count.parse().with_context(form)?;
        Ok(match kind {
            "bulk" => Self::Bulk(count),
            "connections" => Self::Connections(count),
            "streams" => Self::Streams(count),
            _ => bail!(form()),
        })
    }
}

/// The kind of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A count, or a ratio of counts, which is the same on every machine.
    Count,
    /// A time, or a value derived from a time, which is comparable only within a run.
    Time,
}

/// A figure of a row.
#[derive(Clone, Copy)]
pub struct Figure {
    /// The name in the record and on the command line.
    pub name: &'static str,
    /// The kind of the figure.
    pub unit: Unit,
    of: Of,
}

impl fmt::Debug for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Figure {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// A function that computes a figure of a row. For the resources per connection, the function also
/// gets the contender's first row, with which it compares the row.
#[derive(Clone, Copy)]
enum Of {
    Bulk(fn(&BulkRound) -> Option<f64>),
    Rest(fn(&Connections, &Connections) -> Option<f64>),
    Load(fn(&Connections) -> &[Load], fn(&Load) -> f64),
    Streams(fn(&Streams) -> Vec<f64>),
}

const fn bulk(name: &'static str, unit: Unit, of: fn(&BulkRound) -> Option<f64>) -> Figure {
    Figure { name, unit, of: Of::Bulk(of) }
}

const fn rest(
    name: &'static str,
    unit: Unit,
    of: fn(&Connections, &Connections) -> Option<f64>,
) -> Figure {
    Figure { name, unit, of: Of::Rest(of) }
}

const fn load(
    name: &'static str,
    which: fn(&Connections) -> &[Load],
    of: fn(&Load) -> f64,
) -> Figure {
    Figure { name, unit: Unit::Time, of: Of::Load(which, of) }
}

const fn streams(name: &'static str, unit: Unit, of: fn(&Streams) -> Vec<f64>) -> Figure {
    Figure { name, unit, of: Of::Streams(of) }
}

/// Figures of rows of clients. The first is the default.
pub const BULK: [Figure; 5] = [
    bulk("rate", Unit::Time, |round| Some(round.mb_per_s)),
    bulk("fairness", Unit::Count, |round| Some(round.slowest_to_mean)),
    bulk("cpu", Unit::Time, |round| Some(round.cpu_s_per_gb)),
    // Registrations per message.
    bulk("registrations", Unit::Count, |round| {
        Some(round.memory?.registrations as f64 / round.messages as f64)
    }),
    // Copied bytes per payload byte.
    bulk("pressure", Unit::Count, |round| Some(round.memory?.pressure as f64 / round.bytes as f64)),
];

/// Figures of rows of connections. The first is the default. Figures whose names begin with `all-`
/// are for calls on all connections in turn. Figures whose names begin with `one-` are for calls on
/// one connection while the others are idle. All other figures are per idle connection, except
/// `threads`, which is the number of threads of the server.
pub const CONNECTIONS: [Figure; 10] = [
    load("all-rate", |row| &row.all, |load| load.kcalls_per_s),
    load("all-cpu", |row| &row.all, |load| load.cpu_us_per_call),
    load("one-rate", |row| &row.one, |load| load.kcalls_per_s),
    load("one-cpu", |row| &row.one, |load| load.cpu_us_per_call),
    // Processor time of both processes, in microseconds per second.
    rest("rest-cpu", Unit::Time, |row, _| Some(row.rest_cpu_us_per_s? / row.connections as f64)),
    // Memory figures are in KiB.
    rest("server-memory", Unit::Count, |row, first| each(row, first, |ends| ends.server.memory)),
    rest("client-memory", Unit::Count, |row, first| each(row, first, |ends| ends.client.memory)),
    rest("pinned", Unit::Count, |row, first| each(row, first, |ends| ends.server.pinned)),
    rest("descriptors", Unit::Count, |row, first| each(row, first, |ends| ends.server.descriptors)),
    rest("threads", Unit::Count, |row, _| Some(row.rest?.server.threads as f64)),
];

/// Figures of rows of streams. The first is the default.
pub const STREAMS: [Figure; 2] = [
    streams("latency", Unit::Time, |row| row.rounds.iter().map(|r| r.latency_us).collect()),
    streams("cpu", Unit::Time, |row| row.rounds.iter().map(|r| r.cpu_us_per_call).collect()),
];

/// The resources of one more idle connection, relative to the first row.
fn each(row: &Connections, first: &Connections, of: fn(&Ends) -> u64) -> Option<f64> {
    between((row.connections, of(&row.rest?)), (first.connections, of(&first.rest?)))
}

/// The increase of a sum per item, from `base` for `first` items to `sum` for `count` items.
pub fn between((count, sum): (usize, u64), (first, base): (usize, u64)) -> Option<f64> {
    let more = count.checked_sub(first).filter(|more| *more > 0)?;
    Some((sum as f64 - base as f64) / more as f64)
}

impl Figure {
    /// Returns the figure of a row with this name, or the row's first figure if there is no name.
    ///
    /// # Errors
    /// The figure does not exist.
    pub fn of(row: Row, name: Option<&str>) -> anyhow::Result<Self> {
        let figures: &[Figure] = match row {
            Row::Bulk(_) => &BULK,
            Row::Connections(_) => &CONNECTIONS,
            Row::Streams(_) => &STREAMS,
        };
        let found = match name {
            Some(name) => figures.iter().find(|figure| figure.name == name),
            None => figures.first(),
        };
        found.copied().with_context(|| {
            let names: Vec<_> = figures.iter().map(|figure| figure.name).collect();
            format!("{row} has no {}, but {}", name.unwrap_or_default(), names.join(", "))
        })
    }

    /// The values of the rounds. Empty if the row is missing or failed, or the figure was not
    /// measured.
    pub fn rounds(&self, run: &Run, row: Row, contender: &str) -> Vec<f64> {
        match (self.of, row) {
            (Of::Bulk(of), Row::Bulk(clients)) => {
                let row =
                    run.bulk.iter().find(|r| r.contender == contender && r.clients == clients);
                let row = row.filter(|row| row.failure.is_none());
                row.map_or_else(Vec::new, |row| row.rounds.iter().filter_map(of).collect())
            }
            (Of::Load(which, of), Row::Connections(count)) => {
                let row = connections(run, contender, count);
                row.map_or_else(Vec::new, |(row, _)| which(row).iter().map(of).collect())
            }
            (Of::Rest(of), Row::Connections(count)) => {
                let row = connections(run, contender, count);
                row.and_then(|(row, first)| of(row, first)).into_iter().collect()
            }
            (Of::Streams(of), Row::Streams(count)) => {
                let row =
                    run.streams.iter().find(|r| r.contender == contender && r.streams == count);
                row.filter(|row| row.failure.is_none()).map_or_else(Vec::new, of)
            }
            _ => Vec::new(),
        }
    }

    /// The median over the rounds.
    pub fn median(&self, run: &Run, row: Row, contender: &str) -> Option<f64> {
        let rounds = self.rounds(run, row, contender);
        (!rounds.is_empty()).then(|| median(rounds))
    }

    /// The median of the ratios of one row and contender to another in the same round, because a
    /// slow phase of the machine affects both alike.
    pub fn ratio(&self, run: &Run, this: (Row, &str), to: (Row, &str)) -> Option<f64> {
        let (this, to) = (self.rounds(run, this.0, this.1), self.rounds(run, to.0, to.1));
        let rounds: Vec<f64> = this.iter().zip(&to).map(|(a, b)| a / b).collect();
        (!rounds.is_empty()).then(|| median(rounds))
    }
}

/// A row of a contender that did not fail, and the contender's first such row.
fn connections<'a>(
    run: &'a Run,
    contender: &str,
    count: usize,
) -> Option<(&'a Connections, &'a Connections)> {
    let well = |row: &&Connections| row.contender == contender && row.failure.is_none();
    let first = run.connections.iter().find(well)?;
    let row = run.connections.iter().filter(well).find(|row| row.connections == count)?;
    Some((row, first))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::footprint::Footprint;
    use crate::machine::Machine;
    use crate::results::Origin;
    use crate::scale::record::{Bulk, LatencyRound, Memory};

    /// Two contenders: 2 clients of shm have 1.5 times the throughput of one, with a registration
    /// for every other message.
    pub(crate) fn run() -> Run {
        let bulk = |contender: &str, clients, rates: [f64; 2], registrations| Bulk {
            contender: contender.into(),
            clients,
            pool: (contender == "shm").then_some(512 << 20),
            rounds: rates
                .map(|mb_per_s| BulkRound {
                    mb_per_s,
                    slowest_to_mean: 0.75,
                    messages: 100,
                    bytes: 100 << 20,
                    cpu_s_per_gb: 0.25,
                    memory: (contender == "shm").then_some(Memory {
                        registrations,
                        pressure: 25 << 20,
                        registered: 64 << 20,
                    }),
                })
                .into(),
            failure: None,
        };
        let connections = |contender: &str, connections: usize, cpu, each: u64| {
            let load =
                |cpu_us_per_call| Load { kcalls_per_s: 1e3 / cpu_us_per_call, cpu_us_per_call };
            let process = |descriptors| Footprint {
                memory: 1000 + each * connections as u64,
                pinned: 10 * connections as u64,
                descriptors,
                threads: 2,
            };
            let ends = Ends { client: process(10), server: process(10 + 5 * connections as u64) };
            Connections {
                contender: contender.into(),
                connections,
                all: vec![load(cpu), load(cpu * 2.0)],
                busy: Some(ends),
                rest: Some(ends),
                rest_cpu_us_per_s: Some(3.0 * connections as f64),
                one: vec![load(cpu)],
                failure: None,
            }
        };
        Run {
            origin: Origin {
                title: "A run of scale".into(),
                commit: "abc1234".into(),
                date: "2026-11-24".into(),
                command: "scale --bulk 1,2".into(),
            },
            machine: Machine {
                processor: "P".into(),
                processors: 2,
                kernel: "Linux 6".into(),
                c_library: "glibc 2".into(),
                allocators: vec!["a".into()],
                environment: vec![],
            },
            notes: vec!["2 rounds".into()],
            bulk: vec![
                bulk("tonic-tcp", 1, [100.0, 10.0], 0),
                bulk("tonic-tcp", 2, [100.0, 10.0], 0),
                bulk("shm", 1, [400.0, 40.0], 0),
                bulk("shm", 2, [600.0, 60.0], 50),
            ],
            connections: vec![
                connections("tonic-tcp", 1, 16.0, 30),
                connections("tonic-tcp", 101, 32.0, 30),
                connections("shm", 1, 5.0, 200),
                connections("shm", 101, 10.0, 200),
            ],
            streams: vec![Streams {
                contender: "shm".into(),
                streams: 10,
                rounds: vec![LatencyRound { latency_us: 7.0, cpu_us_per_call: 9.0 }],
                ends: Some(Ends::default()),
                failure: None,
            }],
        }
    }

    #[test]
    fn rows_have_names() {
        for name in ["bulk-16", "connections-10000", "streams-0"] {
            assert_eq!(name.parse::<Row>().unwrap().to_string(), name);
        }
        for bad in ["bulk", "bulk-x", "shm", "tonic-tcp", "bulk--1"] {
            assert!(bad.parse::<Row>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ratios_pair_rounds_and_medians_do_not() {
        let run = run();
        let rate = Figure::of(Row::Bulk(1), None).unwrap();
        // The machine was ten times slower in the second round.
        assert_eq!(rate.median(&run, Row::Bulk(2), "shm"), Some(330.0));
        let to = |row, contender| rate.ratio(&run, (Row::Bulk(2), "shm"), (row, contender));
        assert_eq!(to(Row::Bulk(1), "shm"), Some(1.5));
        assert_eq!(to(Row::Bulk(2), "tonic-tcp"), Some(6.0));
        assert_eq!(to(Row::Bulk(3), "shm"), None);
    }

    #[test]
    fn what_one_takes_is_against_the_first_row() {
        let run = run();
        let of = |name, row| Figure::of(row, Some(name)).unwrap().median(&run, row, "shm");
        assert_eq!(of("descriptors", Row::Connections(101)), Some(5.0));
        assert_eq!(of("server-memory", Row::Connections(101)), Some(200.0));
        assert_eq!(of("server-memory", Row::Connections(1)), None);
        assert_eq!(of("rest-cpu", Row::Connections(101)), Some(3.0));
        assert_eq!(of("registrations", Row::Bulk(2)), Some(0.5));
        assert_eq!(of("pressure", Row::Bulk(2)), Some(0.25));
        assert!(Figure::of(Row::Bulk(1), Some("descriptors")).is_err());
    }

    #[test]
    fn what_failed_has_no_figures() {
        let mut run = run();
        run.bulk[3].failure = Some("no".into());
        run.connections[3].failure = Some("no".into());
        let of = |row: Row| Figure::of(row, None).unwrap().median(&run, row, "shm");
        assert_eq!((of(Row::Bulk(2)), of(Row::Connections(101))), (None, None));
        assert_eq!(run.failures(), ["bulk-2 shm: no", "connections-101 shm: no"]);
    }
}
