//! The command line of `scale`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::allocator::Allocator;
use crate::contender::Contender;
use crate::pair::Setup;
use crate::role::{Placement, Role};
use crate::scale::bound::Bound;

/// Measures the costs of many clients, connections and streams: throughput and fairness, processor
/// time of calls and of idle connections, memory, pinned memory and descriptors, of a client and a
/// server process
#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
pub struct Args {
    /// Contenders; ratios are relative to the first contender
    #[arg(long, overrides_with = "contenders", value_delimiter = ',', default_values_t = [
        Contender::TonicTcp, Contender::Tcp, Contender::Shm,
    ])]
    pub contenders: Vec<Contender>,
    /// Allocator of the contenders' processes
    #[arg(long, value_enum, default_value_t = Allocator::Glibc)]
    pub allocator: Allocator,
    /// Addresses and processors
    #[command(flatten)]
    pub placement: Placement,
    /// Parts to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Numbers of clients that send messages of 1 MiB to one server, each with 8 messages in flight
    #[arg(long, overrides_with = "bulk", value_delimiter = ',', default_values_t = [1, 2, 8, 16, 64],
        value_parser = clap::value_parser!(u32).range(1..))]
    pub bulk: Vec<u32>,
    /// Duration in seconds of a round with messages of 1 MiB
    #[arg(long, value_parser = seconds, default_value = "5")]
    pub seconds: Duration,
    /// Duration in seconds of the uncounted warm-up before a round with messages of 1 MiB
    #[arg(long, value_parser = seconds, default_value = "2")]
    pub warm_up: Duration,
    /// Numbers of connections between the two processes
    #[arg(long, overrides_with = "connections", value_delimiter = ',', default_values_t = [1, 8, 64, 1000, 10_000],
        value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: Vec<u32>,
    /// Duration of the measurement of idle connections in seconds
    #[arg(long, overrides_with = "rest", value_parser = seconds, default_value = "10")]
    pub rest: Duration,
    /// Idle time in seconds before idle connections are measured. Connections release resources
    /// that only busy connections need
    #[arg(long, value_parser = seconds, default_value = "20")]
    pub settle: Duration,
    /// Numbers of open streams on one connection
    #[arg(long, overrides_with = "streams", value_delimiter = ',', default_values_t = [0, 1000, 10_000])]
    pub streams: Vec<u32>,
    /// Number of rounds; tables show medians
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Number of small calls in a round, at least two per connection
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(64..))]
    pub calls: u32,
    /// Time limit for any other step in seconds
    #[arg(long, overrides_with = "limit", value_name = "SECONDS", default_value_t = 300)]
    pub limit: u64,
    /// The heading of this run in docs/scale.md
    #[arg(long, value_name = "TEXT", default_value = "A run")]
    pub title: String,
    /// Write all figures to this file
    #[arg(long, overrides_with = "json", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw figures as SVG into this directory
    #[arg(long, overrides_with = "plots", value_name = "DIRECTORY")]
    pub plots: Option<PathBuf>,
    /// Fail if a count or a ratio violates this bound, such as bulk-16:shm:registrations<=0.01,
    /// bulk-16:shm/bulk-1>=0.8 or connections-64:shm:all-rate/tonic-tcp>=4
    #[arg(long, value_name = "BOUND")]
    pub assert: Vec<Bound>,
    /// The role of a process that `scale` starts
    #[command(flatten)]
    pub role: Role,
}

/// A part of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Clients that send large messages
    Bulk,
    /// Many connections of few calls
    Connections,
    /// Many streams on one connection
    Streams,
}

impl Args {
    /// Whether a part is selected.
    pub fn measures(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// Options of the pairs, with memory for `room` connections if given.
    ///
    /// # Errors
    /// No processor is allowed for this process.
    pub fn setup(&self, room: Option<usize>) -> anyhow::Result<Setup> {
        Ok(Setup {
            addr: self.placement.addr,
            threads: self.placement.threads()?,
            // The limit applies in addition to the intended duration of a round.
            limit: Duration::from_secs(self.limit) + self.seconds.max(self.warm_up),
            room,
            server_figures: true,
            agent: None,
            neighbours: None,
        })
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_times_are_read() {
        let parse = |more: &[&str]| Args::try_parse_from([&["scale"], more].concat());
        let args = parse(&["--bulk", "1,2", "--seconds", "0.5", "--only", "bulk,streams"]).unwrap();
        assert_eq!((&args.bulk[..], args.seconds), (&[1, 2][..], Duration::from_millis(500)));
        assert!(args.measures(Part::Bulk) && !args.measures(Part::Connections));
        assert!(parse(&[]).unwrap().measures(Part::Connections));
        // `benches/in-guest` passes its own options first and those of its caller after them.
        let args =
            parse(&["--connections", "1,8", "--rest", "60", "--connections", "1,9", "--rest", "2"]);
        let args = args.unwrap();
        assert_eq!((&args.connections[..], args.rest), (&[1, 9][..], Duration::from_secs(2)));
        for bad in [["--seconds", "-1"], ["--seconds", "x"], ["--bulk", "0"], ["--rounds", "0"]] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }
}
