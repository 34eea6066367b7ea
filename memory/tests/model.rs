//! Random sequences of operations, checked against a model.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::{BufMut, Bytes};
use common::{assert_budgets, assert_unused, of_rkey, small, usage};
use proptest::collection::vec;
use proptest::prelude::*;
use tonic_rdma_memory::{Alloc, Landing, LandingBuf, PinnedBuf, PoolError, Reclaim, Use};

#[derive(Clone, Debug)]
enum Op {
    TryAlloc(usize),
    Wait(usize),
    Poll(usize),
    Cancel(usize),
    Freeze(usize),
    Slice(usize),
    Control(usize),
    Grant { connection: usize, want: usize, min: usize },
    Fill { piece: usize, begin: usize, len: usize, holds: bool },
    Abort(usize),
    Trim(usize),
    Reopen(usize),
    StopWaiting(usize),
    EnforceShare(usize),
    DropBuf(usize),
    DropBytes(usize),
    DropControl(usize),
    Fail(bool),
}

fn lens() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..10_000,
        4 => 10_000usize..300_000,
        1 => 500_000usize..1_200_000,
        1 => usize::MAX - 5_000..=usize::MAX
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let at = || 0usize..64;
    prop_oneof![
        6 => lens().prop_map(Op::TryAlloc),
        6 => lens().prop_map(Op::Wait),
        4 => at().prop_map(Op::Poll),
        2 => at().prop_map(Op::Cancel),
        3 => at().prop_map(Op::Freeze),
        3 => at().prop_map(Op::Slice),
        2 => lens().prop_map(Op::Control),
        8 => (0usize..4, lens(), lens()).prop_map(|(connection, want, min)| Op::Grant { connection, want, min }),
        3 => (at(), prop_oneof![0..4096usize, lens()], lens(), prop::bool::ANY).prop_map(
            |(piece, begin, len, holds)| Op::Fill { piece, begin, len, holds }
        ),
        3 => at().prop_map(Op::Abort),
        2 => (0usize..4).prop_map(Op::Trim),
        1 => (0usize..4).prop_map(Op::Reopen),
        1 => (0usize..4).prop_map(Op::StopWaiting),
        3 => (0usize..4).prop_map(Op::EnforceShare),
        6 => at().prop_map(Op::DropBuf),
        6 => at().prop_map(Op::DropBytes),
        3 => at().prop_map(Op::DropControl),
        1 => prop::bool::weighted(0.3).prop_map(Op::Fail),
    ]
}

/// Removes an element of a list, if there is one.
fn any<T>(list: &mut Vec<T>, at: usize) -> Option<T> {
    if list.is_empty() { None } else { Some(list.swap_remove(at % list.len())) }
}

/// Fills a buffer with its mark, which another owner of the same memory would overwrite.
fn marked(mut buf: PinnedBuf, len: usize, mark: u8) -> (PinnedBuf, u8) {
    assert_eq!((buf.capacity(), buf.len()), (len, 0));
    buf.put_bytes(mark, len);
    (buf, mark)
}

fn is_marked(bytes: &[u8], mark: u8) -> bool {
    // A comparison of memory is fast even without optimization.
    bytes.first().is_none_or(|first| *first == mark && bytes[1..] == bytes[..bytes.len() - 1])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_operations_agrees_with_the_model(ops in vec(op(), 1..120)) {
        let (pool, registrar) = small();
        let sizes = pool.config().clone();
        let mut cx = Context::from_waker(Waker::noop());
        let mut bufs: Vec<(PinnedBuf, u8)> = Vec::new();
        let mut bytes: Vec<(Bytes, u8)> = Vec::new();
        // Ordered by first poll.
        let mut waits: Vec<(Alloc, usize)> = Vec::new();
        let mut controls: Vec<(PinnedBuf, u8)> = Vec::new();
        let mut connections: Vec<Landing> = (0..4).map(|_| pool.landing()).collect();
        let mut waiting = [false; 4];
        let mut pieces: Vec<(LandingBuf, usize)> = Vec::new();
        let mut fails = false;
        let mut mark = 0u8;
        for op in ops {
            mark = mark.wrapping_add(1);
            match op {
                Op::TryAlloc(len) => match pool.try_alloc(len) {
                    Ok(buf) => bufs.push(marked(buf, len, mark)),
                    Err(PoolError::TooLarge { .. }) => prop_assert!(len > sizes.send),
                    Err(PoolError::Register(_)) => prop_assert!(fails),
                    Err(error) => {
                        prop_assert_eq!(usage(&error), Some(Use::Send));
                        // Some memory is in use, or another request waits.
                        prop_assert!(pool.stats().send > 0 || !waits.is_empty());
                    }
                },
                Op::Wait(len) => {
                    let mut alloc = pool.alloc(len);
                    match Pin::new(&mut alloc).poll(&mut cx) {
                        Poll::Pending => {
                            prop_assert!(pool.stats().send > 0);
                            waits.push((alloc, len));
                        }
                        Poll::Ready(Ok(buf)) => bufs.push(marked(buf, len, mark)),
                        Poll::Ready(Err(PoolError::TooLarge { .. })) => prop_assert!(len > sizes.send),
                        Poll::Ready(Err(error)) => {
                            prop_assert!(fails && matches!(error, PoolError::Register(_)), "{error}")
                        }
                    }
                }
                Op::Poll(at) if !waits.is_empty() => {
                    let at = at % waits.len();
                    let (alloc, len) = &mut waits[at];
                    if let Poll::Ready(result) = Pin::new(alloc).poll(&mut cx) {
                        match result {
                            Ok(buf) => bufs.push(marked(buf, *len, mark)),
                            // The registrar failed when the waiter was served.
                            Err(error) => prop_assert!(matches!(error, PoolError::Register(_)), "{error}"),
                        }
                        drop(waits.remove(at));
                    }
                }
                Op::Poll(_) => {}
                Op::Cancel(at) if !waits.is_empty() => drop(waits.remove(at % waits.len())),
                Op::Cancel(_) => {}
                Op::Freeze(at) => {
                    if let Some((buf, mark)) = any(&mut bufs, at) {
                        bytes.push((buf.freeze(), mark));
                    }
                }
                Op::Slice(at) => {
                    if let Some((whole, mark)) = any(&mut bytes, at) {
                        if !whole.is_empty() {
                            let found = pool.resolve(&whole).unwrap();
                            prop_assert!(registrar.covers(found.lkey(), found.iova(), found.len()));
                        }
                        let (front, back) = (whole.slice(..whole.len() / 2), whole.slice(whole.len() / 2..));
                        bytes.extend([(front, mark), (back, mark)]);
                    }
                }
                Op::Control(len) => match pool.control(len) {
                    Ok(buf) => controls.push(marked(buf, len, mark)),
                    Err(PoolError::TooLarge { .. }) => prop_assert!(len > sizes.control),
                    Err(PoolError::Register(_)) => prop_assert!(fails),
                    Err(error) => {
                        prop_assert_eq!(usage(&error), Some(Use::Control));
                        let held = pool.stats().control;
                        prop_assert!(held + len.max(1).next_multiple_of(4096) > sizes.control);
                    }
                },
                Op::Grant { connection, want, min } => match connections[connection].alloc(want, min) {
                    Ok(Some(piece)) => {
                        prop_assert!(piece.capacity() >= min);
                        prop_assert!(piece.capacity() < want.max(min).max(1).saturating_add(4096));
                        let key = of_rkey(piece.rkey());
                        prop_assert!(registrar.covers(key, piece.addr(), piece.capacity()));
                        prop_assert!(pieces.iter().all(|(p, owner)| *owner == connection || p.rkey() != piece.rkey()));
                        // SAFETY: the piece is registered, and granted to nobody else.
                        unsafe { std::ptr::write_bytes(registrar.place(key, piece.addr()), mark, piece.capacity()) };
                        pieces.push((piece, connection));
                        waiting[connection] = false;
                    }
                    Ok(None) => {
                        let idle = sizes.landing - pool.stats().leased;
                        waiting[connection] = true;
                        // Free memory may be kept for connections that have less than their share.
                        let leased = connections[connection].leased();
                        let share = connections[connection].share();
                        let held = connections[connection].others_claim();
                        // No piece is shorter than a granule.
                        let least = min.max(1).checked_next_multiple_of(4096).unwrap_or(usize::MAX);
                        prop_assert!(
                            idle < least || (held && leased.saturating_add(least) > share),
                            "{idle} bytes were left"
                        );
                    }
                    Err(_) => {
                        prop_assert!(fails || want.max(min) > sizes.landing);
                        waiting[connection] = false;
                    }
                },
                Op::Fill { piece, begin, len, holds } => {
                    if let Some((piece, _)) = any(&mut pieces, piece) {
                        let capacity = piece.capacity();
                        let place = registrar.place(of_rkey(piece.rkey()), piece.addr());
                        let landed = piece.filled_from(begin, len);
                        if holds {
                            landed.hold();
                        }
                        let landed = landed.lend();
                        prop_assert_eq!(landed.len(), len.min(capacity - begin.min(capacity)));
                        prop_assert!(landed.is_empty() || landed.as_ptr().addr() == place.addr() + begin);
                        let mark = landed.first().copied().unwrap_or(0);
                        bytes.push((landed, mark));
                    }
                }
                Op::Abort(at) => drop(any(&mut pieces, at)),
                Op::Trim(connection) => {
                    let before = pool.stats().leased;
                    let freed = connections[connection].trim();
                    prop_assert_eq!(pool.stats().leased, before - freed);
                }
                Op::Reopen(connection) => {
                    connections[connection] = pool.landing();
                    waiting[connection] = false;
                    // The remaining pieces belong to the earlier connection, which no longer
                    // exists.
                    pieces.iter_mut().filter(|p| p.1 == connection).for_each(|p| p.1 = usize::MAX);
                }
                Op::StopWaiting(connection) => {
                    connections[connection].stop_waiting();
                    waiting[connection] = false;
                }
                Op::EnforceShare(connection) => {
                    let reclaim = connections[connection].enforce_share();
                    let share = connections[connection].share();
                    let leased = connections[connection].leased();
                    let own = || pieces.iter().filter(|(_, owner)| *owner == connection);
                    let wanted = own().filter(|(piece, _)| piece.is_reclaiming()).count();
                    let held = connections[connection].others_claim() && leased > share;
                    prop_assert!(held || (reclaim == Reclaim::None && wanted == 0), "{reclaim:?}");
                    // Pieces that are not reclaimed fit into the share. Chunks of which the
                    // application holds a piece are an exception, because they stay.
                    let kept: usize = own().filter(|(p, _)| !p.is_reclaiming()).map(|(p, _)| p.capacity()).sum();
                    let holds = pool.stats().held > 0;
                    prop_assert!(!held || holds || kept <= share, "{kept} of {share}");
                    // The call selects chunks exactly while others claim memory and this connection
                    // exceeds its share, unless the application holds memory.
                    prop_assert!(held == (reclaim != Reclaim::None) || holds);
                    connections[connection].return_reclaimed();
                }
                Op::DropBuf(at) => {
                    if let Some((buf, mark)) = any(&mut bufs, at) {
                        prop_assert!(is_marked(&buf, mark));
                    }
                }
                Op::DropBytes(at) => {
                    if let Some((some, mark)) = any(&mut bytes, at) {
                        prop_assert!(is_marked(&some, mark));
                    }
                }
                Op::DropControl(at) => {
                    if let Some((buf, mark)) = any(&mut controls, at) {
                        prop_assert!(is_marked(&buf, mark));
                    }
                }
                Op::Fail(now) => {
                    fails = now;
                    registrar.fail(now);
                }
            }
            assert_budgets(&pool, &registrar);
            for (i, connection) in connections.iter().enumerate() {
                // Only a connection that waits claims memory. A waiting connection need not claim
                // any: its share may have changed, and its idle chunks do not count.
                let claims = (0..4).any(|j| j != i && waiting[j]);
                prop_assert!(claims || !connection.others_claim());
                // Active connections have equal shares of the budget.
                let active = (0..4).filter(|j| waiting[*j] || connections[*j].leased() > 0).count();
                prop_assert_eq!(connection.share(), (sizes.landing / active.max(1)).max(32 << 10));
            }
            let granted: usize = pieces.iter().map(|(p, _)| p.capacity()).sum();
            prop_assert_eq!(pool.stats().granted, granted);
            prop_assert!(pool.stats().held <= pool.stats().filled.min(sizes.landing / 4 * 3));
        }
        for (some, mark) in bufs.iter().chain(&controls) {
            prop_assert!(is_marked(some, *mark));
        }
        // All waiters are served in order once everything else has been returned.
        registrar.fail(false);
        drop((bufs, pieces, controls));
        for (some, mark) in bytes {
            prop_assert!(is_marked(&some, mark));
        }
        for (mut alloc, _) in waits {
            prop_assert!(Pin::new(&mut alloc).poll(&mut cx).is_ready());
        }
        for mut connection in connections {
            connection.trim();
        }
        assert_unused(&pool);
        prop_assert_eq!(pool.stats().leased, 0);
        prop_assert!(pool.try_alloc(sizes.send).is_ok());
        drop(pool);
        registrar.assert_settled();
    }
}
