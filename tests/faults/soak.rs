//! Random faults for as long as SOAK_SECONDS says, on SOAK_FABRIC: `shm` on any host, else the
//! devices of the guest.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tonic_rdma_tests::load::{Load, Tally};
use tonic_rdma_tests::process_resources::Watch;

use crate::log::Log;
use crate::world::{Place, World};
use crate::{host, hostile, veth};

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
    "hostile peer" hostile::break_a_rule;
};

const NETWORK: &[Fault] = faults! {
    "packets lost, late, double or wrong" veth::trouble_some_packets;
    "black hole" veth::swallow;
    "SIGSTOP of the server" host::stop_server;
    "kill -9 of the server" host::kill_server;
};

/// Faults between two looks for leaks.
const ROUND: usize = 4;

type MakePlace = fn() -> Place;

/// Whether it runs outside of the guest.
pub fn needs_no_device() -> bool {
    std::env::var("SOAK_FABRIC").is_ok_and(|fabric| fabric == "shm")
}

pub async fn random_faults(log: Log) {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let time = Duration::from_secs(number("SOAK_SECONDS").expect("SOAK_SECONDS says for how long"));
    let seed = number("TONIC_RDMA_TEST_SEED").unwrap_or_else(|| rand::rng().random());
    let places: &[(MakePlace, &[Fault])] = match needs_no_device() {
        true => &[(Place::shm, PROCESSES)],
        false => {
            &[(Place::one_device, DEVICES), (Place::veth, NETWORK), (Place::veth_alone, NETWORK)]
        }
    };
    println!("TONIC_RDMA_TEST_SEED={seed}");
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
        let load = Load::start_fickle(&veteran, rng.random(), &tally);
        for _ in 0..ROUND {
            let (name, fault) = choice.choose(&mut rng).unwrap();
            println!(" {name}");
            fault(&mut world).await;
            *counts.entry(*name).or_default() += 1;
        }
        load.stop().await;
        drop(veteran);
        // Fails if a byte of a pool is still in use.
        let (more, calls) = world.end(&format!("round {rounds}")).await;
        faults += more;
        totals.include(&calls);
        totals.include(&tally);
        rounds += 1;
        last = Some(watch.check("self", faults).await);
    }
    let held = last.unwrap().beyond(watch.first().unwrap());
    let leaks: Vec<_> = held.into_iter().chain([("bytes of pools", 0)]).collect();
    // What tests/soak reads.
    println!("soak seconds {}", begun.elapsed().as_secs());
    println!("soak seed {seed}");
    println!("soak rounds {rounds}");
    println!("soak faults {faults}");
    for (name, count) in counts {
        println!("soak fault {count} {name}");
    }
    println!("soak calls {}", totals.calls());
    for (end, count) in totals.all() {
        println!("soak call {count} {end}");
    }
    for (name, more) in leaks {
        println!("soak leak {more} {name}");
    }
}
