//! Stock tonic at either end, over TCP.

use std::time::Duration;

use crate::tests::support::echo::Client;
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{World, endpoint, stock};
use crate::{Path, Policy, ReasonCode};

#[tokio::test]
async fn stock_client_to_our_server() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", serving.addr))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut client = Client::new(channel);
    client.all_kinds().await;
    let who = client.who().await.unwrap();
    assert!(who.starts_with("path=tcp device= remote=true local=true agent=tonic/"), "{who}");
}

#[tokio::test]
async fn our_client_to_a_stock_server_says_that_the_peer_is_not_capable() {
    let world = World::new();
    let serving = stock().await;
    let channel = world.endpoint(&serving).user_agent("mine").unwrap().connect().await.unwrap();
    let path = channel.path();
    assert_eq!(path.path, Path::Tcp);
    assert_eq!(path.reason.unwrap().code(), ReasonCode::PeerNotCapable);
    let mut client = Client::new(channel.clone());
    client.all_kinds().await;
    let who = client.who().await.unwrap();
    assert!(who.contains(" agent=mine tonic/"), "{who}");
    let stats = channel.stats();
    assert_eq!((stats.calls_fast, stats.calls_tcp), (0, 6));
    assert!(stats.bytes_sent_tcp > 0 && stats.bytes_received_tcp > 0);
}

#[tokio::test]
async fn without_a_fast_path_at_either_end() {
    let serving = crate::tests::support::world::Serving::start(
        crate::Server::builder().policy(Policy::Off).add_service(crate::tests::support::echo::Echo),
    )
    .await;
    let channel = endpoint(serving.addr).policy(Policy::Off).connect().await.unwrap();
    assert_eq!(channel.path().reason.unwrap().code(), ReasonCode::Policy);
    Client::new(channel).all_kinds().await;
}

/// A program uses the fast path, and also has a stub with tonic's own channel.
#[tokio::test]
async fn a_stock_channel_beside_a_fast_one_is_warned_of_once() {
    let world = World::new();
    let serving = world.serve().await;
    let logs = Logs::capture();
    let fast = world.connect(&serving).await;
    assert_eq!(fast.path().path, Path::Sim);
    let stock = tonic::transport::Endpoint::from_shared(format!("http://{}", serving.addr));
    let mut stock = Client::new(stock.unwrap().connect().await.unwrap());
    let warnings = || logs.lines_with("that never asked for it");
    for _ in 0..25 {
        stock.who().await.unwrap();
    }
    assert_eq!(warnings(), [""; 0], "it may still ask");
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(15 * 60 + 1)).await;
    tokio::time::resume();
    for _ in 0..25 {
        stock.who().await.unwrap();
    }
    assert_eq!(warnings().len(), 1);
    let line = &warnings()[0];
    assert!(line.contains("WARN") && line.contains("tonic-rdma-build"), "{line}");
    Client::new(fast).who().await.unwrap();
}
