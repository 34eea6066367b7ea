//! A connection's share of the landing budget while others wait.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::{Woken, assert_unused, page, small};
use tonic_rdma_memory::{Landing, LandingBuf, Reclaim};

/// Allocates as many pieces of length `each` as the connection may have.
fn everything(landing: &mut Landing, each: usize) -> Vec<LandingBuf> {
    std::iter::from_fn(|| landing.alloc(each, each).unwrap()).collect()
}

/// Drops the pieces of chunks that are being reclaimed, as if the peer had returned them.
fn return_reclaimed(pieces: &mut Vec<LandingBuf>) -> usize {
    let before = pieces.len();
    pieces.retain(|piece| !piece.is_reclaiming());
    before - pieces.len()
}

#[test]
fn a_single_connection_may_have_all_and_yields_to_a_waiter() {
    let (pool, _ledger) = small();
    let each = pool.config().chunk / 4;
    let (mut hog, mut other) = (pool.landing(), pool.landing());
    let mut held = everything(&mut hog, each);
    hog.stop_waiting();
    assert!(hog.leased() > pool.config().landing - pool.config().chunk, "alone it has all");
    assert_eq!(hog.enforce_share(), Reclaim::None, "nobody waits");
    assert!(other.alloc(each, each).unwrap().is_none());
    assert_eq!(hog.share(), pool.config().landing / 2);
    assert_eq!(hog.enforce_share(), Reclaim::New);
    assert_eq!(hog.enforce_share(), Reclaim::Pending);
    let kept: usize = held.iter().filter(|p| !p.is_reclaiming()).map(LandingBuf::capacity).sum();
    assert!(kept > 0 && kept <= hog.share(), "{kept}");
    // The hog gets no memory from the chunks that are being reclaimed, even if a piece of them is
    // free.
    let at = held.iter().position(LandingBuf::is_reclaiming).unwrap();
    drop(held.swap_remove(at));
    assert!(hog.alloc(each, each).unwrap().is_none());
    assert!(return_reclaimed(&mut held) > 0);
    hog.return_reclaimed();
    assert_eq!(hog.enforce_share(), Reclaim::None);
    let share = everything(&mut other, each);
    let bytes: usize = share.iter().map(LandingBuf::capacity).sum();
    assert!(bytes >= pool.config().landing / 2 - pool.config().chunk, "{bytes}");
    drop((held, share, hog, other));
    assert_unused(&pool);
}

/// Chunks that an allocation selects are reported by the next call to `enforce_share`, because
/// their pieces have to be recalled from the peer.
#[test]
fn chunks_selected_by_an_allocation_are_reported() {
    let (pool, _ledger) = small();
    let each = pool.config().chunk / 4;
    let (mut hog, mut other, mut third) = (pool.landing(), pool.landing(), pool.landing());
    let held = everything(&mut hog, each);
    hog.stop_waiting();
    assert!(other.alloc(each, each).unwrap().is_none());
    assert_eq!(hog.enforce_share(), Reclaim::New);
    let selected = held.iter().filter(|piece| piece.is_reclaiming()).count();
    // A third connection makes the share smaller, and the hog allocates before it calls
    // `enforce_share`.
    assert!(third.alloc(each, each).unwrap().is_none());
    assert!(hog.alloc(each, each).unwrap().is_none());
    hog.stop_waiting();
    assert!(held.iter().filter(|piece| piece.is_reclaiming()).count() > selected);
    assert_eq!(hog.enforce_share(), Reclaim::New);
    assert_eq!(hog.enforce_share(), Reclaim::Pending);
    drop((held, hog, other, third));
    assert_unused(&pool);
}

/// Eight connections that keep all their memory still leave room for another one.
#[test]
fn connections_that_keep_their_memory_leave_room() {
    let (pool, _ledger) = small();
    let each = 64 << 10;
    let mut hoarders: Vec<(Landing, Vec<LandingBuf>)> =
        (0..8).map(|_| (pool.landing(), Vec::new())).collect();
    let mut victim = pool.landing();
    let mut got = None;
    for _ in 0..16 {
        for (landing, held) in &mut hoarders {
            held.extend(everything(landing, each));
        }
        got = victim.alloc(each, each).unwrap();
        if got.is_some() {
            break;
        }
        for (landing, held) in &mut hoarders {
            if landing.others_claim() {
                landing.enforce_share();
                // The peer returns the reclaimed pieces, or its connection is closed.
                return_reclaimed(held);
                landing.return_reclaimed();
            }
        }
    }
    assert!(got.is_some());
}

/// A connection may go on using its only chunk if the application holds a piece of the chunk.
#[test]
fn the_only_chunk_stays_usable_while_the_application_holds_it() {
    let (pool, _ledger) = small();
    let landing = pool.config().landing;
    let (mut one, mut other) = (pool.landing(), pool.landing());
    let long = one.alloc(landing / 8 * 5, landing / 8 * 5).unwrap().unwrap();
    let need = landing / 16 * 7;
    assert!(other.alloc(need, need).unwrap().is_none());
    assert_eq!(one.enforce_share(), Reclaim::New, "it is granted, and can be asked back");
    assert!(long.is_reclaiming());
    let read = long.filled(usize::MAX);
    assert_eq!(one.enforce_share(), Reclaim::Pending, "the transport has it, and can copy it");
    assert!(!read.hold(), "it exceeds the share");
    other.stop_waiting();
    assert!(read.hold());
    assert!(other.alloc(need, need).unwrap().is_none());
    assert_eq!(one.enforce_share(), Reclaim::None, "nothing brings it back");
    drop(read);
    assert_eq!(one.enforce_share(), Reclaim::New);
    one.return_reclaimed();
    assert!(other.alloc(need, need).unwrap().is_some());
}

/// A connection keeps its share, however many others wait.
#[test]
fn nothing_within_a_share_is_given_back() {
    let (pool, _ledger) = small();
    let (landing, each) = (pool.config().landing, 64 << 10);
    let mut connections: Vec<Landing> = (0..4).map(|_| pool.landing()).collect();
    let share = landing / 4;
    let held: Vec<Vec<LandingBuf>> = connections
        .iter_mut()
        .map(|landing| {
            (0..share / each).map(|_| landing.alloc(each, each).unwrap().unwrap()).collect()
        })
        .collect();
    drop(held);
    let registrations = pool.stats().registrations;
    // Each connection waits for more than its share, and all of their memory becomes idle in each
    // round.
    for _ in 0..10 {
        let held: Vec<Vec<LandingBuf>> =
            connections.iter_mut().map(|landing| everything(landing, each)).collect();
        for (landing, held) in connections.iter_mut().zip(&held) {
            assert!(held.len() >= share / each, "{} pieces", held.len());
            assert!(!landing.others_claim(), "who has its share is no claim on others");
            assert_eq!(landing.enforce_share(), Reclaim::None);
            assert_eq!(landing.return_reclaimed(), 0);
        }
    }
    assert_eq!(pool.stats().registrations, registrations);
}

/// The budget has room for the smallest shares of all connections but one, and all of it is leased.
/// The connection without memory gets a chunk when it starves.
#[test]
fn one_that_starves_gets_a_chunk_of_a_share() {
    let (pool, _ledger) = small();
    let each = 32 << 10;
    let n = pool.config().landing / each + 1;
    let mut connections: Vec<Landing> = (0..n).map(|_| pool.landing_up_to(each)).collect();
    let mut held: Vec<Option<LandingBuf>> =
        connections.iter_mut().map(|landing| landing.alloc(each, each).unwrap()).collect();
    for _ in 0..3 {
        let victim = held.iter().position(Option::is_none).unwrap();
        assert!(connections[victim].alloc(each, each).unwrap().is_none());
        for landing in &mut connections {
            assert_eq!(landing.enforce_share(), Reclaim::None, "all are within their shares");
        }
        connections[victim].starve();
        assert!(connections[victim].alloc(each, each).unwrap().is_none());
        // The next connection that has a chunk returns it.
        let other = (1..n).map(|at| (victim + at) % n).find(|at| held[*at].is_some()).unwrap();
        assert_eq!(connections[other].enforce_share(), Reclaim::New);
        held[other] = held[other].take().filter(|piece| !piece.is_reclaiming());
        assert!(connections[other].return_reclaimed() >= each);
        held[victim] = connections[victim].alloc(each, each).unwrap();
        assert!(held[victim].is_some());
        let waits = connections[other].alloc(each, each).unwrap();
        assert!(waits.is_none(), "its turn will come");
        connections[other].stop_waiting();
    }
}

/// A chunk has room for several messages without a remainder, and a connection with more memory
/// gets longer chunks.
#[test]
fn chunks_hold_several_pieces() {
    let (pool, _) = common::pool(tonic_rdma_memory::PoolConfig::default());
    let mut landing = pool.landing();
    let each = (1 << 20) + page();
    let mut lengths = Vec::new();
    let mut held = Vec::new();
    while held.len() < 16 {
        let leased = landing.leased();
        held.push(landing.alloc(each, each).unwrap().unwrap());
        if landing.leased() > leased {
            lengths.push((landing.leased() - leased) / each);
            assert_eq!((landing.leased() - leased) % each, 0, "no rest");
        }
    }
    assert!(lengths.len() <= 8 && lengths.iter().max() >= Some(&3), "{lengths:?}");
    // A second connection still gets its share.
    let mut other = pool.landing();
    let all = everything(&mut other, each);
    assert!(all.len() >= 14, "{}", all.len());
}

/// Pieces that a connection can do without are taken within the share only.
#[test]
fn spare_pieces_are_within_the_share() {
    let (pool, _ledger) = small();
    let (landing, each) = (pool.config().landing, 64 << 10);
    let (mut one, mut two) = (pool.landing(), pool.landing());
    let _two = two.alloc(each, each).unwrap().unwrap();
    let mut spare = Vec::new();
    while let Some(piece) = one.alloc_spare(each).unwrap() {
        spare.push(piece);
    }
    assert!(one.leased() <= landing / 2 && one.leased() + each > landing / 2);
    assert!(!two.others_claim(), "it waits for nothing");
    assert!(one.alloc(each, each).unwrap().is_some(), "what is needed goes beyond");
}

/// A connection limited by its share is woken when no other connection waits any longer, even if no
/// memory has become free.
#[test]
fn a_connection_limited_by_its_share_is_woken() {
    let (pool, _ledger) = small();
    let (chunk, landing) = (pool.config().chunk, pool.config().landing);
    let (mut hog, mut other) = (pool.landing(), pool.landing());
    let (woken, waker) = Woken::new();
    hog.register_waker(&waker);
    let first = other.alloc(chunk, chunk).unwrap().unwrap();
    let mut held = Vec::new();
    while pool.stats().leased < landing - chunk {
        held.push(hog.alloc(chunk, chunk).unwrap().unwrap());
    }
    // The request is longer than the free memory, so the connection waits.
    assert!(other.alloc(2 * chunk, 2 * chunk).unwrap().is_none());
    let before = woken.count();
    assert!(hog.alloc(chunk, chunk).unwrap().is_none(), "the last chunk is not for it");
    other.stop_waiting();
    assert!(woken.count() > before);
    assert!(hog.alloc(chunk, chunk).unwrap().is_some());
    drop((first, held));
}
