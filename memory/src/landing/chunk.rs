//! Chunks of landing memory.
//!
//! Each chunk is a separate region, mapped and registered for one lease to one connection. So a key
//! that an earlier peer knows has stopped working, and no data of an earlier peer can be read
//! (R12). The address is random, so that the peer of another connection cannot find the chunk even
//! if it learns the key (`region::random_address`). [Pieces](super::piece) of a chunk are runs of
//! granules of 4 KiB.
//!
//! If the pool has a landing thread (`ledger::landing_thread`), that thread deregisters and unmaps
//! chunks. Without a landing thread, the thread that drops the last holder of a chunk does this
//! work. A chunk belongs to its lease until the chunk is unmapped.
//!
//! [`Freeing`] counts chunks that are queued for the landing thread to free. Until the thread has
//! freed a chunk, the chunk's bytes are missing from the budget and stay pinned. Code that decides
//! whether memory is short counts these bytes as free. Otherwise connections would give up memory
//! for a connection that is about to get these bytes.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Weak};

use super::chunk_bitmap::ChunkBitmap;
use crate::error::{PoolError, RegisterError};
use crate::ledger::{LandingWaiter, Ledger};
use crate::region::Region;
use crate::region::mapping::{MapPlace, Mapping};
use crate::registrar::Access;
use crate::stats::Use;

/// The size of a granule in bytes.
pub(crate) const GRANULE: usize = 4096;

/// A part of the landing budget. Dropping the lease returns the part and wakes the waiters.
#[derive(Debug)]
pub(crate) struct Lease {
    len: usize,
    /// True once a region has been registered for the lease.
    is_registered: bool,
    pub(super) waiter: Arc<LandingWaiter>,
    pub(super) ledger: Arc<Ledger>,
}

impl Lease {
    /// Takes up to `max` bytes of the budget in multiples of `unit`, which is a multiple of the
    /// page size. Returns `None` if that would be fewer than `min` bytes, or 0.
    pub(crate) fn take(
        ledger: &Arc<Ledger>,
        waiter: &Arc<LandingWaiter>,
        max: usize,
        min: usize,
        unit: usize,
    ) -> Option<Self> {
        let budget = ledger.landing_budget();
        let len = ledger.budgets.take_some(Use::Landing, max, min, unit, budget)?;
        Some(Lease { len, is_registered: false, waiter: waiter.clone(), ledger: ledger.clone() })
    }

    /// The length in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.ledger.is_inherited() {
            return;
        }
        self.ledger.budgets.release(Use::Landing, self.len);
        self.ledger.landing_waiters().budget_freed();
        match self.is_registered {
            true => self.ledger.deregistered(),
            false => self.ledger.not_registered(),
        }
    }
}

/// The region of a lease. The order of the fields matters: the region is deregistered and unmapped
/// before the budget gets its bytes back.
#[derive(Debug)]
struct LeasedRegion {
    region: Region,
    /// `Some` while the region waits for the landing thread to free it.
    freeing: Option<Freeing>,
    lease: Lease,
}

impl LeasedRegion {
    /// Deregisters and unmaps the region, on the landing thread if that thread has been started.
    fn free(mut self) {
        let Lease { len, waiter, ledger, .. } = &self.lease;
        let ledger = ledger.clone();
        if ledger.landing_thread.is_started() {
            self.freeing = Some(Freeing::begin(&ledger, waiter, *len));
            ledger.landing_thread.run(Box::new(move || drop(self)));
        }
    }
}

/// A leased region and the bitmap of its granules.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Only `drop` takes the memory.
    memory: ManuallyDrop<LeasedRegion>,
    pub(crate) bitmap: ChunkBitmap,
    /// The granules that the application [holds](super::held).
    pub(super) held: ChunkBitmap,
    /// The number of pieces that the application holds.
    pub(super) n_held: AtomicUsize,
    /// The number of granules that a peer may write to.
    pub(super) granted: AtomicUsize,
    /// Whether the chunk is to be returned as soon as it is free: see [`share`](super::share).
    reclaiming: AtomicBool,
}

impl Chunk {
    /// Maps and registers a chunk for this lease.
    pub(crate) fn new(mut lease: Lease) -> Result<Self, RegisterError> {
        let Lease { len, ledger, is_registered, .. } = &mut lease;
        let (mapping, file) = if ledger.registrar.wants_file() {
            let mapped = Mapping::shared(*len, ledger.sizes.huge_pages);
            let (mapping, file) = mapped.map_err(|source| RegisterError::unmapped(*len, source))?;
            (mapping, Some(file))
        } else {
            let place =
                if ledger.registrar.ignores_iova() { MapPlace::Random } else { MapPlace::Any };
            let mapping = Mapping::new(*len, ledger.sizes.huge_pages, place);
            let mapping = mapping.map_err(|error| match error {
                PoolError::Map { len, source } => RegisterError::unmapped(len, source),
                other => RegisterError::unmapped(*len, std::io::Error::other(other)),
            })?;
            (mapping, None)
        };
        let region = Region::new(mapping, file, &*ledger.registrar, Access::RemoteWrite)?;
        ledger.region_registered(&region, Weak::<()>::new());
        *is_registered = true;
        let (len, bitmap) = (*len, ChunkBitmap::new(*len / GRANULE));
        Ok(Chunk {
            memory: ManuallyDrop::new(LeasedRegion { region, freeing: None, lease }),
            bitmap,
            held: ChunkBitmap::new(len / GRANULE),
            n_held: AtomicUsize::new(0),
            granted: AtomicUsize::new(0),
            reclaiming: AtomicBool::new(false),
        })
    }

    /// The length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.lease.len
    }

    pub(super) fn region(&self) -> &Region {
        &self.memory.region
    }

    pub(super) fn waiter(&self) -> &LandingWaiter {
        &self.memory.lease.waiter
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.memory.lease.ledger
    }

    /// The number of granules that a peer may write to.
    pub(crate) fn granted(&self) -> usize {
        self.granted.load(Relaxed)
    }

    pub(crate) fn is_reclaiming(&self) -> bool {
        self.reclaiming.load(SeqCst)
    }

    /// Sets whether the chunk is being reclaimed. Only the allocator's owner may call this
    /// function.
    pub(crate) fn set_reclaiming(&self, reclaiming: bool) {
        self.reclaiming.store(reclaiming, SeqCst);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if self.ledger().is_inherited() {
            return;
        }
        self.ledger().index.remove(self.region().start());
        // SAFETY: this is the only place that takes it, and the chunk is not used afterwards (R8).
        unsafe { ManuallyDrop::take(&mut self.memory) }.free();
    }
}

/// A chunk that is queued to be freed. This value is dropped after the chunk has been unmapped and
/// before the budget gets its bytes. So a waiter that still counted these bytes as free is woken
/// afterwards, when the budget gets them.
#[derive(Debug)]
pub(super) struct Freeing {
    len: usize,
    waiter: Arc<LandingWaiter>,
    ledger: Arc<Ledger>,
}

impl Freeing {
    pub(super) fn begin(ledger: &Arc<Ledger>, waiter: &Arc<LandingWaiter>, len: usize) -> Freeing {
        let freeing = Freeing { len, waiter: waiter.clone(), ledger: ledger.clone() };
        for counter in freeing.counters() {
            counter.fetch_add(len, SeqCst);
        }
        freeing
    }

    fn counters(&self) -> [&AtomicUsize; 2] {
        [&self.waiter.freeing, &self.ledger.budgets.freeing]
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        for counter in self.counters() {
            counter.fetch_sub(self.len, SeqCst);
        }
    }
}
