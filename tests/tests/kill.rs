//! SIGKILL under load over shared memory. One test kills a server a hundred times, the other kills
//! a hundred clients of one server. The survivor continues, and holds no resources of the killed
//! process. The other processes are this program again. `TONIC_RDMA_TEST_SEED` repeats the random
//! choices of a run, but timing still depends on the machine.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::Trial;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::task::JoinSet;
use tonic_rdma::{Context, Endpoint, FabricKind, Path};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::fixed_port;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{
    Load, Tally, WORKERS, one_call, poll_until, wait_for_call, wait_for_path, with_timeout,
};
use tonic_rdma_tests::process::{Process, codec_from_name, codec_name, in_use, role, runtime};
use tonic_rdma_tests::process_resources::{LeakCheck, ProcessResources};
use tonic_rdma_tests::server_process;

const KILLS: usize = 100;
/// The resources after this number of kills are the baseline.
const FIRST_CHECK: usize = 10;
/// Kills between two comparisons with the baseline.
const CHECK_INTERVAL: usize = 15;

fn main() -> ExitCode {
    if let Some(role) = role() {
        let runtime = runtime(codec_from_name(&role[1]));
        match &role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["server", _, at, device] => {
                runtime.block_on(server_process::serve(at.parse().unwrap(), device, false, || 0))
            }
            ["client", _, port, seed] => {
                runtime.block_on(load(port.parse().unwrap(), seed.parse().unwrap()))
            }
            _ => panic!("no role: {role:?}"),
        }
        runtime.shutdown_background();
        return ExitCode::SUCCESS;
    }
    let seed = match std::env::var("TONIC_RDMA_TEST_SEED") {
        Ok(seed) => seed.parse().unwrap_or_else(|e| panic!("TONIC_RDMA_TEST_SEED={seed}: {e}")),
        Err(_) => rand::rng().random(),
    };
    eprintln!("TONIC_RDMA_TEST_SEED={seed}");
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Each test measures the resources of this process.
    arguments.test_threads = Some(1);
    let trials = vec![
        Trial::test("killed_servers", move || {
            runtime(CodecKind::ZeroCopy).block_on(killed_servers(seed));
            Ok(())
        }),
        Trial::test("killed_clients", move || {
            runtime(CodecKind::Plain).block_on(killed_clients(seed));
            Ok(())
        }),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The client process: makes calls until it is killed.
async fn load(port: u16, seed: u64) {
    let channel = endpoint(port, &Context::builder().build()).connect().await.unwrap();
    let load = Load::start(&channel, seed, &Tally::default());
    while channel.stats().calls_fast < 2 * WORKERS {
        tokio::task::yield_now().await;
    }
    println!("up");
    // Unless this process is killed, it ends with the test, which closes its stdin.
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(_)) = lines.next_line().await {}
    drop(load);
}

const fn local(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

fn endpoint(port: u16, context: &Context) -> Endpoint {
    server_process::endpoint(local(port), (FabricKind::Shm, context))
}

/// Starts a server's process.
async fn start(port: u16, n: usize) -> Process {
    server_process::start("", codec_name(n), local(port), "shm").await
}

fn is_checkpoint(kills: usize) -> bool {
    kills >= FIRST_CHECK && (kills - FIRST_CHECK).is_multiple_of(CHECK_INTERVAL)
}

async fn killed_servers(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let port = fixed_port(Ipv4Addr::LOCALHOST.into());
    let context = Context::builder().build();
    let (tally, mut leak_check) = (Tally::default(), LeakCheck::default());
    let (mut fast, mut tcp, mut answered, mut returns) = (0, 0, 0, 0);
    let mut server = start(port, 0).await;
    // One channel lives through all kills. Its wait before the next attempt at the fast path grows
    // with each loss. So short-lived channels also take turns, and each normally loses an
    // established path twice.
    let long_lived = endpoint(port, &context).connect().await.unwrap();
    let mut background = Load::start(&long_lived, seed, &tally);
    let mut turn = None;
    for kill in 1..=KILLS {
        match &mut turn {
            None => {
                let channel = endpoint(port, &context).connect().await.unwrap();
                assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
                assert!(ProcessResources::of("self").memfd_maps > 0, "what is shared is not seen");
                let load = Load::start(&channel, rng.random(), &tally);
                turn = Some((channel, load, 0));
            }
            // Do not wait: the next kill finds the channel on TCP, or connecting.
            Some((_, _, losses)) if *losses == 1 => {}
            Some((channel, ..)) => {
                answered += usize::from(
                    with_timeout("a call over TCP", wait_for_call(channel, &mut rng)).await,
                );
                wait_for_path(channel, Path::Shm).await;
                returns += 1;
            }
        }
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..60_000))).await;
        server.kill().await;
        if let Some((.., losses)) = &mut turn {
            *losses += 1;
        }
        if let Some((channel, load, _)) =
            turn.take_if(|(.., losses)| *losses == 3 || is_checkpoint(kill))
        {
            load.stop().await;
            fast += channel.stats().calls_fast;
            tcp += channel.stats().calls_tcp;
        }
        if is_checkpoint(kill) {
            background.stop().await;
            poll_until("in use, with no server left", || in_use(&context), |bytes| *bytes == 0)
                .await;
            leak_check.check("self", kill).await;
            background = Load::start(&long_lived, rng.random(), &tally);
        }
        server = start(port, kill).await;
    }
    wait_for_path(&long_lived, Path::Shm).await;
    background.stop().await;
    let carried = long_lived.stats().calls_fast;
    one_call(&mut client_of(AnyChannel::Rdma(long_lived.clone())), &mut rng).await.unwrap();
    assert_eq!(long_lived.stats().calls_fast, carried + 1, "{}", long_lived.path());
    server.kill().await;
    eprintln!(
        "servers: {KILLS} kills, {answered} times first answered over TCP, {returns} returns to shm, calls: {tally:?}"
    );
    eprintln!("begun by the channels that took turns: {fast} over shm, {tcp} over TCP");
    assert!(fast > 0 && tcp > 0 && answered > 0 && returns > 0);
    assert!(tally.of("OK") > 0 && tally.of("Unavailable") > 0);
}

async fn killed_clients(seed: u64) {
    /// Clients that live at the same time.
    const PARALLEL: usize = 5;
    let mut rng = SmallRng::seed_from_u64(seed);
    let port = fixed_port(Ipv4Addr::LOCALHOST.into());
    let context = Context::builder().build();
    let (tally, mut leak_check) = (Tally::default(), LeakCheck::default());
    let mut server = start(port, 0).await;
    let process = server.id();
    let mut healthy = None;
    let mut in_flight = 0;
    for kills in (PARALLEL..=KILLS).step_by(PARALLEL) {
        if healthy.is_none() {
            let channel = endpoint(port, &context).connect().await.unwrap();
            let load = Load::start(&channel, rng.random(), &tally);
            healthy = Some((channel, load));
        }
        let mut to_kill = JoinSet::new();
        for n in 0..PARALLEL {
            let mut client = Process::start(
                "",
                &format!("client {} {port} {}", codec_name(kills + n), rng.random::<u64>()),
            );
            let (early, pause) =
                (rng.random_ratio(1, 4), Duration::from_micros(rng.random_range(0..60_000)));
            to_kill.spawn(async move {
                if !early {
                    assert_eq!(client.read_line().await, "up");
                }
                tokio::time::sleep(pause).await;
                client.kill().await;
                usize::from(!early)
            });
        }
        in_flight += to_kill.join_all().await.into_iter().sum::<usize>();
        if is_checkpoint(kills)
            && let Some((channel, load)) = healthy.take()
        {
            load.stop().await;
            assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
            assert_eq!(channel.stats().calls_tcp, 0, "{:?}", channel.stats());
            drop(channel);
            server_process::wait_for_idle_pools(&mut server).await;
            leak_check.check(&process, kills).await;
        }
    }
    eprintln!(
        "clients: {KILLS} kills, {in_flight} with calls over shm in flight, healthy: {tally:?}"
    );
    assert!(tally.of("OK") > 0 && tally.failed() == 0, "calls of the healthy client: {tally:?}");
}
