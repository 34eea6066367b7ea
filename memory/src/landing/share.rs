//! What of the landing memory an account may have while others wait.
//!
//! An account is active when it has leased memory or waits for some. The **share** of each is the
//! landing budget divided by the number of active accounts, and no less than [`MIN_SHARE`]. An
//! account that is alone may lease all that there is. It is held to its share only while another
//! waits that has less than its own: it leases no more, and of what it has leased it chooses chunks
//! that go back.
//!
//! | a chunk is | from | to, by |
//! |---|---|---|
//! | kept | the start | leaving: the account has more than its share, and this chunk does not fit into it |
//! | leaving | | kept: the account is within its share, or not held to it any more |
//! | leaving | | given back: nothing of it is granted or filled ([`Landing::trim`]) |
//!
//! Pieces are allocated from kept chunks only. What is granted of a leaving one has to be asked
//! back from the peer ([`LandingBuf::is_wanted_back`]). What is filled comes back when its readers
//! drop it: nobody can hurry them, so where all that an account has is filled, and no chunk could
//! be kept, it keeps one.

use std::cmp::Reverse;

use super::allocator::Landing;
use super::chunk::{GRANULE, LandingBuf};

/// The least share, in bytes: some pieces that are worth a grant.
const MIN_SHARE: usize = 64 * 1024;

/// What an account has beyond its share: see [`Landing::keep_share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// Nothing.
    None,
    /// The chunks that have been chosen before.
    Same,
    /// Chunks that had not been chosen before, and perhaps others.
    More,
}

impl Landing {
    /// Bytes that are leased.
    pub fn leased(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.bytes()).sum()
    }

    /// Bytes that this account may have while others wait for theirs: its part of the landing
    /// budget as it is now.
    pub fn share(&self) -> usize {
        let budget = self.ledger.landing_budget();
        (budget / self.ledger.landing_waiters().active().max(1)).max(MIN_SHARE)
    }

    /// Bytes that may be leased at present, those that are leased included.
    pub(crate) fn cap(&self) -> usize {
        let accounts = self.ledger.landing_waiters();
        if !accounts.others_wait(&self.account) {
            return self.limit;
        }
        let share = self.share();
        // Whoever has its share cannot ask others for more.
        match accounts.others_wait_below(&self.account, share.saturating_sub(GRANULE)) {
            true => share.min(self.limit),
            false => self.limit,
        }
    }

    /// Chooses the chunks that have to go back while another account waits and this one has more
    /// than its share. To be called when [`wanted_elsewhere`](Landing::wanted_elsewhere) says so,
    /// and once more when it does not any more. Pieces that a peer may write to say whether their
    /// chunk is one of them ([`LandingBuf::is_wanted_back`]).
    pub fn keep_share(&mut self) -> Excess {
        // Most have little, and need not look who waits.
        if !self.leaves && self.leased() <= self.share() {
            return Excess::None;
        }
        let cap = self.cap();
        if !self.leaves && self.leased() <= cap {
            return Excess::None;
        }
        let mut order: Vec<_> = self.chunks.iter().collect();
        // Those that are kept already, then those that are the longest way from being free.
        order.sort_by_key(|chunk| (chunk.is_leaving(), Reverse(chunk.granules.taken())));
        let (mut kept, mut leaves, mut more) = (0, false, false);
        for chunk in &order {
            let fits = kept + chunk.bytes() <= cap;
            if fits {
                kept += chunk.bytes();
            } else {
                more |= !chunk.is_leaving();
                leaves = true;
            }
            chunk.set_leaving(!fits);
        }
        if kept == 0
            && self.chunks.iter().all(|chunk| chunk.granted() == 0)
            && let Some(fullest) = self.chunks.iter().max_by_key(|chunk| chunk.granules.taken())
            && !fullest.granules.is_free()
        {
            fullest.set_leaving(false);
            leaves = self.chunks.len() > 1;
        }
        self.leaves = leaves;
        match (leaves, more) {
            (false, _) => Excess::None,
            (true, false) => Excess::Same,
            (true, true) => Excess::More,
        }
    }
}

impl LandingBuf {
    /// Its account has more than its share, another waits, and this piece is in the way: the peer
    /// should give it back.
    pub fn is_wanted_back(&self) -> bool {
        self.chunk().is_leaving()
    }
}
