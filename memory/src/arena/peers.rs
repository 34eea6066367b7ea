//! Arenas that serve one peer, and that may be lent to that peer.
//!
//! A peer maps whole arenas. So lendable memory lies in arenas that serve one peer, and only one
//! handle of the pool allocates from such an arena. All arenas share the budget:
//!
//! | memory is wanted for | it comes from |
//! |---|---|
//! | a peer | a free slot of its arenas; a new arena for it, while the arenas for peers take at most three quarters of the budget; the common arenas, of which nothing is lent |
//! | no particular peer | a free slot of the common arenas; a new common arena |
//!
//! A new arena may replace arenas without a slot in use, even arenas for other peers. A request
//! that has to wait joins the single queue of the common arenas.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, Weak};

use super::{Arenas, CLASSES, Peer};
use crate::region::page::HUGE_PAGE;

impl Arenas {
    /// Creates arenas for one peer, within the same budget.
    pub(crate) fn for_peer(self: &Arc<Self>) -> Arc<Self> {
        let common = self.common().clone();
        let next = || NonZeroU32::new(common.next_peer.fetch_add(1, Relaxed));
        // The counter wraps after 2^32 calls to this function, and 0 is not a valid id.
        let id = next().or_else(next).unwrap_or(NonZeroU32::MIN);
        let mut arenas = Arenas::new(self.usage, self.budget, self.ledger.clone());
        arenas.peer = Some(Peer { id, common: common.clone() });
        // Make the arenas small, because there may be many peers.
        let bytes = (self.budget / 64).clamp(CLASSES[2], HUGE_PAGE);
        arenas.arena_bytes = bytes.min(common.arena_bytes);
        let arenas = Arc::new(arenas);
        let mut peers = common.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|peer| peer.strong_count() > 0);
        peers.push(Arc::downgrade(&arenas));
        arenas
    }

    /// The peer that these arenas serve, or `None` for the common arenas.
    pub(crate) fn peer(&self) -> Option<NonZeroU32> {
        self.peer.as_ref().map(|peer| peer.id)
    }

    /// The common arenas of this pool.
    fn common(self: &Arc<Self>) -> &Arc<Self> {
        self.peer.as_ref().map_or(self, |peer| &peer.common)
    }

    /// Returns the pool's other sets of arenas, which share this budget.
    pub(super) fn others(&self) -> Vec<Arc<Arenas>> {
        let common = self.peer.as_ref().map(|peer| &peer.common);
        let peers = &common.map_or(self, |common| common).peers;
        let peers = peers.lock().unwrap_or_else(PoisonError::into_inner);
        let peers = peers.iter().filter_map(Weak::upgrade);
        let peers: Vec<_> = peers.filter(|peer| peer.peer() != self.peer()).collect();
        common.cloned().into_iter().chain(peers).collect()
    }

    /// Removes idle arenas from the pool's other sets of arenas until `bytes` can be taken from the
    /// budget. Returns whether the bytes were taken.
    pub(super) fn take_budget_of_others(&self, bytes: usize, seen: &mut Vec<Arc<Arenas>>) -> bool {
        let others = self.others();
        seen.extend(others.iter().cloned());
        others.iter().any(|other| {
            std::iter::repeat_with(|| other.remove_idle()).take_while(|removed| *removed).any(
                |_| {
                    self.must_notify.store(true, Relaxed);
                    self.take_bytes(bytes)
                },
            )
        })
    }

    /// Removes one idle arena. Returns false if no arena is idle or another thread holds the lock.
    fn remove_idle(&self) -> bool {
        let Ok(mut arenas) = self.arenas.try_lock() else { return false };
        if let Some(handle) = self.take_idle(|_| true) {
            self.remove_dedicated(handle);
            return true;
        }
        let idle = arenas.iter().filter(|(_, arena)| arena.in_use.load(Relaxed) == 0);
        let idle: Vec<usize> = idle.map(|(key, _)| key).collect();
        idle.into_iter().any(|key| self.remove_arena(&mut arenas, key))
    }

    /// Takes `bytes` from the budget if the budget has enough left.
    pub(super) fn take_bytes(&self, bytes: usize) -> bool {
        let Some(peer) = &self.peer else {
            return self.ledger.budgets.take(self.usage, bytes, self.budget);
        };
        // Leave a quarter of the budget to the common arenas, even if every peer arena has a slot
        // in use.
        let for_peers = peer.common.for_peers.fetch_add(bytes, Relaxed).saturating_add(bytes);
        let taken = for_peers <= self.budget / 4 * 3
            && self.ledger.budgets.take(self.usage, bytes, self.budget);
        if !taken {
            peer.common.for_peers.fetch_sub(bytes, Relaxed);
        }
        taken
    }

    pub(super) fn release_bytes(&self, bytes: usize) {
        if let Some(peer) = &self.peer {
            peer.common.for_peers.fetch_sub(bytes, Relaxed);
        }
        self.ledger.budgets.release(self.usage, bytes);
    }
}
