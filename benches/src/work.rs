//! The rows of the comparison: kind, size and concurrency of calls, and number of connections.

use serde::{Deserialize, Serialize};

/// Bytes of a small message.
pub const SMALL: usize = 64;

/// The direction of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// In the request.
    Up,
    /// In the reply.
    Down,
}

/// The kind of calls, and the figure that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkKind {
    /// Sequential small unary calls: microseconds.
    Latency,
    /// Small unary calls, each on a new connection, from the connect to the drop of the connection:
    /// microseconds.
    Connect {
        /// Whether the first call starts the connection.
        lazy: bool,
    },
    /// Concurrent small unary calls: thousands of calls per second.
    Rate {
        /// Calls in flight over all connections.
        in_flight: usize,
        /// Number of connections. With more connections than calls in flight, the calls cycle
        /// through them.
        connections: usize,
    },
    /// Small unary calls that start at equal intervals, whether or not earlier calls have ended:
    /// microseconds from the time when a call was due.
    Open {
        /// Percentage of the highest rate, which is measured first.
        percent: u32,
    },
    /// Concurrent small unary calls on one connection while other connections are idle: thousands
    /// of calls per second.
    Resting {
        /// Calls in flight.
        in_flight: usize,
        /// Number of connections, including the connection with the calls.
        connections: usize,
    },
    /// Large requests of many clients, each on its own connection, for a given time: megabytes per
    /// second of all clients together.
    Clients {
        /// Number of clients.
        clients: usize,
        /// Bytes of a message.
        size: usize,
        /// Calls in flight per client.
        in_flight: usize,
        /// Duration in milliseconds.
        time: u64,
    },
    /// Large unary calls: megabytes per second.
    Bulk {
        /// Bytes of a message.
        size: usize,
        /// Direction of the payload.
        direction: Direction,
        /// Calls in flight.
        in_flight: usize,
    },
    /// Messages of one server-streaming call: megabytes per second.
    Stream {
        /// Bytes of a message.
        size: usize,
    },
    /// Latency of small calls while a large transfer is always in flight: microseconds.
    LatencyUnderLoad {
        /// Bytes of the large message.
        size: usize,
    },
    /// Latency of small calls on a connection with idle open streams: microseconds.
    IdleStreams {
        /// Number of idle streams.
        streams: usize,
    },
    /// Copies of uncached memory by the distance of source and destination: megabytes per second.
    Phase {
        /// Bytes of a copy.
        size: usize,
        /// Distance of the destination behind the source in bytes, modulo a page.
        distance: usize,
    },
}

/// One row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The kind of calls.
    pub kind: WorkKind,
    /// Number of calls or messages in a round. The number is 0 if the kind has a duration instead.
    pub calls: usize,
}

impl Row {
    /// The name: `latency-64`, `connect-64`, `connect-lazy-64`, `rate-64-x64`, `rate-64-x64-c8`,
    /// `open-64-80`, `resting-64-x64-c1000`, `clients-1MiB-x8-c16`, `up-1MiB-x8`, `stream-64KiB`,
    /// `beside-64MiB`, `held-10000`, `phase-64KiB-22`.
    pub fn name(&self) -> String {
        match self.kind {
            WorkKind::Latency => format!("latency-{SMALL}"),
            WorkKind::Connect { lazy: false } => format!("connect-{SMALL}"),
            WorkKind::Connect { lazy: true } => format!("connect-lazy-{SMALL}"),
            WorkKind::Rate { in_flight, connections: 1 } => format!("rate-{SMALL}-x{in_flight}"),
            WorkKind::Rate { in_flight, connections } => {
                format!("rate-{SMALL}-x{in_flight}-c{connections}")
            }
            WorkKind::Open { percent } => format!("open-{SMALL}-{percent}"),
            WorkKind::Resting { in_flight, connections } => {
                format!("resting-{SMALL}-x{in_flight}-c{connections}")
            }
            WorkKind::Clients { clients, size, in_flight, .. } => {
                format!("clients-{}-x{in_flight}-c{clients}", bytes(size))
            }
            WorkKind::Bulk { size, direction, in_flight } => {
                let way = if direction == Direction::Up { "up" } else { "down" };
                format!("{way}-{}-x{in_flight}", bytes(size))
            }
            WorkKind::Stream { size } => format!("stream-{}", bytes(size)),
            WorkKind::LatencyUnderLoad { size } => format!("beside-{}", bytes(size)),
            WorkKind::IdleStreams { streams } => format!("held-{streams}"),
            WorkKind::Phase { size, distance } => format!("phase-{}-{distance}", bytes(size)),
        }
    }

    /// The unit of the figure.
    pub fn unit(&self) -> &'static str {
        match self.kind {
            WorkKind::Latency
            | WorkKind::Connect { .. }
            | WorkKind::Open { .. }
            | WorkKind::LatencyUnderLoad { .. }
            | WorkKind::IdleStreams { .. } => "us",
            WorkKind::Rate { .. } | WorkKind::Resting { .. } => "kcall/s",
            WorkKind::Bulk { .. }
            | WorkKind::Clients { .. }
            | WorkKind::Stream { .. }
            | WorkKind::Phase { .. } => "MB/s",
        }
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        match self.kind {
            WorkKind::Rate { connections, .. } | WorkKind::Resting { connections, .. } => {
                connections
            }
            WorkKind::Clients { clients, .. } => clients,
            _ => 1,
        }
    }

    /// Minimum number of calls for a meaningful figure: at least the number of calls in flight.
    pub fn min_calls(&self) -> usize {
        match self.kind {
            WorkKind::Bulk { in_flight, .. } => in_flight,
            WorkKind::Rate { in_flight, .. } | WorkKind::Resting { in_flight, .. } => {
                in_flight.max(16)
            }
            _ => 16,
        }
    }

    /// The row with a tenth of its calls, but at least [`min_calls`](Self::min_calls).
    pub fn tenth(&self) -> Row {
        Row { calls: (self.calls / 10).max(self.min_calls()), ..*self }
    }

    /// The number of idle streams.
    pub fn streams(&self) -> usize {
        match self.kind {
            WorkKind::IdleStreams { streams } => streams,
            _ => 0,
        }
    }
}

/// Formats a size: `64`, `4KiB`, `1MiB`.
pub(crate) fn bytes(size: usize) -> String {
    match size {
        s if s >= 1 << 20 => format!("{}MiB", s >> 20),
        s if s >= 1 << 10 => format!("{}KiB", s >> 10),
        s => s.to_string(),
    }
}

fn rate(in_flight: usize, connections: usize) -> Row {
    Row { kind: WorkKind::Rate { in_flight, connections }, calls: 20_000 }
}

fn bulk(size: usize, direction: Direction, in_flight: usize, bytes: usize) -> Row {
    let calls = (bytes / size).clamp(in_flight * 2, 4096);
    Row { kind: WorkKind::Bulk { size, direction, in_flight }, calls }
}

/// The most informative rows, for a short run.
pub fn short() -> Vec<Row> {
    let mut rows = vec![Row { kind: WorkKind::Latency, calls: 2000 }, rate(64, 1)];
    for in_flight in [1, 8] {
        for direction in [Direction::Up, Direction::Down] {
            rows.push(bulk(1 << 20, direction, in_flight, 256 << 20));
        }
    }
    rows
}

/// The rows of the full comparison.
pub fn full() -> Vec<Row> {
    let mut rows = vec![Row { kind: WorkKind::Latency, calls: 5000 }];
    for in_flight in [1, 16, 64, 256] {
        let connections = [1, 8, 64].into_iter().filter(|connections| *connections <= in_flight);
        rows.extend(connections.map(|connections| rate(in_flight, connections)));
    }
    for size in [4 << 10, 64 << 10, 1 << 20, 16 << 20] {
        for in_flight in [1, 8] {
            for direction in [Direction::Up, Direction::Down] {
                rows.push(bulk(size, direction, in_flight, 256 << 20));
            }
        }
    }
    rows.push(Row { kind: WorkKind::Stream { size: 64 << 10 }, calls: 4096 });
    rows.push(Row { kind: WorkKind::LatencyUnderLoad { size: 64 << 20 }, calls: 2000 });
    rows
}

/// The rows between a short call and bulk. Most calls of services lie in this range.
pub fn middle() -> Vec<Row> {
    let mut rows = Vec::new();
    for in_flight in [1, 8, 64] {
        for size in [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10] {
            let ways = [Direction::Up, Direction::Down];
            rows.extend(ways.map(|way| bulk(size, way, in_flight, 256 << 20)));
        }
    }
    rows
}

/// The rows with a connection for each call.
pub fn connect() -> Vec<Row> {
    [false, true].map(|lazy| Row { kind: WorkKind::Connect { lazy }, calls: 300 }).into()
}

/// The rows whose calls start at given times.
pub fn open() -> Vec<Row> {
    [10, 50, 80].map(|percent| Row { kind: WorkKind::Open { percent }, calls: 20_000 }).into()
}

/// The rows with messages of 64 MiB.
pub fn long() -> Vec<Row> {
    let rows = [8, 1].map(|in_flight| {
        [Direction::Up, Direction::Down].map(|way| bulk(64 << 20, way, in_flight, 1 << 30))
    });
    rows.concat()
}

/// The rows with one message in flight, which a contender that lends hands over without a copy.
/// These rows show how much a message's length adds to the time of a short call. These rows have
/// more calls than other rows of long messages, because each call takes little time. A message of
/// 256 MiB would exceed the protocol's limit by the length of its other fields.
pub fn handover() -> Vec<Row> {
    let row = |size| Row {
        kind: WorkKind::Bulk { size, direction: Direction::Up, in_flight: 1 },
        calls: HANDOVERS,
    };
    [4 << 10, 64 << 10, 1 << 20, 16 << 20, 255 << 20].map(row).into()
}

/// Calls of a row of [`handover`].
const HANDOVERS: usize = 2000;

/// Distances from source to destination: zero, distances that headers cause, alignments, and a
/// distance near the end of a page.
const DISTANCES: [usize; 16] =
    [0, 1, 6, 8, 16, 22, 32, 38, 48, 64, 128, 256, 512, 1024, 2048, 4090];

/// The rows of copies by distance.
pub fn phase() -> Vec<Row> {
    let of = |size: usize| {
        let row = move |distance| Row {
            kind: WorkKind::Phase { size, distance },
            calls: (128 << 20) / size,
        };
        DISTANCES.map(row)
    };
    [64 << 10, 1 << 20].into_iter().flat_map(of).collect()
}
