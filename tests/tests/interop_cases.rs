//! gRPC's interoperability cases with tonic-rdma at both ends, over TCP and over shared memory.
//! `interop/run` runs them with another language at either end.

#![allow(clippy::unwrap_used)]

use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Endpoint, FabricKind, Path, Policy, Server};
use tonic_rdma_tests::interop::cases;
use tonic_rdma_tests::interop::server::{EchoMetadata, Test};

async fn run(policy: Policy, path: Path) {
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let at = incoming.local_addr().unwrap();
    let server = Server::builder().layer(EchoMetadata).add_service(Test::server());
    let serving = tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = Endpoint::from_shared(format!("http://{at}")).unwrap();
    let channel = endpoint.policy(policy).fabrics([FabricKind::Shm]).connect().await.unwrap();
    assert_eq!(channel.path().path, path, "{}", channel.path());
    let cases = cases::run(&channel).await;
    assert_eq!(cases.len(), 13, "{cases:?}");
    assert_eq!(channel.path().path, path, "{}", channel.path());
    let stats = channel.stats();
    assert_eq!(stats.calls_tcp == 0, path == Path::Shm, "{stats:?}");
    serving.abort();
}

#[tokio::test]
async fn over_tcp() {
    run(Policy::Off, Path::Tcp).await;
}

#[tokio::test]
async fn over_shared_memory() {
    run(Policy::Require, Path::Shm).await;
}
