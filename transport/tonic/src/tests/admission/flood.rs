//! A server at its limits and under a flood keeps serving its established clients, and tells the
//! others why it refuses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request};
use tonic_rdma_proto::Reject;

use crate::bootstrap::connection::HANDSHAKES_AT_ONCE;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::tests::admission::tickets::Hand;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World};
use crate::{Channel, Endpoint, Path, Policy, ReasonCode, Server, Side};

async fn limited(world: &World, limit: impl FnOnce(Server) -> Server) -> Serving {
    Serving::start(limit(world.builder()).add_service(Echo)).await
}

/// Checks that the channel is on TCP because the server has reached a limit.
fn check_refused(channel: &Channel, what: &str) {
    let reason = channel.path().reason.unwrap();
    assert_eq!((reason.code(), reason.side()), (ReasonCode::LimitReached, Side::Peer), "{reason}");
    assert!(reason.detail().contains(what), "{reason}");
}

async fn moves_to_the_fast_path(mut channel: Channel) {
    while channel.path().path != Path::Sim {
        channel.path_changed().await;
    }
}

/// Makes calls on a channel in sequence, all of which must succeed and take the fast path.
struct Served {
    on: Arc<AtomicBool>,
    calls: JoinHandle<u64>,
    channel: Channel,
}

impl Served {
    fn start(channel: &Channel) -> Self {
        let on = Arc::new(AtomicBool::new(true));
        let mut client = Client::new(channel.clone());
        let go_on = on.clone();
        let calls = tokio::spawn(async move {
            let mut calls = 0;
            while go_on.load(Ordering::Relaxed) {
                client.say("hello").await.unwrap();
                calls += 1;
            }
            calls
        });
        Self { on, calls, channel: channel.clone() }
    }

    async fn end(self) {
        self.on.store(false, Ordering::Relaxed);
        let calls = self.calls.await.unwrap();
        let stats = self.channel.stats();
        assert!(calls > 0);
        assert_eq!(
            (stats.calls_tcp, stats.connections, stats.connections_lost),
            (0, 1, 0),
            "{stats:?}"
        );
    }
}

#[tokio::test]
async fn no_more_connections_than_the_limit() {
    let world = World::new();
    let builder = world.builder().max_connections(2);
    let stats = builder.stats();
    let serving = limited(&world, |_| builder).await;
    let [one, two] = [world.connect(&serving).await, world.connect(&serving).await];
    let third = world.endpoint(&serving).connect().await.unwrap();
    check_refused(&third, "as many connections as it allows");
    Client::new(third.clone()).all_kinds().await;
    assert_eq!(third.stats().calls_fast, 0);
    let required = world.endpoint(&serving).require_rdma(true).connect().await.unwrap_err();
    assert_eq!(crate::Reason::of(&required).unwrap().code(), ReasonCode::LimitReached);
    assert!(stats.get().connections_refused >= 2, "{:?}", stats.get());
    for channel in [&one, &two] {
        Client::new(channel.clone()).all_kinds().await;
        assert_eq!(channel.path().path, Path::Sim);
    }
    drop(one);
    moves_to_the_fast_path(third).await;
}

/// Beyond the limit, connections in progress wait for their turn, and none is refused.
#[tokio::test]
async fn no_more_handshakes_than_the_limit() {
    let world = World::new();
    let builder = world.builder().fixed_limits(|limits| limits.handshakes = 1);
    let stats = builder.stats();
    let serving = limited(&world, |_| builder).await;
    let served = Served::start(&world.connect(&serving).await);
    let mut hand = Hand::new(&world, &serving).await;
    let (ticket, addr) = hand.ticket().await;
    {
        // One client sends a connect request and then stalls, and the server waits for it.
        let mut half = std::pin::pin!(hand.enter(addr, ticket));
        assert!(futures_util::poll!(half.as_mut()).is_pending());
        let endpoint = world.endpoint(&serving).require_rdma(true).fast_path_timeout(LONG);
        let waiting: Vec<_> = (0..8)
            .map(|_| endpoint.clone())
            .map(|e| tokio::spawn(async move { e.connect().await }))
            .collect();
        served.end().await;
        assert!(waiting.iter().all(|connecting| !connecting.is_finished()), "they wait");
        // The stalled client processes the server's answer and continues.
        half.await.unwrap();
        for connecting in waiting {
            let channel = connecting.await.unwrap().unwrap();
            Client::new(channel.clone()).all_kinds().await;
            assert_eq!(channel.stats().calls_tcp, 0);
        }
        assert_eq!(stats.get().connections_refused, 0, "{:?}", stats.get());
    }
}

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);
/// The lifetime of tickets that do not expire during a test, however busy the machine is.
const HOUR: Duration = Duration::from_secs(3600);

/// One client may have only a few connections in progress, so other clients get their turn.
#[tokio::test]
async fn one_client_does_not_take_all_turns() {
    let world = World::new();
    let few = |server: Server| server.fixed_limits(|limits| limits.handshakes = 16);
    let serving = limited(&world, few).await;
    let mut hand = Hand::new(&world, &serving).await;
    let mut tickets = Vec::new();
    for _ in 0..30 {
        tickets.push(hand.ticket().await);
    }
    let mut stalled: Vec<_> =
        tickets.iter().map(|(ticket, addr)| Box::pin(hand.enter(*addr, *ticket))).collect();
    for entering in &mut stalled {
        assert!(futures_util::poll!(entering.as_mut()).is_pending());
    }
    let channel = world.endpoint(&serving).require_rdma(true).connect().await.unwrap();
    Client::new(channel).all_kinds().await;
    let entered = futures_util::future::join_all(stalled).await;
    let refused = entered.iter().filter(|entered| matches!(entered, Err(Reject::Handshakes)));
    assert_eq!(refused.count(), 30 - HANDSHAKES_AT_ONCE);
}

/// A client that is refused because of a temporary limit tries again for as long as `connect`
/// waits. With a limit of 0 no client gets in, and the error says why.
#[tokio::test]
async fn a_limit_of_the_moment_is_tried_again_and_one_of_none_is_told() {
    let world = World::new();
    let none = |server: Server| server.fixed_limits(|limits| limits.handshakes = 0);
    let serving = limited(&world, none).await;
    // This time is long enough for several attempts on a busy machine.
    let timeout = Duration::from_secs(4);
    let endpoint = world.endpoint(&serving).fast_path_timeout(timeout);
    let channel = endpoint.clone().connect().await.unwrap();
    check_refused(&channel, "connections in the making");
    Client::new(channel).all_kinds().await;
    let required = endpoint.require_rdma(true).connect().await.unwrap_err();
    assert_eq!(crate::Reason::of(&required).unwrap().code(), ReasonCode::LimitReached);
}

/// If a repeated try has no answer when `connect` stops waiting, the channel reports the reason of
/// the first try.
#[tokio::test]
async fn a_repeated_try_without_an_answer_leaves_the_reason_of_the_first() {
    let world = World::new();
    let builder = world.builder().fixed_limits(|limits| limits.handshakes = 0);
    let stats = builder.stats();
    let serving = limited(&world, |_| builder).await;
    let endpoint = world.endpoint(&serving).fast_path_timeout(Duration::from_secs(4));
    let connecting = tokio::spawn(async move { endpoint.connect().await });
    while stats.get().connections_refused == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    world.server.freeze(true);
    let channel = connecting.await.unwrap().unwrap();
    world.server.freeze(false);
    check_refused(&channel, "connections in the making");
}

#[tokio::test]
async fn a_flood_of_offers_leaves_channels_alone() {
    let world = World::new();
    let few = |server: Server| {
        server.fixed_limits(|limits| (limits.tickets, limits.ticket_lifetime) = (8, HOUR))
    };
    let serving = limited(&world, few).await;
    let channel = world.connect(&serving).await;
    let served = Served::start(&channel);
    let mut hand = Hand::new(&world, &serving).await;
    for _ in 0..500 {
        let outcome = hand.ask().await;
        assert!(matches!(outcome, Outcome::Grant(_)), "{outcome:?}");
    }
    // A channel from the flood's address gets in like any other.
    let other = world.connect(&serving).await;
    Client::new(other).all_kinds().await;
    served.end().await;
}

#[tokio::test]
async fn a_flood_at_the_listener_leaves_channels_alone() {
    let world = World::new();
    let builder = world.builder();
    let stats = builder.stats();
    let serving = limited(&world, |_| builder).await;
    let channel = world.connect(&serving).await;
    let served = Served::start(&channel);
    let mut hand = Hand::new(&world, &serving).await;
    let (good, addr) = hand.ticket().await;
    let mut refused = 0;
    for round in 0..50_u8 {
        // All at the same time, so that they queue at the server.
        let strangers = (0..5).map(|n| hand.enter(addr, [round * 5 + n; 16]));
        for rejected in futures_util::future::join_all(strangers).await {
            let rejected = rejected.unwrap_err();
            assert!(matches!(rejected, Reject::Ticket | Reject::Handshakes), "{rejected}");
            refused += 1;
        }
    }
    assert!(stats.get().connections_refused >= refused, "{:?}", stats.get());
    assert_eq!(stats.get().connections, 1);
    served.end().await;
    hand.enter(addr, good).await.unwrap();
    moves_to_the_fast_path(world.endpoint(&serving).connect().await.unwrap()).await;
}

#[tokio::test]
async fn no_more_tcp_connections_than_the_limit() {
    let world = World::new();
    let serving = limited(&world, |server| server.max_tcp_connections(2)).await;
    let channel = world.connect(&serving).await;
    let stock =
        tonic::transport::Endpoint::from_shared(format!("http://{}", serving.addr)).unwrap();
    let second = stock.connect().await.unwrap();
    assert_eq!(Client::new(second.clone()).say("hello").await.unwrap(), "hello");
    for _ in 0..20 {
        let mut refused = Client::new(stock.connect_lazy());
        refused.say("hello").await.unwrap_err();
    }
    for _ in 0..3 {
        assert_eq!(Client::new(second.clone()).say("hello").await.unwrap(), "hello");
    }
    Client::new(channel).all_kinds().await;
    drop(second);
    // The slot becomes free when the server has noticed the end.
    let mut third = Client::new(stock.connect_lazy());
    while third.say("hello").await.is_err() {
        tokio::task::yield_now().await;
    }
}

/// Makes a call on the fast path and a call on TCP, each with this many bytes of metadata. Returns
/// both answers.
async fn with_headers(endpoint: &Endpoint, bytes: usize, say: &str) -> [Result<String, Code>; 2] {
    let mut answers = Vec::new();
    for policy in [Policy::Require, Policy::Off] {
        let channel = endpoint.clone().policy(policy).connect().await.unwrap();
        let mut request = Request::new(say.to_owned());
        // A single value may have at most 64 KiB.
        for at in (0..bytes).step_by(50_000) {
            let value = MetadataValue::try_from("x".repeat(50_000.min(bytes - at))).unwrap();
            request.metadata_mut().append("filler", value);
        }
        let answer = Client::new(channel).unary("/test.Echo/Say", request).await;
        answers.push(answer.map_err(|status| status.code()));
    }
    answers.try_into().unwrap()
}

#[tokio::test]
async fn the_servers_limit_on_headers() {
    let world = World::new();
    let serving = limited(&world, |server| server.max_header_size(6000)).await;
    let endpoint = world.endpoint(&serving);
    assert_eq!(
        with_headers(&endpoint, 4000, "hello").await,
        [Ok("hello".into()), Ok("hello".into())]
    );
    let [fast, tcp] = with_headers(&endpoint, 7000, "hello").await;
    assert_eq!(fast, Err(Code::ResourceExhausted));
    tcp.unwrap_err();
    // Without the setting, the limit is the protocol's default.
    let serving = world.serve().await;
    let [fast, _] = with_headers(&world.endpoint(&serving), 50_000, "hello").await;
    assert_eq!(fast, Ok("hello".into()));
    let serving = limited(&world, |server| server.max_header_size(200_000)).await;
    let [fast, tcp] = with_headers(&world.endpoint(&serving), 150_000, "hello").await;
    assert_eq!((fast, tcp), (Ok("hello".into()), Ok("hello".into())));
}

#[tokio::test]
async fn the_endpoints_limit_on_headers() {
    let world = World::new();
    let serving = world.serve().await;
    // The text of a status is sent as a header.
    let long = format!("!{}", "x".repeat(7000));
    let endpoint = world.endpoint(&serving);
    assert_eq!(with_headers(&endpoint, 0, &long).await, [Err(Code::Aborted), Err(Code::Aborted)]);
    let [fast, tcp] = with_headers(&endpoint.max_header_size(6000), 0, &long).await;
    assert_eq!(fast, Err(Code::ResourceExhausted));
    assert_ne!(tcp, Err(Code::Aborted));
}
