//! Wakes the connections that wait for landing memory.
//!
//! Each connection's allocator ([`Landing`](crate::Landing)) has one [`LandingWaiter`]:
//!
//! | state | from | to, by |
//! |---|---|---|
//! | idle | the start | waiting: an allocation found no memory |
//! | waiting | | idle: the next allocation succeeds or fails, or the owner gives up or is dropped |
//!
//! An allocator that has leased as much as its own limit allows does not count as waiting, because
//! other connections cannot help it. It is woken when one of its own pieces comes free.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::waiter_count::WaiterCount;

/// The part of a [`Landing`](crate::Landing) that outlives it: a piece that comes free wakes the
/// owner through it.
#[derive(Debug, Default)]
pub(crate) struct LandingWaiter {
    /// The last allocation found no memory.
    waiting: AtomicBool,
    /// The owner has leased as much as its limit allows, and waits for some of that to come free.
    at_limit: AtomicBool,
    /// Only its share keeps the owner from leasing more: the budget has what it wants.
    at_share: AtomicBool,
    /// Bytes that the owner has leased.
    leased: AtomicUsize,
    /// The owner has leased memory, or waits for some.
    active: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl LandingWaiter {
    fn waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(SeqCst)
    }

    /// After setting `true`, the owner must look for memory once more before it waits.
    pub(crate) fn set_at_limit(&self, at_limit: bool) {
        self.at_limit.store(at_limit, SeqCst);
        fence(SeqCst);
    }

    /// Replaces the waker. The old one is dropped outside the lock: dropping it may drop a task and
    /// all that the task owns.
    pub(crate) fn set_waker(&self, new: Option<Waker>) {
        let old = std::mem::replace(&mut *self.waker(), new);
        drop(old);
    }

    pub(crate) fn has_waker(&self, waker: &Waker) -> bool {
        self.waker().as_ref().is_some_and(|current| current.will_wake(waker))
    }

    fn wake(&self) {
        let waker = self.waker().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The waiters of all connections of a pool.
#[derive(Debug, Default)]
pub(crate) struct LandingWaiters {
    /// Those that wait are in the order in which they began to.
    list: Mutex<Vec<Weak<LandingWaiter>>>,
    n_waiting: WaiterCount,
    n_active: AtomicUsize,
    n_at_share: AtomicUsize,
}

impl LandingWaiters {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<LandingWaiter>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a waiter that does not wait yet.
    pub(crate) fn add(&self) -> Arc<LandingWaiter> {
        let waiter = Arc::new(LandingWaiter::default());
        self.list().push(Arc::downgrade(&waiter));
        waiter
    }

    /// Removes a waiter whose owner is dropped. Pieces may keep it alive.
    pub(crate) fn remove(&self, waiter: &Arc<LandingWaiter>) {
        self.set_waiting(waiter, false);
        self.record_leased(waiter, 0);
        self.list().retain(|a| a.as_ptr() != Arc::as_ptr(waiter));
        waiter.set_waker(None);
    }

    /// Sets whether the waiter waits; only its owner calls this. Returns whether that is a change.
    /// After setting `true`, the owner must look for memory once more before it waits.
    pub(crate) fn set_waiting(&self, waiter: &Arc<LandingWaiter>, waiting: bool) -> bool {
        if waiter.waiting.swap(waiting, SeqCst) == waiting {
            return false;
        }
        self.count_active(waiter);
        if !waiting {
            if waiter.at_share.swap(false, SeqCst) {
                self.n_at_share.fetch_sub(1, SeqCst);
            }
            self.n_waiting.leave();
            self.wake_at_share();
            return true;
        }
        {
            // Moves to the end of the queue.
            let mut list = self.list();
            if let Some(at) = list.iter().position(|a| a.as_ptr() == Arc::as_ptr(waiter)) {
                let me = list.remove(at);
                list.push(me);
            }
        }
        self.n_waiting.enter();
        true
    }

    /// Records how many bytes the owner of the waiter has leased; only the owner calls this.
    pub(crate) fn record_leased(&self, waiter: &LandingWaiter, leased: usize) {
        waiter.leased.store(leased, SeqCst);
        self.count_active(waiter);
    }

    fn count_active(&self, waiter: &LandingWaiter) {
        let active = waiter.is_waiting() || waiter.leased.load(SeqCst) > 0;
        match (waiter.active.swap(active, SeqCst), active) {
            (false, true) => {
                self.n_active.fetch_add(1, SeqCst);
            }
            (true, false) => {
                self.n_active.fetch_sub(1, SeqCst);
                // The shares of the others have grown.
                self.wake_at_share();
            }
            (true, true) | (false, false) => {}
        }
    }

    /// The number of connections that have leased memory or wait for some.
    pub(crate) fn n_active(&self) -> usize {
        self.n_active.load(SeqCst)
    }

    /// Whether another connection waits that has leased at most `leased` bytes.
    pub(crate) fn others_wait_below(&self, waiter: &LandingWaiter, leased: usize) -> bool {
        self.list().iter().filter_map(Weak::upgrade).any(|other| {
            !std::ptr::eq(&*other, waiter)
                && other.is_waiting()
                && other.leased.load(SeqCst) <= leased
        })
    }

    /// Whether any other connection waits.
    pub(crate) fn others_wait(&self, waiter: &LandingWaiter) -> bool {
        self.n_waiting.count() > usize::from(waiter.is_waiting())
    }

    /// Wakes the waiters that `which` selects.
    fn wake_each(&self, which: impl Fn(&LandingWaiter) -> bool) {
        let waiters: Vec<Arc<LandingWaiter>> =
            self.list().iter().filter_map(Weak::upgrade).collect();
        waiters.iter().filter(|waiter| which(waiter)).for_each(|waiter| waiter.wake());
    }

    /// Marks a waiter, if it waits, as limited by its share. After that the owner must look for
    /// memory once more before it waits.
    pub(crate) fn set_at_share(&self, waiter: &LandingWaiter) {
        if waiter.is_waiting() && !waiter.at_share.swap(true, SeqCst) {
            self.n_at_share.fetch_add(1, SeqCst);
        }
        fence(SeqCst);
    }

    /// Wakes those that are limited by their shares: fewer connections wait, or shares have grown.
    fn wake_at_share(&self) {
        fence(SeqCst);
        if self.n_at_share.load(SeqCst) > 0 {
            self.wake_each(|waiter| waiter.is_waiting() && waiter.at_share.load(SeqCst));
        }
    }

    /// Wakes all other connections, so that they return what they can spare: this one has begun to
    /// wait.
    pub(crate) fn wake_others(&self, waiter: &Arc<LandingWaiter>) {
        self.wake_each(|other| !std::ptr::eq(other, Arc::as_ptr(waiter)));
    }

    /// Wakes those that wait: part of the budget has come free.
    pub(crate) fn budget_freed(&self) {
        if self.n_waiting.any_after_free() {
            self.wake_each(LandingWaiter::is_waiting);
        }
    }

    /// Wakes the owner of a piece that has come free, if it needs to know: it may wait for that
    /// piece itself, or others wait and the chunk may now be idle and can be returned.
    pub(crate) fn piece_freed(&self, waiter: &LandingWaiter) {
        // `any_after_free` has the fence between freeing the memory and reading both flags.
        if self.n_waiting.any_after_free() || waiter.at_limit.load(SeqCst) {
            waiter.wake();
        }
    }
}
