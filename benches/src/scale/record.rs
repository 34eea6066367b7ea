//! What `scale` measured, as it is kept in JSON: the rounds as they were. Ratios and medians are
//! computed where they are shown.

use serde::{Deserialize, Serialize};

use crate::footprint::Footprint;
use crate::machine::Machine;
use crate::results::Origin;

/// A run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Which program, command and commit.
    #[serde(flatten)]
    pub origin: Origin,
    /// Where.
    pub machine: Machine,
    /// How it was done.
    pub notes: Vec<String>,
    /// Clients that send large messages.
    pub bulk: Vec<Bulk>,
    /// Connections.
    pub connections: Vec<Connections>,
    /// Streams on one connection.
    pub streams: Vec<Streams>,
}

/// Clients of a contender that put large messages into one server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bulk {
    /// Who.
    pub contender: String,
    /// Clients, each with a connection.
    pub clients: usize,
    /// Bytes that the pool of either end may have, where there is one.
    pub pool: Option<usize>,
    /// Round by round.
    pub rounds: Vec<BulkRound>,
    /// Why there are no more rounds.
    pub failure: Option<String>,
}

/// A round of [`Bulk`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BulkRound {
    /// Megabytes a second of all clients together.
    pub mb_per_s: f64,
    /// Messages of the slowest client to those of the mean.
    pub slowest_to_mean: f64,
    /// Messages, those at the end that are not in `mb_per_s` included.
    pub messages: usize,
    /// Bytes of these.
    pub bytes: usize,
    /// Seconds of processor time of both processes for a gigabyte.
    pub cpu_s_per_gb: f64,
    /// What the server's memory did meanwhile, where it has such figures.
    pub memory: Option<Memory>,
}

/// What a server's memory did in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Registrations.
    pub registrations: u64,
    /// Payload bytes that were copied because landing memory was scarce.
    pub pressure: u64,
    /// Bytes that were registered at the end of the round.
    pub registered: usize,
}

/// Connections of a contender.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Connections {
    /// Who.
    pub contender: String,
    /// How many.
    pub connections: usize,
    /// Calls that go round all of them.
    pub all: Vec<Load>,
    /// The processes right after those.
    pub busy: Option<Ends>,
    /// The processes at rest.
    pub rest: Option<Ends>,
    /// Microseconds of processor time of both processes in a second of rest.
    pub rest_cpu_us_per_s: Option<f64>,
    /// Calls on one of them while the others rest.
    pub one: Vec<Load>,
    /// What went wrong, and how near the processes were to their limits.
    pub failure: Option<String>,
}

/// A round of small calls, 64 in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Thousands of calls a second.
    pub kcalls_per_s: f64,
    /// Microseconds of processor time of both processes for a call.
    pub cpu_us_per_call: f64,
}

/// Both processes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// The client's.
    pub client: Footprint,
    /// The server's.
    pub server: Footprint,
}

/// Streams that are open on one connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Streams {
    /// Who.
    pub contender: String,
    /// How many.
    pub streams: usize,
    /// Calls beside them, one at a time.
    pub rounds: Vec<LatencyRound>,
    /// The processes then.
    pub ends: Option<Ends>,
    /// What went wrong.
    pub failure: Option<String>,
}

/// A round of small calls beside open streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyRound {
    /// Median latency in microseconds.
    pub latency_us: f64,
    /// Microseconds of processor time of both processes for a call.
    pub cpu_us_per_call: f64,
}

impl Run {
    /// Failures, one a line.
    pub fn failures(&self) -> Vec<String> {
        let of = |row: String, contender: &str, failure: &Option<String>| {
            failure.as_ref().map(|why| format!("{row} {contender}: {why}"))
        };
        let bulk = self.bulk.iter();
        let bulk = bulk.map(|b| of(format!("bulk-{}", b.clients), &b.contender, &b.failure));
        let connections = self
            .connections
            .iter()
            .map(|c| of(format!("connections-{}", c.connections), &c.contender, &c.failure));
        let streams = self.streams.iter();
        let streams =
            streams.map(|s| of(format!("streams-{}", s.streams), &s.contender, &s.failure));
        bulk.chain(connections).chain(streams).flatten().collect()
    }
}
