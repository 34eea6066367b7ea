//! The results of `scale`, as recorded in JSON. The results contain all rounds. Ratios and medians
//! are computed on display.

use serde::{Deserialize, Serialize};

use crate::footprint::Footprint;
use crate::machine::Machine;
use crate::results::Origin;

/// All results of one run of `scale`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The origin of the results.
    #[serde(flatten)]
    pub origin: Origin,
    /// The machine on which the results were measured.
    pub machine: Machine,
    /// Notes on the procedure.
    pub notes: Vec<String>,
    /// Clients that send large messages.
    pub bulk: Vec<Bulk>,
    /// The rows with many connections.
    pub connections: Vec<Connections>,
    /// Streams on one connection.
    pub streams: Vec<Streams>,
}

/// Clients of a contender that send large messages to one server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bulk {
    /// The name of the contender.
    pub contender: String,
    /// Number of clients, each with its own connection.
    pub clients: usize,
    /// Maximum size in bytes of a process's pool, if the processes have pools.
    pub pool: Option<usize>,
    /// The rounds of bulk transfers.
    pub rounds: Vec<BulkRound>,
    /// The error that ended the rounds.
    pub failure: Option<String>,
}

/// A round of [`Bulk`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BulkRound {
    /// Megabytes per second of all clients together.
    pub mb_per_s: f64,
    /// Messages of the slowest client relative to the mean.
    pub slowest_to_mean: f64,
    /// Number of messages, including messages that ended too late to count in `mb_per_s`.
    pub messages: usize,
    /// Bytes of these messages.
    pub bytes: usize,
    /// Processor time of both processes in seconds per gigabyte.
    pub cpu_s_per_gb: f64,
    /// Statistics of the server's memory, if available.
    pub memory: Option<Memory>,
}

/// Statistics of a server's memory in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Number of registrations.
    pub registrations: u64,
    /// Payload bytes that were copied because landing memory was scarce.
    pub pressure: u64,
    /// Bytes that were registered at the end of the round.
    pub registered: usize,
}

/// Connections of a contender.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Connections {
    /// The name of the contender.
    pub contender: String,
    /// Number of connections.
    pub connections: usize,
    /// Rounds of calls on all connections in turn.
    pub all: Vec<Load>,
    /// The resources of the processes immediately after the rounds on all connections.
    pub busy: Option<Ends>,
    /// The resources of the processes while all connections are idle.
    pub rest: Option<Ends>,
    /// Processor time of both processes while all connections are idle, in microseconds per second.
    pub rest_cpu_us_per_s: Option<f64>,
    /// Rounds of calls on one connection while the others are idle.
    pub one: Vec<Load>,
    /// The error that ended the rounds, with the usage and the limits of both processes.
    pub failure: Option<String>,
}

/// A round of small calls, 64 in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Thousands of calls per second.
    pub kcalls_per_s: f64,
    /// Processor time of both processes per call in microseconds.
    pub cpu_us_per_call: f64,
}

/// The resources of both processes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// The client process.
    pub client: Footprint,
    /// The server process.
    pub server: Footprint,
}

/// Streams that are open on one connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Streams {
    /// The name of the contender.
    pub contender: String,
    /// Number of open streams.
    pub streams: usize,
    /// Rounds of sequential small calls with the streams open.
    pub rounds: Vec<LatencyRound>,
    /// The resources of the processes after the rounds.
    pub ends: Option<Ends>,
    /// The error that ended the rounds.
    pub failure: Option<String>,
}

/// A round of small calls with open streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyRound {
    /// Median latency in microseconds.
    pub latency_us: f64,
    /// Processor time of both processes per call in microseconds.
    pub cpu_us_per_call: f64,
}

impl Run {
    /// All failures, one per line.
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
