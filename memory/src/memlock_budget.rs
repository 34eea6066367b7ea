//! The landing budget where the process may pin less than its pools would.
//!
//! Each pool is made to fit into RLIMIT_MEMLOCK as it finds it, and pins later. Where several share
//! a process, or the limit falls, one may find that it can pin no more. It then works with what it
//! has leased: waits for memory, and copies out what lands where readers hold on to it, as in a
//! smaller pool. It leaves alone what its own control budget has not pinned yet, so that it turns
//! no connection away for what its others land.
//!
//! | a pool's landing budget is | from | to, by |
//! |---|---|---|
//! | as configured | the start | short: a chunk was wanted and the process may not pin it |
//! | short | | as configured: a pool of the process has deregistered memory, or the limit allows a chunk that is wanted |

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::memlock::Memlock;
use crate::pool::Shared;
use crate::stats::Use;

/// The budget in bytes as it is now.
#[derive(Debug)]
pub(crate) struct LandingBudget(AtomicUsize);

impl LandingBudget {
    pub(crate) fn new(bytes: usize) -> Self {
        LandingBudget(AtomicUsize::new(bytes))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.load(SeqCst)
    }
}

/// The pools of the process that are short.
static SHORT: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
/// Whether there are any, for those that free.
static ANY: AtomicBool = AtomicBool::new(false);

impl Shared {
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
    pub(crate) fn fit_landing(self: &Arc<Self>, least: usize) -> Option<usize> {
        let used = self.budgets.used(Use::Landing);
        if used.saturating_add(least) > self.sizes.landing {
            // By its own budget it may not, whatever the limit.
            return Some(0);
        }
        let room = |shared: &Self| shared.landing_left().map_or(usize::MAX, |(left, _)| left);
        let mut left = room(self);
        if left < least {
            self.set_short(used.saturating_add(left));
            // Told first, then a last look: whoever deregisters from now on wakes this pool.
            left = room(self);
        }
        if left >= least {
            self.landing.0.store(self.sizes.landing, SeqCst);
        }
        (left >= least || self.budgets.used(Use::Landing) > 0).then_some(left)
    }

    fn set_short(self: &Arc<Self>, budget: usize) {
        let mut short = SHORT.lock().unwrap_or_else(PoisonError::into_inner);
        if !short.iter().any(|pool| pool.as_ptr() == Arc::as_ptr(self)) {
            short.push(Arc::downgrade(self));
        }
        self.landing.0.store(budget.min(self.sizes.landing), SeqCst);
        ANY.store(true, SeqCst);
        fence(SeqCst);
    }
}

/// Part of a pool, behind all that it has registered.
#[derive(Debug)]
pub(crate) struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        deregistered();
    }
}

/// Memory has been deregistered: pools that were short may look again.
pub(crate) fn deregistered() {
    fence(SeqCst);
    if !ANY.load(SeqCst) {
        return;
    }
    let pools = {
        let mut short = SHORT.lock().unwrap_or_else(PoisonError::into_inner);
        ANY.store(false, SeqCst);
        std::mem::take(&mut *short)
    };
    for pool in pools.iter().filter_map(Weak::upgrade) {
        pool.landing.0.store(pool.sizes.landing, SeqCst);
        pool.accounts.budget_freed();
    }
}
