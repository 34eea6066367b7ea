//! Tests bare connections: connections for a diagnosis, which a server serves one at a time and for
//! a limited time.

use std::time::Duration;

use tonic_rdma_fabric::bare::{Bare, BareError, BareLimits};
use tonic_rdma_fabric::{Connected, Link as _};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Config, Hello, Reject};

use crate::bootstrap::pb::offer_response::Outcome;
use crate::bootstrap::tickets::BARE_LIMIT;
use crate::tests::admission::tickets::Hand;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, World};

/// Connects with a ticket for a bare connection (`bare`) or for calls.
async fn admitted(hand: &mut Hand<'_>, bare: bool) -> Result<(Connected, Pool), Reject> {
    hand.bare = bare;
    let (ticket, addr) = hand.ticket().await;
    let hello = Hello::new(ticket, Config::default().settings()).encode();
    hand.connect(addr, &hello).await
}

async fn open(hand: &mut Hand<'_>) -> Result<Bare, Reject> {
    let (connected, pool) = admitted(hand, true).await?;
    Ok(Bare::open(connected.link, pool, BareLimits::default()).await.unwrap())
}

/// Starts a server that measures.
async fn serve(world: &World) -> Serving {
    Serving::start(world.builder().measuring(true).add_service(Echo)).await
}

/// Checks that calls succeed over the fast path.
async fn calls(world: &World, serving: &Serving) {
    let channel = world.connect(serving).await;
    assert!(channel.path().path.is_fast(), "{}", channel.path());
    assert_eq!(Client::new(channel).say("x").await.unwrap(), "x");
}

/// The server grants a ticket for calls, although the client asked for a ticket for a bare
/// connection. On the client's connection, a measuring peer's messages then break the protocol.
#[tokio::test]
async fn a_server_that_did_not_turn_it_on_serves_none() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = world.serve().await;
    let mut hand = Hand::new(&world, &serving).await;
    hand.bare = true;
    let Outcome::Grant(grant) = hand.ask().await else { panic!("refused") };
    assert!(!grant.bare);
    let (connected, pool) = admitted(&mut hand, true).await.unwrap();
    let error =
        Bare::open(connected.link, pool, BareLimits::default()).await.map(drop).unwrap_err();
    assert!(!matches!(error, BareError::Pool(_)), "{error}");
    assert_eq!(logs.lines_with("bare connection").len(), 0);
    let diagnosis = crate::diagnose().peer(world.endpoint(&serving)).await.unwrap();
    let peer = diagnosis.peer.unwrap();
    assert_eq!((peer.bare, peer.not_measured), (None, None));
    let why = peer.not_bare.unwrap();
    assert!(why.ends_with("the feature `measure` and Server::measuring(true)"), "{why}");
    calls(&world, &serving).await;
}

#[tokio::test]
async fn one_at_a_time_and_others_are_told() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = serve(&world).await;
    let mut hand = Hand::new(&world, &serving).await;
    let mut first = open(&mut hand).await.unwrap();
    assert_eq!(open(&mut hand).await.map(drop).unwrap_err(), Reject::Bare);
    assert_eq!(logs.lines_with("fast path refused").len(), 1);
    // The bare connection takes no pool memory that calls need.
    calls(&world, &serving).await;
    let len = first.longest();
    assert!((4096..1 << 20).contains(&len), "{len} bytes of a pool of 8 MiB");
    first.write(len, 20, 8).await.unwrap();
    first.written(len, 20, 8).await.unwrap();
    first.close();
    // The next bare connection is accepted once the server has noticed the end of the first.
    loop {
        match open(&mut hand).await {
            Ok(mut second) => break second.echo(64, 1, 1).await.unwrap(),
            Err(reject) => assert_eq!(reject, Reject::Bare),
        }
    }
}

#[tokio::test]
async fn a_diagnosis_that_gets_none_measures_the_rest() {
    let world = World::new();
    let serving = serve(&world).await;
    let _other = open(&mut Hand::new(&world, &serving).await).await.unwrap();
    let diagnosis = crate::diagnose().peer(world.endpoint(&serving)).await.unwrap();
    let peer = diagnosis.peer.unwrap();
    assert_eq!((peer.bare, peer.not_measured), (None, None));
    assert!(peer.rates.iter().all(|rates| rates.bare_per_s.is_none()), "{:?}", peer.rates);
    assert!(peer.rates.len() == 14 && peer.fast.is_some());
    let why = peer.not_bare.unwrap();
    assert!(why.starts_with("peer: limit-reached: another diagnosis"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn it_ends_when_its_time_is_over() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = serve(&world).await;
    let mut hand = Hand::new(&world, &serving).await;
    let mut bare = open(&mut hand).await.unwrap();
    tokio::time::sleep(BARE_LIMIT - Duration::from_secs(1)).await;
    bare.echo(64, 1, 1).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let error = bare.echo(64, 1, 1).await.unwrap_err();
    assert!(matches!(error, BareError::Link(_)), "{error}");
    assert_eq!(logs.lines_with("bare connection closed: too old").len(), 1);
    let stats = world.server_context.pool_stats().await;
    assert_eq!(stats[0].1.in_use_bytes(), 0, "all memory has come back");
}

#[tokio::test]
async fn it_ends_when_the_server_does() {
    let world = World::new();
    let mut serving = serve(&world).await;
    let mut hand = Hand::new(&world, &serving).await;
    let mut bare = open(&mut hand).await.unwrap();
    serving.stop();
    let error = bare.echo(64, 1_000_000_000, 1).await.unwrap_err();
    assert!(matches!(error, BareError::Link(_)), "{error}");
    drop(hand);
    serving.ended().await.unwrap();
}

/// One peer sends the protocol of calls over a bare connection, and another peer measures over a
/// connection for calls.
#[tokio::test]
async fn a_ticket_is_for_one_kind() {
    let logs = Logs::capture();
    let world = World::new();
    let serving = serve(&world).await;
    let mut hand = Hand::new(&world, &serving).await;
    let (mut connected, _pool) = admitted(&mut hand, true).await.unwrap();
    let greeting = [7; 64];
    connected.link.block_mut()[..64].copy_from_slice(&greeting);
    let work = tonic_rdma_fabric::Work::Send { offset: 0, len: 64 };
    let _ = connected.link.queue(1, work, true).unwrap();
    connected.link.ring_doorbell().unwrap();
    let mut out = Vec::new();
    while std::future::poll_fn(|cx| connected.link.poll(cx, &mut out)).await.is_ok() {}
    let ended = logs.lines_with("bare connection ended");
    let described = "unknown kind 7: expected 1 to 4, received 64 bytes";
    assert!(ended.len() == 1 && ended[0].contains(described), "{ended:?}");

    let (connected, pool) = admitted(&mut hand, false).await.unwrap();
    let error =
        Bare::open(connected.link, pool, BareLimits::default()).await.map(drop).unwrap_err();
    assert!(!matches!(error, BareError::Pool(_)), "{error}");
    calls(&world, &serving).await;
}
