//! Compares tonic-rdma with stock tonic over TCP, in one run: latency of a 64-byte unary call with
//! one in flight, throughput of 1 MiB unary calls with 8 in flight, in either direction.
//!
//! Each server is a process of its own. The rounds alternate between the two, and what is printed
//! and asserted are medians over the rounds.

use anyhow::{Context as _, bail, ensure};
use benches::{
    measure::{self, Carrier, Exchange},
    service::{self, Contender, WINDOWS},
    summary::{Pairs, median},
};
use bytes::Bytes;
use clap::Parser;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Stdio,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

#[derive(Parser, Debug)]
#[command(version, about, long_about = None)]
struct Args {
    /// Address that both servers bind; for RDMA one that lies on an RDMA device
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    addr: IpAddr,
    /// Rounds of each contender
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Calls in a round of latency
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    latency_calls: u32,
    /// Calls in a round of throughput
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    throughput_calls: u32,
    /// Bytes of a large message
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(1..=(service::LIMIT as u64)/2))]
    size: u64,
    /// Large calls in flight
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    in_flight: u32,
    /// Largest HTTP/2 frame in bytes that the stock ends take; tonic's default is the protocol's, 16 KiB
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(16_384..16_777_216))]
    stock_frame_size: Option<u32>,
    /// Fail unless latency over tonic-rdma is at most this many times that of stock tonic
    #[arg(long, value_name = "RATIO")]
    assert_latency: Option<f64>,
    /// Fail unless throughput over tonic-rdma, in each direction, is at least this many times that of
    /// stock tonic
    #[arg(long, value_name = "RATIO")]
    assert_throughput: Option<f64>,
    /// Compare also where tonic-rdma falls back to TCP, instead of failing
    #[arg(long)]
    allow_tcp: bool,
    /// Be the server of a contender
    #[arg(long, hide = true)]
    serve: Option<Contender>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match args.serve {
            Some(contender) => serve(contender, &args).await,
            None => compare(&args).await,
        }
    })
}

async fn serve(contender: Contender, args: &Args) -> anyhow::Result<()> {
    let addr = SocketAddr::new(args.addr, 0);
    let largest = usize::try_from(args.size)?.max(SMALL);
    service::serve(contender, addr, largest, args.stock_frame_size, |addr| println!("{addr}")).await
}

/// Payload bytes of a small message.
const SMALL: usize = 64;

/// A server in a process of its own, which ends with this value.
struct Server {
    _child: Child,
    uri: String,
}

impl Server {
    async fn start(contender: Contender, args: &Args) -> anyhow::Result<Self> {
        let name = clap::ValueEnum::to_possible_value(&contender).context("no name")?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--serve", name.get_name()])
            .args(["--addr", &args.addr.to_string(), "--size", &args.size.to_string()])
            .args(args.stock_frame_size.map(|size| format!("--stock-frame-size={size}")))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a server process")?;
        let stdout = child.stdout.take().context("no pipe from the server process")?;
        let line = BufReader::new(stdout).lines().next_line().await?;
        let Some(addr) = line else {
            bail!("the {} server did not start: {}", name.get_name(), child.wait().await?);
        };
        Ok(Self { _child: child, uri: format!("http://{addr}") })
    }
}

/// A kind of round.
struct Kind {
    name: &'static str,
    unit: &'static str,
    what: Exchange,
    figures: Pairs,
}

impl Kind {
    fn is_latency(&self) -> bool {
        self.unit == "us"
    }

    async fn round<T: Carrier>(&self, channel: &T, args: &Args) -> anyhow::Result<f64> {
        if self.is_latency() {
            let median = measure::latency(channel, &self.what, args.latency_calls as usize).await?;
            return Ok(median.as_secs_f64() * 1e6);
        }
        let (calls, in_flight) = (args.throughput_calls as usize, args.in_flight as usize);
        Ok(measure::throughput(channel, &self.what, calls, in_flight).await? / 1e6)
    }
}

async fn compare(args: &Args) -> anyhow::Result<()> {
    let stock_server = Server::start(Contender::Stock, args).await?;
    let rdma_server = Server::start(Contender::Rdma, args).await?;
    let (stream, connection) = WINDOWS;
    let stock = tonic::transport::Endpoint::from_shared(stock_server.uri.clone())?
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
        .max_frame_size(args.stock_frame_size)
        .tcp_nodelay(true)
        .connect()
        .await
        .context("cannot connect to the stock server")?;
    let rdma = tonic_rdma::Endpoint::from_shared(rdma_server.uri.clone())?
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
        .tcp_nodelay(true)
        .fast_path_timeout(Duration::from_secs(10))
        .connect()
        .await
        .context("cannot connect to the tonic-rdma server")?;
    let path = rdma.path();
    ensure!(
        path.path.is_fast() || args.allow_tcp,
        "tonic-rdma is on TCP, and there is nothing to compare: {path} (--allow-tcp compares all the same)"
    );
    println!("tonic-rdma path: {path}");

    let large = usize::try_from(args.size)?;
    let kind = |name, unit, request, reply| Kind {
        name,
        unit,
        what: Exchange { request: Bytes::from(vec![0xa5; request]), reply },
        figures: Pairs::default(),
    };
    let mut kinds = [
        kind("latency, small unary, 1 in flight", "us", SMALL, SMALL),
        kind("throughput, large requests", "MB/s", large, 0),
        kind("throughput, large replies", "MB/s", 0, large),
    ];
    // One round of each that does not count: what is set up by first use is set up.
    for counted in (0..=args.rounds).map(|round| round > 0) {
        for kind in &mut kinds {
            let of_stock = kind.round(&stock, args).await.context("over stock tonic")?;
            let of_rdma = kind.round(&rdma, args).await.context("over tonic-rdma")?;
            if counted {
                kind.figures.stock.push(of_stock);
                kind.figures.rdma.push(of_rdma);
            }
        }
    }
    let after = rdma.path();
    ensure!(after == path, "the path changed while measuring: {after}");
    print(&kinds, args);
    check(&kinds, args)
}

fn print(kinds: &[Kind], args: &Args) {
    println!(
        "small: {SMALL} B, large: {} B with {} in flight; medians of {} rounds",
        args.size, args.in_flight, args.rounds
    );
    println!("{:<36} {:>12} {:>12} {:>5} {:>7}", "", "stock", "tonic-rdma", "", "ratio");
    for kind in kinds {
        let Pairs { stock, rdma } = &kind.figures;
        println!(
            "{:<36} {:>12.1} {:>12.1} {:>5} {:>7.2}",
            kind.name,
            median(stock),
            median(rdma),
            kind.unit,
            kind.figures.ratio()
        );
    }
}

fn check(kinds: &[Kind], args: &Args) -> anyhow::Result<()> {
    for kind in kinds {
        let ratio = kind.figures.ratio();
        if let (true, Some(most)) = (kind.is_latency(), args.assert_latency) {
            ensure!(ratio <= most, "{}: ratio {ratio:.2}, at most {most} wanted", kind.name);
        }
        if let (false, Some(least)) = (kind.is_latency(), args.assert_throughput) {
            ensure!(ratio >= least, "{}: ratio {ratio:.2}, at least {least} wanted", kind.name);
        }
    }
    Ok(())
}
