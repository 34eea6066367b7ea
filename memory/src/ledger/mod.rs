//! The accounting of a pool: budgets, counters, the index of regions, the waiters for landing
//! memory, the thread that makes it, and the registrar of the device.
//!
//! Arenas, slots, chunks and pieces hold the ledger, not the pool, so that they can outlive it.
//!
//! | file | what |
//! |---|---|
//! | `budgets` | how much of each budget is mapped |
//! | `counters` | the counters behind [`PoolStats`](crate::PoolStats) |
//! | `index` | finds the lkey and the iova of an address |
//! | `landing_budget` | the landing budget, which RLIMIT_MEMLOCK may lower |
//! | `landing_thread` | the thread that makes and frees landing memory |
//! | `landing_waiters` | wakes the connections that wait for landing memory |
//! | `waiter_count` | the number of waiters, counted so that no wake-up is lost |

mod budgets;
mod counters;
mod index;
mod landing_budget;
mod landing_thread;
mod landing_waiters;
mod waiter_count;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use self::budgets::Budgets;
use self::counters::Counters;
use self::index::Index;
pub(crate) use self::landing_budget::deregistered;
use self::landing_budget::{LandingBudget, NotifyOnDrop};
use self::landing_thread::LandingThread;
pub(crate) use self::landing_waiters::{LandingWaiter, LandingWaiters, MIN_SHARE, Waiting};
pub(crate) use self::waiter_count::WaiterCount;
use crate::config::Sizes;
use crate::error::RegisterError;
use crate::memlock::Memlock;
use crate::region::Region;
use crate::registrar::Registrar;
use crate::stats::Use;

/// Bytes of this process that are about to be unpinned.
pub(crate) static UNPINNING: AtomicUsize = AtomicUsize::new(0);

/// Bytes that pools of this process are about to unpin.
pub(crate) fn unpinning() -> usize {
    UNPINNING.load(SeqCst)
}

/// The accounting of one pool.
pub(crate) struct Ledger {
    pub(crate) sizes: Sizes,
    pub(crate) counters: Counters,
    pub(crate) budgets: Budgets,
    pub(crate) index: Index,
    landing: Arc<LandingBudget>,
    pub(crate) registrar: Arc<dyn Registrar>,
    pub(crate) landing_thread: LandingThread,
    /// Bytes of chunks that wait for the landing thread to free them.
    pub(crate) freeing: AtomicUsize,
    _notify: NotifyOnDrop,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

impl Ledger {
    pub(crate) fn new(sizes: Sizes, registrar: Arc<dyn Registrar>) -> Self {
        Ledger {
            counters: Counters::default(),
            budgets: Budgets::default(),
            index: Index::default(),
            landing: Arc::new(LandingBudget::new(sizes.landing)),
            sizes,
            registrar,
            landing_thread: LandingThread::default(),
            freeing: AtomicUsize::new(0),
            _notify: NotifyOnDrop,
        }
    }

    /// The waiters of all connections that have landing memory or want some.
    pub(crate) fn landing_waiters(&self) -> &LandingWaiters {
        &self.landing.waiters
    }

    /// The current landing budget in bytes, at most `sizes.landing`.
    pub(crate) fn landing_budget(&self) -> usize {
        self.landing.bytes()
    }

    /// The bytes of the landing budget that are not leased.
    pub(crate) fn landing_free(&self) -> usize {
        self.landing_budget().saturating_sub(self.budgets.used(Use::Landing))
    }

    /// As [`landing_free`](Self::landing_free), with those that the landing thread is about to
    /// free.
    pub(crate) fn landing_free_soon(&self) -> usize {
        self.landing_free().saturating_add(self.freeing.load(SeqCst))
    }

    /// The bytes that the owner of the waiter may have leased, including those that are leased
    /// already: its share, or more while no other connection claims memory.
    pub(crate) fn may_lease(&self, waiter: &LandingWaiter) -> usize {
        let waiters = self.landing_waiters();
        let share = waiters.share(self.landing_budget());
        let bytes = match waiters.others_claim(waiter) {
            true => share,
            false => {
                let freeing = waiter.freeing.load(SeqCst);
                let free = self.landing_free().saturating_add(freeing);
                share.max(waiter.leased().saturating_add(free))
            }
        };
        bytes.min(waiter.limit)
    }

    /// Records a region whose bytes have been taken from a budget.
    pub(crate) fn region_registered(&self, region: &Region) {
        self.counters.registrations.fetch_add(1, Relaxed);
        self.budgets.registered();
        self.index.insert(region);
    }

    /// The bytes that landing memory may still pin under RLIMIT_MEMLOCK, and the limit. `None`
    /// means that no limit applies.
    pub(crate) fn landing_left(&self) -> Option<(usize, Memlock)> {
        if !self.registrar.pins() {
            return None;
        }
        let memlock = Memlock::read().ok()?;
        let available = memlock.available(self.registrar.ignores_ipc_lock())?;
        let control = self.sizes.control.saturating_sub(self.budgets.used(Use::Control));
        Some((usize::try_from(available).unwrap_or(usize::MAX).saturating_sub(control), memlock))
    }

    /// Whether a registration failed because the process may not pin more.
    pub(crate) fn exceeded_memlock(&self, error: &RegisterError) -> bool {
        error.is_limit() && self.landing_left().is_some()
    }

    /// The bytes that RLIMIT_MEMLOCK leaves for another chunk. Lowers the landing budget if that is
    /// less than `min`. `None` means that the pool has no landing memory at all, and no pool of
    /// the process is about to unpin some, so waiting for it would never end.
    pub(crate) fn fit_landing(&self, min: usize) -> Option<usize> {
        let used = self.budgets.used(Use::Landing);
        if used.saturating_add(min) > self.sizes.landing {
            // The configured budget does not allow it, whatever the limit.
            return Some(0);
        }
        let room = || self.landing_left().map_or(usize::MAX, |(left, _)| left);
        let mut left = room();
        if left < min {
            self.landing.lower(used.saturating_add(left));
            // Checked again after lowering: memory deregistered from now on wakes this pool.
            left = room();
        }
        if left >= min {
            self.landing.restore();
        }
        (left >= min || self.budgets.used(Use::Landing) > 0 || unpinning() > 0).then_some(left)
    }
}
