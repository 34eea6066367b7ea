//! A pool's accounting: budgets, counters, the index of regions, the waiters for landing memory,
//! the thread that makes landing memory, and the device's registrar.
//!
//! Arenas, slots, chunks and pieces hold the ledger, not the pool, so that they can outlive the
//! pool.
//!
//! | file | what |
//! |---|---|
//! | `budgets` | how much of each budget is mapped |
//! | `index` | finds the lkey and the iova of an address |
//! | `landing_budget` | the landing budget, which RLIMIT_MEMLOCK may lower |
//! | `landing_thread` | the thread that makes and frees landing memory |
//! | `landing_waiters` | wakes the connections that wait for landing memory |
//! | `pinning_pools` | the pools of the process, which share RLIMIT_MEMLOCK |
//! | `waiter_count` | the number of waiters, counted so that no wake-up is lost |

mod budgets;
mod index;
mod landing_budget;
mod landing_thread;
mod landing_waiters;
mod pinning_pools;
mod waiter_count;

use std::any::Any;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Weak};
use std::time::Instant;

use self::budgets::Budgets;
use self::index::Index;
pub(crate) use self::index::{Found, KeepAlive, Keys};
use self::landing_budget::LandingBudget;
use self::landing_thread::LandingThread;
pub(crate) use self::landing_waiters::{LandingWaiter, LandingWaiters, MIN_SHARE, Waiting};
pub(crate) use self::pinning_pools::unpinning;
pub(crate) use self::waiter_count::WaiterCount;
use crate::config::PoolSizes;
use crate::error::RegisterError;
use crate::memlock::Memlock;
use crate::process::Process;
use crate::region::Region;
use crate::region::file_limit::longest_file;
use crate::registrar::Registrar;
use crate::stats::{Counters, Use};

/// The accounting of one pool.
pub(crate) struct Ledger {
    pub(crate) sizes: PoolSizes,
    pub(crate) counters: Counters,
    pub(crate) budgets: Arc<Budgets>,
    pub(crate) index: Index,
    landing: Arc<LandingBudget>,
    pub(crate) registrar: Arc<dyn Registrar>,
    pub(crate) landing_thread: LandingThread,
    /// The process that made the pool.
    process: Process,
    /// True from the time when no landing memory was available until a chunk can be made again.
    pub(crate) cannot_land: AtomicBool,
    /// This field is the last, so that it is dropped after the registrar.
    _notify: NotifyOnDrop,
}

/// Wakes other pools when dropped, if this pool pins memory.
struct NotifyOnDrop(bool);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        if self.0 {
            pinning_pools::returned();
        }
    }
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

impl Ledger {
    pub(crate) fn new(sizes: PoolSizes, registrar: Arc<dyn Registrar>) -> Self {
        let budgets = Arc::<Budgets>::default();
        let landing = Arc::new(LandingBudget::new(sizes.landing, budgets.clone()));
        let pins = registrar.pins();
        if pins {
            pinning_pools::add(&landing);
        }
        Ledger {
            counters: Counters::default(),
            budgets,
            index: Index::default(),
            landing,
            sizes,
            registrar,
            landing_thread: LandingThread::default(),
            process: Process::current(),
            cannot_land: AtomicBool::new(false),
            _notify: NotifyOnDrop(pins),
        }
    }

    /// Whether a parent of this process made the pool. The memory of such a pool is not mapped
    /// here, so this process does not touch the pool or anything that belongs to the pool (R23).
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }

    /// The waiters of all connections that have an allocator of landing memory.
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

    /// Like [`landing_free`](Self::landing_free), but includes bytes that the landing thread is
    /// about to free.
    pub(crate) fn landing_free_soon(&self) -> usize {
        self.landing_free().saturating_add(self.budgets.freeing.load(SeqCst))
    }

    /// The number of bytes that the waiter's owner may lease, including bytes that are leased
    /// already: its share, or more while no other connection claims memory, and at most its limit.
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

    /// Records a region whose bytes have been taken from a budget, and the region's registrations
    /// with further devices, if the region may have any.
    pub(crate) fn region_registered(&self, region: &Region, further: Weak<dyn Any + Send + Sync>) {
        self.counters.registrations.fetch_add(1, Relaxed);
        self.budgets.registered();
        self.index.insert(region, further);
    }

    /// The bytes that the pool may use and has not registered yet.
    pub(crate) fn unused(&self) -> u64 {
        self.sizes.total.saturating_sub(self.budgets.total()) as u64
    }

    /// The bytes that the process may still pin under RLIMIT_MEMLOCK, and the limit. `None` means
    /// that no limit applies, or that the limit cannot be read.
    pub(crate) fn memlock_left(&self) -> Option<(u64, Memlock)> {
        if !self.registrar.pins() {
            return None;
        }
        let memlock = Memlock::read().ok()?;
        Some((memlock.available(self.registrar.ignores_ipc_lock())?, memlock))
    }

    /// The bytes that landing memory may still pin under RLIMIT_MEMLOCK, and the limit. `None`
    /// means that no limit applies, or that the limit cannot be read.
    pub(crate) fn landing_left(&self) -> Option<(usize, Memlock)> {
        let (available, memlock) = self.memlock_left()?;
        let control = self.sizes.control.saturating_sub(self.budgets.used(Use::Control));
        Some((usize::try_from(available).unwrap_or(usize::MAX).saturating_sub(control), memlock))
    }

    /// The length of the longest possible chunk, if chunks are files and RLIMIT_FSIZE limits their
    /// length.
    pub(crate) fn longest_chunk(&self) -> Option<usize> {
        if self.registrar.wants_file() { longest_file() } else { None }
    }

    /// Whether a registration failed because the process may not pin more.
    pub(crate) fn exceeded_memlock(&self, error: &RegisterError) -> bool {
        error.is_limit() && self.landing_left().is_some()
    }

    /// Wakes the pools that wait for room under the limit, after memory has been deregistered.
    pub(crate) fn deregistered(&self) {
        if self.registrar.pins() {
            pinning_pools::returned();
        }
    }

    /// Like [`deregistered`](Self::deregistered), but for a failed registration. Part of the memory
    /// may have been pinned for a moment, but nothing has been returned.
    pub(crate) fn not_registered(&self) {
        if self.registrar.pins() {
            pinning_pools::wake();
        }
    }

    /// While the landing budget is lowered, records that a connection is waiting at `now` (on the
    /// caller's clock), and ends the pause of [`pause_landing`](Self::pause_landing), if there is
    /// one.
    pub(crate) fn waited(&self, now: Instant) {
        if self.landing.is_lowered() {
            self.landing.others_wait.waited(now, pinning_pools::returns());
            self.landing.resume();
        }
    }

    /// Whether waiting helps: other pools of the process hold memory under the limit, and the wait
    /// for them has not taken too long.
    pub(crate) fn waits_for_others(&self) -> bool {
        !self.landing.others_wait.is_over(pinning_pools::returns())
            && self.registrar.pins()
            && pinning_pools::others_hold(&self.landing)
    }

    /// Stops making chunks after the device has refused a chunk that the limit allows, until a pool
    /// of the process returns memory or a connection has waited for a while.
    pub(crate) fn pause_landing(&self) {
        self.landing.pause(self.budgets.used(Use::Landing));
    }

    /// The bytes that RLIMIT_MEMLOCK leaves for another chunk. Lowers the landing budget if the
    /// limit leaves fewer than `min` bytes. In that case, returns `None` if waiting cannot help:
    /// the pool has no landing memory, and there are no [other pools to wait
    /// for](Self::waits_for_others).
    pub(crate) fn fit_landing(&self, min: usize) -> Option<usize> {
        let used = self.budgets.used(Use::Landing);
        if used.saturating_add(min) > self.sizes.landing {
            // Report no room, because the configured budget does not allow the chunk, whatever the
            // limit is.
            return Some(0);
        }
        let room = || match self.landing.is_paused() {
            true => 0,
            false => self.landing_left().map_or(usize::MAX, |(left, _)| left),
        };
        let mut left = room();
        if left < min {
            self.landing.lower(used.saturating_add(left));
            // Check again after lowering, because only memory that is deregistered from now on
            // wakes this pool.
            left = room();
        }
        if left >= min {
            self.landing.restore();
        }
        let waits = || self.budgets.used(Use::Landing) > 0 || self.waits_for_others();
        (left >= min || waits()).then_some(left)
    }
}
