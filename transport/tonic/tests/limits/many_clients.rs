//! Clients of a server that connect at once, as after its restart.

use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tonic_rdma::Path;

use crate::common::{Blob, Blobs, Client, Fabric, LIMIT, Which, World};

/// Descriptors of a client, both of whose ends are in this process, while it connects.
const DESCRIPTORS: u64 = 16;
const CLIENTS: usize = 500;

/// Nobody is refused: each client that may wait is on the fast path when `connect` returns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_connect_at_once_are_let_in() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let room = maximum.unwrap_or(u64::MAX) / DESCRIPTORS;
    let clients = CLIENTS.min(usize::try_from(room).unwrap());
    let blobs = Blobs { codec: Which::Ours, seen: Default::default(), limit: LIMIT, forward: None };
    let serve = |server: tonic_rdma::Server| server;
    let connect = |endpoint: tonic_rdma::Endpoint| endpoint.require_fast_path(true);
    // A debug build makes a few dozen connections in a second, and fewer beside other programs.
    let patience = Duration::from_secs(100);
    let world = World::set(Fabric::Shm, Fabric::Shm.hosts(64 << 20), blobs, serve, connect).await;
    let world = std::sync::Arc::new(world);
    let mut connecting = JoinSet::new();
    for n in 0..clients {
        let world = world.clone();
        connecting.spawn(async move {
            let endpoint = world.endpoint.clone().fast_path_timeout(patience);
            let channel = endpoint.connect().await.unwrap();
            assert_eq!(channel.path().path, Path::Shm, "{n}");
            let data = Bytes::from(vec![n as u8; 64]);
            let mut client = Client::new(channel.clone(), Which::Ours, LIMIT);
            assert_eq!(client.echo(Blob::of(data.clone())).await.unwrap().data, data);
            channel
        });
    }
    let connected = tokio::time::timeout(Duration::from_secs(120), connecting.join_all()).await;
    let channels = connected.expect("some still wait");
    assert_eq!(channels.len(), clients);
    for channel in channels {
        let stats = channel.stats();
        assert_eq!((stats.calls_fast, stats.calls_tcp, stats.attempts), (1, 0, 1), "{stats:?}");
    }
    let stats = world.server.get();
    assert_eq!(stats.connections_refused, 0, "{stats:?}");
}
