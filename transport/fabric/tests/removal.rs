//! A device is removed while it is in use, and the kernel reports such changes. Run this test in a
//! guest of its own, as root, with two devices (`tests/guest/run --device both -- ...`): it deletes
//! them one at a time. It is built only when it is named.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use common::*;
use tonic_rdma_fabric::{
    ConnectError, Fabric, FabricError, HostEvents, HostSnapshot, HostWatch, LinkConfig, LinkError,
};

/// The number of connected pairs that exist when the device is removed.
const LINKS: usize = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_pulled_out_lets_go() {
    for variable in ["RXE_DEVICE", "SIW_DEVICE"] {
        let name = std::env::var(variable).expect(variable);
        // librdmacm keeps the last device of the host open, so each device is put back before the
        // other is removed.
        pull_out(&name).await;
        put_back(&name);
        let side = Side::new(Fabric::open(Some(&name)).expect("the new device"));
        common::sends_of_all_sizes(&side, &side).await;
    }
}

/// Runs `command`. Afterwards an event must arrive, and the host's state must have changed.
async fn tells(events: &mut HostEvents, command: &str) {
    while tokio::time::timeout(Duration::from_millis(300), events.next()).await.is_ok() {}
    let before = HostSnapshot::now(&BTreeSet::new());
    run(command);
    let told = tokio::time::timeout(TIMEOUT, events.next()).await;
    told.unwrap_or_else(|_| panic!("nobody tells of {command}")).unwrap();
    assert_ne!(HostSnapshot::now(&BTreeSet::new()), before, "{command}");
}

fn run(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status();
    assert!(status.expect("sh").success(), "{command}");
}

/// Must run before this process opens a device: librdmacm would keep it open, and the kernel would
/// wait until it is closed.
#[tokio::test]
async fn a_change_is_told() {
    let watch = HostWatch::new().unwrap();
    let mut events = watch.events().unwrap();
    tells(&mut events, "ip address add 10.99.0.1/32 dev d0").await;
    tells(&mut events, "ip address del 10.99.0.1/32 dev d0").await;
    let devices = ["RXE_DEVICE", "SIW_DEVICE"].map(|name| std::env::var(name).expect(name));
    let add =
        |name: &str| format!("rdma link add {name} type {} netdev {}", kind(name), netdev(name));
    for name in &devices {
        let netdev = netdev(name);
        tells(&mut events, &format!("ip link set {netdev} down")).await;
        tells(&mut events, &format!("ip link set {netdev} up")).await;
        tells(&mut events, &format!("rdma link del {name}")).await;
        tells(&mut events, &add(name)).await;
    }
    for name in &devices {
        // The kernel tells only the processes that have the device open, and waits for them.
        let fabric = Fabric::open(Some(name)).unwrap();
        fabric.tell_removal(&watch).unwrap();
        while tokio::time::timeout(Duration::from_millis(300), events.next()).await.is_ok() {}
        let pulling = Command::new("rdma").args(["link", "del", name]).spawn().expect("rdma");
        tokio::time::timeout(TIMEOUT, events.next()).await.expect("nobody tells").unwrap();
        assert!(fabric.is_removed());
        drop(fabric);
        // librdmacm closes the device when it next lists the devices.
        let gone = Fabric::open(Some(name)).map(drop).unwrap_err();
        assert!(matches!(gone, FabricError::NoSuchDevice { .. }), "{gone}");
        let pulled = tokio::task::spawn_blocking(move || wait(pulling));
        tokio::time::timeout(TIMEOUT, pulled).await.expect("the device is still held").unwrap();
        tells(&mut events, &add(name)).await;
    }
    // Events of other devices are not passed on.
    while tokio::time::timeout(Duration::from_millis(300), events.next()).await.is_ok() {}
    run("echo add > /sys/class/net/lo/uevent");
    let told = tokio::time::timeout(Duration::from_millis(300), events.next()).await;
    assert!(told.is_err(), "told of lo");
}

fn netdev(name: &str) -> String {
    if name == std::env::var("RXE_DEVICE").unwrap() { "d0".into() } else { "d1".into() }
}

fn kind(name: &str) -> &'static str {
    if name.starts_with("rxe") { "rxe" } else { "siw" }
}

fn put_back(name: &str) {
    run(&format!("rdma link add {name} type {} netdev {}", kind(name), netdev(name)));
}

async fn pull_out(name: &str) {
    let side = Side::new(Fabric::open(Some(name)).expect("the device under test"));
    let mut listener = side.listen();
    let addr = listener.local_addr();
    let small = LinkConfig { staging: 0, ..config() };
    let mut ends = Vec::new();
    for _ in 0..LINKS {
        let (mut s, mut c) = pair_over(&mut listener, &side, &side, &small).await;
        c.send(0, b"x").await;
        assert_eq!(s.receive().await.unwrap(), b"x");
        ends.extend([s, c]);
    }
    let landing = side.landing(64 << 10);

    let pulling = Command::new("rdma").args(["link", "del", name]).spawn().expect("rdma");
    for end in &mut ends {
        let error = end.death().await;
        let told =
            matches!(error, LinkError::DeviceRemoved { .. } | LinkError::Disconnected { .. });
        assert!(told && error.peer().device == name, "{error}");
    }
    let gone =
        tokio::time::timeout(TIMEOUT, listener.accept()).await.expect("the listener does not end");
    assert!(matches!(gone.map(drop).unwrap_err(), FabricError::DeviceRemoved { .. }));
    let error = side.connect(&addr).await.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Fabric(FabricError::DeviceRemoved { .. })), "{error}");
    let error = side.fabric.listen(&addr).map(drop).unwrap_err();
    assert!(matches!(error, FabricError::DeviceRemoved { .. }), "{error}");

    // The kernel waits until all objects on the device have been destroyed.
    drop((ends, listener, landing, side));
    let pulled = tokio::task::spawn_blocking(move || wait(pulling));
    tokio::time::timeout(TIMEOUT, pulled).await.expect("the device is still held").unwrap();
    let error = Fabric::open(Some(name)).map(drop).unwrap_err();
    assert!(matches!(error, FabricError::NoSuchDevice { .. }), "{error}");
}

fn wait(mut child: std::process::Child) {
    assert!(child.wait().expect("wait").success());
}
