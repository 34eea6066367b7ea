//! The command line of `scale`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::allocator::Allocator;
use crate::contender::Contender;
use crate::pair::Setup;
use crate::role::{Placement, Role};
use crate::scale::bound::Bound;

/// What many clients, connections and streams cost: throughput and fairness, processor time of
/// calls and at rest, memory, pinned memory and descriptors, of client and server in processes of
/// their own
#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
pub struct Args {
    /// Contenders to measure; ratios are also to the first
    #[arg(long, overrides_with = "contenders", value_delimiter = ',', default_values_t = [
        Contender::TonicTcp, Contender::Tcp, Contender::Shm,
    ])]
    pub contenders: Vec<Contender>,
    /// Allocator of their processes
    #[arg(long, value_enum, default_value_t = Allocator::Glibc)]
    pub allocator: Allocator,
    /// Addresses and processors
    #[command(flatten)]
    pub placement: Placement,
    /// Measure only these [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Clients that put messages of 1 MiB, 8 in flight each, into one server
    #[arg(long, overrides_with = "bulk", value_delimiter = ',', default_values_t = [1, 2, 8, 16, 64],
        value_parser = clap::value_parser!(u32).range(1..))]
    pub bulk: Vec<u32>,
    /// Seconds that they do so in each round
    #[arg(long, value_parser = seconds, default_value = "5")]
    pub seconds: Duration,
    /// Seconds that they do so before that, uncounted
    #[arg(long, value_parser = seconds, default_value = "2")]
    pub warm_up: Duration,
    /// Connections between two processes
    #[arg(long, overrides_with = "connections", value_delimiter = ',', default_values_t = [1, 8, 64, 1000, 10_000],
        value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: Vec<u32>,
    /// Seconds without calls in which processor time is counted
    #[arg(long, overrides_with = "rest", value_parser = seconds, default_value = "10")]
    pub rest: Duration,
    /// Seconds without calls before that, after which a connection has given back what only a busy
    /// one needs
    #[arg(long, value_parser = seconds, default_value = "20")]
    pub settle: Duration,
    /// Streams that are open on one connection
    #[arg(long, overrides_with = "streams", value_delimiter = ',', default_values_t = [0, 1000, 10_000])]
    pub streams: Vec<u32>,
    /// Rounds, of which medians are shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Small calls in a round; twice the connections where that is more
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(64..))]
    pub calls: u32,
    /// Seconds that anything else may take before it counts as failed
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
    /// Fail unless a count or a ratio keeps a bound, such as bulk-16:shm:registrations<=0.01,
    /// bulk-16:shm/bulk-1>=0.8 or connections-64:shm:all-rate/tonic-tcp>=4
    #[arg(long, value_name = "BOUND")]
    pub assert: Vec<Bound>,
    /// What a process is started for, none for the first
    #[command(flatten)]
    pub role: Role,
}

/// What `scale` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Clients that send large messages
    Bulk,
    /// Connections
    Connections,
    /// Streams
    Streams,
}

impl Args {
    /// Whether a part is to be measured.
    pub fn measures(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// How pairs are set up, with room for so many connections beyond the default.
    ///
    /// # Errors
    /// No processor is allowed.
    pub fn setup(&self, room: Option<usize>) -> anyhow::Result<Setup> {
        Ok(Setup {
            addr: self.placement.addr,
            cpus: self.placement.cpus()?,
            // A round of a time may take that time in any case.
            limit: Duration::from_secs(self.limit) + self.seconds.max(self.warm_up),
            room,
            server_figures: true,
            neighbours: None,
        })
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text} is no number"))?;
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
        // As `benches/in-guest` passes its own options, and then those it was called with.
        let args =
            parse(&["--connections", "1,8", "--rest", "60", "--connections", "1,9", "--rest", "2"]);
        let args = args.unwrap();
        assert_eq!((&args.connections[..], args.rest), (&[1, 9][..], Duration::from_secs(2)));
        for bad in [["--seconds", "-1"], ["--seconds", "x"], ["--bulk", "0"], ["--rounds", "0"]] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }
}
