//! The pools of this process that pin memory and so share RLIMIT_MEMLOCK.
//!
//! A pool that has no room under the limit waits while other pools hold landing or send memory that
//! they will return. The pool is woken when any pool of the process deregisters memory.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicUsize, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::landing_budget::{ANY_LOWERED, LandingBudget};
use crate::process::PerProcess;

static POOLS: PerProcess<Mutex<Vec<Weak<LandingBudget>>>> = PerProcess::new(Mutex::default);
/// The number of times that pools of this process have returned memory.
static RETURNS: AtomicUsize = AtomicUsize::new(0);

fn list() -> MutexGuard<'static, Vec<Weak<LandingBudget>>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pools() -> Vec<Arc<LandingBudget>> {
    list().iter().filter_map(Weak::upgrade).collect()
}

/// Adds a pool, which stays in the list until its last memory is freed.
pub(super) fn add(pool: &Arc<LandingBudget>) {
    let mut list = list();
    list.retain(|pool| pool.strong_count() > 0);
    list.push(Arc::downgrade(pool));
}

/// Whether pools other than `pool` hold memory that they will return.
pub(super) fn others_hold(pool: &LandingBudget) -> bool {
    pools().iter().any(|other| !std::ptr::eq(&**other, pool) && other.budgets.returnable() > 0)
}

/// The number of bytes that landing threads are about to unpin.
pub(crate) fn unpinning() -> usize {
    pools().iter().map(|pool| pool.budgets.freeing.load(SeqCst)).sum()
}

pub(super) fn returns() -> usize {
    RETURNS.load(SeqCst)
}

/// Restores lowered budgets and wakes their waiters, after a pool has deregistered memory.
pub(super) fn returned() {
    RETURNS.fetch_add(1, SeqCst);
    wake();
}

/// Restores lowered budgets and wakes their waiters.
pub(super) fn wake() {
    fence(SeqCst);
    if !ANY_LOWERED.load(SeqCst) {
        return;
    }
    ANY_LOWERED.store(false, SeqCst);
    for pool in pools().iter().filter(|pool| pool.is_lowered()) {
        pool.restore();
        pool.waiters.budget_freed();
    }
}
