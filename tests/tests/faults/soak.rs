//! Random faults for as long as SOAK_SECONDS says, on SOAK_FABRIC: the devices of the guest, or `shm` on any host.

use crate::{
    host,
    log::Log,
    veth,
    world::{Place, World},
};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};
use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    time::{Duration, Instant},
};
use tonic_rdma_tests::{
    held::Watch,
    load::{Load, Tally},
};

type Fault = (&'static str, for<'a> fn(&'a mut World) -> Pin<Box<dyn Future<Output = ()> + 'a>>);

macro_rules! faults {
    ($($name:literal $fault:path;)+) => {
        &[$(($name, |world| Box::pin($fault(world))),)+]
    };
}

const PROCESSES: &[Fault] = faults! {
    "kill -9 of the server" host::kill_server;
    "kill -9 of a client" host::kill_client;
    "SIGSTOP of the server" host::stop_server;
    "SIGSTOP of a client" host::stop_client;
};

const DEVICES: &[Fault] = faults! {
    "kill -9 of the server" host::kill_server;
    "kill -9 of a client" host::kill_client;
    "rdma link del and add" host::remove_device;
    "interface down and up" host::take_interface_down;
    "address removed and added" host::remove_address;
};

const NETWORK: &[Fault] = faults! {
    "packets lost, late, double or wrong" veth::trouble_some_packets;
    "black hole" veth::swallow;
    "SIGSTOP of the server" host::stop_server;
    "kill -9 of the server" host::kill_server;
};

/// Faults between two looks for leaks.
const ROUND: usize = 4;

pub async fn random_faults(log: Log) {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let time = Duration::from_secs(number("SOAK_SECONDS").expect("SOAK_SECONDS says for how long"));
    let seed = number("TONIC_RDMA_TEST_SEED").unwrap_or_else(|| rand::rng().random());
    let places: &[(fn() -> Place, &[Fault])] = match std::env::var("SOAK_FABRIC").as_deref() {
        Ok("shm") => &[(Place::shm, PROCESSES)],
        _ => &[(Place::one_device, DEVICES), (Place::veth, NETWORK), (Place::veth_alone, NETWORK)],
    };
    println!("soak: TONIC_RDMA_TEST_SEED={seed}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let (begun, mut rounds) = (Instant::now(), 0);
    let (mut counts, mut watch) = (BTreeMap::<_, u64>::new(), Watch::default());
    let (totals, mut faults) = (Tally::default(), 0);
    let mut last = None;
    while begun.elapsed() < time || rounds == 0 {
        let (place, choice) = places.choose(&mut rng).unwrap();
        let mut world = World::new(place(), log.clone()).await;
        // It lives through all of them.
        let veteran = world.connect().await;
        let tally = Tally::default();
        let load = Load::start(&veteran, rng.random(), &tally);
        for _ in 0..ROUND {
            let (name, fault) = choice.choose(&mut rng).unwrap();
            println!(" {name}");
            fault(&mut world).await;
            *counts.entry(*name).or_default() += 1;
        }
        load.stop().await;
        drop(veteran);
        let (more, calls) = world.end(&format!("round {rounds}")).await;
        faults += more;
        totals.include(&calls);
        totals.include(&tally);
        rounds += 1;
        last = Some(watch.check("self", faults).await);
    }
    println!(
        "soak: {} s, {rounds} rounds, {faults} faults, {} calls",
        begun.elapsed().as_secs(),
        totals.calls()
    );
    println!("soak: calls by outcome: {totals:?}");
    println!("soak: faults: {counts:?}");
    println!("soak: held after the first round: {:?}", watch.first().unwrap());
    println!("soak: held at the end:            {:?}; bytes of pools in use: 0", last.unwrap());
}
