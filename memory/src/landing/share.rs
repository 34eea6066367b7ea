//! How much landing memory a connection may lease while others wait.
//!
//! A connection is active if it has leased landing memory or waits for some. The **share** of each
//! is the landing budget divided by the number of active connections, and at least [`MIN_SHARE`].
//! Nothing limits a connection to its share but another connection that waits and has less than its
//! own share. As long as one does, a connection leases no more than its share, and selects chunks
//! beyond it to be reclaimed.
//!
//! | a chunk is | from | to, by |
//! |---|---|---|
//! | usable | the start | being reclaimed: the connection has more than its share, and this chunk exceeds it |
//! | being reclaimed | | usable: the connection is within its share, or no longer limited to it |
//! | being reclaimed | | returned to the pool: nothing of it is granted or filled ([`Landing::trim`]) |
//!
//! Pieces are allocated from usable chunks only. Granted pieces of a chunk that is being reclaimed
//! have to be recalled from the peer ([`LandingBuf::is_wanted_back`]). Filled pieces come free when
//! their readers drop them, which nobody can speed up. So a connection whose chunks are all filled
//! keeps one of them usable, even if it exceeds the share.

use std::cmp::Reverse;

use super::allocator::Landing;
use super::chunk::{GRANULE, LandingBuf};

/// The smallest share in bytes: enough for a few pieces that are worth granting.
const MIN_SHARE: usize = 64 * 1024;

/// What a connection has leased beyond its share: see [`Landing::keep_share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// Nothing.
    None,
    /// Only chunks that an earlier call has selected.
    Same,
    /// Chunks that no earlier call has selected, and perhaps others.
    More,
}

impl Landing {
    /// Bytes that this connection has leased.
    pub fn leased(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes()).sum()
    }

    /// Bytes that this connection may lease while others wait for their share: the current landing
    /// budget divided by the number of active connections, at least 64 KiB.
    pub fn share(&self) -> usize {
        let budget = self.ledger.landing_budget();
        (budget / self.ledger.landing_waiters().n_active().max(1)).max(MIN_SHARE)
    }

    /// Bytes that may be leased now, including those that are leased already.
    pub(super) fn lease_cap(&self) -> usize {
        let waiters = self.ledger.landing_waiters();
        if !waiters.others_wait(&self.waiter) {
            return self.limit;
        }
        let share = self.share();
        // A connection that has its share cannot claim more from others.
        match waiters.others_wait_below(&self.waiter, share.saturating_sub(GRANULE)) {
            true => share.min(self.limit),
            false => self.limit,
        }
    }

    /// Selects the chunks to reclaim while another connection waits and this one has more than its
    /// share. To be called while [`wanted_elsewhere`](Landing::wanted_elsewhere) is true, and once
    /// more when it no longer is. [`LandingBuf::is_wanted_back`] tells whether the chunk of a
    /// granted piece is selected.
    pub fn keep_share(&mut self) -> Excess {
        // Most connections have little, and need not check who waits.
        if !self.has_reclaimed && self.leased() <= self.share() {
            return Excess::None;
        }
        let cap = self.lease_cap();
        if !self.has_reclaimed && self.leased() <= cap {
            return Excess::None;
        }
        let mut order: Vec<_> = self.chunks.iter().collect();
        // Usable chunks first, and of these the fullest first, which would take longest to come
        // free.
        order.sort_by_key(|chunk| (chunk.is_reclaiming(), Reverse(chunk.bitmap.taken())));
        let (mut usable, mut any_reclaimed, mut any_new) = (0, false, false);
        for chunk in &order {
            let fits = usable + chunk.bytes() <= cap;
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
            && let Some(fullest) = self.chunks.iter().max_by_key(|chunk| chunk.bitmap.taken())
            && !fullest.bitmap.is_free()
        {
            fullest.set_reclaiming(false);
            any_reclaimed = self.chunks.len() > 1;
        }
        self.has_reclaimed = any_reclaimed;
        match (any_reclaimed, any_new) {
            (false, _) => Excess::None,
            (true, false) => Excess::Same,
            (true, true) => Excess::More,
        }
    }
}

impl LandingBuf {
    /// Whether the chunk of this piece is being reclaimed, because another connection waits: the
    /// piece should be recalled from the peer.
    pub fn is_wanted_back(&self) -> bool {
        self.chunk().is_reclaiming()
    }
}
