//! Clients connect at the same time, as after the restart of their server. None is refused, and
//! each is on its path when `connect` returns.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tonic_rdma::{Path, Policy};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::client_of;

use crate::client::{Client, Here, connect, echo_one};
use crate::server::Server;

const CLIENTS: u64 = 500;
/// Number of clients over the device of a guest. The guest's memory holds fewer queue pairs.
const CLIENTS_OF_A_DEVICE: u64 = 64;
/// Descriptors that one end of a connection has while it is established.
const DESCRIPTORS: u64 = 10;

/// Connects `count` more channels at the same time, each of which makes a call.
pub async fn answer(here: &Here, count: usize) -> String {
    let mut connecting = JoinSet::new();
    for n in 0..count {
        let (fabric, at) = (here.fabric, here.at);
        let endpoint = match fabric.fast() {
            Some(_) => here.endpoint.clone().policy(Policy::Require),
            None => here.endpoint.clone(),
        };
        connecting.spawn(async move {
            let channel = connect(&endpoint, fabric, at).await;
            echo_one(client_of(channel.clone()), 64 + n).await.unwrap();
            channel
        });
    }
    for channel in connecting.join_all().await {
        let AnyChannel::Rdma(channel) = channel else { continue };
        let (stats, path) = (channel.stats(), channel.path());
        let calls = (stats.calls_fast, stats.calls_tcp, stats.attempts);
        let expected = match here.fabric.fast() {
            Some(_) => (1, 0, 1),
            None => (0, 1, 0),
        };
        assert_eq!(path.path, here.fabric.fast().unwrap_or(Path::Tcp), "{path}");
        assert_eq!(calls, expected, "{stats:?}");
    }
    "ok".to_owned()
}

pub async fn all_that_connect_at_once(fabric: Fabric) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // The child processes inherit this limit.
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let clients = if fabric == Fabric::Verbs { CLIENTS_OF_A_DEVICE } else { CLIENTS };
    let room = maximum.unwrap_or(u64::MAX) / DESCRIPTORS;
    assert!(room >= clients, "`ulimit -Hn` allows {room} clients at once");
    let mut server = Server::start(fabric, "", "").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    client.does(&format!("crowd {clients}")).await;
    assert_eq!(server.process.ask("refused").await, "0");
}
