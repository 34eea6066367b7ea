//! What connections and streams cost while they are there, and what each does to the cost of a
//! call: memory, pinned memory, descriptors, threads, processor time at rest, latency and rate, of
//! client and server in processes of their own.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use benches::allocator::{Allocator, Entrant};
use benches::contender::Contender;
use benches::cost::Usage;
use benches::footprint::Footprint;
use benches::pair::{Pair, Setup};
use benches::report::{markdown, median};
use benches::role::{Places, Role};
use benches::work::{Kind, Row};
use clap::Parser;
use comfy_table::Table;

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Whose
    #[arg(long, value_delimiter = ',', default_values_t = [Contender::TonicTcp, Contender::ShmPlain])]
    contenders: Vec<Contender>,
    /// What their processes allocate with
    #[arg(long, value_enum, default_value_t = Allocator::Glibc)]
    allocator: Allocator,
    #[command(flatten)]
    places: Places,
    /// Connections between two processes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1000])]
    connections: Vec<usize>,
    /// Streams that are open on one connection
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1000, 10_000])]
    streams: Vec<usize>,
    /// Calls in a round, of which there are 5
    #[arg(long, default_value_t = 5000)]
    calls: usize,
    /// Seconds that something may take before it counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    limit: u64,
    #[command(flatten)]
    role: Role,
}

fn main() -> ExitCode {
    benches::exit::exit("scale", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    if args.role.is_some() {
        return args.role.start(&args.places);
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(scale(args))
}

/// What was found with so many connections, or streams.
struct Found {
    client: Footprint,
    server: Footprint,
    /// Milliseconds of processor time in a second in which nothing is called.
    rest: f64,
    figure: f64,
    /// KiB that the server has pinned when nothing was called for a while.
    kept: u64,
    /// Microseconds of processor time of both processes for a call.
    cpu: f64,
}

/// What there are many of.
#[derive(Clone, Copy, Debug)]
enum What {
    Connections,
    Streams,
}

impl What {
    /// Calls beside so many of them.
    fn kind(self, count: usize) -> Kind {
        match self {
            Self::Connections => Kind::Rate { in_flight: count.max(64), connections: count },
            Self::Streams => Kind::Held { streams: count },
        }
    }
}

const ROUNDS: usize = 5;
const REST: Duration = Duration::from_secs(2);
/// By then a connection over RDMA has given back what only a busy one needs: twice its dead-peer
/// time, and some more for landing memory.
const LONG_REST: Duration = Duration::from_secs(20);

async fn find(pair: &mut Pair, row: &Row) -> anyhow::Result<Option<Found>> {
    if !pair.prepare(row).await? {
        return Ok(None);
    }
    let (client, server) = pair.processes();
    let usage = || anyhow::Ok(Usage::of(client)?.cpu_ns + Usage::of(server)?.cpu_ns);
    // The first round touches what is touched by use.
    pair.sample(row).await?;
    let before = usage()?;
    tokio::time::sleep(REST).await;
    // A thread that ends takes its time along.
    let rest = usage()?.saturating_sub(before) as f64 / 1e6 / REST.as_secs_f64();
    let mut samples = Vec::new();
    for _ in 0..ROUNDS {
        samples.extend(pair.sample(row).await?);
    }
    let (of_client, of_server) = (Footprint::of(client)?, Footprint::of(server)?);
    let mut kept = of_server.pinned;
    if kept > 0 {
        tokio::time::sleep(LONG_REST).await;
        kept = Footprint::of(server)?.pinned;
    }
    Ok(Some(Found {
        client: of_client,
        server: of_server,
        kept,
        rest,
        figure: median(samples.iter().map(|s| s.round.figure)),
        cpu: median(
            samples
                .iter()
                .map(|s| (s.client.cpu_ns + s.server.cpu_ns) as f64 / 1e3 / s.round.calls as f64),
        ),
    }))
}

/// A table with a line for each count; what one more of them takes is against the first line.
struct Report {
    table: Table,
    first: Option<(usize, Footprint, Footprint, u64)>,
}

impl Report {
    fn new(what: &str, figure: &str) -> Self {
        let header = [
            "contender",
            what,
            figure,
            "CPU us/call",
            "CPU ms/s at rest",
            "server MiB",
            "client MiB",
            "server KiB each",
            "client KiB each",
            "pinned KiB each",
            "at rest",
            "descriptors each",
            "threads",
        ];
        Self { table: markdown(&header.map(str::to_owned)), first: None }
    }

    fn add(&mut self, contender: Contender, count: usize, found: &Found) {
        let Found { client, server, kept, .. } = found;
        let (less, from, to, keeps) = self.first.unwrap_or((count, *client, *server, *kept));
        self.first = Some((less, from, to, keeps));
        let each = |now: u64, then: u64| match count.saturating_sub(less) {
            0 => "-".to_owned(),
            more => format!("{:.1}", now.saturating_sub(then) as f64 / more as f64),
        };
        let mib = |kib: u64| format!("{:.0}", kib as f64 / 1024.0);
        self.table.add_row([
            contender.to_string(),
            count.to_string(),
            format!("{:.1}", found.figure),
            format!("{:.1}", found.cpu),
            format!("{:.1}", found.rest),
            mib(server.memory),
            mib(client.memory),
            each(server.memory, to.memory),
            each(client.memory, from.memory),
            each(server.pinned, to.pinned),
            each(*kept, keeps),
            each(server.descriptors, to.descriptors),
            server.threads.to_string(),
        ]);
    }
}

async fn scale(args: &Args) -> anyhow::Result<()> {
    let cpus = args.places.cpus()?;
    let room = args.connections.iter().copied().max();
    let limit = Duration::from_secs(args.limit);
    let setup = Setup {
        addr: args.places.addr,
        cpus,
        limit,
        room,
        server_figures: false,
        neighbours: None,
    };
    let mut failures = 0;
    for what in [What::Connections, What::Streams] {
        let (counts, mut report) = match what {
            What::Connections => (&args.connections, Report::new("connections", "kcall/s")),
            What::Streams => (&args.streams, Report::new("streams", "us")),
        };
        for contender in &args.contenders {
            report.first = None;
            let entrant = Entrant { contender: *contender, allocator: args.allocator };
            let start = Pair::start(entrant, &setup, &[]).await;
            let mut pair = start.with_context(|| format!("{contender} did not start"))?;
            for count in counts {
                eprintln!("{contender}: {count} {what:?}");
                let row = Row { kind: what.kind(*count), calls: args.calls.max(*count) };
                match find(&mut pair, &row).await {
                    Ok(Some(found)) => report.add(*contender, *count, &found),
                    Ok(None) => {}
                    Err(error) => {
                        println!("failed: {contender}, {count} {what:?}: {error:#}");
                        failures += 1;
                        break;
                    }
                }
            }
        }
        println!("{}\n", report.table);
    }
    anyhow::ensure!(failures == 0, "{failures} failed");
    Ok(())
}
