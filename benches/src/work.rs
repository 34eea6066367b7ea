//! The rows of the comparison: which calls, of which size, how many at a time.

/// Bytes of a small message.
pub const SMALL: usize = 64;

/// Which way the payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// In the request.
    Up,
    /// In the reply.
    Down,
}

/// What is done, and which figure comes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Small unary calls one after the other: microseconds.
    Latency,
    /// Small unary calls, so many at a time: thousands of calls per second.
    Rate {
        /// Calls in flight.
        in_flight: usize,
    },
    /// Large unary calls: megabytes per second.
    Bulk {
        /// Bytes of a message.
        size: usize,
        /// Which way they go.
        direction: Direction,
        /// Calls in flight.
        in_flight: usize,
    },
    /// Messages of one server-streaming call: megabytes per second.
    Stream {
        /// Bytes of a message.
        size: usize,
    },
    /// Latency of small calls beside one large transfer that is always under way: microseconds.
    Beside {
        /// Bytes of the large message.
        size: usize,
    },
}

/// One row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What is done.
    pub kind: Kind,
    /// Calls, or messages, in a round.
    pub calls: usize,
}

impl Row {
    /// The name: `latency-64`, `rate-64x64`, `up-1MiB-x8`, `stream-64KiB`, `beside-64MiB`.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Latency => format!("latency-{SMALL}"),
            Kind::Rate { in_flight } => format!("rate-{SMALL}-x{in_flight}"),
            Kind::Bulk { size, direction, in_flight } => {
                let way = if direction == Direction::Up { "up" } else { "down" };
                format!("{way}-{}-x{in_flight}", bytes(size))
            }
            Kind::Stream { size } => format!("stream-{}", bytes(size)),
            Kind::Beside { size } => format!("beside-{}", bytes(size)),
        }
    }

    /// The unit of its figure.
    pub fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Latency | Kind::Beside { .. } => "us",
            Kind::Rate { .. } => "kcall/s",
            Kind::Bulk { .. } | Kind::Stream { .. } => "MB/s",
        }
    }
}

fn bytes(size: usize) -> String {
    match size {
        s if s >= 1 << 20 => format!("{}MiB", s >> 20),
        s if s >= 1 << 10 => format!("{}KiB", s >> 10),
        s => s.to_string(),
    }
}

fn bulk(size: usize, direction: Direction, in_flight: usize, bytes: usize) -> Row {
    let calls = (bytes / size).clamp(in_flight * 2, 4096);
    Row { kind: Kind::Bulk { size, direction, in_flight }, calls }
}

/// The rows that show most in a short time.
pub fn short() -> Vec<Row> {
    let mut rows = vec![
        Row { kind: Kind::Latency, calls: 2000 },
        Row { kind: Kind::Rate { in_flight: 64 }, calls: 20_000 },
    ];
    for in_flight in [1, 8] {
        for direction in [Direction::Up, Direction::Down] {
            rows.push(bulk(1 << 20, direction, in_flight, 256 << 20));
        }
    }
    rows
}

/// All rows.
pub fn full() -> Vec<Row> {
    let mut rows = vec![Row { kind: Kind::Latency, calls: 5000 }];
    rows.extend([1, 16, 64, 256].map(|in_flight| Row { kind: Kind::Rate { in_flight }, calls: 20_000 }));
    for size in [4 << 10, 64 << 10, 1 << 20, 16 << 20] {
        for in_flight in [1, 8] {
            for direction in [Direction::Up, Direction::Down] {
                rows.push(bulk(size, direction, in_flight, 256 << 20));
            }
        }
    }
    rows.push(Row { kind: Kind::Stream { size: 64 << 10 }, calls: 4096 });
    rows.push(Row { kind: Kind::Beside { size: 64 << 20 }, calls: 2000 });
    rows
}
