//! Chunks of landing memory, and the pieces that are cut from them.
//!
//! A chunk is a region of its own, which is mapped and registered for one lease to one connection.
//! So a key that an earlier peer knew no longer works, and no data of an earlier peer can be read
//! (R12). Its address is random, so that a peer of another connection that learns the key does not
//! find it (`region::random_address`). Pieces are runs of granules of 4 KiB:
//!
//! | a granule goes from | to | by |
//! |---|---|---|
//! | free | granted | [`Landing::alloc`](crate::Landing::alloc), which only the owner of the allocator calls |
//! | granted | filled | [`LandingBuf::filled_from`], after DONE: the granules that were written, and those in front of them |
//! | granted | free | [`LandingBuf::filled_from`], after DONE: the granules behind those |
//! | granted | free | drop of the [`LandingBuf`], after ABORT or when the queue pair is destroyed (R9) |
//! | filled | free | drop of the last [`Landed`] or `Bytes` over it, by anyone, on any thread |
//!
//! The bit of a granule in the chunk's bitmap is set while it is granted or filled. A second bitmap
//! tells which of the filled ones the application [holds](super::held).

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use bytes::Bytes;

use super::chunk_bitmap::ChunkBitmap;
use super::held::Origin;
use super::landed::Landed;
use crate::error::{PoolError, RegisterError};
use crate::ledger::{LandingWaiter, Ledger, deregistered};
use crate::region::Region;
use crate::region::mapping::{Mapping, Place};
use crate::registrar::Access;
use crate::stats::Use;

/// Bytes of a granule.
pub(crate) const GRANULE: usize = 4096;

/// A part of the landing budget. Dropping it returns the part and wakes the waiters.
#[derive(Debug)]
pub(crate) struct Lease {
    len: usize,
    waiter: Arc<LandingWaiter>,
    ledger: Arc<Ledger>,
}

impl Lease {
    /// Takes up to `max` bytes of the budget in multiples of `unit`, which is whole pages; `None` if
    /// it has fewer than `min`.
    pub(crate) fn take(
        ledger: &Arc<Ledger>,
        waiter: &Arc<LandingWaiter>,
        max: usize,
        min: usize,
        unit: usize,
    ) -> Option<Self> {
        let budget = ledger.landing_budget();
        let len = ledger.budgets.take_some(Use::Landing, max, min, unit, budget)?;
        Some(Lease { len, waiter: waiter.clone(), ledger: ledger.clone() })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.budgets.release(Use::Landing, self.len);
        self.ledger.landing_waiters().budget_freed();
        deregistered();
    }
}

/// A leased region and the bitmap of its granules.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Dropped before the lease: deregistered and unmapped before the budget gets its bytes back.
    region: Region,
    lease: Lease,
    pub(crate) bitmap: ChunkBitmap,
    /// The granules that the application [holds](super::held).
    pub(super) held: ChunkBitmap,
    /// The number of pieces that it holds.
    pub(super) n_held: AtomicUsize,
    /// The number of granules that a peer may write to.
    granted: AtomicUsize,
    /// The chunk is to be returned as soon as it is free: see [`share`](super::share).
    reclaiming: AtomicBool,
}

impl Chunk {
    /// Maps and registers a chunk for this lease.
    pub(crate) fn new(lease: Lease) -> Result<Self, RegisterError> {
        let Lease { len, ledger, .. } = &lease;
        let (mapping, file) = if ledger.registrar.wants_file() {
            let mapped = Mapping::shared(*len, ledger.sizes.huge_pages);
            let (mapping, file) = mapped.map_err(|source| RegisterError::new(*len, source))?;
            (mapping, Some(file))
        } else {
            let place = if ledger.registrar.ignores_iova() { Place::Random } else { Place::Any };
            let mapping = Mapping::new(*len, ledger.sizes.huge_pages, place);
            let mapping = mapping.map_err(|error| match error {
                PoolError::Map { len, source } => RegisterError::new(len, source),
                other => RegisterError::new(*len, std::io::Error::other(other)),
            })?;
            (mapping, None)
        };
        let region = Region::new(mapping, file, &*ledger.registrar, Access::RemoteWrite)?;
        ledger.region_registered(&region);
        let (len, bitmap) = (*len, ChunkBitmap::new(len / GRANULE));
        Ok(Chunk {
            region,
            bitmap,
            held: ChunkBitmap::new(len / GRANULE),
            n_held: AtomicUsize::new(0),
            lease,
            granted: AtomicUsize::new(0),
            reclaiming: AtomicBool::new(false),
        })
    }

    /// The length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.lease.len
    }

    pub(super) fn waiter(&self) -> &LandingWaiter {
        &self.lease.waiter
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.lease.ledger
    }

    /// The number of granules that a peer may write to.
    pub(crate) fn granted(&self) -> usize {
        self.granted.load(Relaxed)
    }

    pub(crate) fn is_reclaiming(&self) -> bool {
        self.reclaiming.load(SeqCst)
    }

    /// For the owner of the allocator only.
    pub(crate) fn set_reclaiming(&self, reclaiming: bool) {
        self.reclaiming.store(reclaiming, SeqCst);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.lease.ledger.index.remove(&self.region);
    }
}

/// A piece of landing memory that has been granted, or is about to be: a peer may write to it, and
/// nobody may read it.
///
/// Drop it only when nothing can write to it any longer: after ABORT, or when the queue pair has
/// been destroyed (R9).
#[derive(Debug)]
pub struct LandingBuf {
    piece: Piece,
}

/// A run of granules that are taken.
#[derive(Debug)]
struct Piece {
    chunk: Arc<Chunk>,
    start: usize,
    granules: usize,
    filled: bool,
}

impl Piece {
    fn bytes(&self) -> usize {
        self.granules * GRANULE
    }

    /// Frees the granules behind the first `n`, in which there is nothing to read.
    fn truncate(&mut self, n: usize) {
        let Some(rest @ 1..) = self.granules.checked_sub(n) else { return };
        let Lease { ledger, waiter, .. } = &self.chunk.lease;
        ledger.counters.granted.fetch_sub(rest * GRANULE, Relaxed);
        self.chunk.granted.fetch_sub(rest, Relaxed);
        if !self.chunk.bitmap.free(self.start + n, rest) {
            tracing::error!(start = self.start, "a granule of landing memory was freed twice");
        }
        self.granules = n;
        waiter.piece_freed();
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Lease { ledger, waiter, .. } = &self.chunk.lease;
        if self.filled {
            self.chunk.let_go(self.start, self.granules);
        }
        let counter = if self.filled { &ledger.counters.filled } else { &ledger.counters.granted };
        counter.fetch_sub(self.bytes(), Relaxed);
        if !self.filled {
            self.chunk.granted.fetch_sub(self.granules, Relaxed);
        }
        if !self.chunk.bitmap.free(self.start, self.granules) {
            tracing::error!(start = self.start, "a granule of landing memory was freed twice");
        }
        waiter.piece_freed();
    }
}

impl LandingBuf {
    /// Takes free granules of a chunk. For the owner of the allocator only.
    pub(crate) fn new(chunk: &Arc<Chunk>, start: usize, granules: usize) -> Self {
        chunk.bitmap.take(start, granules);
        chunk.granted.fetch_add(granules, Relaxed);
        let piece = Piece { chunk: chunk.clone(), start, granules, filled: false };
        chunk.lease.ledger.counters.granted.fetch_add(piece.bytes(), Relaxed);
        LandingBuf { piece }
    }

    /// The address to which a peer directs its WRITEs (iova). It is random, and in general not the
    /// virtual address.
    pub fn addr(&self) -> u64 {
        self.piece.chunk.region.iova() + (self.piece.start * GRANULE) as u64
    }

    pub(crate) fn chunk(&self) -> &Chunk {
        &self.piece.chunk
    }

    /// The remote key of the chunk.
    pub fn rkey(&self) -> u32 {
        self.piece.chunk.region.rkey()
    }

    /// The length in bytes, a multiple of 4 KiB.
    pub fn capacity(&self) -> usize {
        self.piece.bytes()
    }

    /// As [`filled_from`](Self::filled_from) with an offset of 0.
    pub fn filled(self, len: usize) -> Landed {
        self.filled_from(0, len)
    }

    /// Turns the piece into landed bytes: the peer has written `len` bytes from the offset `begin`
    /// on, and has sent DONE. A range beyond the capacity is cut off there. Granules behind the
    /// range return to the pool at once, the others when the last part of the result, and the last
    /// `Bytes` lent of it, is dropped.
    pub fn filled_from(self, begin: usize, len: usize) -> Landed {
        let LandingBuf { mut piece } = self;
        let begin = begin.min(piece.bytes());
        let len = len.min(piece.bytes() - begin);
        piece.truncate((begin + len).div_ceil(GRANULE).max(1));
        let counters = &piece.chunk.lease.ledger.counters;
        // Added first: the bytes may be counted twice for a moment, but are never missing.
        counters.filled.fetch_add(piece.bytes(), Relaxed);
        counters.granted.fetch_sub(piece.bytes(), Relaxed);
        piece.chunk.granted.fetch_sub(piece.granules, Relaxed);
        piece.filled = true;
        if len == 0 {
            return Landed::default();
        }
        let origin = Origin::new(piece.chunk.clone(), piece.start, piece.granules);
        Landed::new(Bytes::from_owner(Filled { piece, begin, len }), origin)
    }
}

/// The owner of landed bytes.
struct Filled {
    piece: Piece,
    /// `begin + len` is at most the length of the piece.
    begin: usize,
    len: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        let start = self.piece.start * GRANULE + self.begin;
        // SAFETY: the bytes lie in the piece, which lies within the region and has belonged to this
        // value since DONE (R4, R8). The mapping was zeroed when it was made for this lease, so all
        // of it is initialized. A peer must not write after DONE (R9). One that does can spoil only
        // what it sent itself (R12), and `Landed` hides the bytes from all code that would rely on
        // them; the application, which may see them, is told so.
        unsafe {
            std::slice::from_raw_parts(self.piece.chunk.region.ptr().as_ptr().add(start), self.len)
        }
    }
}
