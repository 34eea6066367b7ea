//! Turns of a bare connection whose link completes everything at once (R20).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tonic_rdma_memory::{Pool, PoolConfig};

use super::message::{self, BarePlace, Writes};
use super::*;
use crate::bare::end::SLOTS;
use crate::provider::Fabric;
use crate::sim::{InstantCounts, InstantLink, InstantPeer, SimConfig, SimNet};

/// The maximum number of operations in a turn: tokio's budget, and the operations of one step,
/// because one poll can fill all RECVs.
const MAX_TURN: u64 = 128 + SLOTS as u64 + 8;
/// The number of turns that are observed.
const TURNS: usize = 100;

fn pool() -> Pool {
    let device = SimNet::new(SimConfig::default()).device("sim0", [10, 0, 0, 1].into());
    Pool::new(PoolConfig::default(), Fabric::Sim(device).registrar()).unwrap()
}

/// A peer that sends `first`, then `then` for ever.
struct Endless {
    first: std::vec::IntoIter<Vec<u8>>,
    then: Vec<u8>,
}

impl InstantPeer for Endless {
    fn receive(&mut self, _: &[u8]) {}

    fn next_message(&mut self) -> Option<Vec<u8>> {
        Some(self.first.next().unwrap_or_else(|| self.then.clone()))
    }
}

fn peer(first: Vec<Vec<u8>>, then: Vec<u8>) -> (AnyLink, Arc<InstantCounts>) {
    let link = InstantLink::new(&config(), Endless { first: first.into_iter(), then });
    let counts = link.counts();
    (AnyLink::Instant(link), counts)
}

fn places() -> Vec<u8> {
    let mut out = Vec::new();
    message::places(&[BarePlace { addr: 4096, rkey: 7, len: 1 << 20 }], &mut out);
    out
}

/// Returns the number of operations in each of the first [`TURNS`] turns of a future that never
/// ends.
async fn turns(endless: impl Future, counts: &InstantCounts) -> Vec<u64> {
    let mut endless = pin!(endless);
    let (mut turns, mut before) = (Vec::new(), 0);
    poll_fn(|cx| {
        assert!(endless.as_mut().poll(cx).is_pending(), "after {turns:?}");
        let now = counts.operations();
        turns.push(now - before);
        before = now;
        if turns.len() < TURNS { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    turns
}

/// Checks that the server yields in a loop that a peer keeps busy, and then continues.
async fn leaves(first: Vec<Vec<u8>>, then: Vec<u8>) {
    let (link, counts) = peer(first, then);
    // The usual limit on WRITEs would refuse the request, but the loop must yield with any limit.
    let limits = BareLimits { requested_writes: u64::MAX, ..BareLimits::default() };
    let turns = turns(serve(link, pool(), limits), &counts).await;
    assert!(turns.iter().all(|turn| (1..=MAX_TURN).contains(turn)), "{turns:?}");
}

fn writes(len: u32, count: u32, in_flight: u32) -> Vec<u8> {
    let mut out = Vec::new();
    message::write(Writes { len, count, in_flight }, &mut out);
    out
}

#[tokio::test]
async fn writes_of_one_byte_leave_the_turn() {
    leaves(vec![places()], writes(1, 1 << 14, u32::MAX)).await;
}

#[tokio::test]
async fn requests_of_one_write_leave_the_turn() {
    leaves(vec![places()], writes(1, 1, 1)).await;
}

#[tokio::test]
async fn echoes_leave_the_turn() {
    leaves(vec![], vec![1; 64]).await;
}

/// A WRITE of 1 MiB is charged as 17 operations.
#[tokio::test]
async fn copied_bytes_are_charged() {
    let (link, counts) = peer(vec![places()], writes(1 << 20, 1 << 10, 8));
    let turns = turns(serve(link, pool(), BareLimits::default()), &counts).await;
    // One call to `look` can fill all RECVs.
    let looks = 2 * SLOTS as u64;
    let total = turns.iter().sum::<u64>() - looks;
    assert!((TURNS as u64 * 4..=TURNS as u64 * (128 / 16)).contains(&total), "{turns:?}");
}

/// Checks the measuring end, with a peer that answers before it gets a request.
#[tokio::test]
async fn a_measurement_leaves_the_turn() {
    let mut echo = Vec::new();
    message::echo(1, &mut echo);
    let (link, counts) = peer(vec![places()], echo);
    let measured = async {
        let mut bare = Bare::open(link, pool(), BareLimits::default()).await.unwrap();
        loop {
            bare.write(1, 1 << 20, 1000).await.unwrap();
            bare.echo(64, 1 << 20, 16).await.unwrap();
        }
    };
    let turns = turns(measured, &counts).await;
    assert!(turns.iter().all(|turn| (1..=MAX_TURN).contains(turn)), "{turns:?}");
}
