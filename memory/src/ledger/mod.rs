//! What everything in a pool is accounted in: budgets, counters, the index of regions, those that
//! wait for landing memory, and the device's registrar.
//!
//! Arenas, slots, chunks and pieces hold the ledger, not the pool, so that they can outlive it.
//!
//! | file | what |
//! |---|---|
//! | `budgets` | what is mapped of each budget |
//! | `counters` | figures |
//! | `index` | from an address to its lkey and iova |
//! | `landing_budget` | the landing budget where the process may pin less |
//! | `landing_waiters` | wakes those that wait for landing memory |
//! | `waiter_count` | the count of waiters, by which no wake-up is lost |

mod budgets;
mod counters;
mod index;
mod landing_budget;
mod landing_waiters;
mod waiter_count;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use self::budgets::Budgets;
use self::counters::Counters;
use self::index::Index;
pub(crate) use self::landing_budget::deregistered;
use self::landing_budget::{LandingBudget, NotifyOnDrop};
pub(crate) use self::landing_waiters::{LandingWaiter, LandingWaiters};
pub(crate) use self::waiter_count::WaiterCount;
use crate::config::Sizes;
use crate::memlock::Memlock;
use crate::region::Region;
use crate::registrar::Registrar;
use crate::stats::Use;

/// The accounts of one pool.
pub(crate) struct Ledger {
    pub(crate) sizes: Sizes,
    pub(crate) counters: Counters,
    pub(crate) budgets: Budgets,
    pub(crate) index: Index,
    /// Never more than `sizes.landing`.
    landing: Arc<LandingBudget>,
    /// Behind what it registered.
    pub(crate) registrar: Arc<dyn Registrar>,
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
            _notify: NotifyOnDrop,
        }
    }

    /// Those that wait for landing memory, and those that have some.
    pub(crate) fn landing_waiters(&self) -> &LandingWaiters {
        &self.landing.waiters
    }

    /// The landing budget in bytes as it is now.
    pub(crate) fn landing_budget(&self) -> usize {
        self.landing.bytes()
    }

    /// Records a region whose bytes have been taken from a budget.
    pub(crate) fn region_registered(&self, region: &Region) {
        self.counters.registrations.fetch_add(1, Relaxed);
        self.budgets.registered();
        self.index.insert(region);
    }

    /// What the limit leaves: bytes that landing memory may still pin, and the limit. None: there
    /// is none.
    pub(crate) fn landing_left(&self) -> Option<(usize, Memlock)> {
        if !self.registrar.pins() {
            return None;
        }
        let memlock = Memlock::read().ok()?;
        let available = memlock.available(self.registrar.ignores_ipc_lock())?;
        let control = self.sizes.control.saturating_sub(self.budgets.used(Use::Control));
        Some((usize::try_from(available).unwrap_or(usize::MAX).saturating_sub(control), memlock))
    }

    /// Bytes that another chunk may have, as far as the process's limit goes. Lowers the landing
    /// budget if that is less than `least`. None: there is no landing memory at all, and waiting
    /// would bring none.
    pub(crate) fn fit_landing(&self, least: usize) -> Option<usize> {
        let used = self.budgets.used(Use::Landing);
        if used.saturating_add(least) > self.sizes.landing {
            // By its own budget it may not, whatever the limit.
            return Some(0);
        }
        let room = || self.landing_left().map_or(usize::MAX, |(left, _)| left);
        let mut left = room();
        if left < least {
            self.landing.lower(used.saturating_add(left));
            // Told first, then a last look: whoever deregisters from now on wakes this pool.
            left = room();
        }
        if left >= least {
            self.landing.restore();
        }
        (left >= least || self.budgets.used(Use::Landing) > 0).then_some(left)
    }
}
