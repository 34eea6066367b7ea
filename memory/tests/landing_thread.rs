//! Chunks that the landing thread makes and frees, for registrars that are slow.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{Keeper, RecordingRegistrar, Woken, assert_budgets, assert_unused};
use tonic_rdma_memory::{
    Access, Landing, LandingBuf, MIN_POOL, Memory, Pool, PoolConfig, RegisterError, Registrar,
    Registration,
};

const TIMEOUT: Duration = Duration::from_secs(20);
const KIB: usize = 1024;

/// Makes registrations of landing memory, and their ends, wait until the test lets them pass.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    panics: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The number of further calls that may pass. `None` lets all pass.
    passes: Option<usize>,
    /// The lengths of the registrations that have begun, and 0 for each deregistration that has
    /// begun.
    calls: Vec<usize>,
}

impl Gate {
    fn wait(&self, len: usize) {
        let mut state = self.state.lock().unwrap();
        state.calls.push(len);
        self.changed.notify_all();
        let closed = |state: &mut State| state.passes == Some(0);
        let (mut state, result) = self.changed.wait_timeout_while(state, TIMEOUT, closed).unwrap();
        assert!(!result.timed_out());
        state.passes = state.passes.map(|n| n - 1);
    }

    fn let_pass(&self, n: Option<usize>) {
        self.state.lock().unwrap().passes = n;
        self.changed.notify_all();
    }

    /// Waits until this many calls have begun, and returns them.
    fn calls(&self, n: usize) -> Vec<usize> {
        let state = self.state.lock().unwrap();
        let few = |state: &mut State| state.calls.len() < n;
        let (state, _) = self.changed.wait_timeout_while(state, TIMEOUT, few).unwrap();
        assert_eq!(state.calls.len(), n, "{:?}", state.calls);
        state.calls.clone()
    }
}

struct Slow(Keeper, Arc<Gate>);

struct SlowEnd(Option<Box<dyn Registration>>, Arc<Gate>);

impl Registration for SlowEnd {
    fn lkey(&self) -> u32 {
        self.0.as_ref().unwrap().lkey()
    }
    fn rkey(&self) -> u32 {
        self.0.as_ref().unwrap().rkey()
    }
    fn iova(&self) -> u64 {
        self.0.as_ref().unwrap().iova()
    }
}

impl Drop for SlowEnd {
    fn drop(&mut self) {
        self.1.wait(0);
        self.0 = None;
    }
}

// SAFETY: as Keeper.
unsafe impl Registrar for Slow {
    fn pins(&self) -> bool {
        false
    }
    fn is_slow(&self) -> bool {
        true
    }
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let remote = memory.access == Access::RemoteWrite;
        if remote {
            self.1.wait(memory.len);
            assert!(!self.1.panics.load(SeqCst), "asked to");
        }
        // SAFETY: the caller's guarantee.
        let registration = unsafe { self.0.register(memory) }?;
        Ok(match remote {
            true => Box::new(SlowEnd(Some(registration), self.1.clone())),
            false => registration,
        })
    }
}

/// Makes the smallest pool. Its registrations wait at the gate.
fn slow() -> (Pool, Arc<RecordingRegistrar>, Arc<Gate>) {
    let (registrar, gate) = <(Arc<RecordingRegistrar>, Arc<Gate>)>::default();
    gate.let_pass(Some(0));
    let slow = Arc::new(Slow(Keeper(registrar.clone()), gate.clone()));
    let pool = Pool::new(PoolConfig::default().total(MIN_POOL), slow).unwrap();
    registrar.limit(pool.config().total);
    (pool, registrar, gate)
}

fn landing(pool: &Pool) -> (Landing, Arc<Woken>) {
    let (mut landing, (woken, waker)) = (pool.landing(), Woken::new());
    landing.register_waker(&waker);
    (landing, woken)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < TIMEOUT, "{what}");
        thread::yield_now();
    }
}

/// Allocates until there is a piece.
fn wait_for(landing: &mut Landing, want: usize) -> LandingBuf {
    let mut piece = None;
    wait_until("a piece", || {
        piece = landing.alloc(want, want).unwrap();
        piece.is_some()
    });
    piece.unwrap()
}

fn settle(pool: Pool, registrar: &RecordingRegistrar) {
    wait_until("all is returned", || (pool.stats().leased, pool.stats().registered) == (0, 0));
    assert_unused(&pool);
    drop(pool);
    registrar.assert_settled();
}

#[test]
fn others_allocate_while_a_chunk_is_made() {
    let (pool, registrar, gate) = slow();
    let ((mut one, woken), (mut two, _)) = (landing(&pool), landing(&pool));
    gate.let_pass(None);
    drop(wait_for(&mut two, 64 * KIB));
    gate.let_pass(Some(0));
    let before = woken.count();
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    assert!(one.is_pending() && one.is_making());
    let leased = one.leased();
    assert!(leased >= 64 * KIB, "its lease counts");
    assert_eq!(pool.stats().leased, leased + two.leased());
    assert_eq!(one.share(), pool.config().landing / 2, "it is active");
    gate.calls(2);
    assert!(!two.others_claim(), "it claims nothing");
    assert!(two.alloc(64 * KIB, 64 * KIB).unwrap().is_some());
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none() && one.is_pending());
    assert_eq!(one.leased(), leased, "one chunk at a time");
    assert_eq!((woken.count(), pool.stats().registrations), (before, 1));
    gate.let_pass(None);
    wait_until("the waker is woken", || woken.count() > before);
    let piece = one.alloc(64 * KIB, 64 * KIB).unwrap().unwrap();
    assert!(!one.is_pending() && !one.is_making());
    assert_eq!((one.leased(), pool.stats().registrations), (leased, 2));
    assert_budgets(&pool, &registrar);
    drop((piece, one, two));
    settle(pool, &registrar);
}

/// The owner is woken for its own pieces while a chunk is made.
#[test]
fn pieces_that_come_free_are_used_while_a_chunk_is_made() {
    let (pool, registrar, gate) = slow();
    let (mut one, woken) = landing(&pool);
    gate.let_pass(None);
    let first = wait_for(&mut one, 64 * KIB);
    let mut held = Vec::new();
    gate.let_pass(Some(0));
    while let Some(piece) = one.alloc(64 * KIB, 64 * KIB).unwrap() {
        held.push(piece);
    }
    assert!(one.is_pending());
    gate.calls(2);
    assert!(one.alloc(64 * KIB, 4 * KIB).unwrap().is_none(), "the whole is on its way");
    let before = woken.count();
    drop(first);
    assert!(woken.count() > before);
    let meanwhile = one.alloc_meanwhile(32 * KIB).unwrap();
    assert!(meanwhile.is_some() && one.alloc_spare(4 * KIB).unwrap().is_some());
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    gate.let_pass(None);
    wait_for(&mut one, 64 * KIB);
    drop((held, meanwhile, one));
    settle(pool, &registrar);
}

#[test]
fn without_a_waker_chunks_are_made_at_once() {
    let (pool, registrar, gate) = slow();
    gate.let_pass(None);
    let mut landing = pool.landing();
    let piece = landing.alloc(4096, 4096).unwrap().unwrap();
    drop(piece);
    assert!(landing.trim() > 0);
    assert_eq!(pool.stats().leased, 0);
    drop((landing, pool));
    registrar.assert_settled();
}

#[test]
fn an_allocator_that_is_dropped_leaves_nothing() {
    let (pool, registrar, gate) = slow();
    let ((mut one, woken), (mut two, _)) = (landing(&pool), landing(&pool));
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    assert!(two.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    gate.calls(1);
    drop((one, two));
    assert!(pool.stats().leased > 0, "until the thread has done what it does");
    gate.let_pass(None);
    wait_until("all is returned", || pool.stats().leased == 0);
    // The chunk that the thread had not begun to make is not made.
    assert_eq!((pool.stats().registrations, gate.calls(2)[1]), (1, 0));
    assert_eq!(woken.count(), 0);
    settle(pool, &registrar);
}

#[test]
fn a_pool_that_is_dropped_leaves_nothing() {
    let (pool, registrar, gate) = slow();
    let (mut one, _) = landing(&pool);
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    gate.calls(1);
    drop((pool, one));
    gate.let_pass(None);
    gate.calls(2);
    wait_until("it is freed", || registrar.bytes() == 0);
    registrar.assert_settled();
    // The thread drops its reference to the registrar when it ends.
    wait_until("the thread ends", || Arc::strong_count(&registrar) == 1);
}

#[test]
fn the_budget_has_memory_back_once_it_is_deregistered() {
    let (pool, registrar, gate) = slow();
    let budget = pool.config().landing;
    let ((mut one, _), (mut two, woken)) = (landing(&pool), landing(&pool));
    gate.let_pass(None);
    drop(wait_for(&mut one, budget));
    assert!(two.alloc(budget / 2, budget / 2).unwrap().is_none() && !two.is_pending());
    assert!(one.others_claim());
    gate.let_pass(Some(0));
    let before = woken.count();
    assert_eq!(one.trim(), budget);
    assert_eq!(gate.calls(2)[1], 0);
    assert_eq!((one.leased(), pool.stats().leased, registrar.bytes()), (0, budget, budget));
    assert!(two.alloc(budget / 2, budget / 2).unwrap().is_none());
    assert_eq!(woken.count(), before);
    gate.let_pass(None);
    wait_until("it is woken", || woken.count() > before);
    assert!(pool.stats().leased < budget);
    wait_for(&mut two, budget / 2);
    assert!(registrar.most() <= pool.config().total);
    drop((one, two));
    settle(pool, &registrar);
}

/// A connection that returns its chunks to get a longer one does not claim memory while it waits.
#[test]
fn chunks_that_are_not_free_yet_are_no_shortage() {
    let (pool, registrar, gate) = slow();
    let budget = pool.config().landing;
    let ((mut one, woken), (two, _)) = (landing(&pool), landing(&pool));
    gate.let_pass(None);
    drop(wait_for(&mut one, 64 * KIB));
    gate.let_pass(Some(0));
    assert!(one.alloc(budget, budget).unwrap().is_none());
    gate.calls(2);
    assert!(one.is_pending() && !two.others_claim());
    assert!(one.alloc(budget, budget).unwrap().is_none() && one.is_pending());
    let before = woken.count();
    gate.let_pass(Some(1));
    wait_until("it is woken", || woken.count() > before);
    assert!(one.alloc(budget, budget).unwrap().is_none() && one.is_pending());
    gate.let_pass(None);
    assert_eq!(wait_for(&mut one, budget).capacity(), budget);
    assert_budgets(&pool, &registrar);
    drop((one, two));
    settle(pool, &registrar);
}

#[test]
fn the_next_call_returns_the_error() {
    let (pool, registrar, gate) = slow();
    let (mut one, woken) = landing(&pool);
    for panics in [false, true] {
        gate.let_pass(Some(0));
        registrar.fail(true);
        gate.panics.store(panics, SeqCst);
        let before = woken.count();
        assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
        gate.let_pass(None);
        wait_until("it is woken", || woken.count() > before);
        assert_eq!(pool.stats().leased, 0, "the lease is returned first");
        let error = one.alloc(64 * KIB, 64 * KIB).unwrap_err();
        assert_eq!(error.io().raw_os_error().is_none(), panics, "{error}");
        assert_eq!((one.leased(), pool.stats().leased), (0, 0));
        registrar.fail(false);
        gate.panics.store(false, SeqCst);
        drop(wait_for(&mut one, 64 * KIB));
        one.trim();
        wait_until("it is returned", || pool.stats().leased == 0);
    }
    // A shorter piece that is free is used instead, as when the call itself fails to make a chunk.
    let first = wait_for(&mut one, 4 * KIB);
    registrar.fail(true);
    let before = woken.count();
    assert!(one.alloc(512 * KIB, 4 * KIB).unwrap().is_none());
    wait_until("it is woken", || woken.count() > before);
    assert!(one.alloc(512 * KIB, 4 * KIB).unwrap().is_some());
    // An error for a spare piece is not returned for a piece that is needed.
    let before = woken.count();
    assert!(one.alloc_spare(300 * KIB).unwrap().is_none());
    wait_until("it is woken", || woken.count() > before);
    registrar.fail(false);
    let second = wait_for(&mut one, 300 * KIB);
    drop((first, second, one));
    settle(pool, &registrar);
}

#[test]
fn a_failed_spare_piece_is_told_of_once() {
    let (pool, registrar, gate) = slow();
    let (mut one, woken) = landing(&pool);
    gate.let_pass(None);
    registrar.fail(true);
    assert!(one.alloc_spare(64 * KIB).unwrap().is_none() && !one.is_pending());
    wait_until("it is woken", || woken.count() > 0);
    assert!(one.is_making());
    one.collect();
    assert!(!one.is_making());
    assert!(one.alloc_spare(64 * KIB).is_err());
    registrar.fail(false);
    assert!(one.alloc_spare(64 * KIB).unwrap().is_none());
    wait_until("it is made", || {
        one.collect();
        !one.is_making()
    });
    assert!(one.alloc_spare(64 * KIB).unwrap().is_some());
    drop(one);
    settle(pool, &registrar);
}

#[test]
fn a_connection_that_no_longer_waits_gives_its_chunk_up() {
    let (pool, registrar, gate) = slow();
    let (mut one, _) = landing(&pool);
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    gate.calls(1);
    one.trim();
    assert!(one.is_making(), "it waits");
    one.stop_waiting();
    one.trim();
    assert!(!one.is_making());
    assert_eq!(one.leased(), 0);
    gate.let_pass(None);
    wait_until("it is returned", || pool.stats().leased == 0);
    wait_for(&mut one, 64 * KIB);
    drop(one);
    settle(pool, &registrar);
}

#[test]
fn jobs_are_done_in_their_order() {
    let (pool, registrar, gate) = slow();
    let ((mut one, _), (mut two, _), (mut three, _)) =
        (landing(&pool), landing(&pool), landing(&pool));
    gate.let_pass(None);
    drop(wait_for(&mut three, 64 * KIB));
    gate.let_pass(Some(0));
    assert!(one.alloc(320 * KIB, 320 * KIB).unwrap().is_none());
    three.trim();
    assert!(two.alloc(192 * KIB, 192 * KIB).unwrap().is_none());
    for n in 2..=4 {
        gate.calls(n);
        gate.let_pass(Some(1));
    }
    assert_eq!(gate.calls(4)[1..], [320 * KIB, 0, 192 * KIB]);
    gate.let_pass(None);
    drop((wait_for(&mut one, 320 * KIB), wait_for(&mut two, 192 * KIB)));
    drop((one, two, three));
    settle(pool, &registrar);
}

/// While another connection claims memory, a chunk that is being made counts towards the share, so
/// other chunks are returned.
#[test]
fn a_chunk_that_is_being_made_counts_towards_the_share() {
    let (pool, registrar, gate) = slow();
    let budget = pool.config().landing;
    let ((mut one, _), (mut two, _)) = (landing(&pool), landing(&pool));
    gate.let_pass(None);
    let first = wait_for(&mut one, budget / 2);
    gate.let_pass(Some(0));
    assert!(one.alloc(budget / 4, budget / 4).unwrap().is_none() && one.is_pending());
    assert!(two.alloc(budget / 2, budget / 2).unwrap().is_none() && !two.is_pending());
    assert_eq!(one.leased(), budget / 4 * 3);
    assert_eq!(one.enforce_share(), tonic_rdma_memory::Reclaim::New);
    assert!(first.is_reclaiming(), "the other one cannot be returned now");
    drop(first);
    assert_eq!(one.return_reclaimed(), budget / 2);
    gate.let_pass(None);
    drop((wait_for(&mut one, budget / 4), wait_for(&mut two, budget / 2)));
    drop((one, two));
    settle(pool, &registrar);
}

/// A request that is longer than the chunk that is being made waits for its turn, and is not a
/// claim.
#[test]
fn a_longer_want_waits_for_the_chunk_that_is_being_made() {
    let (pool, registrar, gate) = slow();
    let ((mut one, _), (two, _)) = (landing(&pool), landing(&pool));
    assert!(one.alloc_spare(64 * KIB).unwrap().is_none() && one.is_making());
    let long = pool.config().landing / 2;
    assert!(one.alloc(long, long).unwrap().is_none());
    assert!(one.is_pending() && !two.others_claim());
    gate.let_pass(None);
    let piece = wait_for(&mut one, long);
    drop((piece, one, two));
    settle(pool, &registrar);
}

/// A chunk that waits to be freed is enough for a connection that starves, so no other chunks are
/// returned for it.
#[test]
fn who_starves_gets_one_chunk_of_another() {
    let (pool, registrar, gate) = slow();
    gate.let_pass(None);
    let ((mut one, _), (mut two, _)) = (landing(&pool), landing(&pool));
    let mut pieces = Vec::new();
    while pool.stats().leased + 64 * KIB <= pool.config().landing {
        pieces.push(wait_for(&mut one, 64 * KIB));
    }
    drop(pieces);
    let before = one.leased();
    gate.let_pass(Some(0));
    two.starve();
    assert!(two.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    let returned: Vec<usize> = (0..5)
        .map(|_| {
            one.enforce_share();
            one.return_reclaimed()
        })
        .collect();
    assert!(returned[0] > 0 && returned[1..] == [0; 4], "{returned:?} of {before}");
    gate.let_pass(None);
    let piece = wait_for(&mut two, 64 * KIB);
    drop((piece, one, two));
    settle(pool, &registrar);
}

/// An error for a request that has been given up is not returned to a later call.
#[test]
fn an_error_that_comes_too_late_is_dropped() {
    let (pool, registrar, gate) = slow();
    let (mut one, woken) = landing(&pool);
    let before = woken.count();
    registrar.fail(true);
    assert!(one.alloc(64 * KIB, 64 * KIB).unwrap().is_none());
    one.stop_waiting();
    gate.let_pass(None);
    wait_until("it has failed", || woken.count() > before);
    one.collect();
    registrar.fail(false);
    let piece = wait_for(&mut one, 64 * KIB);
    drop((piece, one));
    settle(pool, &registrar);
}
