//! The cost of metrics and spans per call, and the correctness of their values. The test has its
//! own process because it installs an allocator and a recorder.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::alloc::System;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use bytes::Bytes;
use common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World, pooled};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{Channel, Context, Endpoint, Path, Policy, PoolConfig, Server};
use tracing_subscriber::fmt::format::FmtSpan;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A recorder that keeps every value, and counts look-ups.
#[derive(Clone, Default)]
struct Tally {
    values: Arc<Mutex<HashMap<String, Arc<AtomicU64>>>>,
    lookups: Arc<AtomicU64>,
    described: Arc<Mutex<Vec<String>>>,
}

impl Tally {
    fn value(&self, key: &Key) -> Arc<AtomicU64> {
        self.lookups.fetch_add(1, Relaxed);
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name += &format!(" {}={}", label.key(), label.value());
        }
        self.values.lock().unwrap().entry(name).or_default().clone()
    }

    /// A counter's or gauge's value, or the number of values in a histogram.
    fn get(&self, name: &str) -> u64 {
        self.values.lock().unwrap().get(name).map_or(0, |value| value.load(Relaxed))
    }

    fn gauge(&self, name: &str) -> f64 {
        f64::from_bits(self.get(name))
    }

    fn lookups(&self) -> u64 {
        self.lookups.load(Relaxed)
    }
}

struct Count(Arc<AtomicU64>);

impl HistogramFn for Count {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Relaxed);
    }
}

impl Recorder for Tally {
    fn describe_counter(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
        self.described.lock().unwrap().push(key.as_str().to_owned());
    }
    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe_counter(key, unit, text);
    }
    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, text: SharedString) {
        self.describe_counter(key, unit, text);
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Count(self.value(key))))
    }
}

/// Waits until `done`, while the other tasks of this thread run.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let waiting = async {
        while !done() {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    waited.unwrap_or_else(|_| panic!("waited a minute, and still not: {what}"));
}

const CALLS: usize = 200;
const ROUNDS: usize = 3;
const FABRICS: [Fabric; 3] = [Fabric::Sim, Fabric::Shm, Fabric::Tcp];

/// The allocations of `CALLS` small calls at both ends together. Returns the minimum of several
/// rounds.
async fn allocations(world: &World) -> usize {
    let mut client = world.client(Which::Ours);
    let blob = Blob::of(Bytes::from_static(&[7; 64]));
    let mut fewest = usize::MAX;
    for _ in 0..ROUNDS {
        let region = Region::new(ALLOCATOR);
        for _ in 0..CALLS {
            client.echo(blob.clone()).await.unwrap();
        }
        fewest = fewest.min(region.change().allocations);
    }
    fewest
}

/// A writer that keeps its input.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// A single test, because there is only one recorder and one allocator.
#[tokio::test]
async fn listening() {
    let mut unheard = Vec::new();
    for fabric in FABRICS {
        unheard.push(allocations(&World::new(fabric, Which::Ours).await).await);
    }
    let tally = Tally::default();
    ::metrics::set_global_recorder(tally.clone()).unwrap();

    for (fabric, &unheard) in FABRICS.into_iter().zip(&unheard) {
        let world = World::new(fabric, Which::Ours).await;
        // One call is enough for the driver's first turns.
        world.client(Which::Ours).echo(Blob::default()).await.unwrap();
        let lookups = tally.lookups();
        let heard = allocations(&world).await;
        assert!(lookups > 0);
        assert_eq!(tally.lookups(), lookups, "{fabric:?}: something is looked up for calls");
        assert!(heard < unheard + CALLS / 4, "{fabric:?}: {unheard} and {heard} allocations");
        println!("{fabric:?}: {unheard} allocations for {CALLS} calls, {heard} with a recorder");
    }
    for fabric in FABRICS {
        what_is_told_is_so(&tally, fabric).await;
        durations(&tally, fabric).await;
        balanced(&tally, fabric).await;
    }
    round_trip(&tally).await;
    pools(&tally).await;
    reconnects(&tally).await;
    refused(&tally).await;
    every_metric_was_told(&tally);
    // Measure spans last, because a subscriber changes the state of every callsite.
    for (fabric, unheard) in FABRICS.into_iter().zip(unheard) {
        let spans = spans(&World::new(fabric, Which::Ours).await).await;
        println!("{fabric:?}: {spans} allocations with spans");
        // Proves that this test observes the allocations of calls.
        assert!(
            spans > unheard + CALLS,
            "{fabric:?}: {unheard} allocations and {spans} with spans"
        );
    }
}

/// The allocations with spans enabled. Also checks the spans' content.
async fn spans(world: &World) -> usize {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter("tonic_rdma::call=debug")
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let count = allocations(world).await;
    drop(guard);
    let path = world.channel.path().path;
    let text = lines.text();
    let address =
        format!("server.address=\"{}\" server.port={}", world.addr.ip(), world.addr.port());
    for role in ["client", "server"] {
        let call =
            format!("call{{otel.name=\"test.Blobs/Echo\" otel.kind=\"{role}\" role=\"{role}\" ");
        let ended = text.lines().filter(|line| {
            // The server's span is nested in the client's if both run on one thread.
            let own = line.rfind("call{otel.name=").map(|at| &line[at..]).unwrap_or_default();
            own.starts_with(&call)
                && own.contains(&format!("path={path}"))
                && own.contains("rpc.system.name=\"grpc\" rpc.method=\"test.Blobs/Echo\"")
                && own.contains(&address)
                && own.contains("rpc.status_code=\"OK\"")
                && !own.contains("error.type")
                && own.contains("close time.busy")
        });
        let ended = ended.count();
        assert!(
            ended >= ROUNDS * CALLS - 1,
            "{ended} spans of the {role} in {path}: {:.2000}",
            text
        );
    }
    count
}

/// Each listed metric was reported with its labels, and no other metric.
fn every_metric_was_told(tally: &Tally) {
    tonic_rdma::metrics::describe();
    let described = tally.described.lock().unwrap().clone();
    let known: Vec<_> = tonic_rdma::metrics::ALL.iter().map(|metric| metric.name).collect();
    assert_eq!(described, known);
    let told = tally.values.lock().unwrap();
    for metric in tonic_rdma::metrics::ALL {
        let series: Vec<_> =
            told.keys().filter(|key| key.split(' ').next() == Some(metric.name)).collect();
        assert!(!series.is_empty(), "{} was never told", metric.name);
        for key in series {
            let labels: Vec<_> =
                key.split(' ').skip(1).map(|label| label.split('=').next().unwrap()).collect();
            let mut known = metric.labels.to_vec();
            known.retain(|label| *label != "error_type" || key.contains("error_type="));
            assert_eq!(labels, known, "{key}");
        }
    }
    let foreign: Vec<_> =
        told.keys().filter(|key| !known.contains(&key.split(' ').next().unwrap())).collect();
    assert!(foreign.is_empty(), "{foreign:?}");
}

async fn what_is_told_is_so(tally: &Tally, fabric: Fabric) {
    let before: HashMap<String, u64> = {
        let values = tally.values.lock().unwrap();
        values.iter().map(|(name, value)| (name.clone(), value.load(Relaxed))).collect()
    };
    let since = |name: &str| tally.get(name) - before.get(name).copied().unwrap_or(0);
    let world = World::new(fabric, Which::Ours).await;
    let path = world.channel.path().path;
    let mut client = world.client(Which::Ours);
    for len in [10, 5000, 1 << 20] {
        client.echo(Blob::of(pooled(&world.channel, len, 1).await)).await.unwrap();
        client.echo(Blob::of(vec![3; len].into())).await.unwrap();
    }
    for role in ["client", "server"] {
        let stats = || if role == "client" { world.channel.stats() } else { world.server.get() };
        let payload = |direction: &str, by: &str| {
            since(&format!(
                "tonic_rdma_payload_bytes_total role={role} path={path} direction={direction} by={by}"
            ))
        };
        let copied = |reason: &str| {
            since(&format!("tonic_rdma_copied_bytes_total role={role} path={path} reason={reason}"))
        };
        let calls = || since(&format!("tonic_rdma_calls_total role={role} path={path}"));
        let told = || {
            let stats = stats();
            if path == Path::Tcp {
                let sent = (payload("sent", "http2"), payload("received", "http2"));
                assert_eq!(sent, (stats.bytes_sent_tcp, stats.bytes_received_tcp));
                assert_eq!(copied("joined"), stats.copied_tcp.joined);
                // With the policy off, there is no Offer.
                return calls() == stats.calls_tcp && calls() == 6;
            }
            let c = stats.copied_fast;
            [
                (calls(), 6),
                (payload("sent", "write"), stats.bytes_sent_write),
                (payload("sent", "send"), stats.bytes_sent_send),
                (payload("received", "write"), stats.bytes_received_write),
                (payload("received", "send"), stats.bytes_received_send),
                (copied("eager"), c.eager),
                (copied("staging"), c.staging),
                (copied("joined"), c.joined),
                (copied("pressure"), c.pressure),
                (copied("plain_codec"), c.plain_codec),
                (copied("learning"), c.learning),
            ]
            .into_iter()
            .all(|(told, counted)| told == counted)
        };
        // A driver reports at the end of its turn.
        until(&format!("the {role} has told all of {path}"), told).await;
        if path != Path::Tcp {
            assert!(
                payload("sent", "write") > 2 << 20 && copied("eager") > 0 && copied("learning") > 0
            );
            let of = |name: &str| since(&format!("tonic_rdma_{name} role={role} path={path}"));
            assert!(
                of("writes_total") >= 2
                    && of("grants_total") >= 2
                    && of("completions_per_poll") >= 2
            );
            assert_eq!(of("connections_total"), 1);
            assert_eq!(
                tally.gauge(&format!("tonic_rdma_connections role={role} path={path}")),
                1.0
            );
        } else {
            assert_eq!(
                since(&format!("tonic_rdma_fallbacks_total role={role} reason=policy side=local")),
                1
            );
        }
    }
    if path == Path::Tcp {
        return;
    }
    assert_eq!(since(&format!("tonic_rdma_handshake_seconds path={path}")), 1);
    drop((client, world));
    for role in ["client", "server"] {
        let open = format!("tonic_rdma_connections role={role} path={path}");
        until("the connection is gone", || tally.gauge(&open) == 0.0).await;
    }
}

/// Each call is measured once at each end, with its status.
async fn durations(tally: &Tally, fabric: Fabric) {
    let world = World::new(fabric, Which::Ours).await;
    let path = world.channel.path().path;
    let told = |role: &str, status: &str, error: bool| {
        let error = if error { format!(" error_type={status}") } else { String::new() };
        let server = if role == "client" { server_labels(&world) } else { String::new() };
        tally.get(&format!(
            "rpc_{role}_call_duration_seconds rpc_system_name=grpc rpc_status_code={status} \
             path={path}{server}{error}"
        ))
    };
    let ok = (told("client", "OK", false), told("server", "OK", false));
    let mut client = world.client(Which::Ours);
    for _ in 0..3 {
        client.echo(Blob::default()).await.unwrap();
    }
    until("three calls are told", || {
        (told("client", "OK", false), told("server", "OK", false)) == (ok.0 + 3, ok.1 + 3)
    })
    .await;
    client.unary("/test.Others/Echo", Blob::default()).await.unwrap_err();
    for role in ["client", "server"] {
        until("an error is told", || told(role, "UNIMPLEMENTED", true) == 1).await;
    }
    // The stream is longer than what the server may send ahead of the reader.
    let endless =
        Blob { number: u64::from(u32::MAX), data: vec![1; 4096].into(), ..Blob::default() };
    let mut unread = client.down(endless).await.unwrap();
    unread.message().await.unwrap();
    drop(unread);
    until("the client has cancelled", || told("client", "CANCELLED", true) == 1).await;
    until("the server was told", || told("server", "CANCELLED", false) == 1).await;
    assert_eq!((told("client", "OK", false), told("server", "OK", false)), (ok.0 + 3, ok.1 + 3));
}

/// The labels that name the server of a world at its client.
fn server_labels(world: &World) -> String {
    format!(" server_address={} server_port={}", world.addr.ip(), world.addr.port())
}

/// The calls of a balanced channel are told with the server that got them, also if all servers
/// have one name.
async fn balanced(tally: &Tally, fabric: Fabric) {
    const CALLS: u64 = 64;
    let servers = [World::new(fabric, Which::Ours).await, World::new(fabric, Which::Ours).await];
    let origin = http::Uri::from_static("http://blobs.example");
    let endpoints: Vec<_> =
        servers.iter().map(|world| world.endpoint.clone().origin(origin.clone())).collect();
    let mut client = Client::new(Channel::balance_list(endpoints.into_iter()), Which::Ours, LIMIT);
    for _ in 0..CALLS {
        client.echo(Blob::default()).await.unwrap();
    }
    let told = || {
        servers.each_ref().map(|world| {
            let (path, server) = (world.channel.path().path, server_labels(world));
            tally.get(&format!(
                "rpc_client_call_duration_seconds rpc_system_name=grpc rpc_status_code=OK \
                 path={path}{server}"
            ))
        })
    };
    until("all calls are told", || told().iter().sum::<u64>() == CALLS).await;
    let got = servers.each_ref().map(|world| {
        let stats = world.server.get();
        if fabric == Fabric::Tcp { stats.calls_tcp } else { stats.calls_fast }
    });
    assert_eq!(told(), got);
    assert!(got.iter().all(|calls| *calls > 0), "{got:?}");
}

/// While a stream is silent, the device is asked whether the peer's host exists.
async fn round_trip(tally: &Tally) {
    let world = World::new(Fabric::Sim, Which::Ours).await;
    let _silent = world.client(Which::Ours).chat(tokio_stream::pending()).await.unwrap();
    let told = || {
        let values = tally.values.lock().unwrap();
        let of = |key: &&String| key.starts_with("tonic_rdma_round_trip_seconds device=");
        values.keys().filter(of).any(|key| key.ends_with(" path=sim"))
    };
    until("a round trip was told", told).await;
}

async fn pools(tally: &Tally) {
    let hosts = Fabric::Sim.hosts(8 << 20);
    let contexts: Vec<Context> = hosts.iter().flatten().cloned().collect();
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    let world = World::between(Fabric::Sim, hosts, blobs).await;
    let buffer = pooled(&world.channel, 10_000, 1).await;
    contexts[1].record_metrics().await;
    let (device, stats) = contexts[1].pool_stats().await.pop().unwrap();
    let state =
        |state: &str| tally.gauge(&format!("tonic_rdma_pool_bytes device={device} state={state}"));
    assert!(state("send") >= buffer.len() as f64);
    assert_eq!(state("control"), stats.control as f64);
    assert_eq!(
        tally.get(&format!("tonic_rdma_pool_registrations_total device={device}")),
        stats.registrations
    );
}

/// A second channel is refused, because the server allows only one connection.
async fn refused(tally: &Tally) {
    let hosts = Fabric::Sim.hosts(8 << 20);
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    let serve = |server: Server| server.max_connections(1);
    let connect = |endpoint: Endpoint| endpoint.policy(Policy::Auto);
    let world = World::set(Fabric::Sim, hosts, blobs, serve, connect).await;
    assert_eq!(world.channel.path().path, Path::Sim);
    let second = world.connect().await;
    assert_eq!(second.path().path, Path::Tcp);
    let told = tally.get("tonic_rdma_connections_refused_total reason=connections");
    // The channel tries again, so the later count may be higher.
    assert!((1..=world.server.get().connections_refused).contains(&told), "{told}");
}

async fn reconnects(tally: &Tally) {
    let net = SimNet::new(SimConfig::default());
    let devices =
        [net.device("server", [10, 0, 0, 1].into()), net.device("client", [10, 0, 0, 2].into())];
    let hosts = devices.clone().map(|device| {
        Some(Context::builder().pool(PoolConfig::default().total(8 << 20)).sim(device).build())
    });
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    let world = World::between(Fabric::Sim, hosts, blobs).await;
    let mut channel = world.channel.clone();
    let lost = "tonic_rdma_fallbacks_total role=client reason=link-lost side=local";
    let (reconnects, losses) = (tally.get("tonic_rdma_reconnects_total path=sim"), tally.get(lost));
    devices[1].cut();
    while tally.get(lost) == losses {
        channel.path_changed().await;
    }
    while channel.path_changed().await.path != Path::Sim {}
    assert_eq!(tally.get("tonic_rdma_reconnects_total path=sim"), reconnects + 1);
}
