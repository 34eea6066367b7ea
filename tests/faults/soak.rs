//! Random faults for SOAK_SECONDS. With SOAK_FABRIC set to `shm` they run over shared memory, which
//! works on any host, and otherwise on the guest's devices.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tonic_rdma_tests::load::{Load, Tally};
use tonic_rdma_tests::process_resources::LeakCheck;

use crate::fault_test::{FaultTest, Topology};
use crate::log::Log;
use crate::{host, hostile, veth};

/// A fault under load, with its name.
pub type Fault =
    (&'static str, for<'a> fn(&'a mut FaultTest) -> Pin<Box<dyn Future<Output = ()> + 'a>>);

macro_rules! faults {
    ($($name:literal $fault:path;)+) => {
        &[$(($name, |test| Box::pin($fault(test))),)+]
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
    "hostile peer" hostile::run_hostile_peer;
};

const NETWORK: &[Fault] = faults! {
    "packets lost, late, double or wrong" veth::impair_packets_at_random;
    "black hole" veth::black_hole;
    "kill -9 of the server" host::kill_server;
};

/// Faults between two checks for leaks.
const ROUND: usize = 4;

pub type MakePlace = fn() -> Topology;

/// Whether the soak uses shared memory, and so needs no guest.
pub fn runs_on_shm() -> bool {
    std::env::var("SOAK_FABRIC").is_ok_and(|fabric| fabric == "shm")
}

/// The places to choose from, with the faults of each.
pub fn places() -> &'static [(MakePlace, &'static [Fault])] {
    match runs_on_shm() {
        true => &[(Topology::shm, PROCESSES)],
        false => &[
            (Topology::one_device, DEVICES),
            (Topology::veth, NETWORK),
            (Topology::veth_alone, NETWORK),
        ],
    }
}

pub async fn random_faults(log: Log) {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let time = Duration::from_secs(number("SOAK_SECONDS").expect("SOAK_SECONDS says for how long"));
    let seed = number("TONIC_RDMA_TEST_SEED").unwrap_or_else(|| rand::rng().random());
    let places = places();
    println!("TONIC_RDMA_TEST_SEED={seed}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let (started, mut rounds) = (Instant::now(), 0);
    let (mut counts, mut leak_check) = (BTreeMap::<_, u64>::new(), LeakCheck::default());
    let (totals, mut faults) = (Tally::default(), 0);
    let mut last = None;
    while started.elapsed() < time || rounds == 0 {
        let (topology, choice) = places.choose(&mut rng).unwrap();
        let mut test = FaultTest::new(topology(), log.clone()).await;
        // This channel stays open during all faults of the round.
        let long_lived = test.connect().await;
        let tally = Tally::default();
        let load = Load::start_with_cancels(&long_lived, rng.random(), &tally);
        for _ in 0..ROUND {
            let (name, fault) = choice.choose(&mut rng).unwrap();
            println!(" {name}");
            fault(&mut test).await;
            *counts.entry(*name).or_default() += 1;
        }
        load.stop().await;
        drop(long_lived);
        // Fails if a byte of a pool is still in use.
        let (more, calls) = test.end(&format!("round {rounds}")).await;
        faults += more;
        totals.include(&calls);
        totals.include(&tally);
        rounds += 1;
        last = Some(leak_check.check("self", faults).await);
    }
    let held = last.unwrap().excess_over(leak_check.first().unwrap());
    let leaks: Vec<_> = held.into_iter().chain([("bytes of pools", 0)]).collect();
    // tests/soak parses these lines.
    println!("soak seconds {}", started.elapsed().as_secs());
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
