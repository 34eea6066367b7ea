//! The conformance suite over every fabric this process can run. `TONIC_RDMA_TEST_FABRIC=verbs`
//! with `GUEST_ADDR=IP` runs it over an RDMA device; natively it runs over stock tonic, TCP, sim
//! and shared memory, the latter also with the server in a process of its own, which is this
//! program again. `RUST_LOG` shows what the transport logs, `TONIC_RDMA_TEST_HANG` sets after how
//! many seconds a case counts as hung.

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::process::ExitCode;

#[macro_use]
mod case;

mod calls;
mod fast_path;
mod http;
mod limits;
mod messages;
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
    let arguments = libtest_mimic::Arguments::from_args();
    match runner::trials() {
        Ok(trials) => libtest_mimic::run(&arguments, trials).exit_code(),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
