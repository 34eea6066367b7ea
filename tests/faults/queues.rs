//! Devices that pin memory for their queues and create them slowly, as adapters do and Soft-RoCE
//! and Soft-iWARP do not. The library `tests/guest/charge.c`, which is loaded before libibverbs,
//! pins as much for each queue pair as the driver of ConnectX does. It delays a call to libibverbs
//! while a file exists, and names path MTUs that no device has.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, Policy, ReasonCode, Server};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{poll_until, wait_for_path};
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::process::runtime_of;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{Topology, kind};
use crate::log::Log;

/// Number of connections for which the usual limit has room in addition to a pool. Each connection
/// has two queue pairs here, because both ends are in one process.
const ROOM: usize = 20;
/// The usual RLIMIT_MEMLOCK in bytes, and the least that a queue pair pins, also in bytes. This is
/// the amount with 80 bytes of inline data, as on Soft-iWARP. With 256 bytes of inline data it is
/// 24 KiB.
const LIMIT: usize = 8 << 20;
const CHARGE: usize = 12 << 10;
/// Bytes that a queue pair with a short send queue and without inline data pins.
const SHORT: usize = 8 << 10;

/// A server, and the context of the channels to it, on one device.
struct World {
    at: SocketAddr,
    context: Context,
    serving: JoinHandle<()>,
}

impl World {
    fn new() -> World {
        World::of(Server::builder())
    }

    fn of(server: Server) -> World {
        let charged = std::env::var("LD_PRELOAD").is_ok_and(|library| library.contains("charge"));
        assert!(charged, "LD_PRELOAD names the library that charges queue pairs");
        let device = Topology::one_device().client_device;
        let context = Context::builder().device(device).build();
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let at = incoming.local_addr().unwrap();
        let routes = server
            .fabrics([FabricKind::Verbs])
            .context(context.clone())
            .add_service(Scripted::server(&Probe::default()));
        let serving = async { routes.serve_with_incoming(incoming).await.unwrap() };
        World { at, context, serving: tokio::spawn(serving) }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.at))
            .unwrap()
            .policy(Policy::Auto)
            .fabrics([FabricKind::Verbs])
            .context(self.context.clone())
    }
}

async fn call(channel: &Channel) {
    client_of(AnyChannel::Rdma(channel.clone())).unary(payload(1, 300_000)).await.unwrap();
}

/// An ordinary process connects until no further connection is possible. Its default pool is small
/// enough to leave room for the queues.
pub async fn that_are_charged(_: Log) {
    let world = World::new();
    let mut channels: Vec<Channel> = Vec::new();
    let reason = loop {
        let channel = world.endpoint().connect().await.unwrap();
        if channel.path().path != Path::Verbs {
            break channel.path().reason.unwrap();
        }
        call(&channel).await;
        channels.push(channel);
        // Not after each connection, because a hundred connections would then make five thousand
        // calls.
        if channels.len().is_power_of_two() {
            for channel in &channels {
                call(channel).await;
            }
        }
        assert!(channels.len() < 1000, "there is no limit");
    };
    let total = channels[0].pool().config().total;
    println!("  a pool of {total} bytes, {} connections, then: {reason}", channels.len());
    assert!(channels.len() >= ROOM, "{} connections, then: {reason}", channels.len());
    // The reason names what is used up first, at either end.
    assert!([ReasonCode::PoolExhausted, ReasonCode::Memlock].contains(&reason.code()), "{reason}");
    // The pool leaves room for the queues of `ROOM` connections, even if the pool is used up.
    assert!(total + 2 * ROOM * CHARGE <= LIMIT, "a pool of {total} bytes");
    assert!(total > LIMIT / 2, "a pool of {total} bytes");
    for channel in &channels {
        call(channel).await;
        let stats = channel.stats();
        assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0));
    }
    world.serving.abort();
}

/// If memory is scarce, a connection gets shorter queues and carries the same calls. If memory does
/// not suffice for shorter queues either, the reason says so.
pub async fn that_are_short_of_memory(_: Log) {
    let limit = std::env::var("CHARGE_LIMIT").expect("CHARGE_LIMIT names the file with the limit");
    let world = World::new();
    std::fs::write(&limit, SHORT.to_string()).unwrap();
    let channel = world.endpoint().connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Verbs, "{:?}", channel.path().reason);
    for _ in 0..10 {
        let calls = (0..64).map(|_| channel.clone());
        let calls = calls.map(|channel| tokio::spawn(async move { call(&channel).await }));
        for call in calls.collect::<Vec<_>>() {
            call.await.unwrap();
        }
    }
    let stats = channel.stats();
    assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0));
    std::fs::write(&limit, (SHORT - 1).to_string()).unwrap();
    let refused = world.endpoint().connect().await.unwrap();
    assert_eq!(refused.path().path, Path::Tcp);
    let reason = refused.path().reason.unwrap();
    assert_eq!(reason.code(), ReasonCode::Memlock, "{reason}");
    call(&refused).await;
    std::fs::remove_file(&limit).unwrap();
    let again = world.endpoint().connect().await.unwrap();
    assert_eq!(again.path().path, Path::Verbs, "{:?}", again.path().reason);
    world.serving.abort();
}

/// While a device creates a queue pair, changes its state or destroys it, the only worker of the
/// runtime serves other connections.
pub async fn that_take_their_time(_: Log) {
    let one_worker = runtime_of(CodecKind::Plain, 1);
    one_worker.spawn(queue_pairs_are_held()).await.unwrap();
    one_worker.shutdown_background();
}

async fn queue_pairs_are_held() {
    let world = World::new();
    let there = world.endpoint().connect().await.unwrap();
    assert_eq!(there.path().path, Path::Verbs);
    // Each end creates a queue pair, and changes its state, the accepting end first. Over iWARP the
    // kernel changes the state of both.
    let calls: &[&str] = match kind().as_str() {
        "rxe" => &["create 0", "init 0", "rtr 0", "rts 0", "rtr 1", "rts 1"],
        _ => &["create 0", "create 1"],
    };
    for call in calls {
        let connecting = while_held(call, &there, || {
            let next = world.endpoint().fast_path_timeout(Duration::from_secs(60));
            tokio::spawn(async move { next.connect().await.unwrap() })
        });
        let next = connecting.await.await.unwrap();
        call_over_verbs(&next).await;
    }
    for call in ["destroy 0", "destroy 1"] {
        let next = world.endpoint().connect().await.unwrap();
        call_over_verbs(&next).await;
        while_held(call, &there, || drop(next)).await;
    }
    // A failed attempt to connect destroys the queue pair that it has created.
    let full = World::of(Server::builder().max_connections(0));
    let refused = while_held("destroy 0", &there, || {
        let next = full.endpoint().fast_path_timeout(Duration::from_secs(60));
        tokio::spawn(async move { next.connect().await.unwrap() })
    });
    let refused = refused.await.await.unwrap();
    call(&refused).await;
    assert_eq!(refused.path().path, Path::Tcp);
    let stats = there.stats();
    assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0));
    world.serving.abort();
    full.serving.abort();
}

/// The server's answer names a path MTU that no device has. The client's reason contains the code,
/// and its calls take TCP. Its queue pair is destroyed while other connections are served. The code
/// 0 names no path MTU, and over iWARP no code names one.
pub async fn that_are_told_an_unknown_mtu(_: Log) {
    let answer = std::env::var("CHARGE_MTU").expect("CHARGE_MTU names the file with the path MTU");
    let world = World::new();
    let there = world.endpoint().connect().await.unwrap();
    call_over_verbs(&there).await;
    let (pairs, open) = (queue_pairs(), descriptors());
    let (unknown, none): (&[u8], &[u8]) = match kind().as_str() {
        "rxe" => (&[6, 255], &[0]),
        _ => (&[], &[0, 255]),
    };
    for code in unknown {
        std::fs::write(&answer, code.to_string()).unwrap();
        let told = format!("names path MTU {code}, and the codes are 1 to 5");
        let connecting = while_held("destroy 0", &there, || {
            let next = world.endpoint();
            tokio::spawn(async move { next.connect().await.unwrap() })
        });
        let refused = connecting.await.await.unwrap();
        let reason = refused.path().reason.unwrap();
        assert_eq!(reason.code(), ReasonCode::HandshakeRejected, "{reason}");
        assert!(reason.to_string().contains(&told), "{reason}");
        println!("  {reason}");
        call(&refused).await;
        assert_eq!((refused.path().path, refused.stats().calls_tcp), (Path::Tcp, 1));
        let required = world.endpoint().policy(Policy::Require).connect().await.unwrap_err();
        assert!(format!("{required:?}").contains(&told), "{required:?}");

        std::fs::remove_file(&answer).unwrap();
        wait_for_path(&refused, Path::Verbs).await;
        call(&refused).await;
        assert_eq!(refused.stats().calls_fast, 1);
    }
    for code in none {
        std::fs::write(&answer, code.to_string()).unwrap();
        let channel = world.endpoint().connect().await.unwrap();
        call_over_verbs(&channel).await;
        assert_eq!(channel.path().path_mtu, there.path().path_mtu);
        std::fs::remove_file(&answer).unwrap();
    }
    let left = || async { (queue_pairs(), descriptors()) };
    poll_until("attempts leave something", left, |left| *left == (pairs, open)).await;
    call_over_verbs(&there).await;
    let stats = there.stats();
    assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0));
    world.serving.abort();
}

/// The queue pairs of all devices, as the kernel counts them.
fn queue_pairs() -> usize {
    let shown = Command::new("rdma").args(["resource", "show"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let words: Vec<_> = shown.split_whitespace().collect();
    let counts = words.windows(2).filter(|pair| pair[0] == "qp");
    counts.map(|pair| pair[1].parse::<usize>().unwrap()).sum()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

async fn call_over_verbs(channel: &Channel) {
    call(channel).await;
    assert_eq!(channel.path().path, Path::Verbs, "{:?}", channel.path().reason);
}

/// Delays a call to libibverbs that `begin` causes, until 50 gRPC calls over `there` have ended.
async fn while_held<T>(held_call: &str, there: &Channel, begin: impl FnOnce() -> T) -> T {
    let hold = std::env::var("CHARGE_HOLD").expect("CHARGE_HOLD names the file that holds them");
    let held = format!("{hold}.held");
    std::fs::write(&hold, held_call).unwrap();
    // A separate thread ends the delay after 30 s, because a delay that blocks the runtime would
    // otherwise never end.
    let (done, waits) = std::sync::mpsc::channel::<()>();
    let file = hold.clone();
    let late = std::thread::spawn(move || {
        let late = waits.recv_timeout(Duration::from_secs(30)).is_err();
        std::fs::remove_file(file).unwrap();
        late
    });
    let begun = begin();
    let is_held = || async { std::fs::exists(&held).unwrap() };
    poll_until("no queue pair is held", is_held, |held| *held).await;
    for _ in 0..50 {
        call(there).await;
    }
    let _ = done.send(());
    assert!(!late.join().unwrap(), "{held_call} of one queue pair holds up other connections");
    std::fs::remove_file(&held).unwrap();
    begun
}
