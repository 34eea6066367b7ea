//! RLIMIT_MEMLOCK is lowered between connections, and raised again.

use tonic_rdma::{Path, ReasonCode, Side};
use tonic_rdma_tests::load::{Load, Tally, poll_until, wait_for_path};
use tonic_rdma_tests::process::Process;

use crate::fault_test::{FaultTest, Topology, run};
use crate::log::Log;

/// Makes the limit apply even to root.
const BOUND: &str = "setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock";
/// Bytes: less than any pool needs, and the usual limit.
const LOW: usize = 64 << 10;
const USUAL: usize = 8 << 20;

fn limit(process: &Process, bytes: usize) {
    run(&format!("prlimit --pid {} --memlock={bytes}:{bytes}", process.id()));
}

/// Lowers the server's limit while a connection is open: the next connection is refused, and its
/// calls use TCP.
pub async fn of_the_server(log: Log) {
    let mut test = FaultTest::with_wrapper(BOUND, Topology::one_device(), log).await;
    let mut load = test.under_load().await;
    load.begin_fault();
    limit(load.test.server(), LOW);
    let channel = load.test.connect_any_path().await;
    let info = channel.path();
    let reason = info.reason.clone().unwrap();
    assert_eq!(
        (info.path, reason.side(), reason.code()),
        (Path::Tcp, Side::Peer, ReasonCode::PoolExhausted)
    );
    let tally = Tally::default();
    let calls = Load::start(&channel, 0, &tally);
    poll_until("no calls over TCP", || async { tally.of("OK") }, |now| *now > 20).await;
    // The first connection may keep its memory, or need more and fail.
    load.wait_for_calls(20).await;
    limit(load.test.server(), USUAL);
    wait_for_path(&channel, Path::Verbs).await;
    let before = channel.stats().calls_fast;
    poll_until(
        "no calls over RDMA",
        || async { channel.stats().calls_fast },
        |now| *now > before + 20,
    )
    .await;
    calls.stop().await;
    assert_eq!(tally.failed(), 0, "{tally:?}");
    println!("  another channel: {info}, then {}; calls {tally:?}", channel.path());
    drop(channel);
    load.wait_for_recovery().await;
    load.end().await;
    test.end("memlock of the server lowered and raised").await;
}

/// Lowers a client's limit before it connects.
pub async fn of_a_client(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let role = format!("client plain {} {} 1", test.at, test.topology.client_device);
    let mut client = Process::start(&format!("prlimit --memlock={LOW}:{LOW} {BOUND}"), &role);
    test.count_fault();
    assert_eq!(client.read_line().await, "up");
    let path = client.ask("path").await;
    assert!(path.starts_with("tcp (memlock: needed "), "{path}");
    limit(&client, USUAL);
    println!("  {path}; then calls go by RDMA: {}", client.ask("carries").await);
    client.kill().await;
    test.end("memlock of a client low, and raised").await;
}
