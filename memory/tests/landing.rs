//! Landing memory.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{
    RecordingRegistrar, Woken, assert_budgets, assert_unused, of_rkey, page, pool, small,
};
use tonic_rdma_memory::{Access, Landing, LandingBuf, Pool, PoolConfig, Reclaim};

fn take(landing: &mut Landing, want: usize, min: usize) -> Option<LandingBuf> {
    landing.alloc(want, min).unwrap()
}

/// Writes like the peer that holds the grant.
fn write(buf: &LandingBuf, registrar: &RecordingRegistrar, data: &[u8]) {
    let key = of_rkey(buf.rkey());
    assert!(registrar.covers(key, buf.addr(), buf.capacity()));
    assert_eq!(registrar.entry(key).unwrap().access, Access::RemoteWrite);
    assert!(data.len() <= buf.capacity());
    // SAFETY: the range is registered, as checked, and granted to this "peer" alone.
    unsafe {
        std::ptr::copy_nonoverlapping(data.as_ptr(), registrar.place(key, buf.addr()), data.len())
    };
}

fn everything(landing: &mut Landing, each: usize) -> Vec<LandingBuf> {
    std::iter::from_fn(|| take(landing, each, each)).collect()
}

#[test]
fn a_peers_writes_become_landed_bytes() {
    let (pool, registrar) = small();
    let mut landing = pool.landing();
    let buf = take(&mut landing, 10_000, 1).unwrap();
    assert_eq!(buf.capacity(), 12 << 10);
    write(&buf, &registrar, &[5; 10_000]);
    let (addr, place) = (buf.addr(), registrar.place(of_rkey(buf.rkey()), buf.addr()));
    assert_eq!(pool.stats().granted, 12 << 10);
    let bytes = buf.filled(10_000).lend();
    assert_eq!((pool.stats().granted, pool.stats().filled), (0, 12 << 10));
    assert_eq!(bytes, vec![5; 10_000]);
    let part = pool.resolve(&bytes.slice(5000..)).unwrap();
    // Landed bytes are sent on in place, at the address that the device uses for them.
    assert_eq!((part.iova(), part.len()), (addr + 5000, 5000));
    assert_eq!(part.addr(), (place.addr() + 5000) as u64);
    assert!(registrar.covers(part.lkey(), part.iova(), part.len()));
    let inner = part.slice(100..200);
    assert_eq!((inner.iova(), inner.addr()), (part.iova() + 100, part.addr() + 100));
    drop((bytes, inner));
    assert_eq!(pool.stats().filled, 12 << 10, "a slice holds it");
    drop(part);
    assert_unused(&pool);
    // Lengths beyond the capacity, and zero.
    assert_eq!(take(&mut landing, 1, 1).unwrap().filled(usize::MAX).len(), 4096);
    assert_eq!(take(&mut landing, 1, 1).unwrap().filled(0).lend(), Bytes::new());
    assert_unused(&pool);
    for (begin, len, has, keeps) in [
        (42, 4000, 4000, 4096),
        (96, 4001, 4001, 8192),
        (4095, 1, 1, 4096),
        (4095, 2, 2, 8192),
        (8191, usize::MAX, 1, 8192),
        (8192, 1, 0, 0),
        (usize::MAX, usize::MAX, 0, 0),
    ] {
        let buf = take(&mut landing, 8192, 8192).unwrap();
        let data: Vec<u8> = (0..8192).map(|n| (n % 251) as u8).collect();
        write(&buf, &registrar, &data);
        let place = registrar.place(of_rkey(buf.rkey()), buf.addr()).addr();
        let bytes = buf.filled_from(begin, len).lend();
        assert_eq!((bytes.len(), pool.stats().filled), (has, keeps), "{len} from {begin} on");
        assert!(
            bytes.is_empty()
                || bytes == data[begin..][..has] && bytes.as_ptr().addr() == place + begin
        );
        drop(bytes);
        assert_unused(&pool);
    }
    drop((landing, pool));
    registrar.assert_settled();
}

#[test]
fn the_whole_budget_can_be_leased_and_no_more() {
    for (pool, registrar) in [small(), pool(PoolConfig::default().total((8 << 20) - (256 << 10)))] {
        let mut landing = pool.landing();
        let all = everything(&mut landing, 64 << 10);
        let total: usize = all.iter().map(LandingBuf::capacity).sum();
        // The unused part of the budget may be shorter than a piece.
        assert!(total + (64 << 10) > pool.config().landing, "{total}");
        assert!(all.iter().all(|b| b.capacity() == 64 << 10));
        assert_budgets(&pool, &registrar);
        let mut places: Vec<_> = all.iter().map(|b| (b.addr(), b.capacity() as u64)).collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "pieces overlap");
        // The budgets of the other parts are untouched (R11).
        assert!(pool.try_alloc(pool.config().send).is_ok() && pool.control(80 << 10).is_ok());
        drop((all, landing, pool));
        registrar.assert_settled();
    }
}

#[test]
fn extreme_lengths() {
    let (pool, registrar) = small();
    let budget = pool.config().landing;
    let mut landing = pool.landing();
    assert_eq!(take(&mut landing, 0, 0).unwrap().capacity(), 4096);
    for (want, min) in
        [(usize::MAX, usize::MAX), (usize::MAX - 1, budget + 1), (0, usize::MAX), (1, budget + 1)]
    {
        assert!(take(&mut landing, want, min).is_none());
        assert_budgets(&pool, &registrar);
    }
    landing.trim();
    assert_eq!(pool.stats().leased, 0);
    // A request for everything gets the whole budget, in a chunk of its own.
    let all = take(&mut landing, usize::MAX, 0).unwrap();
    assert_eq!(all.capacity(), budget);
    assert_eq!(registrar.registrations(), 2);
    drop((all, landing, pool));
    registrar.assert_settled();
    let (huge, registrar) = self::pool(PoolConfig::default().total(usize::MAX));
    let mut landing = huge.landing();
    assert!(landing.alloc(usize::MAX, 1).is_err(), "the kernel does not map that much");
    assert!(take(&mut landing, 1, 1).is_some());
    assert!(!huge.landing().others_claim());
    drop((landing, huge));
    registrar.assert_settled();
}

#[test]
fn scarce_memory_gives_the_longest_free_piece() {
    let (pool, _) = small();
    let chunk = pool.config().chunk;
    let mut landing = pool.landing();
    let mut all = everything(&mut landing, 4096);
    assert_eq!(all.len() * 4096, pool.config().landing);
    all.sort_unstable_by_key(LandingBuf::addr);
    assert!(take(&mut landing, 4096, 0).is_none());
    // Free two neighbouring granules and a single one.
    all.remove(100);
    all.drain(10..12);
    assert!(take(&mut landing, chunk, 4096 * 3).is_none());
    assert_eq!(take(&mut landing, chunk, 4096).unwrap().capacity(), 8192);
    let two = take(&mut landing, chunk, 8192).unwrap();
    assert_eq!(take(&mut landing, chunk, 4096).unwrap().capacity(), 4096);
    drop(two);
    // A new chunk is used if the budget has room for a longer piece than the leased chunks have.
    let mut other = pool.landing();
    drop(all);
    assert!(landing.trim() > 0);
    let held = take(&mut other, pool.config().landing - 3 * page(), 1).unwrap();
    assert_eq!(take(&mut landing, chunk, 1).unwrap().capacity(), 3 * page());
    drop(held);
}

#[test]
fn keys_stop_working_at_the_end_of_the_lease() {
    let (pool, registrar) = small();
    let (mut one, mut two) = (pool.landing(), pool.landing());
    let a = take(&mut one, 4096, 1).unwrap();
    let b = take(&mut two, 4096, 1).unwrap();
    assert_ne!(a.rkey(), b.rkey(), "a key is for one connection");
    assert_eq!(take(&mut one, 4096, 1).unwrap().rkey(), a.rkey());
    write(&a, &registrar, b"secret");
    let (old, addr) = (of_rkey(a.rkey()), a.addr());
    assert_eq!(one.trim(), 0, "a granted piece keeps its chunk");
    let bytes = a.filled(6);
    assert_eq!(one.trim(), 0, "so does a filled one");
    assert!(registrar.entry(old).is_some());
    drop(bytes);
    assert_eq!(one.trim(), pool.config().chunk);
    assert!(registrar.entry(old).is_none(), "the key is dead");
    // The next lease may use the same address, but has another key and shows no old contents.
    let again = take(&mut two, pool.config().chunk, pool.config().chunk).unwrap();
    assert_ne!(of_rkey(again.rkey()), old);
    let same = again.addr() == addr;
    let shown = again.filled(usize::MAX).lend();
    assert!(
        shown.iter().all(|byte| *byte == 0),
        "shows what another peer sent (same place: {same})"
    );
    drop((shown, b, one, two, pool));
    registrar.assert_settled();
}

#[test]
fn landed_bytes_outlive_the_pool() {
    let (pool, registrar) = small();
    let mut landing = pool.landing();
    let (_, waker) = Woken::new();
    landing.register_waker(&waker);
    let granted = take(&mut landing, 1, 1).unwrap();
    let buf = take(&mut landing, 3, 1).unwrap();
    write(&buf, &registrar, b"abc");
    let bytes = buf.filled(3).lend();
    drop((landing, pool));
    assert_eq!(&bytes[..], b"abc");
    drop(granted);
    assert_eq!(&bytes.slice(1..)[..], b"bc");
    drop(bytes);
    registrar.assert_settled();
    assert_eq!(Arc::strong_count(&registrar), 1);
}

#[test]
fn waiters_are_woken_and_others_learn_of_them() {
    let (pool, registrar) = small();
    let budget = pool.config().landing;
    let (mut one, mut two) = (pool.landing(), pool.landing());
    let ((woken1, waker1), (woken2, waker2)) = (Woken::new(), Woken::new());
    one.register_waker(&waker1);
    two.register_waker(&waker2);
    let busy = take(&mut one, budget / 2, 1).unwrap();
    let idle = take(&mut one, budget / 2, 1).unwrap();
    drop(idle);
    assert!(!one.others_claim());
    assert!(take(&mut two, 4096, 1).is_none());
    assert_eq!((woken1.count(), woken2.count()), (1, 0), "the one above its share is asked, once");
    assert!(take(&mut two, 4096, 1).is_none());
    assert_eq!((woken1.count(), woken2.count()), (1, 0));
    assert!(one.others_claim() && !two.others_claim());
    assert_eq!(one.enforce_share(), Reclaim::New);
    assert_eq!(one.return_reclaimed(), budget / 2);
    assert_eq!(woken2.count(), 1);
    let first = take(&mut two, budget, 1).unwrap();
    assert_eq!(first.capacity(), budget / 2);
    assert!(!one.others_claim(), "it has something");
    // A connection that has its share does not claim memory. It waits for its own pieces and for
    // memory that others return.
    assert!(take(&mut two, 4096, 1).is_none());
    assert!(!one.others_claim());
    let before = (woken1.count(), woken2.count());
    let bytes = busy.filled(usize::MAX);
    std::thread::spawn(move || drop(bytes)).join().unwrap();
    assert_eq!((woken1.count(), woken2.count()), before, "the other keeps its share");
    drop(first);
    assert_eq!(woken2.count(), before.1 + 1);
    let first = take(&mut two, budget, 1).unwrap();
    assert!(take(&mut two, 4096, 1).is_none());
    let before = woken2.count();
    one.trim();
    assert!(woken2.count() > before);
    // A piece that becomes free in a chunk that is being reclaimed wakes the owner.
    let second = take(&mut two, budget, 1).unwrap();
    assert!(take(&mut one, 4096, 1).is_none());
    assert_eq!(two.enforce_share(), Reclaim::New);
    assert_eq!(two.return_reclaimed(), 0, "all of it is granted");
    let mut pieces = vec![first, second];
    let goes = pieces.iter().position(LandingBuf::is_reclaiming).unwrap();
    let before = (woken1.count(), woken2.count());
    drop(pieces.swap_remove(goes));
    assert_eq!((woken1.count(), woken2.count()), (before.0, before.1 + 1));
    assert_eq!(two.return_reclaimed(), budget / 2);
    assert_eq!(woken1.count(), before.0 + 1);
    // The end of a whole connection also wakes the waiter.
    let half = take(&mut one, budget, 1).unwrap();
    assert!(take(&mut one, budget, 1).is_none());
    let before = woken1.count();
    drop((pieces, two));
    assert!(woken1.count() > before);
    assert!(take(&mut one, budget / 2, budget / 2).is_some());
    drop((half, one, pool));
    registrar.assert_settled();
}

#[test]
fn a_connection_that_stops_waiting_claims_nothing() {
    let (pool, registrar) = small();
    let budget = pool.config().landing;
    let (mut one, mut two, three) = (pool.landing(), pool.landing(), pool.landing());
    let held = take(&mut one, budget, 1).unwrap();
    let waits = |two: &mut Landing| {
        assert!(take(two, 1, 1).is_none());
        assert!(one.others_claim() && three.others_claim());
    };
    // The waiter gives up.
    waits(&mut two);
    two.stop_waiting();
    two.stop_waiting();
    assert!(!one.others_claim() && !three.others_claim());
    // The waiter is dropped.
    let mut four = pool.landing();
    waits(&mut four);
    drop(four);
    assert!(!one.others_claim());
    // The waiter's allocation fails.
    waits(&mut two);
    drop(held);
    one.trim();
    registrar.fail(true);
    assert!(two.alloc(1, 1).is_err());
    registrar.fail(false);
    assert!(!one.others_claim());
    // The waiter is served.
    let held = take(&mut one, budget, 1).unwrap();
    assert!(take(&mut two, 1, 1).is_none());
    assert!(one.others_claim());
    drop(held);
    one.trim();
    assert!(take(&mut two, 1, 1).is_some());
    assert!(!one.others_claim());
}

#[test]
fn a_failed_registration_only_fails_the_request() {
    let (pool, registrar) = small();
    let chunk = pool.config().chunk;
    let mut landing = pool.landing();
    let (woken, waker) = Woken::new();
    landing.register_waker(&waker);
    registrar.fail(true);
    let error = landing.alloc(4096, 4096).unwrap_err();
    assert_eq!(error.io().raw_os_error(), Some(libc::ENOMEM));
    assert_eq!((pool.stats().leased, pool.stats().registered), (0, 0));
    assert_eq!(woken.count(), 0, "a failure must not make it try again at once");
    registrar.fail(false);
    let half = take(&mut landing, chunk / 2, 1).unwrap();
    registrar.fail(true);
    // Memory that the connection already has is used if it suffices.
    assert_eq!(take(&mut landing, chunk, 4096).unwrap().capacity(), chunk / 2);
    assert!(landing.alloc(chunk, chunk).is_err());
    registrar.fail(false);
    assert_eq!(take(&mut landing, chunk, chunk).unwrap().capacity(), chunk);
    drop(half);
    assert_budgets(&pool, &registrar);
    drop((landing, pool));
    registrar.assert_settled();
}

#[test]
fn a_failed_registration_wakes_waiters_for_the_same_budget() {
    let (pool, registrar) = small();
    let budget = pool.config().landing;
    let (mut one, mut two) = (pool.landing(), pool.landing());
    let held = take(&mut one, budget, 1).unwrap();
    let (woken, waker) = Woken::new();
    two.register_waker(&waker);
    assert!(take(&mut two, budget, budget).is_none());
    drop(held);
    one.trim();
    let before = woken.count();
    registrar.fail(true);
    assert!(one.alloc(budget, 1).is_err());
    assert_eq!(woken.count(), before + 1);
}

/// A peer gets a grant of the length that it requests, and states in DONE how many bytes it has
/// written.
#[test]
fn unwritten_granules_come_free_at_once() {
    let (pool, registrar) = small();
    let mut landing = pool.landing();
    let piece = take(&mut landing, 3 * 4096, 3 * 4096).unwrap();
    let addr = piece.addr();
    let place = registrar.place(of_rkey(piece.rkey()), addr);
    let bytes = piece.filled(4097).lend();
    assert_eq!((bytes.as_ptr().addr(), bytes.len()), (place.addr(), 4097));
    assert_eq!((pool.stats().filled, pool.stats().granted), (2 * 4096, 0));
    let behind = take(&mut landing, 4096, 4096).unwrap();
    assert!(
        behind.addr() != addr && behind.addr() != addr + 4096,
        "what was written is not given out"
    );
    drop((bytes, behind));
    let mut held = Vec::new();
    while let Some(piece) = take(&mut landing, 16 << 10, 16 << 10) {
        held.push(piece.filled(1));
    }
    let all = pool.config().landing / 4096;
    assert!(held.len() > all / 2, "{} pieces of a byte fill {all} granules", held.len());
    assert_eq!((pool.stats().filled, pool.stats().granted), (held.len() * 4096, 0));
    drop(held);
    assert_eq!((pool.stats().filled, pool.stats().granted), (0, 0));
    drop((landing, pool));
    registrar.assert_settled();
}

#[test]
fn idle_connections_pin_nothing() {
    let (pool, registrar) = small();
    let mut connections: Vec<Landing> = (0..1000).map(|_| pool.landing()).collect();
    for landing in &mut connections {
        let piece = take(landing, 100_000, 100_000).unwrap();
        drop(piece.filled(10));
        assert!(landing.trim() > 0);
    }
    assert_eq!((pool.stats().leased, registrar.bytes()), (0, 0));
    assert_eq!(pool.stats().registrations, 1000);
    drop((connections, pool));
    registrar.assert_settled();
}

/// Acts like a driver that has been woken: returns the chunks that exceed the share, and tries
/// again.
fn settle(connections: &mut [Landing], wants: &mut [usize], got: &mut Vec<(usize, LandingBuf)>) {
    for (i, landing) in connections.iter_mut().enumerate() {
        if landing.others_claim() {
            landing.enforce_share();
            landing.return_reclaimed();
        }
        if wants[i] > 0
            && let Some(piece) = take(landing, wants[i], 4096)
        {
            wants[i] = 0;
            got.push((i, piece));
        }
    }
}

#[test]
fn every_waiter_gets_memory() {
    let (pool, registrar) = small();
    let budget = pool.config().landing;
    let mut connections: Vec<Landing> = (0..10).map(|_| pool.landing()).collect();
    let mut wants = vec![budget; 10];
    let mut got = Vec::new();
    let mut turns = vec![0; 10];
    // Each connection keeps its memory for one round, and only one at a time can have the whole
    // budget.
    for _ in 0..100 {
        settle(&mut connections, &mut wants, &mut got);
        assert!(got.len() <= 10);
        for (i, _piece) in got.drain(..) {
            turns[i] += 1;
        }
    }
    assert_eq!(turns.iter().sum::<i32>(), 10, "{turns:?}");
    drop((connections, pool));
    registrar.assert_settled();
}

fn wait_order(pool: &Pool) -> Vec<usize> {
    use std::sync::Mutex;
    struct Order(usize, Arc<Mutex<Vec<usize>>>);
    impl std::task::Wake for Order {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut holder = pool.landing();
    let held = take(&mut holder, usize::MAX, 1).unwrap();
    let mut connections: Vec<Landing> = (0..4)
        .map(|i| {
            let mut landing = pool.landing();
            landing.register_waker(&Arc::new(Order(i, order.clone())).into());
            landing
        })
        .collect();
    for i in [2, 0, 3, 1] {
        assert!(take(&mut connections[i], 1, 1).is_none());
    }
    order.lock().unwrap().clear();
    drop((held, holder));
    order.lock().unwrap().clone()
}

#[test]
fn the_longest_waiter_is_woken_first() {
    let (pool, _) = small();
    assert_eq!(wait_order(&pool), [2, 0, 3, 1]);
}

#[test]
fn a_limited_connection_waits_for_its_own_pieces() {
    let (pool, registrar) = pool(PoolConfig::default().total((8 << 20) - (256 << 10)));
    let limit = 1 << 20;
    assert!(pool.config().landing > 2 * limit);
    let (mut limited, mut other) = (pool.landing_up_to(limit), pool.landing());
    let (woken, waker) = Woken::new();
    limited.register_waker(&waker);
    let mut all = everything(&mut limited, 64 << 10);
    let total: usize = all.iter().map(LandingBuf::capacity).sum();
    assert!(total <= limit && total + (64 << 10) > limit, "{total}");
    assert!(pool.stats().leased <= limit);
    // The connection waits because of its own limit, so other connections are not asked to make
    // room, and can have all other memory.
    assert!(!other.others_claim());
    let others = everything(&mut other, 64 << 10);
    assert!(others.len() * (64 << 10) + limit + (128 << 10) > pool.config().landing);
    let before = woken.count();
    drop((others, other));
    assert_eq!(woken.count(), before, "what comes free elsewhere does not help it");
    drop(all.pop());
    assert!(woken.count() > before);
    let piece = take(&mut limited, 64 << 10, 64 << 10).unwrap();
    // Memory held by readers counts as well.
    let held = piece.filled(usize::MAX);
    assert!(take(&mut limited, 64 << 10, 64 << 10).is_none());
    drop(held);
    // Idle short chunks are freed to make room for a long piece.
    drop(all);
    assert_eq!(take(&mut limited, limit, limit).unwrap().capacity(), limit);
    assert!(take(&mut limited, 2 * limit, 1).unwrap().capacity() <= limit);
    drop((limited, pool));
    registrar.assert_settled();
}
