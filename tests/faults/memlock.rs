//! RLIMIT_MEMLOCK is lowered between connections, and raised again.

use tonic_rdma::{Path, ReasonCode, Side};
use tonic_rdma_tests::load::{Load, Tally, takes, until};
use tonic_rdma_tests::process::Process;

use crate::log::Log;
use crate::world::{Place, World, run};

/// The limit binds root too then.
const BOUND: &str = "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock";
/// Bytes: less than any pool needs; and the usual limit.
const LOW: usize = 64 << 10;
const USUAL: usize = 8 << 20;

fn limit(process: &Process, bytes: usize) {
    run(&format!("prlimit --pid {} --memlock={bytes}:{bytes}", process.id()));
}

/// The server's, while a connection stands: the next one is refused, and its calls go over TCP.
pub async fn of_the_server(log: Log) {
    let mut world = World::through(BOUND, Place::one_device(), log).await;
    let mut load = world.under_load().await;
    load.strikes();
    limit(load.world.server(), LOW);
    let channel = load.world.connect_somehow().await;
    let info = channel.path();
    let reason = info.reason.clone().unwrap();
    assert_eq!(
        (info.path, reason.side(), reason.code()),
        (Path::Tcp, Side::Peer, ReasonCode::PoolExhausted)
    );
    let tally = Tally::default();
    let calls = Load::start(&channel, 0, &tally);
    until("no calls over TCP", || async { tally.of("OK") }, |now| *now > 20).await;
    // The first may keep what it has, or needs more and is lost.
    load.calls_end(20).await;
    limit(load.world.server(), USUAL);
    takes(&channel, Path::Verbs).await;
    let before = channel.stats().calls_fast;
    until("no calls over RDMA", || async { channel.stats().calls_fast }, |now| *now > before + 20)
        .await;
    calls.stop().await;
    assert_eq!(tally.failed(), 0, "{tally:?}");
    println!("  another channel: {info}, then {}; calls {tally:?}", channel.path());
    drop(channel);
    load.returns().await;
    load.end().await;
    world.end("memlock of the server lowered and raised").await;
}

/// A client's, before it has connected.
pub async fn of_a_client(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    let role = format!("client plain {} {} 1", world.at, world.place.client_device);
    let mut client = Process::start(&format!("prlimit --memlock={LOW}:{LOW} {BOUND}"), &role);
    world.counts_a_fault();
    assert_eq!(client.line().await, "up");
    let path = client.ask("path").await;
    assert!(path.starts_with("tcp (memlock: needed "), "{path}");
    limit(&client, USUAL);
    println!("  {path}; then calls go by RDMA: {}", client.ask("carries").await);
    client.kill().await;
    world.end("memlock of a client low, and raised").await;
}
