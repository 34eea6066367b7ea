//! Pools of one process that need more together than RLIMIT_MEMLOCK allows.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes};
use common::Woken;
use common::pinning::{Pinning, leave, limit, wait_until};
use tonic_rdma_memory::{
    Landing, LandingBuf, MIN_POOL, Memlock, Pool, PoolConfig, RegionError, RegisterError,
};

const KIB: usize = 1024;
/// The time for which a pool waits for another pool that returns nothing.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// A length for which [`leave_none`] leaves no room.
const WANT: usize = 512 * KIB;

/// Runs one test at a time, because the limit applies to the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    // For a moment, memory that an earlier pool has given up may still be pinned, until its landing
    // thread has unpinned it.
    wait_until("the threads of earlier pools have ended", || !any_thread_of_a_pool());
    wait_until("all is unpinned", || Memlock::read().unwrap().pinned == 0);
    limit(8 << 20, 8 << 20);
    guard
}

fn any_thread_of_a_pool() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let names = threads.filter_map(|thread| std::fs::read(thread.ok()?.path().join("comm")).ok());
    names.into_iter().any(|name| name.starts_with(b"tonic-rdma"))
}

fn pool(slow: bool) -> (Pool, Arc<Pinning>) {
    let registrar = Arc::new(Pinning::new(slow));
    (Pool::new(PoolConfig::default(), registrar.clone()).unwrap(), registrar)
}

fn landing(pool: &Pool) -> (Landing, Arc<Woken>) {
    let (mut landing, (woken, waker)) = (pool.landing(), Woken::new());
    landing.register_waker(&waker);
    (landing, woken)
}

/// Allocates, and waits only while the landing thread makes or frees chunks.
fn alloc(landing: &mut Landing, want: usize) -> Result<Option<LandingBuf>, RegisterError> {
    let mut found = Ok(None);
    wait_until("the landing thread is done", || {
        found = landing.alloc(want, want);
        !landing.is_pending()
    });
    found
}

fn take(landing: &mut Landing, want: usize) -> LandingBuf {
    alloc(landing, want).unwrap().unwrap()
}

/// Returns the free chunks, and waits until they are unpinned.
fn trim(landing: &mut Landing, pool: &Pool) {
    let left = pool.stats().leased - landing.trim();
    wait_until("it is returned", || pool.stats().leased == left);
}

/// Lowers the limit so that no landing chunk of this pool fits. Only the bytes that the pool's
/// connections may need are left, and 64 KiB.
fn leave_none(pool: &Pool) {
    leave(pool.config().control + 64 * KIB);
}

/// Reports that the connection waits, at times from `from` to `to` after `begin`. Returns whether
/// the connection still waits then.
fn waits(landing: &mut Landing, begin: Instant, from: Duration, to: Duration) -> bool {
    let mut at = from;
    while at <= to {
        match alloc(landing, WANT) {
            Ok(found) => assert!(found.is_none()),
            Err(_) => return false,
        }
        landing.waited(begin + at);
        at += Duration::from_millis(50);
    }
    alloc(landing, WANT).is_ok()
}

#[test]
fn who_has_none_waits_for_another_pool() {
    for slow in [false, true] {
        let _alone = alone();
        let ((one, _), (two, _)) = (pool(slow), pool(slow));
        let ((mut ones, _), (mut twos, woken)) = (landing(&one), landing(&two));
        let held = take(&mut ones, one.config().landing);
        leave_none(&two);
        for _ in 0..3 {
            assert!(twos.alloc(WANT, WANT).unwrap().is_none() && !twos.is_pending());
            assert!(twos.alloc_meanwhile(WANT).unwrap().is_none());
            assert!(twos.alloc_spare(WANT).unwrap().is_none());
        }
        assert_eq!((woken.count(), two.stats().leased), (0, 0));
        assert!(two.may_land().is_err(), "no new connection");
        drop(held);
        assert_eq!(woken.count(), 0, "it is still pinned");
        trim(&mut ones, &one);
        wait_until("it is woken", || woken.count() > 0);
        assert!(two.may_land().is_ok());
        drop(take(&mut twos, WANT));
    }
}

/// Raises the limit as prlimit(1) does. No pool is notified of this.
#[test]
fn a_limit_that_is_raised_is_used_at_once() {
    for slow in [false, true] {
        let _alone = alone();
        let ((one, _), (two, _)) = (pool(slow), pool(slow));
        let ((mut ones, _), (mut twos, _)) = (landing(&one), landing(&two));
        let _held = take(&mut ones, one.config().landing);
        leave_none(&two);
        assert!(alloc(&mut twos, WANT).unwrap().is_none());
        limit(8 << 20, 8 << 20);
        take(&mut twos, WANT);
    }
}

/// Send memory is returned when its pool is dropped.
#[test]
fn send_memory_is_waited_for_too() {
    let _alone = alone();
    let ((one, _), (two, _)) = (pool(false), pool(false));
    let (mut twos, woken) = landing(&two);
    let buf = one.try_alloc(one.config().send).unwrap();
    leave_none(&two);
    assert!(alloc(&mut twos, WANT).unwrap().is_none());
    drop(buf);
    assert!(alloc(&mut twos, WANT).unwrap().is_none());
    assert_eq!(woken.count(), 0);
    drop(one);
    assert!(woken.count() > 0);
    take(&mut twos, WANT);
}

#[test]
fn nobody_waits_for_ever() {
    for slow in [false, true] {
        let _alone = alone();
        let ((one, _), (two, _)) = (pool(slow), pool(slow));
        let ((mut ones, _), (mut twos, _)) = (landing(&one), landing(&two));
        let mut held: Vec<_> = (0..4).map(|_| take(&mut ones, 256 * KIB)).collect();
        leave_none(&two);
        let begin = Instant::now();
        let almost = MAX_WAIT - Duration::from_millis(1);
        assert!(waits(&mut twos, begin, Duration::ZERO, almost));
        // The returned memory is too little, but restarts the wait.
        held.pop();
        trim(&mut ones, &one);
        leave_none(&two);
        assert!(waits(&mut twos, begin, MAX_WAIT, MAX_WAIT + almost));
        assert!(!waits(&mut twos, begin, 2 * MAX_WAIT, 2 * MAX_WAIT));
        assert!(two.may_land().is_err());
        // The pool's other connections do not wait again.
        let (mut others, _) = landing(&two);
        assert!(alloc(&mut others, WANT).is_err() && alloc(&mut twos, WANT).is_err());
        // They wait again once memory has been returned.
        held.pop();
        trim(&mut ones, &one);
        leave_none(&two);
        assert!(alloc(&mut twos, WANT).unwrap().is_none());
        held.clear();
        trim(&mut ones, &one);
        take(&mut twos, WANT);
    }
}

/// A pool's failed attempts do not count as returned memory.
#[test]
fn attempts_that_fail_do_not_prolong_the_wait() {
    for slow in [false, true] {
        let _alone = alone();
        let ((one, _), (two, registrar)) = (pool(slow), pool(slow));
        let ((mut ones, _), (mut twos, woken)) = (landing(&one), landing(&two));
        let _held = take(&mut ones, 256 * KIB);
        registrar.refuses.store(true, SeqCst);
        let begin = Instant::now();
        assert!(waits(&mut twos, begin, Duration::ZERO, MAX_WAIT / 2));
        assert!(!waits(&mut twos, begin, MAX_WAIT / 2, MAX_WAIT));
        drop((twos, woken));
    }
}

/// The limit leaves enough memory, but another pool takes it first.
#[test]
fn who_is_late_waits() {
    for slow in [false, true] {
        let _alone = alone();
        let ((one, _), (two, registrar)) = (pool(slow), pool(slow));
        let ((mut ones, _), (mut twos, woken)) = (landing(&one), landing(&two));
        let held = take(&mut ones, one.config().landing);
        leave(two.config().control + WANT + 64 * KIB);
        registrar.refuses.store(true, SeqCst);
        type Alloc = fn(&mut Landing) -> Result<Option<LandingBuf>, RegisterError>;
        let allocs: [Alloc; 3] = [
            |twos| alloc(twos, WANT),
            |twos| twos.alloc_meanwhile(WANT),
            // This length is at most the smallest share.
            |twos| twos.alloc_spare(16 * KIB),
        ];
        for alloc in allocs {
            for _ in 0..3 {
                assert!(alloc(&mut twos).unwrap().is_none());
                wait_until("the landing thread is done", || {
                    twos.collect();
                    !twos.is_making()
                });
            }
            // The pool does not try again with each call.
            let tried = registrar.tried.load(SeqCst);
            assert!(alloc(&mut twos).unwrap().is_none());
            assert_eq!(registrar.tried.load(SeqCst), tried);
            twos.waited(Instant::now());
        }
        registrar.refuses.store(false, SeqCst);
        registrar.is_late.store(true, SeqCst);
        assert!(alloc(&mut twos, WANT).unwrap().is_none());
        assert!(!registrar.is_late.load(SeqCst));
        let before = woken.count();
        drop(held);
        trim(&mut ones, &one);
        wait_until("it is woken", || woken.count() > before);
        take(&mut twos, WANT);
    }
}

#[test]
fn without_another_pool_there_is_nothing_to_wait_for() {
    let _alone = alone();
    let ((one, _), (two, registrar)) = (pool(false), pool(false));
    let mut twos = two.landing();
    registrar.refuses.store(true, SeqCst);
    assert!(twos.alloc(WANT, WANT).is_err());
    // Control memory does not count, because connections may keep it for ever.
    let _control = one.control(80 * KIB).unwrap();
    assert!(twos.alloc(WANT, WANT).is_err());
    registrar.refuses.store(false, SeqCst);
    leave_none(&two);
    assert!(twos.alloc(WANT, WANT).is_err() && two.may_land().is_err());
}

/// A claim that begins after a failed attempt wakes the connections that have more memory.
#[test]
fn others_are_woken_for_a_claim_after_a_late_attempt() {
    for slow in [false, true] {
        let _alone = alone();
        let (one, registrar) = pool(slow);
        let ((mut ones, woken), (mut twos, _)) = (landing(&one), landing(&one));
        let held = take(&mut ones, one.config().landing / 4 * 3);
        registrar.is_late.store(true, SeqCst);
        let before = woken.count();
        assert!(alloc(&mut twos, WANT).unwrap().is_none());
        assert!(ones.others_claim());
        assert!(woken.count() > before);
        // Each claim wakes them.
        twos.stop_waiting();
        let before = woken.count();
        assert!(!ones.others_claim());
        assert!(alloc(&mut twos, WANT).unwrap().is_none());
        assert!(ones.others_claim() && woken.count() > before);
        drop(held);
    }
}

/// Chunks in the queue of the landing thread do not take the bytes that connections may need for
/// control memory.
#[test]
fn what_is_queued_counts_under_the_limit() {
    let _alone = alone();
    let (one, registrar) = pool(true);
    let ((mut ones, _), (mut twos, _)) = (landing(&one), landing(&one));
    leave(one.config().control + WANT + 64 * KIB);
    let gate = registrar.gate.lock().unwrap();
    assert!(ones.alloc(WANT, WANT).unwrap().is_none() && ones.is_pending());
    assert!(twos.alloc(WANT, WANT).unwrap().is_none() && twos.is_pending());
    drop(gate);
    let found = [alloc(&mut ones, WANT).unwrap(), alloc(&mut twos, WANT).unwrap()];
    assert!(found[0].is_some() && found[1].is_none());
    one.control(one.config().control).unwrap();
}

/// Send memory of one pool is registered with the other pool's device only if the limit leaves room
/// for all memory that both pools may use.
#[test]
fn memory_of_the_other_pool_fits_beside_both() {
    let _alone = alone();
    let small =
        || Pool::new(PoolConfig::default().total(MIN_POOL), Arc::new(Pinning::new(false))).unwrap();
    let (one, two) = (small(), small());
    two.share_send_memory(&one);
    let unused = |pool: &Pool| pool.config().total - pool.stats().registered;
    let mut buf = one.try_alloc(KIB).unwrap();
    buf.put_bytes(7, KIB);
    let bytes = buf.freeze();
    let arena = one.stats().registered;
    leave(unused(&one) + unused(&two) + arena - 1);
    assert!(two.resolve(&bytes).is_none());
    // A refused arena is not tried again for ten seconds, but another arena is tried at once.
    let mut buf = one.try_alloc(300 * KIB).unwrap();
    buf.put_bytes(7, 300 * KIB);
    let bytes = buf.freeze();
    let arena = one.stats().registered - arena;
    leave(unused(&one) + unused(&two) + arena);
    assert!(two.resolve(&bytes).is_some());
}

/// Application memory is registered only if that leaves room for all memory that the pool may use.
/// Bytes that become free when the application memory is deregistered are used for landing.
#[test]
fn memory_of_the_application_fits_beside_the_pool() {
    let _alone = alone();
    let (pool, _) = pool(true);
    let whole = pool.config().total;
    let memory = |len: usize| Bytes::from(vec![1; len]);
    leave(whole + 256 * KIB);
    let fits = pool.register(memory(200 * KIB)).unwrap();
    assert_eq!(pool.stats().application, 200 * KIB);
    let error = pool.register(memory(100 * KIB)).unwrap_err();
    let RegionError::Memlock { len, reserved, .. } = error else { panic!("{error}") };
    assert_eq!((len, reserved), (100 * KIB, whole as u64));
    assert!(error.to_string().contains("PoolConfig::total"), "{error}");

    // Memory that the pool uses already does not change the result.
    let (mut landing, woken) = landing(&pool);
    let chunk = take(&mut landing, 64 * KIB);
    pool.register(memory(100 * KIB)).unwrap_err();
    let longest = pool.config().landing - pool.stats().leased;
    leave(pool.config().control + 32 * KIB);
    assert!(alloc(&mut landing, longest.min(WANT)).unwrap().is_none(), "the limit leaves none");
    limit(8 << 20, 8 << 20);
    let before = woken.count();
    drop(fits);
    wait_until("the connection is woken", || woken.count() > before);
    assert!(alloc(&mut landing, 64 * KIB).unwrap().is_some());
    drop(chunk);
}
