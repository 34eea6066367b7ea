//! A device is removed while it is in use. Run it in a guest of its own, as root, with two devices
//! (`tests/guest/run --device both -- ...`): it deletes one at a time. Built with the feature
//! `guest-tests` only.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::Command;

use common::*;
use tonic_rdma_fabric::{ConnectError, Fabric, FabricError, LinkConfig, LinkError};

/// Pairs that stand when the device goes.
const LINKS: usize = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_is_pulled_out_lets_go() {
    for variable in ["RXE_DEVICE", "SIW_DEVICE"] {
        let name = std::env::var(variable).expect(variable);
        // librdmacm keeps the last device of the host open, so each is put back before the other is
        // removed.
        pull_out(&name).await;
        put_back(&name);
        let side = Side::new(Fabric::open(Some(&name)).expect("the new device"));
        common::sends_of_all_sizes(&side, &side).await;
    }
}

fn netdev(name: &str) -> String {
    if name == std::env::var("RXE_DEVICE").unwrap() { "d0".into() } else { "d1".into() }
}

fn put_back(name: &str) {
    let kind = if name.starts_with("rxe") { "rxe" } else { "siw" };
    let netdev = netdev(name);
    let status =
        Command::new("rdma").args(["link", "add", name, "type", kind, "netdev", &netdev]).status();
    assert!(status.expect("rdma").success());
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
