//! Faults on real verbs, under load, in the guest: `tests/guest/suite faults`.
//!
//! Whatever the fault, a call ends with OK, or exactly once with the status of a lost connection,
//! or it continues over TCP. Its data is correct, nothing hangs, no resource leaks, and other
//! connections are unaffected. While TCP works, calls continue over it, and they return to RDMA by
//! themselves once that works again.
//!
//! | module | what |
//! |---|---|
//! | `host` | processes are killed and stopped; a device, interface or address is removed and restored |
//! | `veth` | packets lost, delayed, duplicated, corrupted or all dropped between two veth ends |
//! | `bond` | the active slave of a bond at either end fails, and comes back |
//! | `arp_flux` | no fault of a device: two devices of one host in one subnet, seen by a neighbour |
//! | `ack` | all packets are dropped for longer than one device waits, but not longer than another |
//! | `queues` | no fault: a device that pins memory for its queues, and creates them slowly; a server that names an unknown path MTU |
//! | `service_class` | no fault: the type of service of packets on the network |
//! | `memlock` | RLIMIT_MEMLOCK lowered between connections |
//! | `hostile` | peers that have a ticket and violate the protocol |
//! | `named` | peers that keep the key of a buffer that the server has already got back |
//! | `raw_peer` | the queue pair of such a peer |
//! | `rate` | the rate before and after each fault of `soak` |
//! | `soak` | random faults for a given time: `make soak` |
//! | `cable` | the cable between two guests is cut, or loses a message of the connection manager; two cables, in one network and in routed ones |
//! | `fault_test`, `puts`, `roles`, `log` | shared code |

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

mod ack;
mod arp_flux;
mod bond;
mod cable;
mod fault_test;
mod host;
mod hostile;
mod log;
mod memlock;
mod named;
mod puts;
mod queues;
mod rate;
mod raw_peer;
mod roles;
mod service_class;
mod soak;
mod veth;

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;

use libtest_mimic::Trial;
use log::Log;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::process::{role, runtime};

type Test = fn(Log) -> Pin<Box<dyn Future<Output = ()>>>;

/// The tests of a module by name.
macro_rules! tests {
    ($($module:ident: $($name:ident)+;)+) => {
        [$($((
            concat!(stringify!($module), "::", stringify!($name)),
            (|log| Box::pin($module::$name(log))) as Test,
        ),)+)+]
    };
}

fn main() -> ExitCode {
    if let Some(role) = role() {
        return roles::play(&role);
    }
    assert!(
        std::env::var_os("TONIC_RDMA_GUEST").is_some() || soak::runs_on_shm(),
        "run this in the guest: tests/guest/suite faults"
    );
    let log = Log::install();
    let mut arguments = libtest_mimic::Arguments::from_args();
    // The tests remove devices, and count the resources of processes.
    arguments.test_threads = Some(1);
    let tests = tests! {
        host: server_killed client_killed server_stopped client_stopped device_removed interface_down carrier_lost address_removed
            address_moved;
        hostile: peers_that_break_the_rules a_key_without_its_address;
        named: a_key_that_was_withdrawn a_key_that_is_kept;
        veth: packets_lost_delayed_repeated_and_changed black_hole_for_rdma black_hole_for_all
            ends_have_different_mtus long_packets_are_lost
            connect_requests_are_lost;
        memlock: of_the_server of_a_client;
        queues: that_are_charged that_are_short_of_memory that_take_their_time
            that_are_told_an_unknown_mtu;
        bond: slaves_are_cut slaves_go_down;
        ack: a_hole_is_survived;
        arp_flux: two_devices_in_one_subnet;
        service_class: packets_have_what_was_set;
        cable: cut ready_to_use_is_lost rails routed_rails;
        rate: comes_back;
        soak: random_faults;
    };
    let trials = tests.into_iter().map(|(name, test)| {
        let log = log.clone();
        Trial::test(name, move || {
            runtime(CodecKind::Plain).block_on(test(log));
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
