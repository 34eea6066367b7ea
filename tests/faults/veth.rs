//! A network between the two ends of a veth pair that loses, delays, duplicates, corrupts or drops
//! all packets.

use rand::Rng;
use tonic_rdma::ReasonCode;

use crate::fault_test::{FaultTest, Topology, run};
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

/// Drops the packets of the devices; TCP still works.
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
