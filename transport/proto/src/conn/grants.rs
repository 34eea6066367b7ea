//! The grants that the peer holds.

use std::time::{Duration, Instant};

use slab::Slab;

use super::answer_clock::PendingAnswer;
use super::id_map::Ids;
use super::stream::RequestKey;
use crate::config::Config;

/// Maximum number of open requests of a stream.
pub(super) const MAX_REQUESTS: usize = 8;
/// The granule of landing memory, to which lengths are rounded up.
const GRANULE: u32 = 4096;

#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    /// 0: standing.
    pub(super) stream: u32,
    pub(super) memory: usize,
    /// Bytes of the memory in front of the granted part.
    pub(super) begin: u32,
    pub(super) len: u32,
    /// The request that it answers.
    pub(super) request: RequestKey,
    /// It is memory that this side has named: it counts in no window.
    pub(super) named: bool,
    /// RECALL has been queued.
    pub(super) recalled: bool,
    /// The expected end of the grant: since the GRANT, or the RECALL.
    pub(super) asked: PendingAnswer,
}

/// All grants that the peer holds.
#[derive(Debug)]
pub(super) struct Grants {
    pub(super) out: Slab<Grant>,
    /// Ids of the standing grants.
    pub(super) standing: Vec<u32>,
    /// The peer sends bulk, so that it is given standing grants.
    pub(super) active: bool,
    pub(super) recent: [u32; 8],
    pub(super) next_recent: usize,
    pub(super) last_bulk: Instant,
    /// Bytes granted or unread of all streams, including those in `ended`.
    pub(super) held: u64,
    /// Bytes by which the windows of all streams exceed those at the begin of a stream.
    pub(super) windows: u64,
    pub(super) unread_total: u64,
    /// Streams that have ended, with their bytes that have not been read.
    pub(super) ended: Ids<u64>,
    /// The number of requests so far.
    pub(super) requests: u64,
    pub(super) max_standing: usize,
    /// Bytes of all standing grants together, at most.
    pub(super) standing_bytes: u64,
    pub(super) standing_max: u32,
    pub(super) idle_recall: Duration,
}

impl Grants {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        Grants {
            out: Slab::new(),
            standing: Vec::new(),
            active: false,
            recent: [0; 8],
            next_recent: 0,
            last_bulk: now,
            held: 0,
            windows: 0,
            unread_total: config.unread_total,
            ended: Ids::default(),
            requests: 0,
            max_standing: if config.names_requests { 0 } else { config.standing_grants.into() },
            standing_bytes: u64::MAX,
            standing_max: config.standing_max,
            idle_recall: config.idle_recall,
        }
    }

    pub(super) fn outstanding(&self) -> usize {
        self.out.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Grant)> {
        self.out.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Grant)> {
        self.out.iter_mut()
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut Grant {
        &mut self.out[id as usize]
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.out.iter().map(|(id, _)| id as u32)
    }

    pub(super) fn recall_deadline(&self) -> Option<Instant> {
        (self.active && !self.standing.is_empty()).then(|| self.last_bulk + self.idle_recall)
    }

    pub(super) fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_bulk) >= self.idle_recall
    }

    /// Records the length of a transfer: standing grants are as long as the longest of the last
    /// eight. `begin` is the number of bytes left out in front.
    pub(super) fn record_transfer(&mut self, begin: u32, len: u64, now: Instant) {
        self.last_bulk = now;
        let Ok(len) = u32::try_from(len) else { return };
        if len <= self.standing_max {
            self.recent[self.next_recent] = begin + len;
            self.next_recent = (self.next_recent + 1) % self.recent.len();
            self.active = self.max_standing > 0;
        }
    }

    pub(super) fn standing_len(&self) -> u32 {
        self.recent.iter().max().copied().unwrap_or(0).next_multiple_of(GRANULE)
    }

    pub(super) fn wants_standing(&self) -> bool {
        if !self.active || self.standing.len() >= self.max_standing {
            return false;
        }
        let bytes = (self.standing.len() as u64 + 1) * u64::from(self.standing_len());
        // Whoever has been given them may use them for what nobody reads.
        bytes <= self.standing_bytes.min(self.unread_room())
    }

    /// What the unread bytes of all streams leave of their common limit.
    pub(super) fn unread_room(&self) -> u64 {
        self.unread_total.saturating_sub(self.held + self.windows)
    }

    /// A standing grant to recall, because all of them together are longer than they may be.
    pub(super) fn excess_standing(&self) -> Option<u32> {
        let standing = || {
            let grants = self.standing.iter().map(|id| (*id, &self.out[*id as usize]));
            grants.filter(|(_, grant)| !grant.recalled)
        };
        let bytes: u64 = standing().map(|(_, grant)| u64::from(grant.len)).sum();
        // The newest, which is the least likely to be in use.
        standing().next_back().filter(|_| bytes > self.standing_bytes).map(|(id, _)| id)
    }
}
