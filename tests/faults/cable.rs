//! Two guests, each with its own kernel, and the cables between them, which can be cut or told to
//! lose certain messages. `tests/guest/suite` starts the guests.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Instant;

use bytes::BufMut;
use tonic_rdma::{Channel, Context, Endpoint, Path, Policy, PoolConfig, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::{CodecKind, set_thread_codec};
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::poll_until;
use tonic_rdma_tests::server_process::{endpoint, fabric_of};
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{FaultTest, Topology, kind, run, variable, wait_for_server};
use crate::log::Log;
use crate::puts::Puts;

/// A file that controls a cable: `cut`, or `rtu`.
fn control(cable: usize, name: &str) -> PathBuf {
    let folder = std::env::var("CABLE_CONTROL").expect("CABLE_CONTROL names the cables' folder");
    PathBuf::from(folder).join(cable.to_string()).join(name)
}

pub async fn cut(log: Log) {
    let control = control(0, "cut");
    let mut test = FaultTest::with_remote_server(Topology::cable(), log).await;
    for _ in 0..2 {
        let mut load = test.under_load().await;
        load.begin_fault();
        std::fs::write(&control, "").unwrap();
        load.assert_fallback(&[ReasonCode::LinkLost]).await;
        load.wait_for_failed_calls().await;
        std::fs::remove_file(&control).unwrap();
        load.wait_for_recovery().await;
        load.end().await;
    }
    test.end("cable cut between two guests").await;
}

/// The message that tells the server that the connection is established (READY TO USE) never
/// arrives. The first call arrives, and is answered over RDMA. Soft-RoCE only, because iWARP has no
/// such message.
pub async fn ready_to_use_is_lost(log: Log) {
    let mut test = FaultTest::with_remote_server(Topology::cable(), log).await;
    std::fs::write(control(0, "rtu"), "").unwrap();
    test.count_fault();
    for _ in 0..3 {
        let channel = test.endpoint(test.at).connect().await.unwrap();
        assert_eq!(channel.path().path, Path::Verbs);
        for n in 0..50 {
            let mut calls = client_of(AnyChannel::Rdma(channel.clone()));
            calls.unary(payload(n, 20_000)).await.unwrap();
        }
        let stats = channel.stats();
        assert_eq!((stats.calls_fast, stats.calls_tcp, stats.connections_lost), (50, 0, 0));
    }
    let lost = std::fs::read_to_string(control(0, "rtu")).unwrap();
    assert!(lost.len() >= 3, "the cable has lost {} of them", lost.len());
    std::fs::remove_file(control(0, "rtu")).unwrap();
    test.end("ready to use is lost").await;
}

/// The rate of a cable in this direction. It is far below what the machine can carry, so two cables
/// carry twice as much as one.
const RATE: &str = "netem limit 10000 rate 16mbit";
/// Frames that an interface has sent.
fn frames(cable: usize) -> u64 {
    let file = format!("/sys/class/net/eth{cable}/statistics/tx_packets");
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

/// Returns calls per second, and the share of frames that went over the second cable.
async fn rate(channels: &[Channel], in_flight: usize) -> (f64, f64) {
    /// Number of calls that fill the queues and establish connections first.
    const BEFORE: u64 = 40;
    const MEASURED: u64 = 80;
    let puts = Puts::start(channels, in_flight);
    poll_until("no calls", async || puts.done(), |done| *done >= BEFORE).await;
    let (began, before, sent) = (Instant::now(), puts.done(), [frames(0), frames(1)]);
    let end = before + MEASURED;
    let done = poll_until("calls have stopped", async || puts.done(), |done| *done >= end).await;
    let rate = (done - before) as f64 / began.elapsed().as_secs_f64();
    let sent = [0, 1].map(|cable| (frames(cable) - sent[cable]) as f64);
    assert_eq!(puts.failed(), 0);
    puts.stop().await;
    (rate, sent[1] / (sent[0] + sent[1]))
}

async fn connect(endpoint: &Endpoint) -> Channel {
    let channel = endpoint.connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Verbs, "{}", channel.path());
    channel
}

/// Waits for the server in the other guest, and limits two cables to [`RATE`]. Returns an endpoint
/// that may use all devices.
async fn over_slow_cables(at: SocketAddr) -> Endpoint {
    wait_for_server(at).await;
    for cable in 0..2 {
        // At this rate, the jumbo frames that queue pairs may have in flight take longer than the
        // time after which Soft-RoCE sends again.
        run(&format!("ip link set eth{cable} mtu 1500"));
        run(&format!("tc qdisc add dev eth{cable} root {RATE}"));
    }
    let (fabric, context) = fabric_of("all");
    endpoint(at, (fabric, &context)).policy(Policy::Require)
}

/// Two devices of each guest are in one network. A single channel uses both, and so do many
/// channels. Cutting a cable ends only the calls on this cable. Once repaired, the cable carries
/// calls again.
pub async fn rails(_: Log) {
    let at = format!("{}:{}", variable("CABLE_SERVER"), variable("CABLE_PORT")).parse().unwrap();
    // Only tests/guest/speed checks speeds against bounds, and it sets this variable.
    let least = std::env::var("RAILS_AT_LEAST").map_or(0.0, |least| least.parse().unwrap());
    let endpoint = over_slow_cables(at).await;
    let single = endpoint.clone().rails(1);
    sends_from_the_pool_of_another_device(&single).await;

    let alone = [connect(&single).await];
    let (one, on_second) = rate(&alone, 8).await;
    println!(
        "one rail: {one:.1} calls/s, {:.0} % of frames on the second cable",
        on_second * 100.0
    );
    assert!(!(0.1..=0.9).contains(&on_second), "one rail has used both cables");
    drop(alone);

    let both = [connect(&endpoint).await];
    let (two, on_second) = rate(&both, 8).await;
    println!("two rails: {two:.1} calls/s, {:.0} % on the second", on_second * 100.0);
    assert!((0.4..=0.6).contains(&on_second), "{on_second}");
    assert!(two >= least * one, "one channel: {two} and {one}");

    let mut many = Vec::new();
    for _ in 0..8 {
        many.push(connect(&single).await);
    }
    let (spread, on_second) = rate(&many, 1).await;
    println!("8 channels: {spread:.1} calls/s, {:.0} % on the second", on_second * 100.0);
    assert!((0.4..=0.6).contains(&on_second), "{on_second}");
    assert!(spread >= least * one, "many channels: {spread} and {one}");
    drop(many);

    // The route to the address that TCP has reached leaves by the first device.
    let named = Context::builder().device(format!("{}c1", kind())).build();
    let channel = connect(&single.clone().context(named)).await;
    let path = channel.path().to_string();
    assert!(path.contains("10.30.0.4"), "{path}");
    drop(channel);

    let [channel] = both;
    for cable in [1, 0] {
        cut_one(&channel, cable).await;
    }
}

/// A buffer of the first channel's pool is sent by the second channel's device without a copy, once
/// that device has registered the memory. Both pools fit the usual memlock limit.
async fn sends_from_the_pool_of_another_device(endpoint: &Endpoint) {
    let pools = Context::builder().pool(PoolConfig::default().total(2 << 20)).build();
    let endpoint = endpoint.clone().context(pools);
    let (of, by) = (connect(&endpoint).await, connect(&endpoint).await);
    assert_ne!(of.path().device, by.path().device);
    set_thread_codec(CodecKind::ZeroCopy);
    let mut message = payload(7, 64 * 1024);
    let mut buf = of.pool().alloc(message.payload.len()).await.unwrap();
    buf.put_slice(&message.payload);
    message.payload = buf.freeze();
    let client = client_of(AnyChannel::Rdma(by.clone()));
    let copied = || {
        let (mut client, message, by) = (client.clone(), message.clone(), by.clone());
        async move {
            let before = by.stats().copied_fast.staging;
            client.unary(message).await.unwrap();
            by.stats().copied_fast.staging - before
        }
    };
    poll_until("each call is copied", copied, |bytes| *bytes == 0).await;
    for _ in 0..5 {
        assert_eq!(copied().await, 0);
    }
    println!("memory of {:?} is sent by {:?}", of.path().device, by.path().device);
    set_thread_codec(CodecKind::Plain);
}

/// Gives the ends of two cables addresses in routed networks. Each end of a cable has an address in
/// its own /31. By a rule on the source address, packets from that address go to the router of the
/// /31. The main table sends all packets for the peer's networks to the router of the first cable.
/// The opposite end of a cable answers for the router.
pub fn route_cables(own: &str, peer: &str) {
    for cable in 0..2 {
        let (dev, table) = (format!("eth{cable}"), 120 + cable);
        let (ip, router) = (format!("{own}.{cable}.2"), format!("{own}.{cable}.3"));
        run(&format!("ip addr flush dev {dev}"));
        run(&format!("ip addr add {ip}/31 dev {dev}"));
        run(&format!("ip addr add {peer}.{cable}.3/32 dev lo"));
        run(&format!("ip route add default via {router} dev {dev} table {table}"));
        run(&format!("ip rule add pref 40 from {ip} lookup {table}"));
    }
    run(&format!("ip route add {peer}.0.0/16 via {own}.0.3 dev eth0"));
}

/// The first two bytes of the addresses of the two ends, for [`route_cables`].
pub const ROUTED: [&str; 2] = ["10.41", "10.42"];

/// No device of one guest is in the same network as a device of the other guest. The kernel decides
/// which addresses each device of this guest reaches. So a channel has both rails, and channels
/// take turns.
pub async fn routed_rails(_: Log) {
    let [own, peer] = ROUTED;
    route_cables(own, peer);
    let at = format!("{peer}.0.2:{}", variable("CABLE_PORT")).parse().unwrap();
    let endpoint = over_slow_cables(at).await;
    let single = endpoint.clone().rails(1);

    let mut many = Vec::new();
    let mut on_second = 0;
    for _ in 0..4 {
        let channel = connect(&single).await;
        on_second += usize::from(channel.path().to_string().contains(&format!("{peer}.1.2")));
        many.push(channel);
    }
    assert_eq!(on_second, 2, "channels do not take turns");
    let (_, share) = rate(&many, 2).await;
    assert!((0.4..=0.6).contains(&share), "{share}");
    drop(many);

    let channel = connect(&endpoint).await;
    let (_, share) = rate(std::slice::from_ref(&channel), 8).await;
    println!("one channel: {:.0} % of frames on the second cable", share * 100.0);
    assert!((0.4..=0.6).contains(&share), "{share}");
    for cable in [1, 0] {
        cut_one(&channel, cable).await;
    }
}

/// Cuts one of two cables under load. Calls continue over the other cable.
async fn cut_one(channel: &Channel, cable: usize) {
    const IN_FLIGHT: usize = 8;
    let (cut, other, before) = (control(cable, "cut"), 1 - cable, channel.stats());
    let puts = Puts::start(std::slice::from_ref(channel), IN_FLIGHT);
    let started = puts.done();
    poll_until("no calls", async || puts.done(), |done| *done >= started + 20).await;
    std::fs::write(&cut, "").unwrap();
    let lost = || async { channel.stats().connections_lost };
    poll_until("the connection is not lost", lost, |lost| *lost > before.connections_lost).await;
    let (done, sent) = (puts.done(), frames(other));
    poll_until("calls do not go on", async || puts.done(), |now| *now >= done + 40).await;
    let failed = puts.failed();
    println!(
        "cable {cable} is cut: {failed} calls failed, 40 went on in {} frames",
        frames(other) - sent
    );
    assert!(failed <= IN_FLIGHT as u64, "{failed} calls failed of {IN_FLIGHT} in flight");
    assert_eq!(channel.path().path, Path::Verbs);
    std::fs::remove_file(&cut).unwrap();
    let connections = || async { channel.stats().connections };
    poll_until("the rail does not come back", connections, |now| *now > before.connections).await;
    let sent = frames(cable);
    // A message is 180 frames, or 30 jumbo ones.
    poll_until("the rail carries nothing", async || frames(cable), |now| *now > sent + 500).await;
    assert_eq!(puts.failed(), failed);
    puts.stop().await;
    let stats = channel.stats();
    assert_eq!((stats.calls_tcp, stats.connections_lost), (0, before.connections_lost + 1));
}
