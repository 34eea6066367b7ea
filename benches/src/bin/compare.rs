//! Compares transports for tonic in one run. Each contender has a client and a server process. All
//! clients share one processor and all servers another, and the contenders run alternately.
//!
//! Medians over the rounds are printed, plotted and checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use benches::allocator::{Allocator, Variant};
use benches::contender::Contender;
use benches::copies::Copies;
use benches::machine::Machine;
use benches::pair::{Pair, Setup};
use benches::plot;
use benches::remote;
use benches::report::{self, Bound, Cell, RowResult, Run};
use benches::results::Origin;
use benches::role::{Placement, Role};
use benches::work::{self, Row};
use clap::{Parser, ValueEnum};

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Contenders. Each is compared with the first contender that uses the same allocator
    #[arg(long, value_delimiter = ',', default_values_t = [
        Contender::TonicTcp, Contender::TonicUnix, Contender::TcpPlain, Contender::ShmPlain, Contender::Shm,
        Contender::RawShm, Contender::MemcpyHot, Contender::MemcpyCold,
    ], default_value_ifs = [("rows", "phase", "copy,memcpy-apart,memcpy-cold")])]
    contenders: Vec<Contender>,
    /// Allocators for each contender, except bare links and copies, which allocate nothing
    #[arg(long, value_delimiter = ',', default_values_t = [Allocator::Glibc, Allocator::Mimalloc])]
    allocators: Vec<Allocator>,
    #[command(flatten)]
    placement: Placement,
    /// Rounds of each row and contender, after one uncounted round
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The set of rows
    #[arg(long, value_enum, default_value_t = Rows::Short)]
    rows: Rows,
    /// Only rows whose names contain one of these texts
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// Divide the number of calls of each row by this number, for a slow machine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    divide: u32,
    /// Time limit for a round in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    limit: u64,
    /// Count system calls (with strace) and copies, in rounds that are not timed
    #[arg(long)]
    counts: bool,
    /// The heading of this run in benches/RESULTS.md
    #[arg(long, value_name = "TEXT", default_value = "A run")]
    title: String,
    /// Write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw figures as SVG into this directory
    #[arg(long, value_name = "DIRECTORY")]
    plots: Option<PathBuf>,
    /// The program of rdma-io-tonic, ruapc and iceoryx2, built from benches/neighbours
    #[arg(long, value_name = "PROGRAM")]
    neighbours: Option<PathBuf>,
    /// Fail if a median of ratios violates this bound, such as latency-64:shm/tonic-tcp<=0.35, or
    /// with an allocator up-1MiB-x8:shm-plain+mimalloc/tonic-tcp+mimalloc>=3; or, with --counts,
    /// the copies of each byte, such as up-64MiB-x8:verbs-kept:copies<=0.01
    #[arg(long, value_name = "BOUND")]
    assert: Vec<Bound>,
    /// Start servers for a compare on another host, at this address, instead of comparing. Anyone
    /// who can reach the address can start servers
    #[arg(long, value_name = "HOST:PORT")]
    agent: Option<SocketAddr>,
    /// Have this agent start the servers, at its address
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["agent", "counts", "neighbours"])]
    servers_at: Option<SocketAddr>,
    #[command(flatten)]
    role: Role,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rows {
    /// The most informative rows, for a short run
    Short,
    /// All rows with calls
    Full,
    /// Messages of 256 bytes to 256 KiB, 1, 8 and 64 in flight
    Middle,
    /// A connection for each call of 64 bytes
    Connect,
    /// Calls that start at 10, 50 and 80 % of each contender's highest rate
    Open,
    /// One message of 4 KiB to 255 MiB at a time
    Handover,
    /// Messages of 64 MiB, 8 in flight
    Long,
    /// Copies by distance of source and destination. The default contenders are copy, memcpy-apart
    /// and memcpy-cold
    Phase,
}

impl Args {
    /// The program with the contenders from other projects, if any take part.
    fn neighbours(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(contender) = self.contenders.iter().find(|contender| contender.is_neighbour())
        else {
            return Ok(None);
        };
        let wanted = "build benches/neighbours as benches/README.md says, and say where it is: --neighbours PROGRAM";
        let program = self.neighbours.as_ref();
        let program =
            program.with_context(|| format!("{contender} runs in its own program: {wanted}"))?;
        ensure!(
            program.is_file(),
            "{contender} runs in {}, which does not exist: {wanted}",
            program.display()
        );
        Ok(Some(program.clone()))
    }

    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = match self.rows {
            Rows::Short => work::short(),
            Rows::Full => work::full(),
            Rows::Middle => work::middle(),
            Rows::Connect => work::connect(),
            Rows::Open => work::open(),
            Rows::Handover => work::handover(),
            Rows::Long => work::long(),
            Rows::Phase => work::phase(),
        };
        if !self.only.is_empty() {
            rows.retain(|row| self.only.iter().any(|text| row.name().contains(text)));
            ensure!(!rows.is_empty(), "no row's name contains {}", self.only.join(" or "));
        }
        for row in &mut rows {
            row.calls = (row.calls / self.divide as usize).max(row.min_calls());
        }
        Ok(rows)
    }
}

fn main() -> ExitCode {
    benches::exit::exit("compare", run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    if args.role.is_some() {
        return args.role.start(&args.placement);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match args.agent {
        Some(at) => runtime.block_on(remote::agent(at, args.placement.threads()?)),
        None => runtime.block_on(compare(args)),
    }
}

/// A variant, and its processes while they run.
struct Participant {
    variant: Variant,
    pair: Option<Pair>,
    /// Why the processes are not running.
    failure: Option<String>,
}

impl Participant {
    /// Starts new processes. After a failure the old processes may be in an undefined state.
    async fn restart(&mut self, setup: &Setup) {
        self.pair = None;
        match Pair::start(self.variant, setup, &[]).await {
            Ok(pair) => self.pair = Some(pair),
            Err(error) => self.failure = Some(format!("{error:#}")),
        }
    }

    /// Runs one round of a row, and adds its sample to the cell.
    async fn round(&mut self, cell: &mut Cell, row: &Row, counted: bool, setup: &Setup) {
        let Some(pair) = &mut self.pair else {
            cell.failure.clone_from(&self.failure);
            return;
        };
        if cell.failure.is_some() || cell.absent {
            return;
        }
        match pair.sample(row).await {
            Ok(Some(sample)) if counted => cell.samples.push(sample),
            Ok(Some(_)) => {}
            Ok(None) => cell.absent = true,
            Err(error) => {
                cell.failure = Some(format!("{error:#}"));
                eprintln!("{} {}: {error:#}", row.name(), self.variant);
                self.restart(setup).await;
            }
        }
    }
}

async fn compare(args: &Args) -> anyhow::Result<()> {
    let rows = args.rows()?;
    let threads = args.placement.threads()?;
    // A device's default pool has memory for about three dozen connections.
    let room = rows.iter().map(Row::connections).max().filter(|n| *n > 1);
    let limit = Duration::from_secs(args.limit);
    let setup = Setup {
        addr: args.placement.addr,
        threads,
        limit,
        room,
        server_figures: false,
        agent: args.servers_at,
        neighbours: args.neighbours()?,
    };
    let variants = Variant::all(&args.contenders, &args.allocators);
    let used = |allocator: &Allocator| {
        variants.iter().any(|e| e.allocator == *allocator && e.contender.allocates())
    };
    let allocators: Vec<Allocator> = args.allocators.iter().copied().filter(used).collect();
    let machine = Machine::here(&allocators)?;
    let mut notes = vec![
        machine.to_string(),
        match args.servers_at {
            None => format!("{threads}; {} rounds, medians", args.rounds),
            Some(at) => format!(
                "clients here, servers on the host of {}; {} rounds, medians",
                at.ip(),
                args.rounds
            ),
        },
    ];
    let mut participants = Vec::new();
    for variant in &variants {
        let mut participant = Participant { variant: *variant, pair: None, failure: None };
        participant.restart(&setup).await;
        match (&mut participant.pair, &participant.failure) {
            (Some(pair), _) => {
                let processes = match pair.processes() {
                    Ok((client, server)) => {
                        format!("client process {client}, server process {server}")
                    }
                    Err(elsewhere) => elsewhere.to_string(),
                };
                eprintln!("{variant}: {processes}, {}", pair.path());
                if let Err(error) = pair.count_instructions()
                    && participants.is_empty()
                {
                    notes.push(format!("instructions are not counted: {error:#}"));
                }
            }
            (None, failure) => eprintln!("{variant}: {}", failure.as_deref().unwrap_or_default()),
        }
        participants.push(participant);
    }

    let cells = || participants.iter().map(|participant| Cell::new(participant.variant)).collect();
    let mut results: Vec<RowResult> =
        rows.iter().map(|row| RowResult { row: *row, cells: cells() }).collect();
    // The first round is an uncounted warm-up.
    for round in 0..=args.rounds as usize {
        eprintln!("round {round} of {}", args.rounds);
        for result in &mut results {
            // The order rotates from round to round, because the first contender finds the machine
            // in a different state.
            for turn in 0..participants.len() {
                let at = (round + turn) % participants.len();
                participants[at].round(&mut result.cells[at], &result.row, round > 0, &setup).await;
            }
        }
    }
    drop(participants);
    if args.counts {
        count(&mut results, &variants, &setup).await?;
    }
    println!("{}\n{}", report::figures(&results), report::costs(&results));
    let run = Run { origin: Origin::here(&args.title), machine, notes, results };
    for note in &run.notes {
        println!("{note}");
    }
    if let Some(path) = &args.json {
        std::fs::write(path, report::json(&run)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(directory) = &args.plots {
        plot::all(&run.results, directory)?;
    }
    for failure in report::failures(&run.results, |_| true) {
        println!("failed: {failure}");
    }
    let broken: Vec<String> = args
        .assert
        .iter()
        .filter_map(|bound| bound.check(&run.results).err())
        .map(|error| error.to_string())
        .collect();
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    // Failures of other projects' transports appear only in the table.
    let ours = report::failures(&run.results, |contender| !contender.is_neighbour());
    ensure!(ours.is_empty(), "{} contenders failed in a row", ours.len());
    Ok(())
}

/// Counts copies and system calls in separate processes, because counting slows processes down.
async fn count(
    results: &mut [RowResult],
    variants: &[Variant],
    setup: &Setup,
) -> anyhow::Result<()> {
    let copies = Copies::new()?;
    for (index, variant) in variants.iter().enumerate() {
        eprintln!("counting {variant}");
        let Ok(mut pair) = Pair::start(*variant, setup, &copies.environment()).await else {
            continue;
        };
        for result in &mut *results {
            let Some(cell) = result.cells.get_mut(index).filter(|cell| !cell.samples.is_empty())
            else {
                continue;
            };
            match pair.count(&result.row, &copies).await {
                Ok(counted) => cell.counted = counted.unwrap_or_default(),
                Err(error) => {
                    cell.failure = Some(format!("while it was counted: {error:#}"));
                    break;
                }
            }
        }
    }
    Ok(())
}
