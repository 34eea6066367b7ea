//! A network that loses, delays, repeats, changes or swallows packets, between the two ends of a
//! veth pair.

use rand::Rng;
use tonic_rdma::ReasonCode;

use crate::log::Log;
use crate::world::{Place, World, run};

/// What the network does, as tc-netem(8) says it.
const TROUBLE: &[&str] = &["loss 1%", "loss 5%", "delay 20ms", "duplicate 10%", "corrupt 1%"];

/// Calls that are to end meanwhile.
const CALLS: u64 = 40;

fn netem(trouble: &str) {
    for netdev in ["va", "vb"] {
        run(&format!("tc qdisc replace dev {netdev} root netem limit 10000 {trouble}"));
    }
}

fn heal() {
    for netdev in ["va", "vb"] {
        run(&format!("tc qdisc del dev {netdev} root"));
    }
}

pub async fn packets_lost_delayed_repeated_and_changed(log: Log) {
    let mut world = World::new(Place::veth(), log).await;
    for trouble in TROUBLE {
        trouble_packets(&mut world, trouble).await;
    }
    world.end("packets lost, delayed, repeated and changed").await;
}

async fn trouble_packets(world: &mut World, trouble: &str) {
    println!("  {trouble}:");
    let mut load = world.under_load().await;
    load.strikes();
    netem(trouble);
    load.calls_end(CALLS).await;
    load.note("calls ended");
    heal();
    load.returns().await;
    load.end().await;
}

/// Any of them.
pub async fn trouble_some_packets(world: &mut World) {
    let trouble = TROUBLE[world.rng.random_range(0..TROUBLE.len())];
    trouble_packets(world, trouble).await;
}

/// The network of the devices is gone, TCP is not.
pub async fn swallowed_by_the_rdma_network(log: Log) {
    let mut world = World::new(Place::veth(), log).await;
    swallow(&mut world).await;
    world.end("black hole for RDMA").await;
}

/// Everything is gone.
pub async fn swallowed_by_the_network(log: Log) {
    let mut world = World::new(Place::veth_alone(), log).await;
    swallow(&mut world).await;
    world.end("black hole").await;
}

pub async fn swallow(world: &mut World) {
    let mut load = world.under_load().await;
    load.strikes();
    netem("loss 100%");
    load.noticed(&[ReasonCode::LinkLost]).await;
    match load.world.place.keep_alive {
        // TCP has lost its network as well.
        true => load.calls_fail().await,
        false => load.goes_on_over_tcp().await,
    }
    heal();
    load.returns().await;
    load.end().await;
}
