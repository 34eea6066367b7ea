//! Landed memory that the application holds.
//!
//! The transport owns landed bytes until it hands them on. From then on, only the application
//! decides when the memory becomes free. So the transport bounds the amount of memory that the
//! application holds, and hands on a heap copy beyond that bound.
//!
//! | bound | so that |
//! |---|---|
//! | 3/4 of the bytes that the connection may lease now, or a single piece | the rest is available for the next messages |
//! | 3/4 of the landing budget | as above, for all connections |
//! | in the chunk, or in memory that may still be leased, [`MIN_ROOM`] consecutive bytes are not held | the connection can receive any message, perhaps in parts |
//! | chunks with held pieces take at most 7/8 of the landing budget | another connection can receive any message |
//!
//! A piece counts once and with its whole length, from the first [`hold`](Origin::hold) of any of
//! its bytes until it becomes free.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::chunk::{Chunk, GRANULE};
use crate::ledger::MIN_SHARE;

/// The length of a free run in which any message can be received, in parts.
const MIN_ROOM: usize = MIN_SHARE;

/// Identifies the piece of landing memory in which bytes lie. The bytes themselves keep the piece
/// alive.
#[derive(Clone)]
pub(super) struct Origin {
    chunk: Arc<Chunk>,
    start: usize,
    granules: usize,
}

impl Origin {
    pub(super) fn new(chunk: Arc<Chunk>, start: usize, granules: usize) -> Self {
        Origin { chunk, start, granules }
    }

    /// Counts the piece as held by the application. Returns false if the application may not hold
    /// the piece.
    pub(super) fn hold(&self) -> bool {
        let Origin { chunk, start, granules } = self;
        if chunk.held.is_taken(*start) {
            return true;
        }
        let (bytes, waiter, ledger) = (granules * GRANULE, chunk.waiter(), chunk.ledger());
        let (budget, may_lease) = (ledger.landing_budget(), ledger.may_lease(waiter));
        // Add before the check, so that concurrent calls count each other's pieces.
        let by_connection = add(&waiter.held, bytes);
        let by_all = add(&ledger.counters.held, bytes);
        let newly_pinned = match chunk.n_held.fetch_add(1, AcqRel) {
            0 => chunk.bytes(),
            _ => 0,
        };
        let pinned = add(&waiter.pinned, newly_pinned);
        let pinned_by_all = add(&ledger.counters.pinned, newly_pinned);
        let leaves_room = || {
            pinned.saturating_add(MIN_ROOM) <= may_lease
                || chunk.held.longest_without(*start, *granules) >= MIN_ROOM / GRANULE
        };
        let may = (by_connection == bytes || by_connection <= may_lease / 4 * 3)
            && by_all <= budget / 4 * 3
            && (newly_pinned == 0 || pinned_by_all <= budget / 8 * 7)
            && leaves_room();
        if may && chunk.held.try_take(*start, *granules) {
            return true;
        }
        chunk.uncount(bytes);
        // If only `try_take` failed, another part of the same piece has been handed on at the same
        // time, and the piece is already counted.
        may
    }
}

impl Chunk {
    /// True if the application holds a piece of this chunk.
    pub(super) fn is_held(&self) -> bool {
        self.n_held.load(Acquire) > 0
    }

    /// Ends the hold of a piece that is becoming free.
    pub(super) fn let_go(&self, start: usize, granules: usize) {
        if self.held.is_taken(start) {
            self.held.free(start, granules);
            self.uncount(granules * GRANULE);
        }
    }

    /// Subtracts a piece of `bytes` bytes from the counters, because the application does not hold
    /// the piece, or no longer holds it.
    fn uncount(&self, bytes: usize) {
        let (waiter, counters) = (self.waiter(), &self.ledger().counters);
        let unpinned = match self.n_held.fetch_sub(1, AcqRel) {
            1 => self.bytes(),
            _ => 0,
        };
        for (counter, bytes) in [
            (&waiter.held, bytes),
            (&counters.held, bytes),
            (&waiter.pinned, unpinned),
            (&counters.pinned, unpinned),
        ] {
            counter.fetch_sub(bytes, AcqRel);
        }
    }
}

/// Adds to a counter and returns the sum.
fn add(counter: &AtomicUsize, bytes: usize) -> usize {
    counter.fetch_add(bytes, AcqRel).saturating_add(bytes)
}
