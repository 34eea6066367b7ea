//! Who waits for landing memory, and how it is woken.
//!
//! | an account is | from | to, by |
//! |---|---|---|
//! | content | the start | waiting: an allocation found nothing |
//! | waiting | | content: the next allocation got something or failed, its owner gave up or was dropped |
//!
//! One that has leased all that it may is not waiting in this sense: others cannot help it. It is
//! woken by its own pieces.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::waiter_count::WaiterCount;

/// What of a [`Landing`](crate::Landing) outlives it: pieces wake it when they come free.
#[derive(Debug, Default)]
pub(crate) struct LandingWaiter {
    /// It found no memory and waits.
    wanting: AtomicBool,
    /// It has leased all that it may, and waits for some of that to come free.
    full: AtomicBool,
    /// It waits because of its share: the budget has what it wants.
    held: AtomicBool,
    /// Bytes that it has leased.
    leased: AtomicUsize,
    /// It has leased memory, or waits for some.
    active: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl LandingWaiter {
    fn waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_wanting(&self) -> bool {
        self.wanting.load(SeqCst)
    }

    /// Before `true` counts, its owner must look for memory once more.
    pub(crate) fn set_full(&self, full: bool) {
        self.full.store(full, SeqCst);
        fence(SeqCst);
    }

    /// Replaces the waker. The old one is dropped without the lock: that may drop a task, and what
    /// it owns.
    pub(crate) fn set_waker(&self, new: Option<Waker>) {
        let old = std::mem::replace(&mut *self.waker(), new);
        drop(old);
    }

    pub(crate) fn has_waker(&self, waker: &Waker) -> bool {
        self.waker().as_ref().is_some_and(|kept| kept.will_wake(waker))
    }

    fn wake(&self) {
        let waker = self.waker().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// All accounts of a pool.
#[derive(Debug, Default)]
pub(crate) struct LandingWaiters {
    /// Those that wait stand in the order in which they began to.
    list: Mutex<Vec<Weak<LandingWaiter>>>,
    waiting: WaiterCount,
    /// How many are active.
    active: AtomicUsize,
    /// How many are held to their shares.
    held: AtomicUsize,
}

impl LandingWaiters {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<LandingWaiter>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open(&self) -> Arc<LandingWaiter> {
        let account = Arc::new(LandingWaiter::default());
        self.list().push(Arc::downgrade(&account));
        account
    }

    /// Its owner is gone; pieces may live on.
    pub(crate) fn close(&self, account: &Arc<LandingWaiter>) {
        self.set_wanting(account, false);
        self.book(account, 0);
        self.list().retain(|a| a.as_ptr() != Arc::as_ptr(account));
        account.set_waker(None);
    }

    /// Sets what only the account's owner sets. Returns whether it is a change. After `true` the
    /// owner must look for memory once more.
    pub(crate) fn set_wanting(&self, account: &Arc<LandingWaiter>, wanting: bool) -> bool {
        if account.wanting.swap(wanting, SeqCst) == wanting {
            return false;
        }
        self.count_active(account);
        if !wanting {
            if account.held.swap(false, SeqCst) {
                self.held.fetch_sub(1, SeqCst);
            }
            self.waiting.leave();
            self.wake_held();
            return true;
        }
        {
            // To the end of the queue.
            let mut list = self.list();
            if let Some(at) = list.iter().position(|a| a.as_ptr() == Arc::as_ptr(account)) {
                let me = list.remove(at);
                list.push(me);
            }
        }
        self.waiting.enter();
        true
    }

    /// Notes what the account has leased. For its owner.
    pub(crate) fn book(&self, account: &LandingWaiter, leased: usize) {
        account.leased.store(leased, SeqCst);
        self.count_active(account);
    }

    fn count_active(&self, account: &LandingWaiter) {
        let active = account.is_wanting() || account.leased.load(SeqCst) > 0;
        match (account.active.swap(active, SeqCst), active) {
            (false, true) => {
                self.active.fetch_add(1, SeqCst);
            }
            (true, false) => {
                self.active.fetch_sub(1, SeqCst);
                // The shares of the others are larger now.
                self.wake_held();
            }
            (true, true) | (false, false) => {}
        }
    }

    /// How many accounts have leased memory or wait for some.
    pub(crate) fn active(&self) -> usize {
        self.active.load(SeqCst)
    }

    /// Whether another account waits that has leased no more than so many bytes.
    pub(crate) fn others_wait_below(&self, account: &LandingWaiter, leased: usize) -> bool {
        self.list().iter().filter_map(Weak::upgrade).any(|other| {
            !std::ptr::eq(&*other, account)
                && other.is_wanting()
                && other.leased.load(SeqCst) <= leased
        })
    }

    /// Whether others than this account wait.
    pub(crate) fn others_wait(&self, account: &LandingWaiter) -> bool {
        self.waiting.count() > usize::from(account.is_wanting())
    }

    fn each(&self, wake: impl Fn(&LandingWaiter) -> bool) {
        let accounts: Vec<Arc<LandingWaiter>> =
            self.list().iter().filter_map(Weak::upgrade).collect();
        accounts.iter().filter(|account| wake(account)).for_each(|account| account.wake());
    }

    /// The account, which waits, is held to its share. Before that counts, its owner must look once
    /// more.
    pub(crate) fn set_held(&self, account: &LandingWaiter) {
        if account.is_wanting() && !account.held.swap(true, SeqCst) {
            self.held.fetch_add(1, SeqCst);
        }
        fence(SeqCst);
    }

    /// Those that are held to their shares may look again: fewer wait, or shares have grown.
    fn wake_held(&self) {
        fence(SeqCst);
        if self.held.load(SeqCst) > 0 {
            self.each(|account| account.is_wanting() && account.held.load(SeqCst));
        }
    }

    /// This account has begun to wait: the others look for what they can give back.
    pub(crate) fn wake_others(&self, account: &Arc<LandingWaiter>) {
        self.each(|other| !std::ptr::eq(other, Arc::as_ptr(account)));
    }

    /// Part of the budget has come free.
    pub(crate) fn budget_freed(&self) {
        if self.waiting.any_after_free() {
            self.each(LandingWaiter::is_wanting);
        }
    }

    /// A piece of this account's has come free: it may wait for that itself, and if others wait,
    /// its chunk may have become idle and can go back.
    pub(crate) fn piece_freed(&self, account: &LandingWaiter) {
        // The fence between freeing and looking is in the first.
        if self.waiting.any_after_free() || account.full.load(SeqCst) {
            account.wake();
        }
    }
}
