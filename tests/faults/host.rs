//! Processes killed and stopped; a device, its interface, its address taken away and given back.
//! TCP lives on loopback.

use std::net::SocketAddr;
use std::time::Duration;

use rand::Rng;
use tonic_rdma::{Channel, ReasonCode};
use tonic_rdma_tests::load::{Load, Tally, takes, until};
use tonic_rdma_tests::process::Process;
use tonic_rdma_tests::server_process::unused;

use crate::log::Log;
use crate::world::{Place, World, kind, run, serve, signal};

/// What a lost path is called.
const LOST: &[ReasonCode] = &[ReasonCode::LinkLost, ReasonCode::GoAway];

/// Twice, because what is left of the first could be in the way of the second.
const TWICE: usize = 2;

pub async fn server_killed(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    let (mut other, bystander) = Bystander::beside(&world).await;
    for _ in 0..TWICE {
        kill_server(&mut world).await;
    }
    bystander.was_not_hurt().await;
    unused(&mut other).await;
    drop(other);
    world.end("kill -9 of the server").await;
}

pub async fn kill_server(world: &mut World) {
    let mut load = world.under_load().await;
    load.strikes();
    signal(load.world.server(), "KILL");
    load.noticed(LOST).await;
    load.calls_fail().await;
    load.world.replace_server().await;
    load.goes_on_over_tcp().await;
    load.returns().await;
    load.end().await;
}

pub async fn client_killed(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    let bystander = Bystander::of(world.connect().await);
    for _ in 0..TWICE {
        kill_client(&mut world).await;
    }
    bystander.was_not_hurt().await;
    world.end("kill -9 of a client").await;
}

pub async fn kill_client(world: &mut World) {
    let client = client(world).await;
    world.counts_a_fault();
    client.kill().await;
}

pub async fn server_stopped(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    let (mut other, bystander) = Bystander::beside(&world).await;
    stop_server(&mut world).await;
    bystander.was_not_hurt().await;
    unused(&mut other).await;
    drop(other);
    world.end("SIGSTOP of the server").await;
}

pub async fn stop_server(world: &mut World) {
    let mut load = world.under_load().await;
    load.strikes();
    stop_for_a_while(load.world.server()).await;
    // It was away for about as long as a peer may be: either is right.
    load.returns().await;
    load.end().await;
}

pub async fn client_stopped(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    let bystander = Bystander::of(world.connect().await);
    stop_client(&mut world).await;
    bystander.was_not_hurt().await;
    world.end("SIGSTOP of a client").await;
}

pub async fn stop_client(world: &mut World) {
    let mut client = client(world).await;
    world.counts_a_fault();
    stop_for_a_while(&client).await;
    println!("  calls of the client that was stopped: {}", client.ask("carries").await);
    client.kill().await;
}

pub async fn device_removed(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    for _ in 0..TWICE {
        remove_device(&mut world).await;
    }
    world.end("rdma link del and add").await;
}

pub async fn remove_device(world: &mut World) {
    let (device, netdev, kind) = (world.place.server_device.clone(), netdev(), kind());
    let mut load = world.under_load().await;
    load.strikes();
    // The kernel waits until both processes have let go of everything.
    let del = format!("rdma link del {device}");
    let gone = tokio::task::spawn_blocking(move || run(&del));
    load.noticed(LOST).await;
    load.goes_on_over_tcp().await;
    tokio::time::timeout(Duration::from_secs(20), gone)
        .await
        .expect("the device is still held")
        .unwrap();
    load.goes_on_over_tcp().await;
    run(&format!("rdma link add {device} type {kind} netdev {netdev}"));
    load.returns().await;
    load.end().await;
}

pub async fn interface_down(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    for _ in 0..TWICE {
        take_interface_down(&mut world).await;
    }
    world.end("interface down and up").await;
}

pub async fn take_interface_down(world: &mut World) {
    let mut load = world.under_load().await;
    load.strikes();
    run(&format!("ip link set {} down", netdev()));
    load.noticed(LOST).await;
    load.goes_on_over_tcp().await;
    run(&format!("ip link set {} up", netdev()));
    if kind() == "rxe" {
        // Soft-RoCE of Linux 6.1 loses its QP 1 for good over a CM message that cannot be sent, as
        // while the interface is down: nobody on the host can connect through the device until it
        // is made anew.
        let device = load.world.place.server_device.clone();
        run(&format!("rdma link del {device}"));
        run(&format!("rdma link add {device} type rxe netdev {}", netdev()));
    }
    load.returns().await;
    load.end().await;
}

pub async fn address_removed(log: Log) {
    let mut world = World::new(Place::one_device(), log).await;
    for _ in 0..TWICE {
        remove_address(&mut world).await;
    }
    world.end("address removed and added").await;
}

pub async fn remove_address(world: &mut World) {
    let address = std::env::var(format!("{}_ADDR", kind().to_uppercase())).unwrap();
    let mut load = world.under_load().await;
    load.strikes();
    run(&format!("ip addr del {address}/24 dev {}", netdev()));
    load.noticed(LOST).await;
    load.goes_on_over_tcp().await;
    run(&format!("ip addr add {address}/24 dev {}", netdev()));
    load.returns().await;
    load.end().await;
}

fn netdev() -> &'static str {
    if kind() == "rxe" { "d0" } else { "d1" }
}

async fn client(world: &mut World) -> Process {
    let (at, seed, device) = (world.at, world.rng.random::<u64>(), &world.place.client_device);
    let mut client = Process::start("", &format!("client plain {at} {device} {seed}"));
    assert_eq!(client.line().await, "up");
    client
}

/// For as long as a peer may be silent.
async fn stop_for_a_while(process: &Process) {
    signal(process, "STOP");
    // The length of the fault.
    tokio::time::sleep(Duration::from_secs(5)).await;
    signal(process, "CONT");
}

/// A channel that no fault is meant for.
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

    /// From this process to another server on the same device.
    async fn beside(world: &World) -> (Process, Self) {
        let at = SocketAddr::new(world.at.ip(), world.at.port() + 1);
        let server = serve(at, &world.place.server_device).await;
        let channel = world.endpoint(at).connect().await.unwrap();
        takes(&channel, world.fast()).await;
        (server, Self::of(channel))
    }

    /// All its calls went well, and by RDMA.
    async fn was_not_hurt(self) {
        let read = || async { self.tally.of("OK") };
        let before = self.tally.of("OK");
        until("no calls of the bystander", read, |now| *now > before + 10).await;
        self.load.stop().await;
        assert_eq!(
            (self.tally.failed(), self.channel.stats().calls_tcp),
            (0, 0),
            "{:?}",
            self.tally
        );
        println!("  beside it {} calls went well", self.tally.of("OK"));
    }
}
