//! Finding and using the fast path, over the simulated fabric.

use std::time::Duration;

use tonic::Code;

use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World};
use crate::{Path, Policy, ReasonCode};

#[tokio::test]
async fn all_kinds_of_call() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.connect(&serving).await;
    let info = channel.path();
    assert_eq!(info.device.as_deref(), Some("sim-client"));
    assert_eq!(info.remote_addr.unwrap().ip().to_string(), "10.0.0.1");
    let mut client = Client::new(channel.clone());
    client.all_kinds().await;
    let stats = channel.stats();
    assert_eq!((stats.calls_fast, stats.calls_tcp), (5, 0));
    assert_eq!(stats.bytes_sent_tcp, 0);
}

#[tokio::test]
async fn the_handler_knows_path_addresses_and_user_agent() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.endpoint(&serving).user_agent("mine").unwrap().connect().await.unwrap();
    let who = Client::new(channel).who().await.unwrap();
    let stock = crate::tests::support::world::stock().await;
    let endpoint = world.endpoint(&stock).user_agent("mine").unwrap();
    let by_tcp = Client::new(endpoint.connect().await.unwrap()).who().await.unwrap();
    let agent = |who: &str| who.split(" agent=").nth(1).unwrap().to_owned();
    assert_eq!(agent(&who), agent(&by_tcp), "a server cannot tell the path by the user agent");
    let agent = agent(&who);
    assert!(agent.starts_with("mine tonic/0."), "{agent}");
    assert_eq!(who, format!("path=sim device=sim-server remote=true local=true agent={agent}"));
}

#[tokio::test]
async fn a_lazy_channel_starts_on_tcp_and_moves() {
    let world = World::new();
    let serving = world.serve().await;
    let mut channel = world.endpoint(&serving).connect_lazy();
    assert_eq!(channel.path().reason.unwrap().code(), ReasonCode::Pending);
    let mut client = Client::new(channel.clone());
    let who = client.who().await.unwrap();
    assert!(who.starts_with("path=tcp "), "{who}");
    while channel.path_changed().await.path != Path::Sim {}
    let who = client.who().await.unwrap();
    assert!(who.starts_with("path=sim "), "{who}");
}

/// A program that connects for each short call does not pay for a fast path.
#[tokio::test(start_paused = true)]
async fn one_call_over_a_lazy_channel_makes_no_attempt() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.endpoint(&serving).connect_lazy();
    let mut client = Client::new(channel.clone());
    client.say("only").await.unwrap();
    assert_eq!(channel.stats().attempts, 0);
    client.say("second").await.unwrap();
    let mut moved = channel.clone();
    while moved.path_changed().await.path != Path::Sim {}
    assert_eq!(channel.stats().attempts, 1);
}

#[tokio::test]
async fn a_lazy_channel_that_requires_rdma_never_uses_tcp() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.endpoint(&serving).require_rdma(true).connect_lazy();
    let mut client = Client::new(channel.clone());
    client.all_kinds().await;
    assert_eq!(channel.stats().calls_tcp, 0);
}

#[tokio::test]
async fn a_server_that_goes_in_good_order_finishes_its_calls() {
    let world = World::new();
    let mut serving = world.serve().await;
    let channel = world.connect(&serving).await;
    let mut client = Client::new(channel.clone());
    let waiting = tokio::spawn({
        let mut client = client.clone();
        async move {
            let request = tonic::Request::new("zzz".to_owned());
            client.unary("/test.Echo/Say", request).await
        }
    });
    client.say("before").await.unwrap();
    serving.stop();
    // A call is in flight, and the server waits for it.
    while channel.path().path == Path::Sim {
        let _ = client.say("after").await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!serving.is_finished());
    waiting.abort();
    drop((client, channel));
    serving.ended().await.unwrap();
}

#[tokio::test]
async fn every_byte_of_the_pools_comes_back() {
    let world = World::new();
    let mut serving = world.serve().await;
    let channel = world.connect(&serving).await;
    let pool = channel.pool();
    Client::new(channel.clone()).all_kinds().await;
    drop(channel);
    serving.stop();
    serving.ended().await.unwrap();
    while pool.stats().in_use_bytes() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_server_that_requires_rdma_starts_with_it_or_not_at_all() {
    let world = World::new();
    let serving = Serving::start(world.builder().policy(Policy::Require).add_service(Echo)).await;
    world.connect(&serving).await;

    world.server.remove();
    let serving = Serving::start(world.builder().policy(Policy::Require).add_service(Echo)).await;
    let error = serving.ended().await.unwrap_err();
    assert_eq!(crate::Reason::of(&error).unwrap().code(), ReasonCode::NoDevice);
}

#[tokio::test]
async fn unknown_methods_are_unimplemented_on_both_paths() {
    let world = World::new();
    let serving = world.serve().await;
    for policy in [Policy::Auto, Policy::Off] {
        let channel = world.endpoint(&serving).policy(policy).connect().await.unwrap();
        let mut client = Client::new(channel);
        for path in ["/test.Echo/Nothing", "/no.such.Service/Method"] {
            let status = client.unary(path, tonic::Request::new(String::new())).await.unwrap_err();
            assert_eq!(status.code(), Code::Unimplemented, "{path}");
        }
    }
}
