//! The conformance suite over every fabric this process can run. `TONIC_RDMA_TEST_FABRIC=verbs` with
//! `GUEST_ADDR=IP` runs it over an RDMA device; natively it runs over stock tonic, TCP and sim.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = libtest_mimic::Arguments::from_args();
    match tonic_rdma_tests::runner::trials() {
        Ok(trials) => libtest_mimic::run(&arguments, trials).exit_code(),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
