//! The roles of the other processes of these tests.

use std::net::SocketAddr;
use std::process::ExitCode;

use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tonic_rdma_tests::load::{Load, Tally, WORKERS, poll_until};
use tonic_rdma_tests::process::{codec_from_name, runtime};
use tonic_rdma_tests::server_process::{fabric_of, serve};

use crate::arp_flux;
use crate::cable::{ROUTED, route_cables};
use crate::fault_test::endpoint;
use crate::log::Log;

/// Runs a role until its standard input ends or it is killed.
pub fn play(role: &[String]) -> ExitCode {
    let words: Vec<_> = role.iter().map(String::as_str).collect();
    Log::install();
    let runtime = runtime(codec_from_name(words[1]));
    match words[..] {
        ["server", _, at, device] => {
            runtime.block_on(serve(at.parse().unwrap(), device, false, || 0))
        }
        ["server", _, at, device, "alone"] => {
            runtime.block_on(serve(at.parse().unwrap(), device, true, || 0))
        }
        // The other guest's end of the cables of `cable::routed_rails`.
        ["server", _, at, device, "routed"] => {
            let [peer, own] = ROUTED;
            route_cables(own, peer);
            runtime.block_on(serve(at.parse().unwrap(), device, true, || 0))
        }
        // The host with two devices in one subnet of `arp_flux`.
        ["server", _, at, device, "flux"] => {
            runtime.block_on(arp_flux::host(at.parse().unwrap(), device))
        }
        ["client", _, at, device, seed] => {
            runtime.block_on(call(at.parse().unwrap(), device, seed.parse().unwrap()));
        }
        _ => panic!("no role: {role:?}"),
    }
    runtime.shutdown_background();
    ExitCode::SUCCESS
}

/// Keeps making calls. Answers `path` with the path that calls take. Answers any other line, once
/// calls use RDMA, with the outcomes of calls so far.
async fn call(at: SocketAddr, device: &str, seed: u64) {
    let (fabric, context) = fabric_of(device);
    let channel = endpoint(at, false, (fabric, &context)).connect().await.unwrap();
    let tally = Tally::default();
    let mut load = Load::start(&channel, seed, &tally);
    let started = || async { channel.stats().calls_fast + channel.stats().calls_tcp };
    poll_until("no calls", started, |calls| *calls >= 2 * WORKERS).await;
    println!("up");
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(question)) = lines.next_line().await {
        if question == "path" {
            println!("{}", channel.path());
            continue;
        }
        poll_until("not on the fast path", || async { channel.path() }, |info| info.path.is_fast())
            .await;
        let (started, before) =
            (|| async { channel.stats().calls_fast }, channel.stats().calls_fast);
        poll_until("no calls over RDMA", started, |calls| *calls >= before + 2 * WORKERS).await;
        load.check();
        println!("{tally:?}");
    }
    load.stop().await;
}
