//! Wakes the connections that wait for landing memory.
//!
//! Each connection's allocator ([`Landing`](crate::Landing)) has one [`LandingWaiter`]:
//!
//! | it waits | for | the other connections |
//! |---|---|---|
//! | not at all | | |
//! | for its own pieces | its own pieces to become free, because its limit rules out another chunk or its chunk is being made | cannot help it, or need not |
//! | at its share | its own pieces, and free memory in the budget | keep what they have |
//! | for its share | its own pieces, and free memory in the budget; it has at most three quarters of its share | return what exceeds their shares |
//! | starving | its own pieces, and free memory in the budget; its memory has no room even for its shortest piece | return a chunk, even one within their shares |
//!
//! The last two states are claims. Each attempt to allocate replaces the state. The wait ends with
//! the next attempt that returns a piece or an error, and when the owner gives up or is dropped.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::waiter_count::WaiterCount;

/// The smallest share in bytes: enough for two pieces that are worth granting.
pub(crate) const MIN_SHARE: usize = 32 * 1024;

/// The memory that an allocator waits for, as in the module's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum Waiting {
    No,
    ForOwn,
    AtShare,
    ForShare,
    Starving,
}

impl Waiting {
    const ALL: [Waiting; 5] =
        [Waiting::No, Waiting::ForOwn, Waiting::AtShare, Waiting::ForShare, Waiting::Starving];

    /// Whether memory that becomes free in the budget helps the waiter.
    fn takes_budget(self) -> bool {
        self >= Waiting::AtShare
    }

    pub(crate) fn is_claim(self) -> bool {
        self >= Waiting::ForShare
    }
}

/// The part of a [`Landing`](crate::Landing) that outlives the allocator. A piece that becomes free
/// wakes the allocator's owner through this part.
#[derive(Debug)]
pub(crate) struct LandingWaiter {
    /// The [`Waiting`] state as a number.
    state: AtomicU8,
    /// True if some chunks are to be returned as soon as they are free.
    reclaims: AtomicBool,
    /// The number of bytes that the owner has leased.
    leased: AtomicUsize,
    /// The maximum number of bytes that the owner may lease at a time.
    pub(crate) limit: usize,
    /// The total size of the pieces that the application holds.
    pub(crate) held: AtomicUsize,
    /// The total size of the chunks in which held pieces lie.
    pub(crate) pinned: AtomicUsize,
    /// The total size of the owner's chunks that wait to be deregistered and unmapped.
    pub(crate) freeing: AtomicUsize,
    /// True if the owner has leased memory or waits for some.
    active: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl LandingWaiter {
    fn new(limit: usize) -> Self {
        LandingWaiter {
            state: AtomicU8::new(0),
            reclaims: AtomicBool::new(false),
            leased: AtomicUsize::new(0),
            limit,
            held: AtomicUsize::new(0),
            pinned: AtomicUsize::new(0),
            freeing: AtomicUsize::new(0),
            active: AtomicBool::new(false),
            waker: Mutex::new(None),
        }
    }

    fn waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> Waiting {
        Waiting::ALL[usize::from(self.state.load(SeqCst)) % Waiting::ALL.len()]
    }

    pub(crate) fn leased(&self) -> usize {
        self.leased.load(SeqCst)
    }

    /// Sets whether chunks are to be returned as soon as they are free. After setting `true`, the
    /// owner must check again for free chunks.
    pub(crate) fn set_reclaims(&self, reclaims: bool) {
        self.reclaims.store(reclaims, SeqCst);
        fence(SeqCst);
    }

    /// Replaces the waker. Drops the old waker outside the lock, because dropping it may drop a
    /// task and everything that the task owns.
    pub(crate) fn set_waker(&self, new: Option<Waker>) {
        let old = std::mem::replace(&mut *self.waker(), new);
        drop(old);
    }

    pub(crate) fn has_waker(&self, waker: &Waker) -> bool {
        self.waker().as_ref().is_some_and(|current| current.will_wake(waker))
    }

    pub(crate) fn wake(&self) {
        let waker = self.waker().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Wakes the owner after one of its pieces has become free, if the owner waits for memory or
    /// has a chunk to return that may now be free.
    pub(crate) fn piece_freed(&self) {
        // Orders the freeing of the memory before the reads of `state` and `reclaims`.
        fence(SeqCst);
        if self.state() != Waiting::No || self.reclaims.load(SeqCst) {
            self.wake();
        }
    }
}

/// The waiters of all connections of a pool.
#[derive(Debug, Default)]
pub(crate) struct LandingWaiters {
    /// The waiters. Waiters that claim memory are in the order in which their claims began.
    list: Mutex<Vec<Weak<LandingWaiter>>>,
    /// The number of waiters that can use free memory of the budget.
    n_waiting: WaiterCount,
    n_claims: AtomicUsize,
    n_starving: AtomicUsize,
    n_active: AtomicUsize,
}

impl LandingWaiters {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<LandingWaiter>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an idle waiter for an allocator that may lease `limit` bytes.
    pub(crate) fn add(&self, limit: usize) -> Arc<LandingWaiter> {
        let waiter = Arc::new(LandingWaiter::new(limit));
        self.list().push(Arc::downgrade(&waiter));
        waiter
    }

    /// Removes a waiter whose owner is dropped. Pieces may keep the waiter alive.
    pub(crate) fn remove(&self, waiter: &Arc<LandingWaiter>) {
        self.set(waiter, Waiting::No);
        self.record_leased(waiter, 0);
        self.list().retain(|a| a.as_ptr() != Arc::as_ptr(waiter));
        waiter.set_waker(None);
    }

    /// Sets the state of a waiter and returns the old state. Only the waiter's owner calls this
    /// function. An owner that begins to wait must check for memory again before it waits.
    pub(crate) fn set(&self, waiter: &Arc<LandingWaiter>, state: Waiting) -> Waiting {
        let before = waiter.state();
        if before == state {
            return before;
        }
        waiter.state.store(state as u8, SeqCst);
        self.count_active(waiter);
        let changes = |counts: fn(Waiting) -> bool| (counts(before), counts(state));
        match changes(Waiting::takes_budget) {
            (false, true) => self.n_waiting.enter(),
            (true, false) => self.n_waiting.leave(),
            (true, true) | (false, false) => {}
        }
        // Orders the new state before the last check for memory.
        fence(SeqCst);
        count(&self.n_starving, changes(|state| state == Waiting::Starving));
        count(&self.n_claims, changes(Waiting::is_claim));
        match changes(Waiting::is_claim) {
            (false, true) => self.move_to_end(waiter),
            // Wake the other connections that wait at their shares, because they may no longer be
            // limited to their shares.
            (true, false) => self.wake_at_share(waiter),
            _ => {}
        }
        before
    }

    fn move_to_end(&self, waiter: &Arc<LandingWaiter>) {
        let mut list = self.list();
        if let Some(at) = list.iter().position(|a| a.as_ptr() == Arc::as_ptr(waiter)) {
            let me = list.remove(at);
            list.push(me);
        }
    }

    /// Records how many bytes the waiter's owner has leased. Only the owner calls this function.
    pub(crate) fn record_leased(&self, waiter: &LandingWaiter, leased: usize) {
        waiter.leased.store(leased, SeqCst);
        self.count_active(waiter);
    }

    fn count_active(&self, waiter: &LandingWaiter) {
        let active = waiter.state() != Waiting::No || waiter.leased() > 0;
        match (waiter.active.swap(active, SeqCst), active) {
            (false, true) => {
                self.n_active.fetch_add(1, SeqCst);
            }
            (true, false) => {
                self.n_active.fetch_sub(1, SeqCst);
                // Wake the other connections, because their shares have grown.
                self.wake_at_share(waiter);
            }
            (true, true) | (false, false) => {}
        }
    }

    /// The number of connections that have leased memory or wait for some.
    pub(crate) fn n_active(&self) -> usize {
        self.n_active.load(SeqCst)
    }

    /// The share of a connection in a budget of `budget` bytes.
    pub(crate) fn share(&self, budget: usize) -> usize {
        (budget / self.n_active().max(1)).max(MIN_SHARE)
    }

    /// Whether any other connection claims memory.
    pub(crate) fn others_claim(&self, waiter: &LandingWaiter) -> bool {
        self.n_claims.load(SeqCst) > usize::from(waiter.state().is_claim())
    }

    /// Whether any other connection starves.
    pub(crate) fn others_starve(&self, waiter: &LandingWaiter) -> bool {
        self.n_starving.load(SeqCst) > usize::from(waiter.state() == Waiting::Starving)
    }

    /// Wakes the waiters that `which` selects.
    fn wake_each(&self, which: impl Fn(&LandingWaiter) -> bool) {
        let waiters: Vec<Arc<LandingWaiter>> =
            self.list().iter().filter_map(Weak::upgrade).collect();
        waiters.iter().filter(|waiter| which(waiter)).for_each(|waiter| waiter.wake());
    }

    /// Wakes the other connections that wait at their shares, because fewer connections claim
    /// memory or shares have grown.
    fn wake_at_share(&self, waiter: &LandingWaiter) {
        if self.n_waiting.any_after_free() {
            self.wake_each(|other| {
                !std::ptr::eq(other, waiter) && other.state() == Waiting::AtShare
            });
        }
    }

    /// Wakes the other connections that have more than `leased` bytes, because this connection has
    /// begun to claim memory and those connections have to return some.
    pub(crate) fn wake_above(&self, waiter: &Arc<LandingWaiter>, leased: usize) {
        self.wake_each(|other| {
            !std::ptr::eq(other, Arc::as_ptr(waiter)) && other.leased() > leased
        });
    }

    /// Wakes the waiters after a part of the budget has become free.
    pub(crate) fn budget_freed(&self) {
        if self.n_waiting.any_after_free() {
            self.wake_each(|waiter| waiter.state().takes_budget());
        }
    }
}

/// Adds 1 to `counter` if `change` goes from false to true, and subtracts 1 if it goes from true to
/// false.
fn count(counter: &AtomicUsize, change: (bool, bool)) {
    match change {
        (false, true) => {
            counter.fetch_add(1, SeqCst);
        }
        (true, false) => {
            counter.fetch_sub(1, SeqCst);
        }
        (true, true) | (false, false) => {}
    }
}
