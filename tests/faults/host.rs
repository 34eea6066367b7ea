//! Processes are killed and stopped. A device, its interface or its address is removed and
//! restored. TCP uses loopback.

use std::net::SocketAddr;
use std::time::Duration;

use rand::Rng;
use tonic_rdma::{Channel, Policy, ReasonCode};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{Load, Tally, poll_until, wait_for_path};
use tonic_rdma_tests::process::Process;
use tonic_rdma_tests::server_process::wait_for_idle_pools;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{FaultTest, Topology, kind, run, serve, signal};
use crate::log::Log;

/// The reason codes of a lost path.
const LOST: &[ReasonCode] = &[ReasonCode::LinkLost, ReasonCode::GoAway];
/// The reasons that the host reports, before or after the connection is lost.
const NO_PORT: &[ReasonCode] =
    &[ReasonCode::NoActivePort, ReasonCode::NotOnRdmaDevice, ReasonCode::LinkLost];

/// Each fault occurs twice, because leftovers of the first occurrence could affect the second.
const REPEATS: usize = 2;

pub async fn server_killed(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let (mut other, bystander) = Bystander::on_other_server(&test).await;
    for _ in 0..REPEATS {
        kill_server(&mut test).await;
    }
    bystander.assert_unaffected().await;
    wait_for_idle_pools(&mut other).await;
    drop(other);
    test.end("kill -9 of the server").await;
}

pub async fn kill_server(test: &mut FaultTest) {
    let mut load = test.under_load().await;
    load.begin_fault();
    signal(load.test.server(), "KILL");
    load.assert_fallback(LOST).await;
    load.wait_for_failed_calls().await;
    load.test.replace_server().await;
    load.assert_calls_over_tcp().await;
    load.wait_for_recovery().await;
    load.end().await;
}

pub async fn client_killed(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let bystander = Bystander::of(test.connect().await);
    for _ in 0..REPEATS {
        kill_client(&mut test).await;
    }
    bystander.assert_unaffected().await;
    test.end("kill -9 of a client").await;
}

pub async fn kill_client(test: &mut FaultTest) {
    let client = client(test).await;
    test.count_fault();
    client.kill().await;
}

pub async fn server_stopped(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let (mut other, bystander) = Bystander::on_other_server(&test).await;
    stop_server(&mut test).await;
    bystander.assert_unaffected().await;
    wait_for_idle_pools(&mut other).await;
    drop(other);
    test.end("SIGSTOP of the server").await;
}

pub async fn stop_server(test: &mut FaultTest) {
    let (channel, path) = (test.connect().await, test.fast_path());
    wait_for_path(&channel, path).await;
    // The fault must not affect this channel's calls.
    let bystander = Bystander::of(channel);
    test.count_fault();
    stop_for_a_while(test.server()).await;
    bystander.assert_unaffected().await;
}

pub async fn client_stopped(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let bystander = Bystander::of(test.connect().await);
    stop_client(&mut test).await;
    bystander.assert_unaffected().await;
    test.end("SIGSTOP of a client").await;
}

pub async fn stop_client(test: &mut FaultTest) {
    let mut client = client(test).await;
    test.count_fault();
    stop_for_a_while(&client).await;
    println!("  calls of the client that was stopped: {}", client.ask("carries").await);
    client.kill().await;
}

pub async fn device_removed(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    for _ in 0..REPEATS {
        remove_device(&mut test).await;
    }
    test.end("rdma link del and add").await;
}

pub async fn remove_device(test: &mut FaultTest) {
    let (device, netdev, kind) = (test.topology.server_device.clone(), netdev(), kind());
    let mut load = test.under_load().await;
    load.begin_fault();
    // The kernel waits until both processes have released the device.
    let del = format!("rdma link del {device}");
    let gone = tokio::task::spawn_blocking(move || run(&del));
    load.assert_fallback(LOST).await;
    load.assert_calls_over_tcp().await;
    tokio::time::timeout(Duration::from_secs(20), gone)
        .await
        .expect("the device is still held")
        .unwrap();
    load.assert_calls_over_tcp().await;
    run(&format!("rdma link add {device} type {kind} netdev {netdev}"));
    load.wait_for_recovery().await;
    load.end().await;
}

pub async fn interface_down(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    for _ in 0..REPEATS {
        take_interface_down(&mut test).await;
    }
    test.end("interface down and up").await;
}

pub async fn take_interface_down(test: &mut FaultTest) {
    let mut load = test.under_load().await;
    load.begin_fault();
    run(&format!("ip link set {} down", netdev()));
    load.assert_fallback(NO_PORT).await;
    load.assert_calls_over_tcp().await;
    run(&format!("ip link set {} up", netdev()));
    if kind() == "rxe" {
        // If Soft-RoCE of Linux 6.1 cannot send a CM message, for example while the interface is
        // down, its QP 1 stays broken. No process can then connect through the device until it is
        // recreated.
        let device = load.test.topology.server_device.clone();
        run(&format!("rdma link del {device}"));
        run(&format!("rdma link add {device} type rxe netdev {}", netdev()));
    }
    load.wait_for_recovery().await;
    load.end().await;
}

/// Between two ends on one device, messages arrive even without a carrier. So this test shows that
/// calls leave a connection whose port is down before the connection is lost, and that no call
/// fails. Calls without another path stay.
pub async fn carrier_lost(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let required = test.endpoint(test.at).policy(Policy::Require).connect().await.unwrap();
    let call = || async {
        let channel = AnyChannel::Rdma(required.clone());
        client_of(channel).unary(payload(1, 100_000)).await.unwrap();
    };
    call().await;
    for _ in 0..REPEATS {
        let mut load = test.under_load().await;
        load.begin_fault();
        run(&format!("ip link set {} carrier off", netdev()));
        load.assert_fallback(&[ReasonCode::NoActivePort]).await;
        load.assert_calls_over_tcp().await;
        for _ in 0..20 {
            call().await;
        }
        run(&format!("ip link set {} carrier on", netdev()));
        load.wait_for_recovery().await;
        let lost = load.channel.stats().connections_lost;
        let tally = load.end().await;
        assert_eq!((lost, tally.failed()), (0, 0), "{tally:?}");
    }
    let stats = required.stats();
    assert_eq!((stats.calls_tcp, stats.connections), (0, 1), "{}", required.path());
    drop(required);
    test.end("carrier off and on").await;
}

pub async fn address_removed(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    for _ in 0..REPEATS {
        remove_address(&mut test).await;
    }
    test.end("address removed and added").await;
}

pub async fn remove_address(test: &mut FaultTest) {
    let address = address();
    let mut load = test.under_load().await;
    load.begin_fault();
    run(&format!("ip addr del {address}/24 dev {}", netdev()));
    load.assert_fallback(NO_PORT).await;
    load.assert_calls_over_tcp().await;
    run(&format!("ip addr add {address}/24 dev {}", netdev()));
    load.wait_for_recovery().await;
    load.end().await;
}

/// The address of both ends moves to another device and back, without a gap, as with two devices in
/// a bond. Calls leave the connection at once and use the other device, where the server starts to
/// listen by itself.
pub async fn address_moved(log: Log) {
    let kind = kind();
    let (first, second) = (format!("{kind}0"), format!("{kind}8"));
    // The guest may have a device of the other kind, to which calls could also move.
    let other = if kind == "rxe" { "d1" } else { "d0" };
    let has_other = std::path::Path::new("/sys/class/net").join(other).exists();
    if has_other {
        run(&format!("ip link set {other} down"));
    }
    run("ip link add d8 type dummy");
    run("ip link set d8 mtu 9000 up");
    run(&format!("rdma link add {second} type {kind} netdev d8"));
    let all = || "all".to_owned();
    let one = Topology::one_device();
    let both = Topology { server_device: all(), client_device: all(), ..one };
    let mut test = FaultTest::new(both, log).await;
    for round in 0..REPEATS {
        move_address(&mut test, netdev(), "d8", (&first, &second)).await;
        move_address(&mut test, "d8", netdev(), (&second, &first)).await;
        if round == 0 {
            test.forget_baseline();
            test.assert_at_rest().await;
        }
    }
    test.end("address moved to another device").await;
    // The device remains, because librdmacm keeps it open in this process.
    run("ip link set d8 down");
    if has_other {
        run(&format!("ip link set {other} up"));
    }
}

async fn move_address(test: &mut FaultTest, from: &str, to: &str, devices: (&str, &str)) {
    let address = address();
    let mut load = test.under_load().await;
    assert_eq!(load.channel.path().device.as_deref(), Some(devices.0));
    load.begin_fault();
    run(&format!("ip addr add {address}/24 dev {to}"));
    run(&format!("ip addr del {address}/24 dev {from}"));
    // Soft-RoCE may lose the connection first. Soft-iWARP's would stay up for ever.
    let lost: &[_] = if kind() == "rxe" { &[ReasonCode::LinkLost] } else { &[] };
    load.assert_fallback(&[&[ReasonCode::NotOnRdmaDevice], lost].concat()).await;
    load.wait_for_recovery().await;
    assert_eq!(load.channel.path().device.as_deref(), Some(devices.1));
    load.end().await;
}

fn address() -> String {
    std::env::var(format!("{}_ADDR", kind().to_uppercase())).unwrap()
}

fn netdev() -> &'static str {
    if kind() == "rxe" { "d0" } else { "d1" }
}

async fn client(test: &mut FaultTest) -> Process {
    let (at, seed, device) = (test.at, test.rng.random::<u64>(), &test.topology.client_device);
    let mut client = Process::start("", &format!("client plain {at} {device} {seed}"));
    assert_eq!(client.read_line().await, "up");
    client
}

/// Stops a process for long enough that silent connections to it are probed.
async fn stop_for_a_while(process: &Process) {
    signal(process, "STOP");
    // The duration of the fault.
    tokio::time::sleep(Duration::from_secs(6)).await;
    signal(process, "CONT");
}

/// A channel that the faults must not affect.
struct Bystander {
    channel: Channel,
    load: Load,
    tally: Tally,
}

impl Bystander {
    fn of(channel: Channel) -> Self {
        let tally = Tally::default();
        let load = Load::start(&channel, 0, &tally);
        Self { channel, load, tally }
    }

    /// A channel from this process to another server on the same device.
    async fn on_other_server(test: &FaultTest) -> (Process, Self) {
        let at = SocketAddr::new(test.at.ip(), test.at.port() + 1);
        let server = serve(at, &test.topology.server_device).await;
        let channel = test.endpoint(at).connect().await.unwrap();
        wait_for_path(&channel, test.fast_path()).await;
        (server, Self::of(channel))
    }

    /// Checks that all its calls succeeded, over RDMA.
    async fn assert_unaffected(self) {
        let read = || async { self.tally.of("OK") };
        let before = self.tally.of("OK");
        poll_until("no calls of the bystander", read, |now| *now > before + 10).await;
        self.load.stop().await;
        let stats = self.channel.stats();
        assert_eq!(
            (self.tally.failed(), stats.calls_tcp, stats.connections_lost),
            (0, 0, 0),
            "{:?}",
            self.tally
        );
        println!("  beside it {} calls went well", self.tally.of("OK"));
    }
}
