//! Time and concurrency limits act on both paths in the same way.

use std::future::poll_fn;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::JoinSet;
use tonic::{Code, Request};
use tower::Service;

use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, World};
use crate::{Channel, Endpoint, Policy};

const SOON: Duration = Duration::from_millis(20);

/// A channel on the fast path and one on TCP.
async fn both(endpoint: Endpoint) -> [Channel; 2] {
    let fast = endpoint.clone().require_rdma(true).connect().await.unwrap();
    let tcp = endpoint.policy(Policy::Off).connect().await.unwrap();
    [fast, tcp]
}

fn forever() -> Request<String> {
    Request::new("zzz".to_owned())
}

#[tokio::test]
async fn the_endpoints_timeout() {
    let world = World::new();
    let serving = world.serve().await;
    for channel in both(world.endpoint(&serving).timeout(SOON)).await {
        let status = Client::new(channel).unary("/test.Echo/Say", forever()).await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Cancelled, "Timeout expired"));
    }
}

#[tokio::test]
async fn the_servers_timeout_and_the_requests_own() {
    let world = World::new();
    for (server, request) in [(Some(SOON), None), (None, Some(SOON))] {
        let mut builder = match server {
            Some(timeout) => world.builder().timeout(timeout),
            None => world.builder(),
        };
        let serving = Serving::start(builder.add_service(Echo)).await;
        for channel in both(world.endpoint(&serving)).await {
            let mut forever = forever();
            if let Some(timeout) = request {
                forever.set_timeout(timeout);
            }
            let status = Client::new(channel).unary("/test.Echo/Say", forever).await.unwrap_err();
            assert_eq!((status.code(), status.message()), (Code::Cancelled, "Timeout expired"));
        }
    }
}

fn is_ready(channel: &mut Channel) -> bool {
    matches!(channel.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())))
}

#[tokio::test]
async fn the_endpoints_concurrency_limit_is_shared_by_clones() {
    let world = World::new();
    let serving = world.serve().await;
    for channel in both(world.endpoint(&serving).concurrency_limit(1)).await {
        let (mut one, mut two) = (channel.clone(), channel);
        poll_fn(|cx| one.poll_ready(cx)).await.unwrap();
        assert!(!is_ready(&mut two));
        drop(one);
        poll_fn(|cx| two.poll_ready(cx)).await.unwrap();
    }
}

#[tokio::test]
async fn the_endpoints_rate_limit() {
    let world = World::new();
    let serving = world.serve().await;
    let limited = world.endpoint(&serving).rate_limit(2, Duration::from_secs(3600));
    for channel in both(limited).await {
        let mut client = Client::new(channel.clone());
        client.say("one").await.unwrap();
        client.say("two").await.unwrap();
        let third = tokio::time::timeout(SOON, client.say("three")).await;
        assert!(third.is_err(), "{third:?}");
        let stats = channel.stats();
        assert_eq!(stats.calls_fast + stats.calls_tcp, 2);
    }
}

#[tokio::test]
async fn the_server_sheds_load_of_each_connection() {
    let world = World::new();
    let mut builder = world.builder().load_shed(true).concurrency_limit_per_connection(1);
    let serving = Serving::start(builder.add_service(Echo)).await;
    for channel in both(world.endpoint(&serving)).await {
        let mut waiting = Client::new(channel.clone());
        let waiting =
            tokio::spawn(async move { waiting.unary("/test.Echo/Say", forever()).await.map(drop) });
        let mut client = Client::new(channel);
        // Calls succeed until the waiting call has arrived at the server.
        let status = loop {
            match client.say("hello").await {
                Ok(_) => tokio::task::yield_now().await,
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(status.message(), "Too many active requests for the connection");
        waiting.abort();
    }
}

#[tokio::test]
async fn the_servers_stream_limit_holds_calls_back() {
    let world = World::new();
    let mut builder = world.builder().max_concurrent_streams(1);
    let serving = Serving::start(builder.add_service(Echo)).await;
    for channel in both(world.endpoint(&serving)).await {
        let mut calls = JoinSet::new();
        for n in 0..20 {
            let mut client = Client::new(channel.clone());
            calls.spawn(async move { client.say(&n.to_string()).await.unwrap() });
        }
        assert_eq!(calls.join_all().await.len(), 20);
    }
}

/// Begins a call without an answer over the fast path.
async fn hold(channel: &Channel, calls: &mut JoinSet<()>) {
    let (mut client, begun) = (Client::new(channel.clone()), channel.stats().calls_fast);
    calls.spawn(async move { drop(client.unary("/test.Echo/Say", forever()).await) });
    while channel.stats().calls_fast == begun {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_first_call_over_the_servers_stream_limit_is_logged() {
    let logs = Logs::capture();
    let world = World::new();
    let mut builder = world.builder().max_concurrent_streams(2);
    let serving = Serving::start(builder.add_service(Echo)).await;
    let channel = world.endpoint(&serving).require_rdma(true).connect().await.unwrap();
    let mut calls = JoinSet::new();
    for (begun, logged) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
        hold(&channel, &mut calls).await;
        let lines = logs.lines_with("Server::max_concurrent_streams");
        assert_eq!(lines.len(), logged, "{begun} calls: {lines:?}");
        for line in lines {
            assert!(line.contains(" WARN ") && line.contains(" limit=2"), "{line}");
        }
    }
}

/// The Offer is a call over TCP, which such a server refuses or never begins.
#[tokio::test]
async fn a_server_that_allows_no_streams_offers_no_fast_path() {
    let world = World::new();
    for (max, is_offered) in [(0, false), (1, true)] {
        let mut builder = world.builder().max_concurrent_streams(max);
        let serving = Serving::start(builder.add_service(Echo)).await;
        let connected = world.endpoint(&serving).require_rdma(true).connect().await;
        assert_eq!(connected.is_ok(), is_offered, "{max}: {connected:?}");
    }
}

#[tokio::test]
async fn the_largest_settings_are_served() {
    let world = World::new();
    let mut builder = world.builder().concurrency_limit_per_connection(usize::MAX);
    let serving = Serving::start(builder.add_service(Echo)).await;
    let endpoint = world.endpoint(&serving).fast_path_timeout(Duration::MAX);
    for channel in both(endpoint.concurrency_limit(usize::MAX)).await {
        let mut client = Client::new(channel);
        assert_eq!(client.say("hello").await.unwrap(), "hello");
    }
}
