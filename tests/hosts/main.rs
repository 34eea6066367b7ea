//! Kinds of problems that users of gRPC, of RDMA and of shared memory have reported about their
//! hosts: process limits, forks, signals, pauses, sandboxes, crowds. Each is a test that runs over
//! stock tonic, over TCP and over shared memory, and in the guest over each device
//! (`TONIC_RDMA_TEST_FABRIC=verbs`, `GUEST_ADDR`). tests/README.md lists the kinds, and those whose
//! test is in another suite.
//!
//! | module | kind |
//! |---|---|
//! | `limits` | RLIMIT_AS, RLIMIT_NOFILE and RLIMIT_FSIZE, lowered while a connection is established |
//! | `fork` | a child of fork(2) that executes no program |
//! | `signals` | a profiler that sends SIGPROF to each thread every millisecond |
//! | `pauses` | a process that stands still for seconds |
//! | `sandbox` | a seccomp(2) filter, and a PID namespace |
//! | `large` | messages of 300 MiB and of 1 GiB |
//! | `unread` | unread streams, and how many there can be |
//! | `crowd` | clients that connect at the same time |
//! | `lifetime` | a server that is killed and started again, and one that ends old connections |
//! | `bombs` | messages that are longer when decompressed than a server accepts |
//! | `server`, `client` | the other processes, which are this program again |

// Test code: a failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

mod bombs;
mod client;
mod crowd;
mod fork;
mod large;
mod lifetime;
mod limits;
mod pauses;
mod sandbox;
mod server;
mod signals;
mod unread;

use std::future::Future;
use std::pin::Pin;
use std::process::ExitCode;

use libtest_mimic::Trial;
use peak_alloc::PeakAlloc;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::process::{role, runtime};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Number of concurrent tests. Most of them wait most of the time.
const AT_ONCE: usize = 4;
/// The fabrics that the suite runs over by default.
const NATIVE: &[Fabric] = &[Fabric::Stock, Fabric::Tcp, Fabric::Shm];
/// All fabrics that the suite can run over.
const ALL: &[Fabric] = &[Fabric::Stock, Fabric::Tcp, Fabric::Shm, Fabric::Verbs];
/// Over a device, if a child maps memory, User Mode Linux gives it pages of its parent's memory. So
/// the guest runs a test whose child maps no memory: `transport/tonic/tests/fork`.
const FORKING: &[Fabric] = NATIVE;
/// The fabrics with a path that a channel can require and lose.
const FAST: &[Fabric] = &[Fabric::Shm, Fabric::Verbs];

type Run = fn(Fabric) -> Pin<Box<dyn Future<Output = ()>>>;

/// The tests of each module, with the fabrics that each runs over.
macro_rules! tests {
    ($($module:ident: $($name:ident in $fabrics:expr),+;)+) => {
        [$($((
            concat!(stringify!($module), "::", stringify!($name)),
            (|fabric| Box::pin($module::$name(fabric))) as Run,
            $fabrics as &[Fabric],
        ),)+)+]
    };
}

fn main() -> ExitCode {
    if let Some(role) = role() {
        let words: Vec<_> = role.iter().map(String::as_str).collect();
        match words[..] {
            ["server", ref words @ ..] => server::play(words),
            ["client", ref words @ ..] => client::play(words),
            _ => panic!("no role: {role:?}"),
        }
        return ExitCode::SUCCESS;
    }
    let chosen = match std::env::var_os("TONIC_RDMA_TEST_FABRIC") {
        Some(_) => Fabric::chosen().unwrap(),
        None => NATIVE.to_vec(),
    };
    assert!(chosen.iter().all(|fabric| ALL.contains(fabric)), "not one of {ALL:?}: {chosen:?}");
    let tests = tests! {
        limits: address_space_of_the_server in ALL, address_space_of_the_client in ALL,
            descriptors_of_the_server in ALL, descriptors_of_the_client in ALL,
            files_of_the_server in ALL, files_of_the_client in ALL,
            no_descriptor_for_another_client in ALL, no_file_from_the_start in ALL, a_required_path_that_is_left in FAST;
        fork: a_child_with_its_own_channel in FORKING, a_child_with_its_parents_channel in FORKING,
            a_child_of_a_handler in FORKING, a_child_that_outlives_its_parent in FORKING;
        signals: connecting_and_calling in ALL;
        pauses: a_handler_that_blocks_its_worker in ALL, a_client_that_blocks_while_it_reads in ALL,
            a_stopped_server in ALL, a_keep_alive_ends_a_pause in ALL,
            a_servers_keep_alive_ends_a_pause in ALL, a_shutdown_waits_for_a_stopped_client in ALL;
        sandbox: without_memory_files in ALL, without_unix_sockets in ALL, without_fstatfs in ALL, in_another_namespace in ALL;
        large: three_hundred_mebibytes in ALL, one_gibibyte in ALL;
        unread: small_messages in ALL, medium_messages in ALL, large_messages in ALL,
            streams_at_a_time in ALL;
        crowd: all_that_connect_at_once in ALL;
        lifetime: killed_and_started_again in ALL, connections_of_limited_age in ALL;
        bombs: far_beyond_the_limit in ALL;
    };
    let trials = chosen.into_iter().flat_map(|fabric| {
        let tests = tests.iter().filter(move |(.., fabrics)| fabrics.contains(&fabric));
        tests.map(move |&(name, run, _)| {
            let trial = Trial::test(format!("{fabric}::{name}"), move || {
                let runtime = runtime(CodecKind::ZeroCopy);
                runtime.block_on(run(fabric));
                runtime.shutdown_background();
                Ok(())
            });
            // `make test-large` runs this test.
            trial.with_ignored_flag(name == "large::one_gibibyte")
        })
    });
    let trials = trials.collect();
    let mut arguments = libtest_mimic::Arguments::from_args();
    arguments.test_threads.get_or_insert(AT_ONCE);
    libtest_mimic::run(&arguments, trials).exit_code()
}
