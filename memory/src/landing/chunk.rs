//! Chunks of landing memory, and pieces of them.
//!
//! A chunk is a region of its own, mapped and registered for one lease to one connection's account:
//! a key that an earlier peer had is worth nothing, and nothing that an earlier peer sent can be
//! read (R12). Its address is random, so that a peer of another connection who has the key does not
//! find it (`random_address`). Pieces are cut from it in granules of 4 KiB:
//!
//! | from | to | by |
//! |---|---|---|
//! | free | granted | [`Landing::alloc`](crate::Landing::alloc): only the account's owner takes |
//! | granted | filled | [`LandingBuf::filled_from`], after DONE: the granules that were written, and those in front of them |
//! | granted | free | the same: those behind |
//! | granted | free | drop of the [`LandingBuf`], after ABORT or with the queue pair gone (R9) |
//! | filled | free | drop of the last [`Landed`] or `Bytes` over it, by anyone, on any thread |
//!
//! A granule's bit in the chunk's map is set from granted until free.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use bytes::Bytes;

use super::chunk_bitmap::ChunkBitmap;
use super::landed::Landed;
use crate::error::{PoolError, RegisterError};
use crate::ledger::{LandingWaiter, Ledger, deregistered};
use crate::region::Region;
use crate::region::mapping::{Mapping, Place};
use crate::region::page::page;
use crate::registrar::Access;
use crate::stats::Use;

/// Bytes of a granule.
pub(crate) const GRANULE: usize = 4096;

/// A part of the landing budget. Gives it back, and tells those that wait.
#[derive(Debug)]
pub(crate) struct Lease {
    len: usize,
    account: Arc<LandingWaiter>,
    ledger: Arc<Ledger>,
}

impl Lease {
    /// As much of `most` bytes as the budget has, if it is `least` or more.
    pub(crate) fn take(
        ledger: &Arc<Ledger>,
        account: &Arc<LandingWaiter>,
        most: usize,
        least: usize,
    ) -> Option<Self> {
        let (unit, budget) = (page(), ledger.landing_budget());
        let len = ledger.budgets.take_some(Use::Landing, most, least, unit, budget)?;
        Some(Lease { len, account: account.clone(), ledger: ledger.clone() })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.ledger.budgets.give(Use::Landing, self.len);
        self.ledger.landing_waiters().budget_freed();
        deregistered();
    }
}

/// A leased region and the map of its granules.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Dropped before the lease: deregistered and unmapped before the budget says so.
    region: Region,
    lease: Lease,
    pub(crate) granules: ChunkBitmap,
    /// Of `granules`, those that a peer may write to.
    granted: AtomicUsize,
    /// It is to go back as soon as it is free: see [`share`](crate::share).
    leaving: AtomicBool,
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
        let granules = ChunkBitmap::new(len / GRANULE);
        Ok(Chunk {
            region,
            granules,
            lease,
            granted: AtomicUsize::new(0),
            leaving: AtomicBool::new(false),
        })
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.lease.len
    }

    /// ChunkBitmap that a peer may write to.
    pub(crate) fn granted(&self) -> usize {
        self.granted.load(Relaxed)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(SeqCst)
    }

    /// For the owner of the account.
    pub(crate) fn set_leaving(&self, leaving: bool) {
        self.leaving.store(leaving, SeqCst);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.lease.ledger.index.remove(&self.region);
    }
}

/// A piece of landing memory that has been granted, or is about to be: a peer may write to it,
/// nobody may read it.
///
/// Drop it only when nothing can write to it any more: after ABORT, or when the queue pair has been
/// destroyed (R9).
#[derive(Debug)]
pub struct LandingBuf {
    piece: Piece,
}

/// A taken run of granules.
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

    /// Frees the granules behind the first so many: nothing was written there, or nothing that
    /// anybody reads.
    fn cut(&mut self, granules: usize) {
        let Some(rest @ 1..) = self.granules.checked_sub(granules) else {
            return;
        };
        let Lease { ledger, account, .. } = &self.chunk.lease;
        ledger.counters.granted.fetch_sub(rest * GRANULE, Relaxed);
        self.chunk.granted.fetch_sub(rest, Relaxed);
        if !self.chunk.granules.free(self.start + granules, rest) {
            tracing::error!(start = self.start, "a granule of landing memory was free already");
        }
        self.granules = granules;
        ledger.landing_waiters().piece_freed(account);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Lease { ledger, account, .. } = &self.chunk.lease;
        let counter = if self.filled { &ledger.counters.filled } else { &ledger.counters.granted };
        counter.fetch_sub(self.bytes(), Relaxed);
        if !self.filled {
            self.chunk.granted.fetch_sub(self.granules, Relaxed);
        }
        if !self.chunk.granules.free(self.start, self.granules) {
            tracing::error!(start = self.start, "a granule of landing memory was free already");
        }
        ledger.landing_waiters().piece_freed(account);
    }
}

impl LandingBuf {
    /// Takes free granules of a chunk. For the owner of the account only.
    pub(crate) fn new(chunk: &Arc<Chunk>, start: usize, granules: usize) -> Self {
        chunk.granules.take(start, granules);
        chunk.granted.fetch_add(granules, Relaxed);
        let piece = Piece { chunk: chunk.clone(), start, granules, filled: false };
        chunk.lease.ledger.counters.granted.fetch_add(piece.bytes(), Relaxed);
        LandingBuf { piece }
    }

    /// The address, as a peer's WRITE names it: random, and not the virtual one, as a rule.
    pub fn addr(&self) -> u64 {
        self.piece.chunk.region.iova() + (self.piece.start * GRANULE) as u64
    }

    pub(crate) fn chunk(&self) -> &Chunk {
        &self.piece.chunk
    }

    /// The remote key.
    pub fn rkey(&self) -> u32 {
        self.piece.chunk.region.rkey()
    }

    /// Bytes, a multiple of 4 KiB.
    pub fn capacity(&self) -> usize {
        self.piece.bytes()
    }

    /// The peer has written the first `len` bytes: [`filled_from`](Self::filled_from) the first.
    pub fn filled(self, len: usize) -> Landed {
        self.filled_from(0, len)
    }

    /// The peer has written `len` bytes from the offset `begin` on, and said DONE: they can be
    /// read, as what the peer may still write to can be. At most the capacity counts. The memory
    /// returns when the last of them, and the last `Bytes` that was lent of them, is dropped; whole
    /// granules behind these bytes return at once.
    pub fn filled_from(self, begin: usize, len: usize) -> Landed {
        let LandingBuf { mut piece } = self;
        let begin = begin.min(piece.bytes());
        let len = len.min(piece.bytes() - begin);
        piece.cut((begin + len).div_ceil(GRANULE).max(1));
        let counters = &piece.chunk.lease.ledger.counters;
        // Counted twice for a moment, rather than not at all.
        counters.filled.fetch_add(piece.bytes(), Relaxed);
        counters.granted.fetch_sub(piece.bytes(), Relaxed);
        piece.chunk.granted.fetch_sub(piece.granules, Relaxed);
        piece.filled = true;
        match len {
            0 => Landed::default(),
            _ => Landed::from(Bytes::from_owner(Filled { piece, begin, len })),
        }
    }
}

/// Landed bytes.
struct Filled {
    piece: Piece,
    /// No more than the piece has, together with `len`.
    begin: usize,
    len: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        let start = self.piece.start * GRANULE + self.begin;
        // SAFETY: the bytes lie in the piece, the piece lies within the region and belongs to this
        // value since DONE (R4, R8); the mapping was zeroed when it was made for this lease, so all
        // of it is initialized. That a peer writes no more after DONE is its duty (R9): one that
        // does can spoil only what it sent itself (R12), and `Landed` keeps it from who would rely
        // on it: all but the application, which is told.
        unsafe {
            std::slice::from_raw_parts(self.piece.chunk.region.ptr().as_ptr().add(start), self.len)
        }
    }
}
