//! Compares transports for tonic in one run: each contender's server in a process of its own, client and servers each
//! on a processor of their own, the contenders in turns.
//!
//! What is printed and asserted are medians over the rounds.

use anyhow::{Context as _, bail, ensure};
use benches::{
    client::Client,
    contender::{Contender, Way},
    cost::{SystemCalls, Usage},
    cpu,
    measure::{self, Round},
    raw::Raw,
    report::{self, Bound, Cell, RowResult, Sample},
    service::{self, Place},
    work::{self, Row},
};
use clap::{Parser, ValueEnum};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::{ExitCode, Stdio},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Who takes part; the others are set against the first
    #[arg(long, value_delimiter = ',', default_values_t = [Contender::TonicTcp, Contender::TonicUnix, Contender::Tcp, Contender::Shm])]
    contenders: Vec<Contender>,
    /// Address that servers bind; for RDMA one that lies on an RDMA device
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    addr: IpAddr,
    /// Rounds of each row and contender
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Which rows
    #[arg(long, value_enum, default_value_t = Rows::Short)]
    rows: Rows,
    /// Only rows whose names contain this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Divide the calls of each row by this, on a slow machine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    divide: u32,
    /// Processor of the client [default: the first that is allowed]
    #[arg(long, value_name = "CPU")]
    client_cpu: Option<usize>,
    /// Processor of the servers [default: the second that is allowed, or the only one]
    #[arg(long, value_name = "CPU")]
    server_cpu: Option<usize>,
    /// Count system calls, with strace, in rounds that are not timed
    #[arg(long)]
    system_calls: bool,
    /// Write all figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fail unless a ratio of medians keeps a bound, such as latency-64:shm/tonic-tcp<=0.35
    #[arg(long, value_name = "BOUND")]
    assert: Vec<Bound>,
    /// Be the server of a contender
    #[arg(long, hide = true)]
    serve: Option<Contender>,
    /// Where that server listens, if not on an address
    #[arg(long, hide = true)]
    socket: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rows {
    /// Those that show most in a short time
    Short,
    /// All
    Full,
}

impl Args {
    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = match self.rows {
            Rows::Short => work::short(),
            Rows::Full => work::full(),
        };
        if let Some(only) = &self.only {
            rows.retain(|row| row.name().contains(only));
            ensure!(!rows.is_empty(), "no row's name contains {only}");
        }
        for row in &mut rows {
            row.calls = (row.calls / self.divide as usize).max(16);
        }
        Ok(rows)
    }

    /// Processors of the client and of the servers.
    fn cpus(&self) -> anyhow::Result<(usize, usize)> {
        let allowed = cpu::allowed()?;
        let first = *allowed.first().context("no processor is allowed")?;
        let second = allowed.get(1).copied().unwrap_or(first);
        Ok((self.client_cpu.unwrap_or(first), self.server_cpu.unwrap_or(second)))
    }
}

/// The largest reply that a row asks for.
const LARGEST: usize = 64 << 20;

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("compare: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let (client, server) = args.cpus()?;
    cpu::pin(if args.serve.is_some() { server } else { client })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match args.serve {
            Some(contender) => {
                let ip = Place::Ip(SocketAddr::new(args.addr, 0));
                let place = args.socket.clone().map_or(ip, Place::Unix);
                service::serve(contender, place, LARGEST, |said| println!("{said}")).await
            }
            None => compare(&args, (client, server)).await,
        }
    })
}

/// A contender's server process, which ends with this value, and the connection to it.
struct Running {
    contender: Contender,
    connection: Connection,
    path: String,
    server: u32,
    _child: Child,
    _dir: Option<tempfile::TempDir>,
}

/// Calls, or a bare link.
enum Connection {
    Calls(Box<Client>),
    Raw(Box<Raw>),
}

impl Connection {
    async fn to(contender: Contender, said: &str) -> anyhow::Result<Self> {
        Ok(match contender.way() {
            Way::Raw(kind) => Self::Raw(Box::new(Raw::connect(kind, said).await?)),
            _ => Self::Calls(Box::new(Client::connect(contender, said).await?)),
        })
    }

    fn path(&self) -> String {
        match self {
            Self::Calls(client) => client.path(),
            Self::Raw(raw) => raw.path(),
        }
    }

    fn runs(&self, row: &Row) -> bool {
        matches!(self, Self::Calls(_)) || Raw::runs(row)
    }

    async fn round(&self, row: &Row) -> anyhow::Result<Round> {
        match self {
            Self::Calls(client) => Ok(measure::round(client, row).await?),
            Self::Raw(raw) => raw.round(row).await,
        }
    }
}

impl Running {
    async fn start(contender: Contender, args: &Args, cpus: (usize, usize)) -> anyhow::Result<Self> {
        let dir = match contender.way() {
            Way::Tonic { unix: true } => Some(tempfile::tempdir().context("no directory for a unix socket")?),
            _ => None,
        };
        // Each process is told its own processor, whatever this one is pinned to.
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--serve", &contender.name(), "--addr", &args.addr.to_string()])
            .arg(format!("--server-cpu={}", cpus.1))
            .args(dir.as_ref().map(|dir| format!("--socket={}", dir.path().join("s").display())))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a server process")?;
        let stdout = child.stdout.take().context("no pipe from the server process")?;
        let Some(said) = BufReader::new(stdout).lines().next_line().await? else {
            bail!("the {contender} server did not start: {}", child.wait().await?);
        };
        let connection = Connection::to(contender, &said).await.with_context(|| format!("{contender}"))?;
        let server = child.id().context("the server process is gone")?;
        Ok(Self { contender, path: connection.path(), connection, server, _child: child, _dir: dir })
    }

    async fn sample(&self, row: &Row) -> anyhow::Result<Sample> {
        let me = std::process::id();
        let (client, server) = (Usage::of(me)?, Usage::of(self.server)?);
        let round = self.connection.round(row).await?;
        let sample =
            Sample { round, client: Usage::of(me)? - client, server: Usage::of(self.server)? - server };
        let path = self.connection.path();
        ensure!(path == self.path, "the path changed: {path}");
        Ok(sample)
    }

    /// System calls of both processes for one call.
    async fn system_calls(&self, row: &Row) -> anyhow::Result<f64> {
        let row = Row { calls: (row.calls / 10).max(16), ..*row };
        // The server's first: a strace of this process would follow into the other one.
        let server = SystemCalls::of(self.server)?;
        let client = SystemCalls::of(std::process::id())?;
        let round = self.connection.round(&row).await?;
        Ok((client.sum()? + server.sum()?) as f64 / round.calls as f64)
    }
}

async fn compare(args: &Args, cpus: (usize, usize)) -> anyhow::Result<()> {
    let rows = args.rows()?;
    let mut running = Vec::new();
    for contender in &args.contenders {
        let started = Running::start(*contender, args, cpus).await?;
        println!("{contender}: server process {}, path {}", started.server, started.path);
        running.push(started);
    }
    println!("client on processor {}, servers on {}; {} rounds, medians", cpus.0, cpus.1, args.rounds);

    let cell =
        |r: &Running| Cell { contender: r.contender, samples: vec![], system_calls: None, failure: None };
    let mut results: Vec<RowResult> =
        rows.iter().map(|row| RowResult { row: *row, cells: running.iter().map(cell).collect() }).collect();
    // One round of each that does not count: what is set up by first use is set up.
    for counted in (0..=args.rounds).map(|round| round > 0) {
        for result in &mut results {
            for (cell, running) in result.cells.iter_mut().zip(&running) {
                if cell.failure.is_some() || !running.connection.runs(&result.row) {
                    continue;
                }
                match running.sample(&result.row).await {
                    Ok(sample) if counted => cell.samples.push(sample),
                    Ok(_) => {}
                    Err(error) => cell.failure = Some(format!("{error:#}")),
                }
            }
        }
    }
    if args.system_calls {
        for result in &mut results {
            for (cell, running) in result.cells.iter_mut().zip(&running) {
                if running.connection.runs(&result.row) {
                    cell.system_calls = Some(running.system_calls(&result.row).await?);
                }
            }
        }
    }
    println!("{}\n{}", report::figures(&results), report::costs(&results));
    if let Some(path) = &args.json {
        std::fs::write(path, report::json(&results)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let failures = report::failures(&results);
    for failure in &failures {
        println!("failed: {failure}");
    }
    let broken: Vec<String> =
        args.assert.iter().filter_map(|bound| bound.check(&results).err()).map(|e| e.to_string()).collect();
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    ensure!(failures.is_empty(), "{} contenders failed in a row", failures.len());
    Ok(())
}
