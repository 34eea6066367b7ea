//! Measures how long an honest client's calls take next to hostile peers, and what the peers cost
//! the server.
//!
//! It prints a table and asserts nothing about times, so it runs only on request:
//! `cargo test -p tonic-rdma-tests --test hostile_streams -- --ignored victim`.

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use tokio::time::{Instant, interval};
use tonic::body::Body;
use tonic_rdma::{Context, FabricKind, Path};
use tonic_rdma_fabric::bare::{self, Bare, BareLimits};
use tonic_rdma_fabric::{Addr, Fabric, Lending, ShmAccess};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::frame::Frame;
use tonic_rdma_proto::{Config, Hello, LentBody, LentPlace};
use tonic_rdma_tests::bootstrap::fabric_offer::Fabric as Offered;
use tonic_rdma_tests::offer::{request_grant, request_measuring_grant};
use tonic_rdma_tests::process::Process;
use tonic_rdma_tests::server_process::endpoint;
use tonic_rdma_tests::wire::head;
use tower::{Service as _, ServiceExt as _};

use super::peer::{Ended, Peer, data};

/// The programs that run next to the victim, each with the server settings for it.
const BESIDE: [(&str, &str); 11] = [
    ("nothing", ""),
    ("spin-1", ""),
    ("spin-2", ""),
    ("pings", ""),
    ("resets", ""),
    ("pieces", ""),
    ("files", "borrowing"),
    ("breaches", "borrowing copying"),
    ("closes", ""),
    ("offers", ""),
    ("writes", "measuring"),
];
/// Time between two calls of the victim.
const EVERY: Duration = Duration::from_millis(5);
/// Number of the victim's calls.
const CALLS: usize = 2000;
/// Number of streams that a peer opens at the same time.
const STREAMS: u32 = 25;
/// Time limit for the measuring peer to connect.
const LIMIT: Duration = Duration::from_secs(20);

/// Runs the victim next to each of [`BESIDE`] in turn, each time with a new server.
pub(crate) async fn print_figures() {
    println!(
        "| beside | p99 | longest | failed | attackers' CPU | server's CPU | server's RSS, most |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (beside, settings) in BESIDE {
        let mut server = Process::start("", &format!("server 100 {settings}"));
        let at = server.read_line().await;
        let mut other = Process::start("", &format!("beside {at} {beside}"));
        assert_eq!(other.read_line().await, "begun");
        let (began, before) = (Instant::now(), [&server, &other].map(cpu));
        let figures = Process::start("", &format!("victim {at}")).read_line().await;
        let took = began.elapsed().as_secs_f64();
        let after = [&server, &other].map(cpu);
        let percent = |n: usize| format!("{:.0} %", (after[n] - before[n]) / took * 100.0);
        let rss = field(&server, "VmHWM:") / 1024;
        println!("| {beside} | {figures} | {} | {} | {rss} MiB |", percent(1), percent(0));
        // This also checks that the other process has not ended.
        other.kill().await;
    }
}

/// Processor time of a process in seconds.
fn cpu(process: &Process) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    // The kernel reports ticks, of which a second has 100.
    fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
}

/// The number of KiB in a line of /proc/pid/status.
fn field(process: &Process, name: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Runs the victim's process, which prints cells of the table.
pub(crate) async fn call(at: SocketAddr) {
    let shm = (FabricKind::Shm, &Context::builder().build());
    let mut channel = endpoint(at, shm).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    let (mut turns, mut times, mut failed) = (interval(EVERY), Vec::new(), 0);
    for _ in 0..CALLS {
        turns.tick().await;
        let began = Instant::now();
        let request = Request::post("/tonic_rdma.conformance.v1.Conformance/Other")
            .header("content-type", "application/grpc")
            .body(Body::empty());
        let answer = channel.ready().await.unwrap().call(request.unwrap()).await;
        times.push(began.elapsed());
        failed += usize::from(!answer.is_ok_and(|answer| answer.status() == 200));
    }
    times.sort_unstable();
    let ms = |time: &Duration| format!("{:.2} ms", time.as_secs_f64() * 1000.0);
    println!("{} | {} | {failed}", ms(&times[CALLS * 99 / 100]), ms(times.last().unwrap()));
}

/// The process that runs next to the victim. It reports when it has begun.
pub(crate) async fn run_beside(at: SocketAddr, what: &str) {
    match what {
        "nothing" => println!("begun"),
        "spin-1" => spin(1),
        "spin-2" => spin(2),
        "pings" => again(at, Lending::Off, async |peer, _| peer.sync().await).await,
        "resets" => again(at, Lending::Off, resets).await,
        "pieces" => again(at, Lending::Off, pieces).await,
        "files" => again(at, Lending::SameUser, files).await,
        "breaches" => again(at, Lending::Off, breach).await,
        "closes" => again(at, Lending::Off, close).await,
        "offers" => {
            println!("begun");
            loop {
                request_grant(at, "shm").await;
            }
        }
        "writes" => writes(at).await,
        _ => panic!("nothing is called {what}"),
    }
    pending::<()>().await;
}

/// Keeps `threads` processors busy.
fn spin(threads: usize) {
    for _ in 0..threads {
        std::thread::spawn(|| while std::hint::black_box(true) {});
    }
    println!("begun");
}

/// Attacks in rounds, over one connection after the other.
async fn again(
    at: SocketAddr,
    lending: Lending,
    mut round: impl AsyncFnMut(&mut Peer, u32) -> Result<(), Ended>,
) {
    let mut has_begun = false;
    loop {
        let mut peer = Peer::connect_as(at, lending).await;
        if !std::mem::replace(&mut has_begun, true) {
            println!("begun");
        }
        for n in 0.. {
            if round(&mut peer, n).await.is_err() {
                break;
            }
        }
    }
}

/// Opens and resets streams.
async fn resets(peer: &mut Peer, n: u32) -> Result<(), Ended> {
    let ids = n * STREAMS + 1..(n + 1) * STREAMS + 1;
    let heads: Vec<_> = ids.clone().map(|id| head(id, "Hold")).collect();
    let resets: Vec<_> = ids.map(|stream| Frame::Reset { stream, code: 8 }).collect();
    peer.send(&heads).await?;
    peer.sync().await?;
    peer.send(&resets).await?;
    peer.sync().await
}

/// Sends bodies that are never read, one byte at a time.
async fn pieces(peer: &mut Peer, n: u32) -> Result<(), Ended> {
    if n == 0 {
        let heads: Vec<_> = (1..=STREAMS).map(|id| head(id, "Hold")).collect();
        peer.send(&heads).await?;
    }
    peer.send(&vec![data(1 + n % STREAMS, 1); 1000]).await
}

/// Lends files and takes them back.
async fn files(peer: &mut Peer, n: u32) -> Result<(), Ended> {
    // The bytes are longer than half of the memory for sending, so each time they lie in a new file
    // that replaces the previous one.
    let bytes = peer.lendable((5 << 19) + (n as usize % 8) * 4096).await;
    match peer.lend(bytes).await? {
        Some(lent) => peer.end_lease(lent.lease),
        None => peer.sync().await?,
    }
    Ok(())
}

/// Lends memory that the server does not accept.
async fn breach(peer: &mut Peer, _: u32) -> Result<(), Ended> {
    let place = LentPlace { lease: 1, key: 0, addr: 0 };
    let head_of = Bytes::from_static(b"\0\0\0\0\x05");
    let lent = Box::new(LentBody { head: head_of, place, len: 4096, tail: Bytes::new() });
    peer.send(&[head(1, "Hold"), Frame::Lent { stream: 1, end: false, lent }]).await?;
    peer.sync().await
}

/// Ends the connection with an error and a text.
async fn close(peer: &mut Peer, _: u32) -> Result<(), Ended> {
    peer.send(&[Frame::Close { code: 2, text: Bytes::from_static(&[b'x'; 240]) }]).await?;
    peer.sync().await
}

/// Makes the server WRITE without end.
async fn writes(at: SocketAddr) {
    let grant = request_measuring_grant(at, "shm").await;
    let Some(Offered::Shm(shm)) = &grant.fabrics[0].fabric else { panic!("{grant:?}") };
    let addr = Addr::Shm(shm.socket.parse().unwrap());
    let fabric = Fabric::shm(ShmAccess::SameUser, Lending::Off).unwrap();
    let pool = Pool::new(PoolConfig::default().total(16 << 20), fabric.registrar()).unwrap();
    let hello = Hello::new(grant.ticket[..].try_into().unwrap(), Config::default().settings());
    let connected = fabric.connect(&addr, &bare::config(), &pool, &hello.encode(), LIMIT).await;
    let mut bare = Bare::open(connected.unwrap().link, pool, BareLimits::default()).await.unwrap();
    println!("begun");
    panic!("{:?}", bare.written(1, usize::MAX, 8).await);
}
