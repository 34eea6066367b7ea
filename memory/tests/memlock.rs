//! Pools under RLIMIT_MEMLOCK. This file has a single test, because the limit applies to the whole
//! process.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use common::Woken;
use common::pinning::{Pinning, limit, wait_until};
use tonic_rdma_memory::{
    HeapRegistrar, Landing, LandingBuf, MIN_POOL, Memlock, Pool, PoolConfig, PoolError,
};

/// Allocates 64 KiB of landing memory, if 64 KiB are available.
fn piece(landing: &mut Landing) -> Option<LandingBuf> {
    let mut found = None;
    wait_until("the chunk is made", || {
        found = landing.alloc(64 << 10, 64 << 10).unwrap();
        !landing.is_pending()
    });
    found
}

/// Allocates all landing memory in pieces of 64 KiB.
fn everything(landing: &mut Landing) -> Vec<LandingBuf> {
    std::iter::from_fn(|| piece(landing)).collect()
}

/// Checks two pools that together need more than the process may pin. Each continues with the
/// memory that it has.
fn two_pools_share_the_limit(slow: bool) {
    let [first, second, third] = [(); 3].map(|()| registering(slow).unwrap());
    let sizes = first.config().clone();
    assert_eq!(second.config(), &sizes);
    let [mut firsts, mut seconds] = [&first, &second].map(Pool::landing);
    for landing in [&mut firsts, &mut seconds] {
        landing.register_waker(Waker::noop());
    }
    let one = piece(&mut seconds).unwrap();
    let mut held = everything(&mut firsts);
    // The first pool leases all its landing memory, and leaves the bytes that its connections may
    // need.
    assert_eq!(first.stats().leased, sizes.landing);
    let more = everything(&mut seconds);
    let leased = second.stats().leased;
    assert!(leased > 0 && leased < sizes.landing, "{leased}");
    assert!(sizes.total + leased > 8 << 20, "{leased}");
    // New connections are still possible, and further messages are copied out.
    let controls: Vec<_> =
        (0..8).map(|n| [&first, &second][n % 2].control(80 << 10).unwrap()).collect();
    let landed: Vec<_> = more.into_iter().map(|piece| piece.filled(usize::MAX)).collect();
    let kept = landed.iter().filter(|landed| landed.hold()).count();
    assert!(kept > 0 && kept < landed.len(), "{kept} of {}", landed.len());
    assert!(second.may_land().is_ok());
    // A third pool waits for the memory of these two pools, but not for ever.
    let (mut thirds, begin) = (third.landing(), Instant::now());
    for n in 0..=20 {
        assert!(piece(&mut thirds).is_none());
        thirds.waited(begin + Duration::from_millis(100) * n);
    }
    assert!(thirds.alloc(64 << 10, 64 << 10).is_err());
    assert!(third.may_land().is_err());
    drop((thirds, third));
    // Memory that one pool returns is available to the other, which is woken.
    let (woken, waker) = Woken::new();
    seconds.register_waker(&waker);
    assert!(piece(&mut seconds).is_none());
    held.clear();
    assert!(woken.count() == 0);
    assert_eq!(firsts.trim(), sizes.landing);
    assert!(slow || woken.count() > 0);
    wait_until("it is woken", || woken.count() > 0);
    wait_until("all is returned", || first.stats().leased == 0);
    let more = everything(&mut seconds);
    assert_eq!(second.stats().leased, sizes.landing);
    // The same holds for memory of a pool that is dropped.
    held = everything(&mut firsts);
    let (woken, waker) = Woken::new();
    firsts.register_waker(&waker);
    assert!(!held.is_empty() && first.stats().leased < sizes.landing);
    drop((one, landed, more, controls, seconds, second));
    assert!(slow || woken.count() > 0);
    wait_until("it is woken", || woken.count() > 0);
    wait_until("all is unpinned", || {
        Memlock::read().unwrap().pinned <= first.stats().registered as u64
    });
    held.extend(everything(&mut firsts));
    assert_eq!(first.stats().leased, sizes.landing);
}

fn pool() -> Result<Pool, PoolError> {
    registering(false)
}

fn registering(slow: bool) -> Result<Pool, PoolError> {
    Pool::new(PoolConfig::default(), Arc::new(Pinning::new(slow)))
}

#[test]
fn the_limit_determines_the_size() {
    const MARGIN: usize = 256 << 10;
    limit(64 << 10, 8 << 20);
    two_pools_share_the_limit(false);
    two_pools_share_the_limit(true);
    wait_until("all is unpinned", || Memlock::read().unwrap().pinned == 0);
    let all = pool().unwrap();
    assert_eq!(all.config().total, (8 << 20) - MARGIN);
    assert_eq!(
        Memlock::read().unwrap().soft,
        Some(8 << 20),
        "the soft limit is raised to the hard one"
    );
    // All parts can use their whole budgets at the same time.
    let sizes = all.config().clone();
    let mut landing = all.landing();
    let held = (
        all.try_alloc(sizes.send).unwrap(),
        all.control(80 << 10).unwrap(),
        all.control(80 << 10).unwrap(),
        landing.alloc(sizes.landing, sizes.landing).unwrap().unwrap(),
    );
    assert!(all.stats().registered <= sizes.total);
    drop((held, landing, all));

    let least = (MIN_POOL + MARGIN) as u64;
    limit(0, least);
    assert_eq!(pool().unwrap().config().total, MIN_POOL);

    limit(0, least - 1);
    let error = pool().unwrap_err();
    let PoolError::Memlock { needed, limit: named, pinned: 0 } = error else { panic!("{error}") };
    assert_eq!((needed, named), (least, least - 1));
    let text = error.to_string();
    for part in
        ["2359296 bytes", "2359295 bytes", "ulimit -l 2304", "LimitMEMLOCK=", "--ulimit memlock=-1"]
    {
        assert!(text.contains(part), "{text}");
    }
    // The limit does not apply to registrars that pin nothing.
    let heap = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).unwrap();
    assert_eq!(heap.config().total, tonic_rdma_memory::DEFAULT_POOL);
}
