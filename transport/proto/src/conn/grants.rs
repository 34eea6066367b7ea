//! The grants that the peer holds.
//!
//! # Recall
//!
//! A grant whose memory is wanted elsewhere is recalled; `peer_grants` describes what the peer does
//! then. Bytes that the peer returns unwritten are wanted again without another REQUEST, because
//! both sides know the number of these bytes. This side restores these bytes to their request, at
//! its place among the stream's requests. This side answers no request of the stream until all
//! recalled grants of the stream have ended, because the order of GRANTs determines which request
//! each GRANT answers.
//!
//! All grants of a stream are recalled together. Otherwise a transfer could keep memory while an
//! earlier transfer waits for memory, and both might wait for each other.

use std::time::{Duration, Instant};

use slab::Slab;

use super::answer_clock::PendingAnswer;
use super::control::Control;
use super::recv_half::RecvState;
use super::requests::RequestKey;
use super::stream::Stream;
use super::streams::Streams;
use super::types::GrantMemory;
use super::unread::Unread;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::Frame;
use crate::ids::{GrantId, StreamId};

/// Maximum number of open requests of a stream.
pub(super) const MAX_REQUESTS: usize = 8;
/// The granule of landing memory. The lengths of standing grants are multiples of the granule.
const GRANULE: u32 = 4096;

/// A grant to be made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NewGrant {
    /// The stream's number, or 0 for a standing grant.
    pub(super) stream: u32,
    /// Bytes of the memory in front of the granted part.
    pub(super) begin: u32,
    pub(super) len: u32,
    /// The request that the grant answers.
    pub(super) request: RequestKey,
    /// Whether this side has named the memory, which then counts in no window.
    pub(super) named: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Grant {
    pub(super) given: NewGrant,
    /// The driver's key of the memory.
    pub(super) memory: usize,
    /// Whether RECALL has been queued.
    pub(super) recalled: bool,
    /// The answer, DONE or ABORT, that the peer owes to the GRANT or the RECALL.
    asked: PendingAnswer,
}

/// All grants that the peer holds, and the limits of its standing grants.
#[derive(Debug)]
pub(super) struct Grants {
    out: Slab<Grant>,
    /// Ids of the standing grants.
    standing: Vec<u32>,
    /// Whether the peer is given standing grants, because it sends bulk.
    active: bool,
    /// The lengths of the last transfers.
    recent: [u32; 8],
    next_recent: usize,
    last_bulk: Instant,
    max_standing: usize,
    /// Maximum bytes of all standing grants together.
    standing_bytes: u64,
    standing_max: u32,
    idle_recall: Duration,
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
            max_standing: if config.names_requests { 0 } else { config.standing_grants.into() },
            standing_bytes: u64::MAX,
            standing_max: config.standing_max,
            idle_recall: config.idle_recall,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    /// Gives a grant to the peer.
    pub(super) fn give(&mut self, given: NewGrant, memory: GrantMemory, control: &mut Control) {
        let asked = PendingAnswer::by(control.last_frame() + 1);
        let id =
            self.out.insert(Grant { given, memory: memory.key, recalled: false, asked }) as u32;
        let NewGrant { stream, begin, len, .. } = given;
        if stream == 0 {
            self.standing.push(id);
        }
        let (rkey, addr) = (memory.rkey, memory.addr + u64::from(begin));
        control.push(Frame::Grant { stream, id, rkey, len, addr });
    }

    /// Returns the grant that a frame from the peer ends.
    pub(super) fn get(&self, frame: &'static str, id: u32) -> Result<Grant, Breach> {
        let grant = self.out.get(id as usize);
        grant.copied().ok_or(Breach::UnknownGrant { frame, grant: GrantId(id) })
    }

    /// Removes a grant that the peer has ended. `stream` is the stream for which the grant was
    /// given, if that stream has not ended.
    pub(super) fn remove(&mut self, id: u32, stream: Option<&mut Stream>) {
        let grant = self.out.remove(id as usize);
        if grant.given.stream == 0 {
            self.standing.retain(|standing| *standing != id);
        } else if let Some(stream) = stream {
            stream.landing.open_grants -= 1;
            stream.landing.recalled -= u32::from(grant.recalled);
        }
    }

    /// Granted bytes that count in the stream's window.
    pub(super) fn granted(&self, stream: &Stream) -> u64 {
        if stream.landing.open_grants == 0 {
            return 0;
        }
        let given = self.out.iter().map(|(_, grant)| grant.given);
        let of_stream = given.filter(|given| given.stream == stream.id && !given.named);
        of_stream.map(|given| u64::from(given.len)).sum()
    }

    /// Recalls a grant, unless it has already been recalled.
    pub(super) fn recall(&mut self, id: u32, streams: &mut Streams, control: &mut Control) {
        let grant = &mut self.out[id as usize];
        if std::mem::replace(&mut grant.recalled, true) {
            return;
        }
        grant.asked = PendingAnswer::by(control.last_frame() + 1);
        if let Some((_, stream)) = streams.find(StreamId(grant.given.stream)) {
            stream.landing.recalled += 1;
        }
        control.push(Frame::Recall { id });
    }

    /// Recalls the grants whose memory is wanted elsewhere, and all other grants of their streams.
    pub(super) fn recall_wanted(
        &mut self,
        wanted: impl Fn(usize) -> bool,
        all: &mut Streams,
        control: &mut Control,
    ) {
        let mut streams = Vec::new();
        let mut recalled = Vec::new();
        for (id, grant) in &self.out {
            if wanted(grant.memory) {
                match grant.given.stream {
                    0 => recalled.push(id as u32),
                    stream => streams.push(stream),
                }
            }
        }
        streams.sort_unstable();
        streams.dedup();
        // Recall no grants of streams that are no longer read: the peer has to return these grants
        // in any case.
        streams.retain(|id| all.key(*id).is_some_and(|key| all[key].recv.state.is_read()));
        for (id, grant) in &self.out {
            let stream = grant.given.stream;
            if stream != 0 && streams.binary_search(&stream).is_ok() {
                recalled.push(id as u32);
            }
        }
        recalled.into_iter().for_each(|id| self.recall(id, all, control));
    }

    /// Counts a tick for all grants that the peer has to end. Returns whether there are such
    /// grants, and the breach for the first overdue grant. See
    /// [`AnswerClock`](super::answer_clock::AnswerClock).
    pub(super) fn tick(&mut self, streams: &Streams, handed_out: u64) -> (bool, Option<Breach>) {
        let (mut pending, mut overdue) = (false, None);
        for (id, grant) in &mut self.out {
            let stream = streams.key(grant.given.stream).map(|key| &streams[key].recv);
            let since = match stream {
                Some(recv) if recv.state == RecvState::Discarding => recv.reset_frame,
                Some(recv) if recv.state.is_done() => 0,
                None if grant.given.stream != 0 => 0,
                _ if grant.recalled => 0,
                _ => continue,
            };
            pending = true;
            // Ticks count only once the GRANT or RECALL, and any RESET of the stream, has been
            // handed out.
            if grant.asked.tick(since, handed_out) {
                overdue.get_or_insert(Breach::GrantKept(GrantId(id as u32)));
            }
        }
        (pending, overdue)
    }

    /// Returns when the standing grants are to be recalled if the peer sends no bulk until then.
    pub(super) fn recall_deadline(&self) -> Option<Instant> {
        (self.active && !self.standing.is_empty()).then(|| self.last_bulk + self.idle_recall)
    }

    pub(super) fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_bulk) >= self.idle_recall
    }

    /// Records that the peer sends bulk in grants other than standing grants.
    pub(super) fn record_bulk(&mut self, now: Instant) {
        self.last_bulk = now;
    }

    /// Records the length of a transfer. Standing grants are as long as the longest of the last
    /// eight transfers of up to `standing_max`, rounded up to [`GRANULE`]. The length includes
    /// `begin`, the number of unused bytes in front of the transfer.
    pub(super) fn record_transfer(&mut self, begin: u32, len: u64, now: Instant) {
        self.last_bulk = now;
        let Ok(len) = u32::try_from(len) else { return };
        if len <= self.standing_max {
            self.recent[self.next_recent] = begin + len;
            self.next_recent = (self.next_recent + 1) % self.recent.len();
            self.active = self.max_standing > 0;
        }
    }

    /// The length of the standing grants to give.
    pub(super) fn standing_len(&self) -> u32 {
        self.recent.iter().max().copied().unwrap_or(0).next_multiple_of(GRANULE)
    }

    /// Whether to give the peer one more standing grant. With it, all standing grants must fit into
    /// their own limit, and into what the streams leave of the limit on unread bytes.
    pub(super) fn wants_standing(&self, unread: &Unread) -> bool {
        if !self.active || self.standing.len() >= self.max_standing {
            return false;
        }
        let bytes = (self.standing.len() as u64 + 1) * u64::from(self.standing_len());
        // Standing grants must fit into the limit on unread bytes of all streams, because the peer
        // may use the grants for messages that nobody reads.
        bytes <= self.standing_bytes.min(unread.room())
    }

    /// Whether the peer is given standing grants, because it sends bulk.
    pub(super) fn gives_standing(&self) -> bool {
        self.active
    }

    /// Limits the bytes of all standing grants together.
    pub(super) fn limit_standing(&mut self, bytes: u64) {
        self.standing_bytes = bytes;
    }

    /// Recalls all standing grants, and gives no standing grants until the peer sends bulk.
    pub(super) fn recall_standing(&mut self, streams: &mut Streams, control: &mut Control) {
        self.active = false;
        self.recent = [0; 8];
        for at in 0..self.standing.len() {
            self.recall(self.standing[at], streams, control);
        }
    }

    /// Recalls one standing grant that is shorter than [`standing_len`](Self::standing_len),
    /// because the peer had to send a REQUEST.
    pub(super) fn replace_short_standing(&mut self, all: &mut Streams, control: &mut Control) {
        let want = self.standing_len();
        let short = self.standing.iter().copied().find(|id| {
            let grant = &self.out[*id as usize];
            !grant.recalled && grant.given.len < want
        });
        if let Some(id) = short {
            self.recall(id, all, control);
        }
    }

    /// Recalls standing grants until they are within their common limit.
    pub(super) fn recall_excess_standing(&mut self, all: &mut Streams, control: &mut Control) {
        while let Some(id) = self.excess_standing() {
            self.recall(id, all, control);
        }
    }

    fn excess_standing(&self) -> Option<u32> {
        let standing = || {
            let grants = self.standing.iter().map(|id| (*id, &self.out[*id as usize]));
            grants.filter(|(_, grant)| !grant.recalled)
        };
        let bytes: u64 = standing().map(|(_, grant)| u64::from(grant.given.len)).sum();
        // Recall the newest grant, which is the least likely to be in use.
        standing().next_back().filter(|_| bytes > self.standing_bytes).map(|(id, _)| id)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Grant)> {
        self.out.iter()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.out.iter().map(|(id, _)| id as u32)
    }
}
