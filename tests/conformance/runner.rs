//! Runs the cases as tests, with a time limit for each.

use std::any::Any;
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::thread;
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use tonic_rdma_tests::codec;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::TestEnv;

use crate::case::Case;
use crate::{calls, fast_path, http, limits, messages, random, termination};

/// A case counts as hung after this many seconds without an event, and at the latest after
/// [`MAX_WAITS`] times as many, unless `TONIC_RDMA_TEST_HANG` sets another limit.
/// Cases take milliseconds to a few seconds. The limit leaves room for the guest and for a busy
/// machine.
const HANG: u64 = 120;

/// A case counts as hung after this many times [`HANG`] at the latest. On a busy machine, a case
/// with 5,000 calls may take several minutes.
const MAX_WAITS: usize = 10;

fn hang_limit() -> Result<Duration, String> {
    match std::env::var("TONIC_RDMA_TEST_HANG") {
        Ok(text) => text
            .parse()
            .map(Duration::from_secs)
            .map_err(|e| format!("TONIC_RDMA_TEST_HANG={text}: {e}; it takes whole seconds")),
        Err(_) => Ok(Duration::from_secs(HANG)),
    }
}

/// One trial for each case and each fabric that this process runs, named `FABRIC::MODULE::CASE`.
///
/// # Errors
/// The environment names an unknown fabric, or a limit that is not a number.
pub(crate) fn trials() -> Result<Vec<Trial>, String> {
    let hang = hang_limit()?;
    let mut trials = Vec::new();
    for fabric in Fabric::chosen()? {
        for case in all_cases() {
            if case.only.is_none_or(|only| only.contains(&fabric)) {
                trials.push(Trial::test(format!("{fabric}::{}", case.name), move || {
                    run(case, fabric, hang)
                }));
            }
        }
    }
    Ok(trials)
}

/// Every case of every module.
fn all_cases() -> Vec<Case> {
    [
        ("addresses", http::addresses::CASES),
        ("calls", calls::CASES),
        ("cancel", termination::cancel::CASES),
        ("compression", messages::compression::CASES),
        ("deadlines", termination::deadlines::CASES),
        ("fast_path", fast_path::CASES),
        ("headers", http::headers::CASES),
        ("layers", http::layers::CASES),
        ("like_tonic", termination::like_tonic::CASES),
        ("limits", limits::CASES),
        ("land_in", messages::land_in::CASES),
        ("mixed_load", messages::mixed_load::CASES),
        ("metadata", http::metadata::CASES),
        ("random", random::CASES),
        ("raw", http::raw::CASES),
        ("shutdown", termination::shutdown::CASES),
        ("sizes", messages::sizes::CASES),
        ("status", termination::status::CASES),
        ("streams", messages::streams::CASES),
        ("zero_copy", messages::zero_copy::CASES),
    ]
    .into_iter()
    .flat_map(|(module, cases)| {
        cases.iter().map(move |(name, run, only)| Case {
            name: format!("{module}::{name}"),
            run: *run,
            only: *only,
        })
    })
    .collect()
}

/// Over verbs all cases share the pool of the process. Cases that count copies run alone, because
/// others may use so much of the pool that messages have to be copied.
static POOL: RwLock<()> = RwLock::new(());

fn run(case: Case, fabric: Fabric, hang: Duration) -> Result<(), Failed> {
    let alone = fabric == Fabric::Verbs && case.name.starts_with("zero_copy::");
    let _alone = alone.then(|| POOL.write().unwrap_or_else(PoisonError::into_inner));
    let _beside = (!alone).then(|| POOL.read().unwrap_or_else(PoisonError::into_inner));
    let name = format!("{fabric}::{}", case.name);
    let (done, result) = mpsc::channel();
    let env = Arc::new(TestEnv::new(fabric));
    let watched = env.clone();
    let thread = thread::Builder::new()
        .name(name.clone())
        .spawn(move || {
            let (client, server) = fabric.codecs();
            codec::set_thread_codec(client);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name(name)
                .on_thread_start(move || codec::set_thread_codec(server))
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                (case.run)(&env).await;
                env.check_paths();
                env.assert_pools_returned().await;
            });
            // Tasks of a failed case end with its runtime, and need not be waited for.
            runtime.shutdown_background();
            // The receiver is gone if the case took too long.
            let _ = done.send(());
        })
        .unwrap();
    let (mut events, mut waits) = (Vec::new(), 0);
    let result = loop {
        match result.recv_timeout(hang) {
            Err(mpsc::RecvTimeoutError::Timeout) => waits += 1,
            result => break result,
        }
        let before = std::mem::replace(&mut events, watched.probe().events());
        if events == before || waits == MAX_WAITS {
            break Err(mpsc::RecvTimeoutError::Timeout);
        }
    };
    match result {
        Ok(()) => Ok(()),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            events.extend(watched.pools());
            let (after, events) = (hang.as_secs() * waits as u64, events.join("\n  "));
            Err(format!("hangs: not done after {after} s; events:\n  {events}").into())
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Ok(()) => Err("the case ended without a result".into()),
            Err(panic) => Err(text_of(panic.as_ref()).into()),
        },
    }
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "a panic without a text".to_owned())
}
