//! Recalling grants before the peer has used them.
//!
//! The receiver of a RECALL ends the grant at once:
//!
//! | the grant is | on RECALL |
//! |---|---|
//! | standing, not bound | ABORT |
//! | of a request, nothing handed out as WRITE | ABORT |
//! | of a request, a part handed out | DONE for that part |
//! | standing and bound to a transfer, or in front of one | it is written before all others, and ends with DONE |
//! | written or ended | nothing: DONE or ABORT is on its way |
//!
//! The bytes that a request loses this way are wanted again without another REQUEST, since both
//! sides know how many they are. The sender of the RECALL restores them at their place among the
//! requests of the stream, and grants none of these until all recalled grants of the stream have
//! ended: the order of GRANTs determines the request that each of them answers.
//!
//! All grants of a stream are recalled together. Otherwise a transfer could keep memory while one
//! in front of it waits for memory, and both might wait for each other. For the same reason a grant
//! is written, and not aborted, if a transfer behind it has a standing grant.

use super::answer_clock::PendingAnswer;
use super::connection::Connection;
use super::stream::{OutputItem, PeerRequest, PendingDone, RecvState, RequestKey};
use crate::frame::Frame;
use crate::ids::GrantId;

impl Connection {
    /// Recalls the grants whose memory is wanted elsewhere, and all other grants of their streams.
    /// A stream continues when there is memory for it again. Each grant comes back as
    /// [`Event::Landed`](super::Event::Landed) or [`Event::Returned`](super::Event::Returned). A
    /// peer that keeps one for about four seconds ends the connection, unless
    /// [`memory_is_unwanted`](Self::memory_is_unwanted) before.
    ///
    /// `wanted` tells whether the memory with a key ([`GrantMemory::key`](super::GrantMemory::key))
    /// is wanted elsewhere.
    pub fn recall_grants(&mut self, wanted: impl Fn(usize) -> bool) {
        let mut streams = Vec::new();
        let mut recalled = Vec::new();
        for (id, grant) in self.grants.iter() {
            if wanted(grant.memory) {
                match grant.stream {
                    0 => recalled.push(id as u32),
                    stream => streams.push(stream),
                }
            }
        }
        streams.sort_unstable();
        streams.dedup();
        // The grants of other streams have to be returned anyway.
        streams.retain(|id| {
            let key = self.streams.key(*id);
            key.is_some_and(|key| {
                matches!(self.streams[key].recv.state, RecvState::Headers | RecvState::Body)
            })
        });
        for (id, grant) in self.grants.iter() {
            if grant.stream != 0 && streams.binary_search(&grant.stream).is_ok() {
                recalled.push(id as u32);
            }
        }
        recalled.into_iter().for_each(|id| self.recall(id));
        self.start_answer_clock();
    }

    pub(super) fn recall(&mut self, id: u32) {
        let frame = self.control.last_frame() + 1;
        let grant = self.grants.get_mut(id);
        if std::mem::replace(&mut grant.recalled, true) {
            return;
        }
        grant.asked = PendingAnswer::by(frame);
        let stream = grant.stream;
        if let Some(key) = self.streams.key(stream) {
            self.streams[key].landing.recalled += 1;
        }
        self.control.push(Frame::Recall { id });
    }

    /// Restores `len` bytes to a request: the peer has returned them, unwritten, from a recalled
    /// grant.
    pub(super) fn restore_request(&mut self, key: usize, request: RequestKey, len: u32) {
        let stream = &mut self.streams[key];
        let is_read = matches!(stream.recv.state, RecvState::Headers | RecvState::Body);
        if !is_read || stream.landing.declined || len == 0 {
            return;
        }
        let peer_requests = &mut stream.landing.requests;
        let at = peer_requests.iter().position(|want| want.request.number >= request.number);
        let at = at.unwrap_or(peer_requests.len());
        match peer_requests.get_mut(at) {
            Some(want) if want.request.number == request.number => want.rest += u64::from(len),
            _ => peer_requests.insert(at, PeerRequest { request, rest: len.into() }),
        }
    }

    /// Handles RECALL. An unknown grant has ended already: its DONE or ABORT crossed the RECALL.
    pub(super) fn on_recall(&mut self, id: u32) {
        let Some(&stream) = self.peer_grants.get(&id) else { return };
        if let Some(at) = self.standing.iter().position(|grant| grant.id.0 == id) {
            let grant = self.standing.swap_remove(at);
            return self.refuse_grant(grant.id);
        }
        let bound = match self.streams.key(stream) {
            Some(key) => self.streams[key].find_grant(id).map(|place| (key, place)),
            None => {
                self.streams.iter().find_map(|(key, s)| s.find_grant(id).map(|place| (key, place)))
            }
        };
        // If it is not bound, its DONE is queued.
        let Some((key, (place, at))) = bound else { return };
        let stream = &mut self.streams[key];
        // Recorded, so that a bound standing grant need not be searched again.
        self.peer_grants.insert(id, stream.id);
        let in_front = stream.send.out.iter().skip(place).any(|out| match out {
            OutputItem::Bulk(bulk) => bulk.grants.front().is_some_and(|grant| grant.standing),
            OutputItem::Headers { .. } | OutputItem::Eager { .. } | OutputItem::Lend(_) => false,
        });
        let Some(OutputItem::Bulk(bulk)) = stream.send.out.get_mut(place) else { return };
        let Some(grant) = bulk.grants.get_mut(at) else { return };
        if in_front {
            if !std::mem::replace(&mut grant.recalled, true) {
                stream.transfers.urgent += 1;
                self.write_first(key);
            }
            return;
        }
        let (len, used) = (grant.len, grant.used);
        bulk.grants.remove(at);
        bulk.granted -= u64::from(len - used);
        if used > 0 {
            stream.transfers.dones.push_back(PendingDone {
                grant: GrantId(id),
                len: used,
                begin: 0,
                end: false,
            });
            self.mark_send(key);
        } else {
            self.refuse_grant(GrantId(id));
            if self.streams[key].send.sends_data {
                self.mark_send(key);
            }
        }
    }

    /// Moves a stream to the front of those that wait to write.
    fn write_first(&mut self, key: usize) {
        if std::mem::take(&mut self.streams[key].queues.write) {
            self.write_ready.remove(key);
        }
        self.mark_write(key);
    }
}
