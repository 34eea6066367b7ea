//! A connection's share of the landing budget while others wait.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::{Woken, assert_unused, small};
use tonic_rdma_memory::{Excess, Landing, LandingBuf};

/// Allocates as many pieces of length `each` as the connection may have.
fn everything(landing: &mut Landing, each: usize) -> Vec<LandingBuf> {
    std::iter::from_fn(|| landing.alloc(each, each).unwrap()).collect()
}

/// Drops the pieces of chunks that are being reclaimed, as if the peer had returned them.
fn give_back(pieces: &mut Vec<LandingBuf>) -> usize {
    let before = pieces.len();
    pieces.retain(|piece| !piece.is_wanted_back());
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
    assert_eq!(hog.keep_share(), Excess::None, "nobody waits");
    assert!(other.alloc(each, each).unwrap().is_none());
    assert_eq!(hog.share(), pool.config().landing / 2);
    assert_eq!(hog.keep_share(), Excess::More);
    assert_eq!(hog.keep_share(), Excess::Same);
    let kept: usize = held.iter().filter(|p| !p.is_wanted_back()).map(LandingBuf::capacity).sum();
    assert!(kept > 0 && kept <= hog.share(), "{kept}");
    // Until then it gets no memory from the chunks that are being reclaimed.
    let at = held.iter().position(LandingBuf::is_wanted_back).unwrap();
    drop(held.swap_remove(at));
    assert!(hog.alloc(each, each).unwrap().is_none());
    assert!(give_back(&mut held) > 0);
    hog.trim();
    assert_eq!(hog.keep_share(), Excess::None);
    let share = everything(&mut other, each);
    let bytes: usize = share.iter().map(LandingBuf::capacity).sum();
    assert!(bytes >= pool.config().landing / 2 - pool.config().chunk, "{bytes}");
    drop((held, share, hog, other));
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
            if landing.wanted_elsewhere() {
                landing.keep_share();
                // The peer returns the reclaimed pieces, or its connection is closed.
                give_back(held);
                landing.trim();
            }
        }
    }
    assert!(got.is_some());
}

/// A connection whose only chunk is held by readers may continue to use it.
#[test]
fn the_only_chunk_stays_usable_while_readers_hold_it() {
    let (pool, _ledger) = small();
    let landing = pool.config().landing;
    let (mut one, mut other) = (pool.landing(), pool.landing());
    let whole = one.alloc(landing, landing).unwrap().unwrap();
    assert!(other.alloc(4096, 4096).unwrap().is_none());
    assert_eq!(one.keep_share(), Excess::More, "it is granted, and can be asked back");
    assert!(whole.is_wanted_back());
    let read = whole.filled(usize::MAX);
    assert_eq!(one.keep_share(), Excess::None, "it is read");
    drop(read);
    one.trim();
    assert!(other.alloc(4096, 4096).unwrap().is_some());
}

/// After DONE, granules that were granted but not written no longer count as granted.
#[test]
fn a_partly_written_chunk_is_held_by_readers_only() {
    let (pool, _ledger) = small();
    let landing = pool.config().landing;
    let (mut one, mut other) = (pool.landing(), pool.landing());
    let whole = one.alloc(landing, landing).unwrap().unwrap();
    let read = whole.filled(landing - 3 * 4096);
    let rest: Vec<_> = std::iter::from_fn(|| one.alloc(4096, 4096).unwrap()).collect();
    let read_too: Vec<_> = rest.into_iter().map(|piece| piece.filled(1)).collect();
    assert_eq!(read_too.len(), 3);
    assert!(other.alloc(4096, 4096).unwrap().is_none());
    assert_eq!(one.keep_share(), Excess::None, "nothing of it is granted");
    drop((read, read_too));
}

/// A connection limited by its share is woken when no other waits, even if no memory came free.
#[test]
fn a_connection_limited_by_its_share_is_woken() {
    let (pool, _ledger) = small();
    let (chunk, landing) = (pool.config().chunk, pool.config().landing);
    let (mut hog, mut other) = (pool.landing(), pool.landing());
    let (woken, waker) = Woken::new();
    hog.register_waker(&waker);
    let held: Vec<LandingBuf> =
        (0..landing / chunk - 1).map(|_| hog.alloc(chunk, chunk).unwrap().unwrap()).collect();
    // More than is left, so that this connection waits.
    assert!(other.alloc(2 * chunk, 2 * chunk).unwrap().is_none());
    let before = woken.count();
    assert!(hog.alloc(chunk, chunk).unwrap().is_none(), "the last chunk is not for it");
    other.stop_waiting();
    assert!(woken.count() > before);
    assert!(hog.alloc(chunk, chunk).unwrap().is_some());
    drop(held);
}
