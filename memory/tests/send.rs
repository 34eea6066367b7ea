//! Send and control memory.

#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::BufMut;
use common::{
    Keeper, RecordingRegistrar, Woken, assert_budgets, assert_unused, page, pool, small, usage,
};
use tonic_rdma_memory::{
    Alloc, HugePages, MIN_POOL, PinnedBuf, Pool, PoolConfig, PoolError, Registrar, Use,
};

fn poll(alloc: &mut Alloc, waker: &Waker) -> Poll<Result<PinnedBuf, PoolError>> {
    Pin::new(alloc).poll(&mut Context::from_waker(waker))
}

fn ready(alloc: &mut Alloc) -> Option<PinnedBuf> {
    match poll(alloc, Waker::noop()) {
        Poll::Ready(result) => Some(result.unwrap()),
        Poll::Pending => None,
    }
}

fn exhausted(result: Result<PinnedBuf, PoolError>) -> bool {
    result.is_err_and(|error| usage(&error) == Some(Use::Send))
}

/// Allocates buffers of `len` bytes until there is no memory left.
fn fill(pool: &Pool, len: usize) -> Vec<PinnedBuf> {
    let mut all = Vec::new();
    loop {
        match pool.try_alloc(len) {
            Ok(buf) => all.push(buf),
            Err(error) => {
                assert_eq!(usage(&error), Some(Use::Send), "{error}");
                return all;
            }
        }
    }
}

#[test]
fn the_whole_budget_is_available_in_every_size() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    for len in [1, 4096, 4097, 16 << 10, 64 << 10, 100_000, 256 << 10, 300_000, budget] {
        let all = fill(&pool, len);
        let classes = pool.stats().classes.into_iter().map(|c| c.slot);
        let slot = classes.filter(|slot| *slot >= len).min().unwrap_or(len.next_multiple_of(4096));
        assert_eq!(all.len(), budget / slot, "{len}");
        assert_budgets(&pool, &registrar);
        drop(all);
        assert_unused(&pool);
    }
    drop(pool);
    registrar.assert_settled();
}

#[test]
fn idle_arenas_are_kept_if_removing_them_would_not_suffice() {
    let (pool, registrar) = small();
    let held = pool.try_alloc(pool.config().send - (64 << 10)).unwrap();
    drop(pool.try_alloc(1).unwrap());
    let before = registrar.registrations();
    assert!(exhausted(pool.try_alloc(256 << 10)));
    drop(pool.try_alloc(1).unwrap());
    assert_eq!(registrar.registrations(), before);
    drop((held, pool));
    registrar.assert_settled();
}

#[test]
fn a_larger_slot_is_better_than_none() {
    let (pool, _) = small();
    let mut all = fill(&pool, 256 << 10);
    all.pop();
    // The idle arena of the large slot is removed to make room for small slots.
    let small = pool.try_alloc(1).unwrap();
    all.push(small);
    let rest = fill(&pool, 4096);
    drop(all);
    assert!(!rest.is_empty());
    let (pool, _) = pool_with_two_slots_in_one_arena();
    let one = pool.try_alloc(16 << 10).unwrap();
    let others = fill(&pool, 64 << 10);
    // Small buffers take the last 32 KiB, then the free 16 KiB slot beside the one in use.
    let small = fill(&pool, 1);
    assert_eq!(small.len(), 9);
    assert_eq!(pool.stats().classes[1].in_use, 2);
    drop((one, others, small));
    assert_unused(&pool);
}

fn pool_with_two_slots_in_one_arena() -> (Pool, Arc<RecordingRegistrar>) {
    pool(PoolConfig::default().total(MIN_POOL).send(256 << 10))
}

#[test]
fn extreme_lengths() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    let empty = pool.try_alloc(0).unwrap();
    assert_eq!((empty.capacity(), empty.len()), (0, 0));
    assert_ne!(empty.addr(), 0);
    assert!(empty.freeze().is_empty());
    assert_unused(&pool);
    for len in [budget + 1, usize::MAX - 4096, usize::MAX - 1, usize::MAX] {
        assert!(matches!(pool.try_alloc(len), Err(PoolError::TooLarge { len: l, .. }) if l == len));
        assert!(matches!(pool.control(len), Err(PoolError::TooLarge { usage: Use::Control, .. })));
        let mut alloc = pool.alloc(len);
        assert!(matches!(
            poll(&mut alloc, Waker::noop()),
            Poll::Ready(Err(PoolError::TooLarge { .. }))
        ));
    }
    drop(pool);
    registrar.assert_settled();
    let (huge, _) = self::pool(PoolConfig::default().total(usize::MAX));
    assert!(matches!(huge.try_alloc(usize::MAX / 8), Err(PoolError::Map { .. })));
    assert!(huge.try_alloc(1).is_ok());
    let (none, _) = self::pool(PoolConfig::default().send(0));
    assert!(matches!(none.try_alloc(0), Err(PoolError::TooLarge { budget: 0, .. })));
}

#[test]
fn spare_leaves_a_quarter_and_trim_deregisters_it() {
    let (pool, registrar) = small();
    let budget = pool.config().control;
    let extra: Vec<_> = std::iter::from_fn(|| pool.spare(page())).collect();
    assert_eq!(extra.len(), (budget - budget / 4) / page());
    let block = pool.control(budget / 4).expect("what connections need is there");
    drop(extra);
    assert!(pool.stats().registered > block.capacity(), "kept for whoever is next");
    let start = Instant::now();
    let second = Duration::from_secs(1);
    for (after, left) in [(0, false), (1, true)] {
        pool.trim(start + second * after);
        // A second call within the same second has no effect.
        pool.trim(start + second * after + second / 2);
        let only_block = pool.stats().registered == block.capacity();
        assert_eq!(
            only_block, left,
            "what was idle since the last time is taken down, after {after} s"
        );
    }
    drop(pool.spare(page()));
    assert!(pool.stats().registered > block.capacity());
    pool.trim_now();
    assert_eq!(pool.stats().registered, block.capacity());
    assert_budgets(&pool, &registrar);
    assert!(pool.spare(budget).is_none() && pool.spare(usize::MAX).is_none());
    drop((block, pool));
    registrar.assert_settled();
}

#[test]
fn control_blocks_of_many_connections_fit_the_smallest_pool() {
    let (pool, registrar) = small();
    let mut blocks: Vec<_> = std::iter::from_fn(|| pool.control(80 << 10).ok()).collect();
    assert_eq!(blocks.len(), 6);
    assert_budgets(&pool, &registrar);
    let error = pool.control(80 << 10).unwrap_err();
    assert_eq!(usage(&error), Some(Use::Control));
    // The budgets of the other parts are untouched (R11).
    assert!(pool.try_alloc(pool.config().send).is_ok());
    assert!(pool.landing().alloc(4096, 4096).unwrap().is_some());
    let old = blocks.pop().unwrap().lkey();
    let before = pool.stats().registrations;
    assert_eq!(
        pool.control(80 << 10).unwrap().lkey(),
        old,
        "the next connection's block needs no registration"
    );
    assert_eq!(pool.stats().registrations, before);
    drop((blocks, pool));
    registrar.assert_settled();
}

#[test]
fn waiters_are_served_in_order() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    let held = pool.try_alloc(budget).unwrap();
    let (woken, waker) = Woken::new();
    let mut first = pool.alloc(budget);
    let mut second = pool.alloc(1);
    let mut third = pool.alloc(1);
    assert!(poll(&mut first, &waker).is_pending());
    assert!(poll(&mut second, &waker).is_pending());
    assert!(poll(&mut third, &waker).is_pending());
    assert_eq!(pool.stats().waits, 3);
    assert!(exhausted(pool.try_alloc(1)));
    drop(held);
    assert_eq!(woken.count(), 1, "only the first has what it wants");
    // The first waiter has been served but has not fetched its buffer, so the others still wait.
    assert!(ready(&mut second).is_none());
    assert!(exhausted(pool.try_alloc(1)));
    let buf = ready(&mut first).unwrap();
    assert_eq!(buf.capacity(), budget);
    drop(buf);
    assert!(ready(&mut third).is_some());
    assert!(ready(&mut second).is_some());
    assert_unused(&pool);
    assert!(pool.try_alloc(1).is_ok());
    drop((first, second, third, pool));
    registrar.assert_settled();
}

#[test]
fn the_waker_of_the_last_poll_is_woken() {
    let (pool, _) = small();
    let held = pool.try_alloc(pool.config().send).unwrap();
    let ((old, old_waker), (new, new_waker)) = (Woken::new(), Woken::new());
    let mut alloc = pool.alloc(1);
    assert!(poll(&mut alloc, &old_waker).is_pending());
    assert!(poll(&mut alloc, &new_waker).is_pending());
    drop(old_waker);
    assert_eq!(Arc::strong_count(&old), 1, "the old waker is kept");
    drop(held);
    assert_eq!((old.count(), new.count()), (0, 1));
}

#[test]
fn memory_freed_as_bytes_or_in_other_sizes_wakes_waiters() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    // Memory moves from small slots, whose arenas are removed, to one large buffer, and back.
    let mut slots = fill(&pool, 4096);
    let mut large = pool.alloc(budget);
    assert!(ready(&mut large).is_none());
    let last = slots.pop();
    drop(slots);
    assert!(ready(&mut large).is_none());
    drop(last);
    let held = ready(&mut large).unwrap();
    assert_budgets(&pool, &registrar);
    let mut small: Vec<_> = (0..3).map(|_| pool.alloc(4096)).collect();
    assert!(small.iter_mut().all(|alloc| ready(alloc).is_none()));
    drop(held);
    assert!(small.iter_mut().all(|alloc| ready(alloc).is_some()));
    // The memory becomes free with the last clone or slice of frozen bytes, here on another thread.
    let mut buf = pool.try_alloc(budget).unwrap();
    buf.put_slice(b"0123");
    let bytes = buf.freeze();
    let (part, rest) = (bytes.slice(1..2), bytes.clone());
    let mut waits = pool.alloc(1);
    assert!(ready(&mut waits).is_none());
    drop((bytes, rest));
    assert!(ready(&mut waits).is_none());
    std::thread::spawn(move || drop(part)).join().unwrap();
    assert!(ready(&mut waits).is_some());
    drop((large, small, waits, pool));
    registrar.assert_settled();
}

#[test]
fn a_wait_can_be_cancelled_at_every_point() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    for polls in 0..3 {
        for served in [false, true] {
            for first in [false, true] {
                let held = pool.try_alloc(budget).unwrap();
                let (mut a, mut b) = (pool.alloc(budget), pool.alloc(1));
                // The cancelled waiter is first or last in the queue.
                let order: [&mut Alloc; 2] =
                    if first { [&mut a, &mut b] } else { [&mut b, &mut a] };
                let (woken, waker) = Woken::new();
                for alloc in order {
                    for _ in 0..if alloc.is(budget) { polls } else { 1 } {
                        assert!(poll(alloc, &waker).is_pending());
                    }
                }
                if served {
                    drop(held);
                    drop(a);
                } else {
                    drop(a);
                    drop(held);
                }
                assert!(ready(&mut b).is_some(), "{polls} polls, served {served}, first {first}");
                assert!(woken.count() >= 1);
                assert_unused(&pool);
                assert_eq!(pool.stats().in_use_bytes(), 0);
            }
        }
    }
    // A large request blocks a small one behind it until the large request is cancelled.
    let _held = pool.try_alloc(budget / 2 + 1).unwrap();
    let mut much = pool.alloc(budget);
    let mut little = pool.alloc(1);
    let (woken, waker) = Woken::new();
    assert!(poll(&mut much, &waker).is_pending() && poll(&mut little, &waker).is_pending());
    drop(much);
    assert_eq!(woken.count(), 1);
    assert!(ready(&mut little).is_some());
    drop((little, _held, pool));
    registrar.assert_settled();
}

trait Is {
    fn is(&self, len: usize) -> bool;
}
impl Is for Alloc {
    fn is(&self, len: usize) -> bool {
        format!("{self:?}").contains(&format!("len: {len}"))
    }
}

/// A waker that is the last owner of another buffer, as a task's waker may be.
struct Owns(#[allow(dead_code)] PinnedBuf);
impl std::task::Wake for Owns {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn wakers_may_own_buffers() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    let half = pool.try_alloc(budget / 2).unwrap();
    let other = pool.try_alloc(budget / 2).unwrap();
    let mut alloc = pool.alloc(budget);
    let waker = Waker::from(Arc::new(Owns(half)));
    assert!(poll(&mut alloc, &waker).is_pending());
    drop(waker);
    drop(other);
    // Replacing the waker frees the buffer that it owns, which serves this very wait.
    assert!(poll(&mut alloc, Waker::noop()).is_pending());
    assert!(ready(&mut alloc).is_some());
    drop((alloc, pool));
    registrar.assert_settled();
}

#[test]
fn a_failed_registration_only_fails_the_request() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    registrar.fail(true);
    for len in [1, 64 << 10, budget] {
        assert!(matches!(pool.try_alloc(len), Err(PoolError::Register(_))));
        assert!(matches!(pool.control(len), Err(PoolError::Register(_))));
    }
    assert_budgets(&pool, &registrar);
    assert_eq!(pool.stats().registered, 0);
    registrar.fail(false);
    let held = pool.try_alloc(budget).unwrap();
    let (mut first, mut second) = (pool.alloc(4096), pool.alloc(4096));
    assert!(ready(&mut first).is_none() && ready(&mut second).is_none());
    registrar.fail(true);
    drop(held);
    // Waiters get the error, because perhaps no memory ever becomes free for them.
    for alloc in [&mut first, &mut second] {
        let Poll::Ready(Err(PoolError::Register(error))) = poll(alloc, Waker::noop()) else {
            panic!()
        };
        assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    }
    registrar.fail(false);
    assert_eq!(pool.try_alloc(budget).unwrap().capacity(), budget);
    drop((first, second, pool));
    registrar.assert_settled();
}

#[test]
fn buffers_outlive_pool_and_registrar() {
    let (pool, registrar) = small();
    let mut slot = pool.try_alloc(10).unwrap();
    slot.put_slice(b"slot");
    let mut own = pool.try_alloc(300_000).unwrap();
    own.put_slice(b"own");
    let mut control = pool.control(10).unwrap();
    control.put_slice(b"control");
    let resolved = pool.resolve(&slot.freeze()).unwrap();
    let waiting = pool.alloc(1);
    drop(pool);
    assert!(registrar.bytes() > 0);
    let (slot, own, control) = (resolved.into_bytes(), own.freeze(), control.freeze());
    drop(waiting);
    assert_eq!((&slot[..], &own[..], &control[..]), (&b"slot"[..], &b"own"[..], &b"control"[..]));
    drop((slot, control));
    assert_eq!(&own[..], b"own");
    drop(own);
    registrar.assert_settled();
    assert_eq!(Arc::strong_count(&registrar), 1);
}

#[test]
fn a_registrar_outlives_its_registrations() {
    /// Checks that the registrar is dropped last.
    struct Last(Keeper);
    impl Drop for Last {
        fn drop(&mut self) {
            assert_eq!(self.0.0.bytes(), 0);
        }
    }
    // SAFETY: as `Keeper`.
    unsafe impl Registrar for Last {
        fn pins(&self) -> bool {
            self.0.pins()
        }
        unsafe fn register(
            &self,
            memory: tonic_rdma_memory::Memory,
        ) -> Result<Box<dyn tonic_rdma_memory::Registration>, tonic_rdma_memory::RegisterError>
        {
            // SAFETY: the caller's guarantee.
            unsafe { self.0.register(memory) }
        }
    }
    type Keep = fn(&Pool) -> Box<dyn std::any::Any>;
    let keep: [Keep; 4] = [
        |pool| Box::new(pool.try_alloc(1).unwrap()),
        |pool| Box::new(pool.try_alloc(300_000).unwrap()),
        |pool| Box::new(pool.control(1).unwrap()),
        |pool| Box::new(pool.landing().alloc(1, 1).unwrap().unwrap()),
    ];
    for keep in keep {
        let registrar = Arc::new(RecordingRegistrar::default());
        let last = Arc::new(Last(Keeper(registrar.clone())));
        let pool = Pool::new(PoolConfig::default().total(MIN_POOL), last).unwrap();
        let kept = keep(&pool);
        drop(pool);
        assert!(registrar.bytes() > 0);
        drop(kept);
        registrar.assert_settled();
    }
}

#[test]
fn long_buffers_reuse_registrations() {
    let (pool, registrar) = pool(PoolConfig::default());
    for _ in 0..100 {
        drop(pool.try_alloc(3 << 20).unwrap().freeze());
        drop(pool.try_alloc((3 << 20) - 5000).unwrap());
    }
    assert_eq!(pool.stats().registrations, 1);
    // Kept arenas do not reduce the budget.
    drop(pool.try_alloc(pool.config().send).unwrap());
    assert_budgets(&pool, &registrar);
    drop(pool);
    registrar.assert_settled();
}

#[test]
fn explicit_huge_pages_fall_back_to_ordinary_ones() {
    let (pool, registrar) =
        pool(PoolConfig::default().total(64 << 20).huge_pages(HugePages::Explicit));
    assert_eq!(pool.config().chunk % (2 << 20), 0);
    let mut buf = pool.try_alloc(4 << 20).unwrap();
    buf.resize_zeroed(4 << 20);
    let mut small = pool.try_alloc(1).unwrap();
    small.put_u8(7);
    let landed = pool.landing().alloc(4 << 20, 4 << 20).unwrap().unwrap();
    assert_eq!(landed.filled(4 << 20).len(), 4 << 20);
    assert_budgets(&pool, &registrar);
    assert_eq!((buf.freeze().len(), &small.freeze()[..]), (4 << 20, &[7][..]));
    drop(pool);
    registrar.assert_settled();
}

#[tokio::test]
async fn many_tasks_share_a_little_memory() {
    let (pool, registrar) = small();
    let budget = pool.config().send;
    let tasks: Vec<_> = (0..200)
        .map(|i| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let len = [1, 5_000, 70_000, 300_000, budget][i % 5];
                for _ in 0..5 {
                    let mut buf = pool.alloc(len).await.unwrap();
                    buf.put_u8(i as u8);
                    tokio::task::yield_now().await;
                    assert_eq!(buf[..], [i as u8]);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_unused(&pool);
    assert!(pool.stats().waits > 0);
    drop(pool);
    registrar.assert_settled();
}

#[test]
fn a_future_can_be_pinned_anywhere() {
    let (pool, _) = small();
    let mut alloc = pin!(pool.alloc(1));
    assert!(alloc.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}
