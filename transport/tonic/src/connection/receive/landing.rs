//! The landing memory of a connection.

use slab::Slab;
use tonic_rdma_memory::{Landing, LandingBuf, Pool};
use tonic_rdma_proto::Connection;

use crate::connection::receive::give_back::GiveBack;
use crate::connection::receive::landing_wait::LandingWait;

/// What a connection has of the pool's landing memory, and waits for.
#[derive(Debug)]
pub(in crate::connection) struct LandingMemory {
    pub(in crate::connection) account: Landing,
    /// Memory that the peer may write to.
    pub(in crate::connection) granted: Slab<LandingBuf>,
    /// Whether messages land in parts where memory in one piece is short.
    pub(in crate::connection) wait: LandingWait,
    /// Whether memory is to go back to other connections.
    pub(in crate::connection) give_back: GiveBack,
    /// The account waits for memory.
    pub(in crate::connection) is_short: bool,
    /// The peer is not trusted to leave alone what it has sent.
    pub(in crate::connection) copy_on_delivery: bool,
}

impl LandingMemory {
    /// At most `max` bytes of `pool`.
    pub(in crate::connection) fn new(pool: &Pool, max: usize, copy_on_delivery: bool) -> Self {
        LandingMemory {
            account: pool.landing_up_to(max),
            granted: Slab::new(),
            wait: LandingWait::default(),
            give_back: GiveBack::default(),
            is_short: false,
            copy_on_delivery,
        }
    }

    /// Landed memory is copied when it is delivered: from then on nobody reads what the peer can
    /// write to, or a reader that keeps it must not starve the others.
    #[inline]
    pub(in crate::connection) fn copies_on_delivery(&self) -> bool {
        self.copy_on_delivery || self.account.under_pressure() || self.account.is_spent()
    }

    /// Another connection waits for landing memory: what is idle here goes back, and what is more
    /// than the share of this one.
    #[inline]
    pub(in crate::connection) fn make_room_elsewhere(&mut self, conn: &mut Connection) {
        let wanted = self.account.wanted_elsewhere();
        if wanted {
            conn.recall_standing();
            self.account.trim();
        }
        if wanted || !self.give_back.0.is_idle() {
            let excess = self.account.keep_share();
            self.give_back.chosen(excess, conn.dead_peer());
        }
    }

    /// Recalls the grants that are in the way of connections that wait, if it is time to.
    pub(in crate::connection) fn recall_excess(
        &mut self,
        conn: &mut Connection,
        now: tokio::time::Instant,
    ) {
        if self.give_back.0.expire(now) {
            let granted = &self.granted;
            conn.recall_grants(|key| granted.get(key).is_some_and(LandingBuf::is_wanted_back));
        }
    }

    /// Everything goes back to the pool.
    pub(in crate::connection) fn release(&mut self) {
        self.granted.clear();
        self.account.trim();
    }
}
