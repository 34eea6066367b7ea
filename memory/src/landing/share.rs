//! The limit on the landing memory that a connection may lease while other connections claim some.
//!
//! A connection is active if it has leased landing memory or waits for some. The **share** of each
//! active connection is the landing budget divided by the number of active connections, and at
//! least 32 KiB. A connection that waits and has at most three quarters of its share claims memory,
//! unless it needs more than fits into the share. While no other connection claims memory, a
//! connection may exceed its share. While another connection claims memory, a connection leases no
//! more than its share, and selects chunks beyond its share to be reclaimed. A connection never has
//! to return memory within its share, unless another connection starves. So as long as the same
//! connections are active, they keep their chunks and register no further chunks. A connection
//! stays active until it has been idle for a while and returns its last chunk.
//!
//! | a chunk is | from | to, by |
//! |---|---|---|
//! | usable | the start | being reclaimed: another connection claims memory, this one has more than its share, and this chunk lies beyond the share |
//! | usable | | being reclaimed: another connection starves, and this chunk is the emptiest |
//! | being reclaimed | | usable: the connection is within its share, or no longer limited to it |
//! | being reclaimed | | returned to the pool: nothing of it is granted or filled ([`Landing::return_reclaimed`]) |
//!
//! Pieces are allocated from usable chunks only. Granted pieces of a chunk that is being reclaimed
//! have to be recalled from the peer ([`LandingBuf::is_reclaiming`]). Pieces that the application
//! [holds](crate::Landed::hold) become free only when it drops them. So a chunk with such a piece
//! is not selected. A chunk that was selected before the application held a piece of it becomes
//! usable again if the connection has no usable chunk and no granted piece.
//!
//! The shares together may exceed the memory: readers hold memory that a connection leased when its
//! share was larger, or there are too many connections for the smallest share. A connection that
//! gets no memory for that reason **starves** ([`Landing::starve`]), and gets another connection's
//! chunk.

use std::cmp::Reverse;

use super::piece::LandingBuf;
use crate::landing::Landing;
use crate::ledger::MIN_SHARE;

/// The chunks that a connection has to return: see [`Landing::enforce_share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaim {
    /// No chunks.
    None,
    /// Only chunks that an earlier call has selected.
    Pending,
    /// Chunks that no earlier call has selected, and perhaps others.
    New,
}

impl Landing {
    /// The number of bytes that this connection has leased, including the bytes of a chunk that is
    /// being made.
    pub fn leased(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes()).sum::<usize>() + self.making_bytes()
    }

    /// The number of bytes that this connection may lease while others claim memory: the current
    /// landing budget divided by the number of active connections, at least 32 KiB.
    pub fn share(&self) -> usize {
        self.ledger.landing_waiters().share(self.ledger.landing_budget())
    }

    /// Whether another connection starves and this connection must yield to it.
    fn yields_to_starving(&self) -> bool {
        !self.starves && self.ledger.landing_waiters().others_starve(&self.waiter)
    }

    /// The number of bytes that may be leased now, including bytes that are leased already.
    pub(super) fn lease_cap(&self) -> usize {
        if self.yields_to_starving() {
            self.share().min(self.leased()).min(self.limit)
        } else if self.starves || !self.others_claim() {
            self.limit
        } else {
            self.share().min(self.limit)
        }
    }

    /// Selects the chunks to reclaim if this connection has more than its share while another
    /// connection claims memory, or if another connection starves. Call this function while
    /// [`others_claim`](Landing::others_claim) is true, and once more after it has become false.
    /// [`LandingBuf::is_reclaiming`] returns whether the chunk of a granted piece is selected, and
    /// [`return_reclaimed`](Landing::return_reclaimed) returns the chunks that are free.
    pub fn enforce_share(&mut self) -> Reclaim {
        self.collect();
        self.select();
        match (self.has_reclaimed, std::mem::take(&mut self.has_unreported)) {
            (false, _) => Reclaim::None,
            (true, false) => Reclaim::Pending,
            (true, true) => Reclaim::New,
        }
    }

    /// Selects the chunks to reclaim. Remembers that chunks were newly selected, until
    /// [`enforce_share`](Landing::enforce_share) reports this.
    pub(super) fn select(&mut self) {
        let leased = self.leased();
        let scarce = self.ledger.landing_free_soon() < MIN_SHARE;
        let cap = match scarce && self.yields_to_starving() {
            // At least one chunk must be returned.
            true => self.lease_cap().min(leased.saturating_sub(1)),
            false => self.lease_cap(),
        };
        if !self.has_reclaimed && leased <= cap {
            self.has_unreported = false;
            return;
        }
        let mut order: Vec<_> = self.chunks.iter().collect();
        // Sort usable chunks before chunks that are being reclaimed. In each of the two groups,
        // chunks with pieces that the application holds come first, and then the fullest chunks,
        // because these take longest to become free.
        order.sort_by_key(|chunk| {
            (chunk.is_reclaiming(), !chunk.is_held(), Reverse(chunk.bitmap.taken()))
        });
        // A chunk that is being made cannot be returned. So this chunk counts as usable here, and
        // other chunks are returned instead.
        let (mut usable, mut any_reclaimed, mut any_new) = (self.making_bytes(), false, false);
        for chunk in &order {
            let stays = chunk.is_held() && !chunk.is_reclaiming();
            let fits = stays || usable + chunk.bytes() <= cap;
            if fits {
                usable += chunk.bytes();
            } else {
                any_new |= !chunk.is_reclaiming();
                any_reclaimed = true;
            }
            chunk.set_reclaiming(!fits);
        }
        if usable == 0
            && self.chunks.iter().all(|chunk| chunk.granted() == 0)
            && let Some(fullest) = self.chunks.iter().max_by_key(|chunk| chunk.held.taken())
            && fullest.is_held()
        {
            fullest.set_reclaiming(false);
            any_reclaimed = self.chunks.len() > 1;
        }
        self.has_reclaimed = any_reclaimed;
        self.has_unreported = any_reclaimed && (self.has_unreported || any_new);
        self.waiter.set_reclaims(any_reclaimed);
    }

    /// Deregisters the chunks that [`enforce_share`](Landing::enforce_share) has selected and that
    /// have no granted or filled pieces, and returns them to the pool. Returns their size in bytes.
    pub fn return_reclaimed(&mut self) -> usize {
        if !self.has_reclaimed {
            return 0;
        }
        let bytes = self.return_free(super::chunk::Chunk::is_reclaiming);
        if !self.chunks.iter().any(|chunk| chunk.is_reclaiming()) {
            self.has_reclaimed = false;
            self.waiter.set_reclaims(false);
        }
        bytes
    }
}

impl LandingBuf {
    /// Whether the chunk of this piece is being reclaimed because another connection claims memory.
    /// If so, the piece should be recalled from the peer.
    pub fn is_reclaiming(&self) -> bool {
        self.chunk().is_reclaiming()
    }
}
