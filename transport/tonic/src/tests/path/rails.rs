//! Several devices at either end.

use std::future::Future;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use tonic::Status;
use tonic_rdma_fabric::sim::SimDevice;

use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World, endpoint};
use crate::{Channel, Context, Endpoint, Path, Policy, PoolConfig, Server};

struct Rails {
    server: Vec<SimDevice>,
    client: Vec<SimDevice>,
    context: Context,
    serving: Serving,
}

fn context(devices: &[SimDevice]) -> Context {
    let pool = PoolConfig::default().total(16 << 20);
    devices
        .iter()
        .cloned()
        .fold(Context::builder().pool(pool), |with, device| with.sim(device))
        .build()
}

impl Rails {
    async fn new() -> Self {
        Self::with(2).await
    }

    async fn with(count: u8) -> Self {
        Self::with_server(count, Server::builder()).await
    }

    async fn with_server(count: u8, builder: Server) -> Self {
        let world = World::new();
        let device =
            |end: char, n, from| world.net.device(format!("{end}{n}"), [10, 0, 0, from + n].into());
        let server: Vec<_> = (0..count).map(|n| device('s', n, 11)).collect();
        let client: Vec<_> = (0..count).map(|n| device('c', n, 31)).collect();
        let mut builder = builder.context(context(&server));
        let serving = Serving::start(builder.add_service(Echo)).await;
        Self { context: context(&client), server, client, serving }
    }

    fn endpoint(&self) -> Endpoint {
        let endpoint = endpoint(self.serving.addr).context(self.context.clone());
        endpoint.policy(Policy::Require).fast_path_timeout(Duration::from_secs(10))
    }

    /// A channel that has a connection on each rail, and a client that uses it.
    async fn all(&self) -> (Channel, Client<Channel>) {
        self.all_of(self.endpoint()).await
    }

    async fn all_of(&self, endpoint: Endpoint) -> (Channel, Client<Channel>) {
        let channel = endpoint.connect().await.unwrap();
        let mut client = Client::new(channel.clone());
        bulk(&mut client).await;
        assert_eq!(channel.stats().connections, 1, "until calls overlap");
        let waiting: Vec<_> = self.server.iter().map(|_| Held::begin(&client)).collect();
        until(|| async {
            bulk(&mut client.clone()).await;
            channel.stats().connections == self.server.len() as u64
        })
        .await;
        drop(waiting);
        (channel, client)
    }
}

async fn until<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    let polling = async {
        while !is_so().await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), polling).await.expect("it becomes so");
}

async fn bulk(client: &mut Client<Channel>) {
    let text = "x".repeat(200_000);
    assert_eq!(client.say(&text).await.unwrap(), text);
}

/// A call that gets no answer. Its method is `Say`, with which [`bulk`] transfers bulk.
struct Held(std::pin::Pin<Box<dyn Future<Output = Result<String, Status>> + Send>>);

impl Held {
    fn begin(client: &Client<Channel>) -> Self {
        let mut client = client.clone();
        let mut held = Self(Box::pin(async move { client.say("zzz").await }));
        assert!(held.poll().is_pending());
        held
    }

    fn poll(&mut self) -> Poll<Result<String, Status>> {
        self.0.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()))
    }
}

async fn device_of_small(client: &mut Client<Channel>) -> String {
    let who = client.who().await.unwrap();
    who.split(" device=").nth(1).unwrap().split(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn overlapping_bulk_goes_over_both_rails_and_the_rest_over_one() {
    let rails = Rails::new().await;
    let (channel, mut client) = rails.all().await;
    let first = device_of_small(&mut client).await;
    let alone = client.say("?").await.unwrap();
    assert_eq!(alone, first, "a call that is alone takes the first connection");
    let held = Held::begin(&client);
    let second = client.say("?").await.unwrap();
    assert_ne!(second, first);
    for _ in 0..5 {
        assert_eq!(device_of_small(&mut client).await, first);
        assert_eq!(client.say("?").await.unwrap(), second);
    }
    let third = Held::begin(&client);
    assert_eq!(client.say("?").await.unwrap(), first, "one call on each");
    drop((held, third));
    let used: Vec<_> = rails.context.pool_stats().await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(used, ["c0", "c1"]);
    assert_eq!((channel.stats().connections, channel.stats().calls_tcp), (2, 0));
    // The list has a connection for each rail, beginning with the connection that decides the path.
    let listed: Vec<_> = channel.connections().into_iter().map(|info| info.device).collect();
    assert_eq!(listed.len(), 2);
    assert_eq!(listed[0], channel.path().device);
    assert_ne!(listed[0], listed[1]);
}

#[tokio::test]
async fn small_calls_have_one_connection_and_so_has_whoever_wants_one_rail() {
    let rails = Rails::new().await;
    let channel = rails.endpoint().connect().await.unwrap();
    let mut client = Client::new(channel.clone());
    let _held: Vec<_> = (0..20).map(|_| Held::begin(&client)).collect();
    client.all_kinds().await;
    assert_eq!(channel.stats().connections, 1);

    for most in [0, 1] {
        let channel = rails.endpoint().rails(most).connect().await.unwrap();
        let mut client = Client::new(channel.clone());
        bulk(&mut client).await;
        let _held: Vec<_> = (0..20).map(|_| Held::begin(&client)).collect();
        bulk(&mut client).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!((channel.stats().attempts, channel.stats().connections), (1, 1));
    }
}

#[tokio::test]
async fn a_lost_rail_costs_its_own_calls_and_comes_back() {
    let rails = Rails::new().await;
    let (channel, mut client) = rails.all().await;
    let first = device_of_small(&mut client).await;
    let lost = rails.server.iter().find(|device| device.name() == first).unwrap();
    let (mut on_first, mut on_second) = (Held::begin(&client), Held::begin(&client));
    lost.lose_connects(true);
    lost.cut();
    until(|| async { channel.stats().connections_lost == 1 }).await;
    let mut ended = Poll::Pending;
    until(|| {
        ended = on_first.poll();
        std::future::ready(ended.is_ready())
    })
    .await;
    let Poll::Ready(Err(status)) = ended else { panic!("{ended:?}") };
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    // Calls use the other rail. With Policy::Require, each call would fail over TCP.
    for _ in 0..20 {
        assert_ne!(device_of_small(&mut client).await, first);
        bulk(&mut client).await;
    }
    assert!(on_second.poll().is_pending(), "the other rail's call goes on");
    assert_eq!(channel.path().path, Path::Sim);
    lost.lose_connects(false);
    // The lost rail is connected again now, because calls overlap with the call that is held.
    until(|| async {
        bulk(&mut client.clone()).await;
        channel.stats().connections == 3
    })
    .await;
    until(|| async { client.clone().say("?").await.unwrap() == first }).await;
    let stats = channel.stats();
    assert_eq!((stats.calls_tcp, stats.connections_lost), (0, 1), "{stats:?}");
}

#[tokio::test]
async fn the_first_of_three_rails_is_replaced_and_a_lost_further_one_takes_no_other_with_it() {
    let rails = Rails::with(3).await;
    let (channel, mut client) = rails.all().await;
    let device = |name: &str| rails.server.iter().find(|device| device.name() == name).unwrap();
    let first = device_of_small(&mut client).await;
    let _held = [Held::begin(&client), Held::begin(&client), Held::begin(&client)];
    // Lose a further connection first, and then the first connection.
    let further = rails.server.iter().find(|device| device.name() != first).unwrap();
    for (number, lost) in [(1, further), (2, device(&first))] {
        lost.lose_connects(true);
        lost.cut();
        until(|| async { channel.stats().connections_lost == number }).await;
        for _ in 0..10 {
            bulk(&mut client.clone()).await;
        }
    }
    let second = device_of_small(&mut client).await;
    assert!(second != first && second != further.name(), "{first}, {}, {second}", further.name());
    let stats = channel.stats();
    assert_eq!(
        (stats.connections, stats.connections_lost, stats.calls_tcp),
        (3, 2, 0),
        "{stats:?}"
    );
}

/// A call that waits until the server allows one more was not sent, so it may move.
#[tokio::test]
async fn a_call_that_was_not_sent_moves_to_another_rail_and_not_to_tcp() {
    let rails = Rails::with_server(2, Server::builder().max_concurrent_streams(4)).await;
    let (channel, mut client) = rails.all_of(rails.endpoint().policy(Policy::Auto)).await;
    let first = device_of_small(&mut client).await;
    let mut held: Vec<_> = (0..8).map(|_| Held::begin(&client)).collect();
    // Every second held call is on the second rail.
    let mut number = 0;
    held.retain(|_| {
        number += 1;
        number % 2 == 1
    });
    let mut waiting = client.clone();
    let waiting = async move { device_of_small(&mut waiting).await };
    let mut waiting = std::pin::pin!(waiting);
    let waker = &mut TaskContext::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(waker).is_pending());
    rails.server.iter().find(|device| device.name() == first).unwrap().cut();
    let device = tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap();
    assert_ne!(device, first);
    let stats = channel.stats();
    assert_eq!(
        (stats.calls_tcp, stats.calls_moved, stats.connections_lost),
        (0, 1, 1),
        "{stats:?}"
    );
}

/// A rail that does not work is tried again while it is needed, and otherwise left alone.
#[tokio::test]
async fn a_rail_that_never_works_is_not_tried_without_need() {
    let rails = Rails::new().await;
    let channel = rails.endpoint().connect().await.unwrap();
    let mut client = Client::new(channel.clone());
    let first = device_of_small(&mut client).await;
    for device in rails.server.iter().filter(|device| device.name() != first) {
        device.remove();
    }
    let held = Held::begin(&client);
    until(|| async {
        bulk(&mut client.clone()).await;
        channel.stats().attempts >= 3
    })
    .await;
    drop(held);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let after = channel.stats().attempts;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(channel.stats().attempts <= after + 1, "{:?}", channel.stats());
    assert_eq!((channel.stats().connections, channel.stats().calls_tcp), (1, 0));
}

#[tokio::test]
async fn sixty_channels_spread_over_the_rails() {
    let rails = Rails::new().await;
    let mut channels = Vec::new();
    let mut on = [0, 0];
    for _ in 0..60 {
        let channel = rails.endpoint().connect().await.unwrap();
        let device = device_of_small(&mut Client::new(channel.clone())).await;
        on[rails.server.iter().position(|of| of.name() == device).unwrap()] += 1;
        channels.push(channel);
    }
    assert_eq!(on, [30, 30]);
}

#[tokio::test]
async fn a_client_of_one_device_takes_turns_at_those_of_the_server() {
    let rails = Rails::new().await;
    let context = context(&rails.client[..1]);
    let mut on = Vec::new();
    for _ in 0..4 {
        let channel = rails.endpoint().context(context.clone()).connect().await.unwrap();
        let mut client = Client::new(channel.clone());
        on.push(device_of_small(&mut client).await);
        bulk(&mut client).await;
        let _held = Held::begin(&client);
        bulk(&mut client).await;
        assert_eq!(channel.stats().attempts, 1, "there is no second rail");
    }
    assert_eq!(on, ["s0", "s1", "s0", "s1"]);
}

/// The server accepts over its first device, and the client does not learn of this. The ticket is
/// then spent, and the next rail needs another ticket.
#[tokio::test]
async fn an_answer_that_is_lost_costs_no_other_rail() {
    let rails = Rails::new().await;
    rails.server[0].lose_accepts(true);
    for _ in 0..3 {
        let channel = rails.endpoint().connect().await.unwrap();
        assert_eq!(channel.stats().attempts, 1);
        assert_eq!(device_of_small(&mut Client::new(channel)).await, "s1");
    }
}

#[tokio::test]
async fn a_device_that_does_not_answer_is_passed_by() {
    let rails = Rails::new().await;
    rails.server[0].lose_connects(true);
    for _ in 0..3 {
        let channel = rails.endpoint().connect().await.unwrap();
        assert_eq!(device_of_small(&mut Client::new(channel)).await, "s1");
    }
}

/// If two requests or two answers are lost, the channel sends a third request, and keeps its rail.
#[tokio::test]
async fn a_datagram_that_is_lost_is_no_verdict() {
    for lose_next in [SimDevice::lose_next_connects, SimDevice::lose_next_accepts] {
        for lost in [1, 2] {
            let rails = Rails::new().await;
            lose_next(&rails.server[0], lost);
            let channel = rails.endpoint().connect().await.unwrap();
            assert_eq!(channel.stats().attempts, 1);
            assert_eq!(device_of_small(&mut Client::new(channel)).await, "s0");
        }
    }
}
