//! The rate of calls after a fault.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tonic_rdma::Channel;
use tonic_rdma_tests::load::{poll_until, wait_for_path};

use crate::fault_test::{FaultTest, Topology};
use crate::log::Log;
use crate::puts::Puts;
use crate::soak::{Fault, places};

const IN_FLIGHT: usize = 4;
/// Time over which a rate is measured.
const WINDOW: Duration = Duration::from_millis(1500);
/// Time after a fault within which the channel must be back on its path, and a window must have the
/// rate of before. Windows overlap, because the load of the machine changes the result of a single
/// window.
const BACK: Duration = Duration::from_secs(5);
/// Time between the beginnings of two windows.
const STEP: Duration = Duration::from_millis(250);

pub async fn comes_back(log: Log) {
    for (place, faults) in places() {
        behind_each(place(), faults, log.clone()).await;
    }
}

/// A channel's calls continue during faults. Within a few seconds after each fault, they are as
/// fast as before it. All calls end, and no work request keeps a buffer.
async fn behind_each(topology: Topology, faults: &[Fault], log: Log) {
    // Only tests/guest/speed checks speeds against bounds, and it sets this variable.
    let least = std::env::var("RATE_BACK_AT_LEAST").map_or(0.0, |least| least.parse().unwrap());
    let mut test = FaultTest::new(topology, log).await;
    let channel = test.connect().await;
    let puts = Puts::start(std::slice::from_ref(&channel), IN_FLIGHT);
    for (name, fault) in faults {
        wait_for_calls(&puts, 20).await;
        let before = rate(&puts).await.min(rate(&puts).await);
        fault(&mut test).await;
        let deadline = Instant::now() + BACK;
        wait_for_path(&channel, test.fast_path()).await;
        let behind = best_rate(&puts, least * before, deadline).await;
        println!(
            "  {name}: {before:.1} calls/s before, {behind:.1} behind, {:.2} times",
            behind / before
        );
        assert!(
            behind >= least * before,
            "{name}: {before} calls/s before, {behind} in any window within {BACK:?}"
        );
        assert_on_fast_path(&channel, &puts).await;
    }
    puts.stop().await;
    drop(channel);
    test.end("the rate behind faults").await;
}

async fn rate(puts: &Puts) -> f64 {
    let (began, before) = (Instant::now(), puts.done());
    tokio::time::sleep(WINDOW).await;
    (puts.done() - before) as f64 / began.elapsed().as_secs_f64()
}

/// The highest rate of a window that ends before the deadline. Returns as soon as a window has the
/// rate `enough`.
async fn best_rate(puts: &Puts, enough: f64, deadline: Instant) -> f64 {
    let (mut samples, mut best) = (VecDeque::from([(Instant::now(), puts.done())]), 0.0_f64);
    while best < enough.max(f64::MIN_POSITIVE) && Instant::now() + STEP < deadline {
        tokio::time::sleep(STEP).await;
        let (now, done) = (Instant::now(), puts.done());
        samples.push_back((now, done));
        while let Some(&(began, before)) = samples.front()
            && now - began >= WINDOW
        {
            best = best.max((done - before) as f64 / (now - began).as_secs_f64());
            samples.pop_front();
        }
    }
    best
}

async fn wait_for_calls(puts: &Puts, count: u64) {
    let end = puts.done() + count;
    poll_until("no calls", async || puts.done(), |done| *done >= end).await;
}

async fn assert_on_fast_path(channel: &Channel, puts: &Puts) {
    let (tcp, failed) = (channel.stats().calls_tcp, puts.failed());
    wait_for_calls(puts, 20).await;
    assert_eq!((channel.stats().calls_tcp, puts.failed()), (tcp, failed), "{}", channel.path());
}
