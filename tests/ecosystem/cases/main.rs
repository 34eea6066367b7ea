//! Libraries around tonic, as published and unchanged, over shared memory and TCP, and in the guest
//! over its device. `TONIC_RDMA_TEST_FABRIC` selects `shm`, `tcp` or `verbs`.

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used)]

use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use tonic_rdma_ecosystem_tests::Net;

mod axum_routes;
mod conventions;
mod etcd;
mod flight_sql;
mod health;
mod otlp;
mod qdrant;
mod reflection;
mod repeated;
mod tower_http;
mod traced;
mod web;

/// A case takes seconds at most. The limit leaves room for the guest and for a busy machine.
const HANG: Duration = Duration::from_secs(120);

/// A case, which prepares its test over `Net` and panics if it fails.
type Case = fn(Net) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// The cases with their names.
macro_rules! cases {
    ($($module:ident::$name:ident),+ $(,)?) => {
        &[$((
            concat!(stringify!($module), "::", stringify!($name)),
            |net| Box::pin($module::$name(net)),
        )),+]
    };
}

const CASES: &[(&str, Case)] = cases![
    axum_routes::beside_grpc,
    conventions::spans_have_their_attributes,
    etcd::by_a_service_and_by_tonics_channel,
    flight_sql::queries_and_updates,
    health::is_checked_and_watched,
    otlp::spans_are_exported_through_into_tonic,
    qdrant::stubs_by_either_channel_beside_its_own_client,
    reflection::lists_and_describes,
    repeated::retries_until_it_works,
    repeated::hedges_and_cancels_the_slow_one,
    tower_http::traces_counts_and_marks_calls,
    tower_http::compresses_pages_but_no_calls,
    tower_http::a_handler_that_panics_fails_its_call_only,
    traced::the_context_is_carried,
    web::calls_by_http_1_beside_the_fast_path,
];

fn main() -> ExitCode {
    traced::subscribe();
    let nets = match Net::chosen() {
        Ok(nets) => nets,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let trial = |net: Net, (name, case): (&str, Case)| {
        Trial::test(format!("{net}::{name}"), move || run(net, case))
    };
    let trials = nets.iter().flat_map(|net| CASES.iter().map(|case| trial(*net, *case))).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn run(net: Net, case: Case) -> Result<(), Failed> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let done = runtime.block_on(async { tokio::time::timeout(HANG, case(net)).await });
    // Servers end with the runtime, and need not be waited for.
    runtime.shutdown_background();
    done.map_err(|_| format!("hangs: not done after {} s", HANG.as_secs()).into())
}
