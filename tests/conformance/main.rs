//! The conformance suite over every fabric that this process can run. By default these are the
//! fabrics that need no RDMA device: stock tonic, TCP, the simulated network, and shared memory.
//! With `shm-two`, the server runs in a second process, which is this program again.
//! `TONIC_RDMA_TEST_FABRIC=verbs` with `GUEST_ADDR=IP` selects an RDMA device. `RUST_LOG` prints
//! the transport's log, and `TONIC_RDMA_TEST_HANG` sets the number of seconds after which a case
//! counts as hung.

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::num::NonZero;
use std::process::ExitCode;
use std::thread;

use tonic_rdma_tests::fabric::Fabric;

#[macro_use]
mod case;

mod calls;
mod expiry;
mod fast_path;
mod http;
mod limits;
mod messages;
mod random;
mod runner;
mod termination;

fn main() -> ExitCode {
    if std::env::var_os("RUST_LOG").is_some() {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    }
    match tonic_rdma_tests::harness::remote_child::serve_if_asked() {
        Ok(None) => {}
        Ok(Some(code)) => return code,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    }
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Some cases wait for seconds until a peer is known to be dead, so there are more threads than
    // processors. Cases over a device share the memory that this process may pin, so they get no
    // additional threads.
    if Fabric::chosen().is_ok_and(|chosen| !chosen.contains(&Fabric::Verbs)) {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        arguments.test_threads.get_or_insert(4 * processors);
    }
    match runner::trials() {
        Ok(trials) => libtest_mimic::run(&arguments, trials).exit_code(),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
