//! A network between the two ends of a veth pair that loses, delays, duplicates or corrupts
//! packets, or drops all of them.

use std::time::Duration;

use rand::Rng;
use tonic_rdma::{Channel, Path, Policy, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{poll_until, wait_for_path, with_timeout};
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{FaultTest, Topology, kind, run};
use crate::log::Log;

/// Impairments of the network, as options of tc-netem(8).
const IMPAIRMENTS: &[&str] = &["loss 1%", "loss 5%", "delay 20ms", "duplicate 10%", "corrupt 1%"];

/// Calls that must end during an impairment.
const CALLS: u64 = 40;

pub fn netem(impairment: &str) {
    for netdev in ["va", "vb"] {
        run(&format!("tc qdisc replace dev {netdev} root netem limit 10000 {impairment}"));
    }
}

pub fn clear_netem() {
    for netdev in ["va", "vb"] {
        run(&format!("tc qdisc del dev {netdev} root"));
    }
}

pub async fn packets_lost_delayed_repeated_and_changed(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    for impairment in IMPAIRMENTS {
        impair_packets(&mut test, impairment).await;
    }
    test.end("packets lost, delayed, repeated and changed").await;
}

async fn impair_packets(test: &mut FaultTest, impairment: &str) {
    println!("  {impairment}:");
    let mut load = test.under_load().await;
    load.begin_fault();
    netem(impairment);
    load.wait_for_calls(CALLS).await;
    load.note("calls ended");
    clear_netem();
    load.wait_for_recovery().await;
    load.end().await;
}

/// Applies a random impairment.
pub async fn impair_packets_at_random(test: &mut FaultTest) {
    let impairment = IMPAIRMENTS[test.rng.random_range(0..IMPAIRMENTS.len())];
    impair_packets(test, impairment).await;
}

/// Drops the devices' packets. TCP still works.
pub async fn black_hole_for_rdma(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    black_hole(&mut test).await;
    test.end("black hole for RDMA").await;
}

/// Drops all packets.
pub async fn black_hole_for_all(log: Log) {
    let mut test = FaultTest::new(Topology::veth_alone(), log).await;
    black_hole(&mut test).await;
    test.end("black hole").await;
}

pub async fn black_hole(test: &mut FaultTest) {
    let mut load = test.under_load().await;
    load.begin_fault();
    netem("loss 100%");
    load.assert_fallback(&[ReasonCode::LinkLost]).await;
    match load.test.topology.keep_alive {
        // TCP uses the same network.
        true => load.wait_for_failed_calls().await,
        false => load.assert_calls_over_tcp().await,
    }
    clear_netem();
    load.wait_for_recovery().await;
    load.end().await;
}

/// Nothing arrives for 0.4 s, in which the connect request is sent. The connection manager repeats
/// it after more than four seconds, when `connect` has ended. Over iWARP, TCP repeats it in time.
pub async fn connect_requests_are_lost(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    // From here on, the kernel knows the neighbour.
    drop(test.endpoint(test.at).connect().await.unwrap());
    for _ in 0..3 {
        netem("loss 100%");
        test.count_fault();
        let endpoint = test.endpoint(test.at).policy(Policy::Require);
        let endpoint = endpoint.fast_path_timeout(Duration::from_secs(3));
        let connecting = tokio::spawn(async move { endpoint.connect().await });
        tokio::time::sleep(Duration::from_millis(400)).await;
        clear_netem();
        let channel = connecting.await.unwrap().unwrap();
        assert_eq!((channel.path().path, channel.stats().attempts), (Path::Verbs, 1));
    }
    test.end("connect requests lost").await;
}

async fn unary(channel: &Channel, len: usize) {
    let mut client = client_of(AnyChannel::Rdma(channel.clone()));
    with_timeout("a call", client.unary(payload(1, len))).await.unwrap();
}

/// The netdev of one end takes shorter packets than the other's, whichever end it is. Both queue
/// pairs use the smaller MTU, and calls of any length go over RDMA. Over iWARP, TCP agrees on a
/// length that arrives.
pub async fn ends_have_different_mtus(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    for (netdev, [mtu, next]) in [("vb", [2000, 9000]), ("va", [1500, 9000])] {
        run(&format!("ip link set {netdev} mtu {mtu}"));
        test.count_fault();
        let channel = test.connect().await;
        for len in [100, 4 << 20] {
            unary(&channel, len).await;
        }
        let (stats, path) = (channel.stats(), channel.path());
        assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0), "{path}");
        assert_eq!(path.path_mtu, (kind() == "rxe").then_some(1024), "{path}");
        run(&format!("ip link set {netdev} mtu {next}"));
        let channel = test.connect().await;
        unary(&channel, 4 << 20).await;
        assert_eq!(channel.path().path_mtu, (kind() == "rxe").then_some(4096));
    }
    test.end("ends have different MTUs").await;
}

/// The network loses the long packets of one end, although both ends' netdevs take them. Bulk takes
/// TCP, and no call fails. Over iWARP, TCP finds a length that arrives.
pub async fn long_packets_are_lost(log: Log) {
    let mut test = FaultTest::new(Topology::veth(), log).await;
    // The client sends by `va`, and the server by `vb`.
    for netdev in ["va", "vb"] {
        if kind() == "siw" {
            // A token bucket would cut TCP's long packets into shorter ones.
            run(&format!("ip link set {netdev} mtu 2000"));
        } else {
            // A token bucket drops each packet that is longer than the bucket's size.
            run(&format!(
                "tc qdisc replace dev {netdev} root tbf rate 1gbit burst 2000 limit 100000"
            ));
        }
        test.count_fault();
        let channel = test.endpoint(test.at).connect().await.unwrap();
        if kind() == "rxe" {
            let reason = || async { channel.path().reason.map(|reason| reason.code()) };
            let is_told = |code: &Option<ReasonCode>| *code == Some(ReasonCode::LargePacketsLost);
            poll_until("the path is taken for good", reason, is_told).await;
            for len in [100, 4 << 20] {
                unary(&channel, len).await;
            }
            assert_eq!(channel.stats().calls_tcp, 2);
            let required = test.endpoint(test.at).policy(Policy::Require).connect().await;
            let told = format!("{:?}", required.unwrap_err());
            assert!(told.contains("LargePacketsLost"), "{told}");
            run(&format!("tc qdisc del dev {netdev} root"));
        } else {
            run(&format!("ip link set {netdev} mtu 9000"));
        }
        wait_for_path(&channel, Path::Verbs).await;
        unary(&channel, 4 << 20).await;
        assert_eq!(channel.stats().connections_lost, 0);
    }
    test.end("long packets are lost").await;
}
