//! Pieces of chunks, which are granted to peers and then filled by them.
//!
//! | a granule goes from | to | by |
//! |---|---|---|
//! | free | granted | [`Landing::alloc`](crate::Landing::alloc), which only the owner of the allocator calls |
//! | granted | filled | [`LandingBuf::filled_from`], after DONE: the granules that were written, and those before them |
//! | granted | free | [`LandingBuf::filled_from`], after DONE: the granules after the written ones |
//! | granted | free | drop of the [`LandingBuf`], after ABORT or when the queue pair is destroyed (R9) |
//! | filled | free | drop of the last [`Landed`] or `Bytes` over it, on any thread |
//!
//! The bit of a granule in the chunk's bitmap is set while it is granted or filled. A second bitmap
//! tells which filled granules the application [holds](super::held).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use super::chunk::{Chunk, GRANULE};
use super::held::Origin;
use super::landed::Landed;

/// A piece of landing memory that is granted or about to be granted. A peer may write to the piece,
/// so this process must not read it.
///
/// Drop the piece only when nothing can write to it any longer: after ABORT, or when the queue pair
/// has been destroyed (R9).
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

    /// Frees the granules after the first `n`, which hold no landed bytes.
    fn truncate(&mut self, n: usize) {
        let Some(rest @ 1..) = self.granules.checked_sub(n) else { return };
        let (ledger, waiter) = (self.chunk.ledger(), self.chunk.waiter());
        ledger.counters.granted.fetch_sub(rest * GRANULE, Relaxed);
        self.chunk.granted.fetch_sub(rest, Relaxed);
        if !self.chunk.bitmap.free(self.start + n, rest) {
            crate::throttled!(
                error,
                start = self.start,
                "a granule of landing memory was freed twice"
            );
        }
        self.granules = n;
        waiter.piece_freed();
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let (ledger, waiter) = (self.chunk.ledger(), self.chunk.waiter());
        if ledger.is_inherited() {
            return;
        }
        if self.filled {
            self.chunk.let_go(self.start, self.granules);
        }
        let counter = if self.filled { &ledger.counters.filled } else { &ledger.counters.granted };
        counter.fetch_sub(self.bytes(), Relaxed);
        if !self.filled {
            self.chunk.granted.fetch_sub(self.granules, Relaxed);
        }
        if !self.chunk.bitmap.free(self.start, self.granules) {
            crate::throttled!(
                error,
                start = self.start,
                "a granule of landing memory was freed twice"
            );
        }
        waiter.piece_freed();
    }
}

impl LandingBuf {
    /// Takes free granules of a chunk. Only the allocator's owner may call this function.
    pub(crate) fn new(chunk: &Arc<Chunk>, start: usize, granules: usize) -> Self {
        chunk.bitmap.take(start, granules);
        chunk.granted.fetch_add(granules, Relaxed);
        let piece = Piece { chunk: chunk.clone(), start, granules, filled: false };
        chunk.ledger().counters.granted.fetch_add(piece.bytes(), Relaxed);
        LandingBuf { piece }
    }

    /// The address to which a peer directs its WRITEs (iova). This address is random, and in
    /// general not the virtual address.
    pub fn addr(&self) -> u64 {
        self.piece.chunk.region().iova() + (self.piece.start * GRANULE) as u64
    }

    pub(crate) fn chunk(&self) -> &Chunk {
        &self.piece.chunk
    }

    /// The remote key of the chunk.
    pub fn rkey(&self) -> u32 {
        self.piece.chunk.region().rkey()
    }

    /// The length in bytes, a multiple of 4 KiB.
    pub fn capacity(&self) -> usize {
        self.piece.bytes()
    }

    /// Like [`filled_from`](Self::filled_from) with an offset of 0.
    pub fn filled(self, len: usize) -> Landed {
        self.filled_from(0, len)
    }

    /// Turns the piece into landed bytes, after the peer has written `len` bytes from the offset
    /// `begin` on and has sent DONE. A range beyond the capacity is truncated. Granules after the
    /// range become free at once. All other granules become free when the last part of the result,
    /// and the last `Bytes` lent from it, is dropped.
    pub fn filled_from(self, begin: usize, len: usize) -> Landed {
        let LandingBuf { mut piece } = self;
        let begin = begin.min(piece.bytes());
        let len = len.min(piece.bytes() - begin);
        piece.truncate((begin + len).div_ceil(GRANULE).max(1));
        let counters = &piece.chunk.ledger().counters;
        // Add first, so that the bytes may be counted twice for a moment, but are never missing.
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
        // of it is initialized. A peer must not write after DONE (R9). A peer that does so can
        // spoil only its own message (R12), and parsers read the private copies that `Landed`
        // makes. The application may see the bytes themselves, and the public documentation warns
        // of such peers.
        unsafe {
            std::slice::from_raw_parts(
                self.piece.chunk.region().ptr().as_ptr().add(start),
                self.len,
            )
        }
    }
}
