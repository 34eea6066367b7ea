//! Real verbs between two processes, on the device that `GUEST_DEVICE` names, as in verbs/main.rs.
//! The other process runs this same program, which therefore has its own main function.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::process::ExitCode;

use common::process::{self, Process};
use common::*;
use tonic_rdma_fabric::{Addr, Link, LinkError};

/// The environment variable for the address to which the other process connects.
const PEER: &str = "FABRIC_PEER";

fn main() -> ExitCode {
    if let Ok(addr) = std::env::var(PEER) {
        process::block_on(another_process(addr));
        return ExitCode::SUCCESS;
    }
    process::run([process::self_test("a_killed_peer_is_noticed", a_killed_peer_is_noticed)])
}

/// Connects, and echoes until it is killed.
async fn another_process(addr: String) {
    let side = on_guest_device();
    let mut c = End::new(side.connect(&Addr::Ip(addr.parse().unwrap())).await.unwrap().link);
    c.send(0, b"first").await;
    println!("stands {}", std::process::id());
    while let Ok(data) = c.receive().await {
        c.send(1, &data).await;
    }
}

async fn a_killed_peer_is_noticed() {
    let side = on_guest_device();
    for busy in [false, true] {
        let mut listener = side.listen();
        let mut peer = Process::start(&[(PEER, &listener.local_addr().to_string())]);
        let incoming = listener.accept().await.unwrap();
        let mut s = End::new(incoming.accept(&config(), &side.pool, b"", TIMEOUT).await.unwrap());
        assert_eq!(s.receive().await.unwrap(), b"first");
        peer.says("stands");
        s.send(0, b"echo").await;
        assert_eq!(s.receive().await.unwrap(), b"echo");
        if busy {
            for i in 0..8 {
                s.queue_send(i, b"more", true).unwrap();
            }
            s.link.ring_doorbell().unwrap();
        }
        peer.kill();
        let error = s.death().await;
        let named = match &error {
            LinkError::Disconnected { .. } => true,
            LinkError::Completion { .. } => busy,
            _ => false,
        };
        assert!(named, "busy {busy}: {error}");
        assert!(error.to_string().contains(&side.ip().to_string()), "{error}");
    }
}
