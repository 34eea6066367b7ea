//! A child of fork(2) and its parent's connection over a device. The step `fork` of
//! tests/guest/suite runs this, because it needs a device at GUEST_ADDR.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{Blob, Blobs, Client, LIMIT, Which, calls, pattern, pooled};
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, FabricKind, Path, Policy, ReasonCode, Server};
use tonic_rdma_memory::test_util::process::fork;

const MIB: usize = 1 << 20;

/// A child drops its copies of its parent's connection over a device, and the parent's WRITEs
/// continue. The child maps no memory, because User Mode Linux would give it pages of the parent in
/// place of the pages that MADV_DONTFORK excludes.
#[test]
fn a_child_leaves_its_parents_device_alone() {
    let ip: std::net::IpAddr = std::env::var("GUEST_ADDR").unwrap().parse().unwrap();
    let runtime = Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind((ip, 0))).unwrap();
    let addr = listener.local_addr().unwrap();
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LIMIT, forward: None };
    let router = Server::builder().fabrics([FabricKind::Verbs]).add_service(blobs);
    runtime.spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    let endpoint = endpoint.fabrics([FabricKind::Verbs]).policy(Policy::Require);
    let channel = runtime.block_on(endpoint.connect()).unwrap();
    assert_eq!(channel.path().path, Path::Verbs);
    let data = Blob::of(Bytes::from(pattern(MIB, 1)));
    let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
    let received = runtime.block_on(client.echo(data.clone())).unwrap();
    let stream = Blob { number: 64, ..data.clone() };
    let mut inherited = Some((channel.clone(), received.clone(), pooled_in(&runtime, &channel)));
    let mut stream = Some(runtime.block_on(client.down(stream)).unwrap());
    for _ in 0..3 {
        let child = fork(|| {
            let (channel, received, pooled) = inherited.take().unwrap();
            assert_eq!(channel.path().reason.unwrap().code(), ReasonCode::Forked);
            let devices = tonic_rdma_fabric::Fabric::devices();
            assert!(matches!(devices, Err(tonic_rdma_fabric::FabricError::Forked)), "{devices:?}");
            drop((channel, received, pooled, stream.take()));
        })
        .unwrap();
        assert!(child.wait().unwrap());
        runtime.block_on(calls(channel.clone()));
    }
    let mut stream = stream.unwrap();
    for _ in 0..64 {
        assert!(runtime.block_on(stream.message()).unwrap().unwrap().data == data.data);
    }
    assert!(received.data == data.data);
    assert_eq!((channel.stats().connections, channel.stats().calls_tcp), (1, 0));
    runtime.shutdown_background();
}

fn pooled_in(runtime: &Runtime, channel: &Channel) -> Bytes {
    runtime.block_on(pooled(channel, MIB, 5))
}
