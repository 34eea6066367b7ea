//! Faults on real verbs, under load, in the guest: `tests/guest/suite faults`.
//!
//! Whatever happens, a call ends well, or once with the status of a lost connection, or it goes on
//! over TCP; its data is right; nothing hangs, nothing is left behind, and nobody else is hurt.
//! Where TCP lives calls go on over it, and they return to RDMA when that works again, without
//! anybody's help.
//!
//! | module | what |
//! |---|---|
//! | `host` | processes killed and stopped; a device, its interface, its address taken away and given back |
//! | `veth` | packets lost, delayed, repeated, changed, swallowed, between the two ends of a veth pair |
//! | `memlock` | RLIMIT_MEMLOCK lowered between connections |
//! | `hostile` | peers that have a ticket and break every rule |
//! | `soak` | random ones, for as long as one likes: `make soak` |
//! | `cable` | two guests, and the cable between them is cut |
//! | `world`, `roles`, `log` | what they have in common |

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

mod cable;
mod host;
mod hostile;
mod log;
mod memlock;
mod roles;
mod soak;
mod veth;
mod world;

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;

use libtest_mimic::Trial;
use log::Log;
use tonic_rdma_tests::codec::Which;
use tonic_rdma_tests::process::{role, runtime};

type Test = fn(Log) -> Pin<Box<dyn Future<Output = ()>>>;

/// Tests of a module, by their names.
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
        std::env::var_os("TONIC_RDMA_GUEST").is_some() || soak::needs_no_device(),
        "run this in the guest: tests/guest/suite faults"
    );
    let log = Log::keep();
    let mut arguments = libtest_mimic::Arguments::from_args();
    // They take devices away from each other, and count what processes hold.
    arguments.test_threads = Some(1);
    let tests = tests! {
        host: server_killed client_killed server_stopped client_stopped device_removed interface_down address_removed;
        hostile: peers_that_break_the_rules a_key_without_its_address;
        veth: packets_lost_delayed_repeated_and_changed swallowed_by_the_rdma_network swallowed_by_the_network;
        memlock: of_the_server of_a_client;
        cable: cut;
        soak: random_faults;
    };
    let trials = tests.into_iter().map(|(name, test)| {
        let log = log.clone();
        Trial::test(name, move || {
            runtime(Which::Plain).block_on(test(log));
            Ok(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
