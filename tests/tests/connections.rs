//! A process holds no more resources after 1,300 connections than after 10: descriptors, mappings,
//! threads, pinned memory, bytes of the pools and of the heap. Half of the connections are closed,
//! every second one of these with a call in flight. The other half are lost under load, when
//! SIGKILL ends the other process, which is this program again. The test runs over shared memory,
//! and in the guest over its device, where `CONNECTIONS` sets the number.
//!
//! Over shared memory it also counts what up to 1,000 idle connections cost: descriptors, memory
//! and wake-ups of threads. When they have ended, nothing is left.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::Trial;
use peak_alloc::PeakAlloc;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tokio::task::JoinSet;
use tonic_rdma::{Channel, Context, FabricKind, Path};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::fabric::{bind_ip, fixed_port};
use tonic_rdma_tests::harness::{Client, client_of};
use tonic_rdma_tests::load::{
    assert_connection_lost, one_call, poll_until, wait_for_path, with_timeout,
};
use tonic_rdma_tests::process::{Process, codec_from_name, codec_name, in_use, role, runtime};
use tonic_rdma_tests::process_resources::{LeakCheck, ProcessResources};
use tonic_rdma_tests::server_process::{self, endpoint, fabric_of};
use tonic_rdma_tests::service::script::{echo, steps};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Connections that one process has at a time. The resources after the first round are the
/// baseline.
const PARALLEL: usize = 10;
/// Bytes by which the heap may exceed the baseline, which includes each thread's buffers for
/// received messages. Each thread that polls calls keeps a buffer of 16 KiB for pieces of messages
/// and one of 4 KiB for headers. It allocates them for its first long piece and its first long
/// headers, which may come late in the test. These threads are two workers and the test's own.
/// Queues and tables keep spare capacity.
const HEAP_SLACK: usize = 3 * (20 << 10) + (24 << 10);
/// Number of connections at which a leak of 67 bytes for each connection exceeds [`HEAP_SLACK`].
const CONNECTIONS: usize = 1300;
/// Number of connections at rest.
const AT_REST: usize = 1000;

/// Descriptors of a connection at rest, including the TCP connection, at either end. All
/// connections share the two eventfds of shared memory.
const FDS_AT_REST: usize = 2;
/// Memory of a connection at rest in KiB (VmRSS), at either end.
const KIB_AT_REST: usize = 128;
/// How long the connections rest.
const REST: Duration = Duration::from_secs(3);

fn heap() -> usize {
    HEAP.current_usage()
}

/// A number in a process's status file.
fn status_of(process: &str, name: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

/// How often a process's threads have waited for something, and so woken up again.
fn wake_ups(process: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let ids = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
    // A thread may have ended since.
    let of = |id: String| std::fs::read_to_string(format!("/proc/{process}/task/{id}/status")).ok();
    let count = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<usize>().unwrap()
    };
    ids.filter_map(of).map(count).sum()
}

/// The number of connections that the descriptor limit of this process allows, up to `wanted`.
fn allowed(wanted: usize) -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let soft = line.split_whitespace().next().unwrap().parse::<usize>().unwrap_or(usize::MAX);
    wanted.min(soft.saturating_sub(200) / FDS_AT_REST)
}

fn main() -> ExitCode {
    if let Some(role) = role() {
        let runtime = runtime(codec_from_name(&role[1]));
        match &role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["server", _, at, device] => {
                runtime.block_on(server_process::serve(at.parse().unwrap(), device, false, heap));
            }
            ["client", _, at, device, seed] => {
                runtime.block_on(run_client(at.parse().unwrap(), device, seed.parse().unwrap()));
            }
            _ => panic!("no role: {role:?}"),
        }
        runtime.shutdown_background();
        return ExitCode::SUCCESS;
    }
    let number = |name| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    let seed = number("TONIC_RDMA_TEST_SEED").unwrap_or_else(|| rand::rng().random());
    let connections = number("CONNECTIONS").map_or(CONNECTIONS, |count| count as usize);
    eprintln!("TONIC_RDMA_TEST_SEED={seed}");
    let mut arguments = libtest_mimic::Arguments::from_args();
    // Each test measures the resources of this process.
    arguments.test_threads = Some(1);
    let mut trials = vec![
        Trial::test("of_a_client", move || {
            runtime(CodecKind::ZeroCopy).block_on(of_a_client(connections, seed));
            Ok(())
        }),
        Trial::test("of_a_server", move || {
            runtime(CodecKind::Plain).block_on(of_a_server(connections, seed));
            Ok(())
        }),
    ];
    if std::env::var("GUEST_DEVICE").is_err() {
        trials.push(Trial::test("at_rest", move || {
            runtime(CodecKind::ZeroCopy).block_on(at_rest(allowed(connections.min(AT_REST))));
            Ok(())
        }));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The server's address, and the fabric and path of the connections.
struct Target {
    device: String,
    at: SocketAddr,
    kind: FabricKind,
    context: Context,
    path: Path,
}

impl Target {
    fn new() -> Self {
        let device = std::env::var("GUEST_DEVICE").unwrap_or_else(|_| "shm".into());
        let ip = match device.as_str() {
            "shm" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            _ => bind_ip().unwrap(),
        };
        Self::of(&device, SocketAddr::new(ip, fixed_port(ip)))
    }

    fn of(device: &str, at: SocketAddr) -> Self {
        let (kind, context) = fabric_of(device);
        let path = if kind == FabricKind::Shm { Path::Shm } else { Path::Verbs };
        Self { device: device.to_owned(), at, kind, context, path }
    }

    async fn server(&self, n: usize) -> Process {
        server_process::start("", codec_name(n), self.at, &self.device).await
    }

    /// `PARALLEL` channels on the fast path, each of which has carried a call.
    async fn connect(&self, rng: &mut SmallRng) -> Vec<(Channel, Client)> {
        let mut connecting = JoinSet::new();
        for _ in 0..PARALLEL {
            let connecting_one = self.connect_one();
            let mut rng = SmallRng::seed_from_u64(rng.random());
            connecting.spawn(async move {
                let (channel, mut client) = connecting_one.await;
                with_timeout("a call", one_call(&mut client, &mut rng)).await.unwrap();
                assert_eq!(channel.stats().calls_fast, 1, "{}", channel.path());
                (channel, client)
            });
        }
        connecting.join_all().await
    }

    /// Makes `PARALLEL` channels that have carried a few bytes each, so that none has used landing
    /// memory.
    async fn connect_small(&self) -> Vec<(Channel, Client)> {
        let mut connecting = JoinSet::new();
        for _ in 0..PARALLEL {
            let connecting_one = self.connect_one();
            connecting.spawn(async move {
                let (channel, mut client) = connecting_one.await;
                small_call(&mut client).await;
                (channel, client)
            });
        }
        connecting.join_all().await
    }

    fn connect_one(&self) -> impl Future<Output = (Channel, Client)> + Send + 'static {
        let (endpoint, path) = (endpoint(self.at, (self.kind, &self.context)), self.path);
        async move {
            let channel = with_timeout("connecting", endpoint.connect()).await.unwrap();
            wait_for_path(&channel, path).await;
            let client = client_of(AnyChannel::Rdma(channel.clone()));
            (channel, client)
        }
    }

    async fn wait_for_idle_pools(&self) {
        poll_until("in use, with no channel left", || in_use(&self.context), |bytes| *bytes == 0)
            .await;
    }
}

async fn small_call(client: &mut Client) {
    let request = steps("", [echo(1)]).with_payload(1, 64);
    let reply = with_timeout("a small call", client.unary(request)).await.unwrap();
    reply.into_inner().expect(1, 64);
}

/// Closes half of the channels. Every other one is dropped with a call in flight.
async fn close_half(channels: &mut Vec<(Channel, Client)>, rng: &mut SmallRng) {
    for (n, (channel, mut client)) in channels.drain(..PARALLEL / 2).enumerate() {
        if n % 2 == 1 {
            let mut calls = SmallRng::seed_from_u64(rng.random());
            let cancel_after = Duration::from_micros(rng.random_range(0..2_000));
            let call = one_call(&mut client, &mut calls);
            // The call may end before the time-out.
            if let Ok(end) = tokio::time::timeout(cancel_after, call).await {
                end.unwrap();
            }
        }
        drop((client, channel));
    }
}

/// Makes calls, one at a time on each channel, until one fails because the peer is gone.
fn call_until_lost(channels: Vec<(Channel, Client)>, rng: &mut SmallRng) -> JoinSet<Channel> {
    let mut calling = JoinSet::new();
    for (channel, mut client) in channels {
        let mut rng = SmallRng::seed_from_u64(rng.random());
        calling.spawn(async move {
            loop {
                if let Err(status) = with_timeout("a call", one_call(&mut client, &mut rng)).await {
                    assert_connection_lost(&status);
                    return channel;
                }
            }
        });
    }
    calling
}

/// The resources after the first connections, for comparison with later readings.
#[derive(Default)]
struct LeakRecord {
    leak_check: LeakCheck,
    heap: Option<usize>,
}

impl LeakRecord {
    /// The first call records the baseline. Later calls fail if the resources exceed it.
    async fn check(
        &mut self,
        process: &str,
        connections: usize,
        heap: impl AsyncFn() -> usize,
    ) -> (ProcessResources, usize) {
        let held = self.leak_check.check(process, connections).await;
        let heap = match self.heap {
            None => *self.heap.insert(settled_heap(&heap).await),
            Some(before) => {
                poll_until("bytes of the heap", || heap(), |now| *now <= before + HEAP_SLACK).await
            }
        };
        eprintln!("process {process} after {connections} connections: heap {heap}");
        (held, heap)
    }

    fn print(
        &self,
        whose: &str,
        target: &Target,
        connections: usize,
        (held, heap): (ProcessResources, usize),
    ) {
        let (first, heap_then) = (self.leak_check.first().unwrap(), self.heap.unwrap());
        println!(
            "{whose}, {}: after {PARALLEL} connections {first:?}, heap {heap_then}",
            target.device
        );
        println!(
            "{whose}, {}: after {connections} connections {held:?}, heap {heap}",
            target.device
        );
    }
}

/// The minimum heap size over 200 ms, because memory may be about to be freed.
async fn settled_heap(heap: &impl AsyncFn() -> usize) -> usize {
    let mut min = usize::MAX;
    for _ in 0..40 {
        min = min.min(heap().await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    min
}

/// The resources are checked after the first round, after every hundred connections, and at the
/// end.
fn is_checkpoint(done: usize, connections: usize) -> bool {
    done == PARALLEL || done == connections || done.is_multiple_of(100)
}

async fn of_a_client(connections: usize, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let target = Target::new();
    let (mut record, mut last) = (LeakRecord::default(), None);
    let mut server = target.server(0).await;
    for done in (PARALLEL..=connections).step_by(PARALLEL) {
        let mut channels = target.connect(&mut rng).await;
        close_half(&mut channels, &mut rng).await;
        let mut calling = call_until_lost(channels, &mut rng);
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..20_000))).await;
        server.kill().await;
        while let Some(channel) = calling.join_next().await {
            wait_for_path(&channel.unwrap(), Path::Tcp).await;
        }
        if is_checkpoint(done, connections) {
            target.wait_for_idle_pools().await;
            last = Some(record.check("self", done, async || heap()).await);
        }
        server = target.server(done / PARALLEL).await;
    }
    record.print("client", &target, connections, last.unwrap());
}

async fn of_a_server(connections: usize, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let target = Target::new();
    let (mut record, mut last) = (LeakRecord::default(), None);
    let mut server = target.server(0).await;
    let process = server.id();
    for done in (PARALLEL..=connections).step_by(PARALLEL) {
        let role = format!(
            "client {} {} {} {}",
            codec_name(done / PARALLEL),
            target.at,
            target.device,
            rng.random::<u64>()
        );
        let mut client = Process::start("", &role);
        assert_eq!(client.read_line().await, "half are closed");
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..20_000))).await;
        client.kill().await;
        if is_checkpoint(done, connections) {
            server_process::wait_for_idle_pools(&mut server).await;
            let asked = tokio::sync::Mutex::new(&mut server);
            let heap = async || asked.lock().await.ask("heap").await.parse().unwrap();
            last = Some(record.check(&process, done, heap).await);
        }
    }
    record.print("server", &target, connections, last.unwrap());
}

async fn at_rest(connections: usize) {
    let target = Target::new();
    let mut server = target.server(0).await;
    let processes = ["self".to_owned(), server.id()];
    let of_all = |what: &dyn Fn(&str) -> usize| processes.each_ref().map(|process| what(process));
    let fds = |process: &str| ProcessResources::of(process).fds;
    let memory = |process: &str| status_of(process, "VmRSS");
    // Creates threads, lists and tables before the measurement.
    drop(target.connect_small().await);
    target.wait_for_idle_pools().await;
    server_process::wait_for_idle_pools(&mut server).await;
    let (fds_before, memory_before) = (of_all(&fds), of_all(&memory));

    let mut channels = Vec::new();
    while channels.len() < connections {
        channels.extend(target.connect_small().await);
    }
    let made = channels.len();
    // A connection is at rest 1.25 s after its last message.
    tokio::time::sleep(REST).await;
    let woken_before = of_all(&wake_ups);
    tokio::time::sleep(REST).await;
    let woken = of_all(&wake_ups);
    for (at, process) in processes.iter().enumerate() {
        let fds = fds(process) - fds_before[at];
        let memory = memory(process).saturating_sub(memory_before[at]);
        let woken = woken[at] - woken_before[at];
        println!(
            "process {process}, {made} connections at rest: {:.2} descriptors and {:.1} KiB each, \
             {woken} wake-ups in {REST:?}",
            fds as f64 / made as f64,
            memory as f64 / made as f64
        );
        assert!(fds <= FDS_AT_REST * made + PARALLEL, "{fds} descriptors");
        assert!(memory <= KIB_AT_REST * made, "{memory} KiB");
        // A single wake-up for each connection would exceed this limit tenfold.
        assert!(woken * 10 <= made, "{woken} wake-ups of {process}");
    }

    // The connections still work.
    for (channel, client) in &mut channels {
        small_call(client).await;
        assert_eq!((channel.path().path, channel.stats().calls_fast), (target.path, 2));
    }
    drop(channels);
    target.wait_for_idle_pools().await;
    server_process::wait_for_idle_pools(&mut server).await;
    for (at, process) in processes.iter().enumerate() {
        let read = || async { fds(process) };
        poll_until("descriptors of connections that are gone", read, |now| {
            *now <= fds_before[at] + PARALLEL
        })
        .await;
    }
}

/// The client process: connects, closes half, and makes calls until it is killed.
async fn run_client(at: SocketAddr, device: &str, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let target = Target::of(device, at);
    let mut channels = target.connect(&mut rng).await;
    close_half(&mut channels, &mut rng).await;
    let calling = call_until_lost(channels, &mut rng);
    println!("half are closed");
    // Unless this process is killed, it ends with the test, which closes its stdin.
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(_)) = lines.next_line().await {}
    drop(calling);
}
