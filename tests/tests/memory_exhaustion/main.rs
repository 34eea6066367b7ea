//! Landing memory that a peer does not return stays charged to that peer, and the server recovers
//! it when other clients need their share. The tests run over shared memory.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod greedy_peer;

use std::net::SocketAddr;
use std::time::Duration;

use greedy_peer::GreedyPeer;
use tokio::task::{JoinHandle, JoinSet};
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Context, FabricKind, Path, PoolConfig, PoolStats};
use tonic_rdma_fabric::{Fabric, Lending, ShmAccess};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::{Client, client_of};
use tonic_rdma_tests::load::{poll_until, wait_for_path, with_timeout};
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::server_process::endpoint;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{echo, steps};

const UPLOAD: &str = "/tonic_rdma.conformance.v1.Conformance/Upload";
/// The size of the victim's messages.
const PUT: usize = 8 << 20;

/// A server with 32 MiB of landing memory, in this process.
struct TestServer {
    at: SocketAddr,
    context: Context,
    task: JoinHandle<()>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TestServer {
    async fn new() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let context = Context::builder().pool(PoolConfig::default().total(64 << 20)).build();
        let mut server =
            tonic_rdma::Server::builder().fabrics([FabricKind::Shm]).context(context.clone());
        let router = server.add_service(Scripted::server(&Probe::default()));
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let task = tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
        TestServer { at, context, task }
    }

    async fn pool(&self) -> PoolStats {
        self.context.pool_stats().await.remove(0).1
    }

    /// A client with its own pool.
    async fn client(&self) -> (Channel, Client) {
        let context = Context::builder().build();
        let channel =
            with_timeout("connecting", endpoint(self.at, (FabricKind::Shm, &context)).connect())
                .await
                .unwrap();
        wait_for_path(&channel, Path::Shm).await;
        (channel.clone(), client_of(AnyChannel::Rdma(channel)))
    }

    async fn greedy_peer(&self, path: &str, deadline: Option<&str>) -> GreedyPeer {
        let fabric = Fabric::shm(ShmAccess::SameUser, Lending::Off).unwrap();
        GreedyPeer::connect(self.at, "shm", &fabric, path, deadline).await
    }

    /// Waits until no landing memory is granted, filled or leased.
    async fn assert_pool_returned(&self) {
        let read = || async {
            let pool = self.pool().await;
            (pool.granted, pool.filled, pool.leased)
        };
        poll_until("landing memory is gone", read, |left| *left == (0, 0, 0)).await;
    }
}

/// Makes a call that echoes its payload, and checks it.
async fn put(client: &mut Client, seed: u64) {
    let request = steps("", [echo(1)]).with_payload(seed, PUT);
    let reply = with_timeout("a put", client.unary(request)).await.unwrap().into_inner();
    reply.expect(seed, PUT);
}

/// Calls have ended, while the peer keeps the memory of all 64.
async fn calls_that_are_over(path: &str, deadline: Option<&str>) {
    let server = TestServer::new().await;
    let (channel, mut victim) = server.client().await;
    let mut greedy_peer = server.greedy_peer(path, deadline).await;
    // Calls that end before their memory is registered get no memory. Then another peer tries.
    for attempt in 1.. {
        let held = tokio::time::timeout(Duration::from_secs(1), greedy_peer.hold_grants(1)).await;
        if held == Ok(true) {
            break;
        }
        assert!(attempt < 20, "no call has got memory before it was over");
        greedy_peer = server.greedy_peer(path, deadline).await;
    }
    // The peer ignores RESET, as a paused process does. Other clients take their share, and the
    // peer's connection ends if the peer has to give up memory for that.
    let hoarder = tokio::spawn(greedy_peer.run_until_closed());
    for seed in 0..4 {
        put(&mut victim, seed).await;
    }
    assert_eq!((channel.stats().calls_fast, channel.stats().calls_tcp), (4, 0));
    match hoarder.is_finished() {
        true => {
            let reason = hoarder.await.unwrap();
            assert!(reason.contains("asked back") && reason.contains("kept"), "{reason}");
        }
        false => hoarder.abort(),
    }
    drop((channel, victim));
    server.assert_pool_returned().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_whose_deadline_has_passed_hold_no_memory() {
    calls_that_are_over(UPLOAD, Some("500m")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_to_unknown_methods_hold_no_memory() {
    calls_that_are_over("/nobody.knows.v1.This/Method", None).await;
}

/// The calls never end, so only another client's demand makes the server recall their memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_client_gets_its_share() {
    let server = TestServer::new().await;
    let (channel, mut victim) = server.client().await;
    let mut greedy_peers = JoinSet::new();
    let mut first = server.greedy_peer(UPLOAD, None).await;
    assert!(with_timeout("all of the memory", first.hold_grants(8)).await);
    assert_eq!(server.pool().await.granted, 32 << 20, "alone it has all there is");
    greedy_peers.spawn(first.run_until_closed());
    for _ in 0..2 {
        // These peers also claim their shares, and keep them.
        greedy_peers.spawn(server.greedy_peer(UPLOAD, None).await.run_until_closed());
    }
    for seed in 0..4 {
        put(&mut victim, seed).await;
    }
    assert_eq!((channel.stats().calls_fast, channel.stats().calls_tcp), (4, 0));
    // A peer that kept more than its share has been disconnected, with the reason.
    let reason =
        with_timeout("the end of a hoarder", greedy_peers.join_next()).await.unwrap().unwrap();
    assert!(reason.contains("asked back") && reason.contains("kept"), "{reason}");
    drop((channel, victim, greedy_peers));
    server.assert_pool_returned().await;
}

/// Two honest clients together need more landing memory than the server has. All calls succeed over
/// their first connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_peers_share() {
    const WORKERS: u64 = 8;
    const PUTS: u64 = 6;
    let server = TestServer::new().await;
    let mut peers = JoinSet::new();
    let mut channels = Vec::new();
    for _ in 0..2 {
        let (channel, client) = server.client().await;
        channels.push(channel);
        for worker in 0..WORKERS {
            let mut client = client.clone();
            peers.spawn(async move {
                for n in 0..PUTS {
                    put(&mut client, worker * PUTS + n).await;
                }
            });
        }
    }
    while let Some(ended) = peers.join_next().await {
        ended.unwrap();
    }
    for channel in &channels {
        let stats = channel.stats();
        assert_eq!((stats.calls_fast, stats.calls_tcp), (WORKERS * PUTS, 0), "{}", channel.path());
        assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    }
    drop(channels);
    server.assert_pool_returned().await;
}
