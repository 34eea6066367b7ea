//! The limit on landing memory that the application holds.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::{assert_unused, pool, small};
use tonic_rdma_memory::{Landed, Landing, PoolConfig};

/// Lands `len` bytes in a new piece.
fn land(landing: &mut Landing, len: usize) -> Option<Landed> {
    landing.alloc(len, len).unwrap().map(|piece| piece.filled(len))
}

/// Holds every landed piece until the application may hold no more, and returns them.
fn hold_all(landing: &mut Landing, len: usize) -> Vec<Landed> {
    std::iter::from_fn(|| land(landing, len).filter(Landed::hold)).collect()
}

#[test]
fn only_what_has_landed_and_is_held_counts() {
    let (pool, _) = small();
    let budget = pool.config().landing;
    let mut landing = pool.landing();
    // Granted memory, and landed memory that is unread, do not count as held.
    let granted = landing.alloc(budget / 2, 1).unwrap().unwrap();
    let unread = land(&mut landing, budget / 4).unwrap();
    assert_eq!(pool.stats().held, 0);
    let piece = land(&mut landing, 10_000).unwrap();
    assert!(piece.is_in_pool() && piece.hold() && piece.hold());
    assert_eq!(pool.stats().held, 12 << 10, "whole granules, once");
    let lent = piece.clone().lend();
    drop(piece);
    assert_eq!(pool.stats().held, 12 << 10);
    // The last bytes may be dropped on any thread.
    std::thread::spawn(move || drop(lent)).join().unwrap();
    assert_eq!(pool.stats().held, 0);
    drop((granted, unread));
    assert!(Landed::from(bytes::Bytes::from_static(b"elsewhere")).hold());
    assert_eq!((pool.stats().filled, pool.stats().granted, pool.stats().held), (0, 0, 0));
}

#[test]
fn a_connection_alone_holds_three_quarters() {
    let (pool, _) = pool(PoolConfig::default().total(16 << 20));
    let budget = pool.config().landing;
    let mut landing = pool.landing();
    let held = hold_all(&mut landing, 64 << 10);
    assert_eq!(pool.stats().held, budget / 4 * 3);
    assert_eq!(held.len() * (64 << 10), budget / 4 * 3);
    // Data that lands from now on is copied, and its memory becomes free again.
    for _ in 0..100 {
        assert!(!land(&mut landing, 64 << 10).unwrap().hold());
    }
    drop(held);
    assert!(land(&mut landing, 64 << 10).unwrap().hold());
    assert_unused(&pool);
}

/// An application that never drops what it holds can still receive, and so can other connections,
/// with any length of message, any share and any limit.
#[test]
fn whoever_keeps_everything_goes_on_receiving() {
    const MIN: usize = 16 << 10;
    for total in [2 << 20, 8 << 20, 64 << 20] {
        for len in [4096, 60 << 10, 300 << 10, (1 << 20) + 4096] {
            for limit in [256 << 10, 1 << 20, usize::MAX] {
                let (pool, registrar) = pool(PoolConfig::default().total(total));
                let mut kept = Vec::new();
                let mut connections: Vec<Landing> = Vec::new();
                for n in 0..12 {
                    connections.push(pool.landing_up_to(limit));
                    // Many rounds, in which the application returns nothing that it holds.
                    for round in 0..200 {
                        // Every third message is short.
                        let want = if round % 3 == 1 { MIN } else { len };
                        let mut tries = 0;
                        let piece = loop {
                            if let Some(piece) = connections[n].alloc(want, MIN.min(want)).unwrap()
                            {
                                break piece;
                            }
                            tries += 1;
                            assert!(tries < 4, "{total} {len} {limit}: connection {n} is stuck");
                            for other in &mut connections[..n] {
                                other.enforce_share();
                                other.return_reclaimed();
                            }
                            if tries > 1 {
                                connections[n].starve();
                            }
                        };
                        let landed = piece.filled(want);
                        if landed.hold() {
                            kept.push(landed);
                        }
                    }
                    connections[n].stop_waiting();
                }
                let stats = pool.stats();
                assert!(stats.held <= pool.config().landing / 4 * 3);
                assert_eq!(stats.held, stats.filled);
                drop((kept, connections, pool));
                registrar.assert_settled();
            }
        }
    }
}
