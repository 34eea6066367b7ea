//! Tables of a record, for a terminal and for a document.

use crate::report;
use crate::results::{digits, table};
use crate::scale::figure::{Figure, Row, between};
use crate::scale::record::{Connections, Ends, Run};

/// A table: heading and lines. The first line contains the column names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The heading above the table.
    pub heading: &'static str,
    lines: Vec<Vec<String>>,
}

impl Table {
    fn new(heading: &'static str, header: &[&str]) -> Self {
        Self { heading, lines: vec![header.iter().map(|name| (*name).to_owned()).collect()] }
    }

    /// Adds a line, without figures if the row failed.
    fn add(&mut self, contender: &str, count: usize, failed: bool, figures: Vec<String>) {
        let mut line = vec![contender.to_owned(), count.to_string()];
        match failed {
            true => {
                line.push("failed".to_owned());
                line.resize(self.lines[0].len(), String::new());
            }
            false => line.extend(figures),
        }
        self.lines.push(line);
    }

    /// Formats the table for a document.
    pub fn markdown(&self) -> String {
        table(&self.lines, 1)
    }

    /// Formats the table for a terminal, with aligned columns.
    pub fn aligned(&self) -> String {
        let (header, lines) = self.lines.split_at(1);
        let mut table = report::markdown(&header[0]);
        table.add_rows(lines);
        table.to_string()
    }
}

/// Formats all tables of a run.
pub fn all(run: &Run) -> Vec<Table> {
    let tables = [bulk(run), calls(run), rest(run), streams(run)];
    tables.into_iter().filter(|table| table.lines.len() > 1).collect()
}

fn or_dash(value: Option<f64>) -> String {
    value.filter(|value| value.is_finite()).map_or_else(|| "-".to_owned(), digits)
}

fn median(run: &Run, row: Row, contender: &str, name: &str) -> Option<f64> {
    Figure::of(row, Some(name)).ok()?.median(run, row, contender)
}

/// The ratio to the same contender's row with a count of 1.
fn to_one(run: &Run, row: Row, contender: &str, name: &str) -> Option<f64> {
    let one = match row {
        Row::Bulk(_) => Row::Bulk(1),
        Row::Connections(_) => Row::Connections(1),
        Row::Streams(_) => return None,
    };
    let figure = Figure::of(row, Some(name)).ok()?;
    (row != one).then(|| figure.ratio(run, (row, contender), (one, contender))).flatten()
}

/// The ratio to the first contender of the run in the same row.
fn to_first(run: &Run, row: Row, contender: &str, name: &str) -> Option<f64> {
    let first = match row {
        Row::Bulk(_) => &run.bulk.first()?.contender,
        Row::Connections(_) => &run.connections.first()?.contender,
        Row::Streams(_) => &run.streams.first()?.contender,
    };
    let figure = Figure::of(row, Some(name)).ok()?;
    (first != contender).then(|| figure.ratio(run, (row, contender), (row, first))).flatten()
}

fn mib(bytes: Option<usize>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| (bytes >> 20).to_string())
}

fn bulk(run: &Run) -> Table {
    let mut table = Table::new(
        "Clients that put messages of 1 MiB, 8 in flight each",
        &[
            "contender",
            "clients",
            "MB/s of all",
            "to one client",
            "to the first contender",
            "slowest/mean",
            "CPU s/GB",
            "registrations/message",
            "copied under pressure, of all bytes",
            "pool, MiB",
            "of it registered",
        ],
    );
    for found in &run.bulk {
        let (row, who) = (Row::Bulk(found.clients), found.contender.as_str());
        let figure = |name| or_dash(median(run, row, who, name));
        let registered = found.rounds.iter().filter_map(|round| Some(round.memory?.registered));
        table.add(
            who,
            found.clients,
            found.failure.is_some(),
            vec![
                figure("rate"),
                or_dash(to_one(run, row, who, "rate")),
                or_dash(to_first(run, row, who, "rate")),
                figure("fairness"),
                figure("cpu"),
                figure("registrations"),
                figure("pressure"),
                mib(found.pool),
                mib(registered.max()),
            ],
        );
    }
    table
}

fn calls(run: &Run) -> Table {
    let mut table = Table::new(
        "64 calls of 64 B in flight: round all connections, and on one while the others rest",
        &[
            "contender",
            "connections",
            "round all: kcall/s",
            "to one connection",
            "CPU us/call",
            "to one connection",
            "to the first contender",
            "on one: kcall/s",
            "CPU us/call",
            "to one connection",
        ],
    );
    for found in &run.connections {
        let (row, who) = (Row::Connections(found.connections), found.contender.as_str());
        let figure = |name| or_dash(median(run, row, who, name));
        let to_one = |name| or_dash(to_one(run, row, who, name));
        table.add(
            who,
            found.connections,
            found.failure.is_some(),
            vec![
                figure("all-rate"),
                to_one("all-rate"),
                figure("all-cpu"),
                to_one("all-cpu"),
                or_dash(to_first(run, row, who, "all-cpu")),
                figure("one-rate"),
                figure("one-cpu"),
                to_one("one-cpu"),
            ],
        );
    }
    table
}

fn rest(run: &Run) -> Table {
    let mut table = Table::new(
        "What a connection takes",
        &[
            "contender",
            "connections",
            "CPU at rest, us/s each",
            "server, KiB each",
            "client, KiB each",
            "pinned, KiB each",
            "pinned while busy",
            "descriptors each",
            "server, MiB",
            "client, MiB",
            "threads",
        ],
    );
    for found in &run.connections {
        let (row, who) = (Row::Connections(found.connections), found.contender.as_str());
        let figure = |name| or_dash(median(run, row, who, name));
        let memory = |of: fn(&Ends) -> u64| {
            found.rest.as_ref().map_or_else(|| "-".to_owned(), |ends| (of(ends) >> 10).to_string())
        };
        table.add(
            who,
            found.connections,
            found.failure.is_some(),
            vec![
                figure("rest-cpu"),
                figure("server-memory"),
                figure("client-memory"),
                figure("pinned"),
                or_dash(busy_pinned(run, found)),
                figure("descriptors"),
                memory(|ends| ends.server.memory),
                memory(|ends| ends.client.memory),
                figure("threads"),
            ],
        );
    }
    table
}

/// Pinned memory of the server per additional connection in KiB, immediately after calls on all
/// connections.
fn busy_pinned(run: &Run, row: &Connections) -> Option<f64> {
    let same = |other: &&Connections| {
        other.contender == row.contender && other.failure.is_none() && other.busy.is_some()
    };
    let first = run.connections.iter().find(same)?;
    let of = |row: &Connections| Some((row.connections, row.busy?.server.pinned));
    between(of(row)?, of(first)?)
}

fn streams(run: &Run) -> Table {
    let mut table = Table::new(
        "Calls of 64 B, one at a time, beside open streams of the same connection",
        &[
            "contender",
            "streams",
            "latency, us",
            "CPU us/call",
            "server, KiB each",
            "client, KiB each",
            "server, MiB",
            "client, MiB",
        ],
    );
    for found in &run.streams {
        let (row, who) = (Row::Streams(found.streams), found.contender.as_str());
        let figure = |name| or_dash(median(run, row, who, name));
        let first = run.streams.iter().find(|other| other.contender == who && other.ends.is_some());
        let each = |of: fn(&Ends) -> u64| {
            let first = first.and_then(|first| Some((first.streams, of(first.ends.as_ref()?))));
            let this = found.ends.as_ref().map(|ends| (found.streams, of(ends)));
            or_dash(this.zip(first).and_then(|(this, first)| between(this, first)))
        };
        let memory = |of: fn(&Ends) -> u64| {
            found.ends.as_ref().map_or_else(|| "-".to_owned(), |ends| (of(ends) >> 10).to_string())
        };
        table.add(
            who,
            found.streams,
            found.failure.is_some(),
            vec![
                figure("latency"),
                figure("cpu"),
                each(|ends| ends.server.memory),
                each(|ends| ends.client.memory),
                memory(|ends| ends.server.memory),
                memory(|ends| ends.client.memory),
            ],
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::figure::tests::run;

    fn cells(text: &str, begin: &str) -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(begin));
        let line = line.unwrap_or_else(|| panic!("no {begin} in:\n{text}"));
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    }

    #[test]
    fn a_line_for_each_count_and_contender() {
        let tables = all(&run());
        let [bulk, calls, rest, streams] = &tables[..] else { panic!("{tables:?}") };
        assert_eq!(
            cells(&bulk.markdown(), "| shm | 2 |"),
            ["shm", "2", "330", "1.5", "6", "0.75", "0.25", "0.5", "0.25", "512", "64"]
        );
        assert_eq!(
            cells(&bulk.markdown(), "| tonic-tcp | 1 |"),
            ["tonic-tcp", "1", "55", "-", "-", "0.75", "0.25", "-", "-", "-", "-"]
        );
        assert_eq!(
            cells(&calls.markdown(), "| shm | 101 |"),
            ["shm", "101", "75", "0.5", "15", "2", "0.312", "100", "10", "2"]
        );
        assert_eq!(
            cells(&rest.markdown(), "| shm | 101 |"),
            ["shm", "101", "3", "200", "200", "10", "10", "5", "20", "20", "2"]
        );
        assert_eq!(
            cells(&streams.markdown(), "| shm | 10 |"),
            ["shm", "10", "7", "9", "-", "-", "0", "0"]
        );
    }

    #[test]
    fn a_failure_is_shown_as_one() {
        let mut run = run();
        run.bulk[3].failure = Some("no".into());
        run.streams.clear();
        let tables = all(&run);
        assert_eq!(tables.len(), 3);
        let line = cells(&tables[0].markdown(), "| shm | 2 |");
        assert_eq!((line.len(), line[2].as_str(), line[3].as_str()), (11, "failed", ""));
        assert!(tables[0].aligned().contains(" failed |"), "{}", tables[0].aligned());
    }
}
