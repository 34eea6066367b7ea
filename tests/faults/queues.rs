//! Devices that pin memory for their queues, as adapters do and Soft-RoCE and Soft-iWARP do not:
//! `tests/guest/charge.c`, loaded before libibverbs, pins 84 KiB for each queue pair.

use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, Policy, Server};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::Topology;
use crate::log::Log;

/// Connections that the usual limit has room for beside a pool: each has two queue pairs here, as
/// both ends are in one process.
const ROOM: usize = 10;
/// Bytes of RLIMIT_MEMLOCK, and of what a queue pair pins.
const LIMIT: usize = 8 << 20;
const CHARGE: usize = 84 << 10;

/// An ordinary process connects until it can no more. Its pool was made small enough to leave room
/// for the queues.
pub async fn that_are_charged(_: Log) {
    let charged = std::env::var("LD_PRELOAD").is_ok_and(|library| library.contains("charge"));
    assert!(charged, "LD_PRELOAD names the library that charges queue pairs");
    let device = Topology::one_device().client_device;
    let context = Context::builder().device(device).build();
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let at = incoming.local_addr().unwrap();
    let routes = Server::builder()
        .fabrics([FabricKind::Verbs])
        .context(context.clone())
        .add_service(Scripted::server(&Probe::default()));
    let serving = tokio::spawn(routes.serve_with_incoming(incoming));
    let connect = async || {
        Endpoint::from_shared(format!("http://{at}"))
            .unwrap()
            .policy(Policy::Auto)
            .fabrics([FabricKind::Verbs])
            .context(context.clone())
            .connect()
            .await
            .unwrap()
    };
    let mut channels: Vec<Channel> = Vec::new();
    let reason = loop {
        let channel = connect().await;
        if channel.path().path != Path::Verbs {
            break channel.path().reason.unwrap();
        }
        channels.push(channel);
        for channel in &channels {
            let mut calls = client_of(AnyChannel::Rdma(channel.clone()));
            calls.unary(payload(1, 300_000)).await.unwrap();
        }
        assert!(channels.len() < 1000, "there is no limit");
    };
    let total = channels[0].pool().config().total;
    println!("  a pool of {total} bytes, {} connections, then: {reason}", channels.len());
    assert!(channels.len() >= ROOM, "{} connections, then: {reason}", channels.len());
    // The pool could be used up, and leaves the queues of as many.
    assert!(total + 2 * ROOM * CHARGE <= LIMIT, "a pool of {total} bytes");
    assert!(total > LIMIT / 2, "a pool of {total} bytes");
    for channel in &channels {
        let stats = channel.stats();
        assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 0));
    }
    serving.abort();
}
