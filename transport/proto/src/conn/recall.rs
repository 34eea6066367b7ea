//! Grants that are asked back before the peer has used them.
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
//! What a request loses so is asked for again without another REQUEST: both sides know how much it
//! is. The sender of the RECALL puts it back in its place among the requests of the stream, and
//! grants none of them until all that it has recalled of the stream has ended: which request a
//! GRANT is for follows from their order.
//!
//! All grants of a stream are recalled together. Otherwise memory would stay with a transfer that
//! stands behind one that waits for memory, and both might wait for each other. For the same reason
//! a grant is not cut off in front of a transfer that has a standing grant.

use super::answer_clock::Owed;
use super::connection::Connection;
use super::stream::{Announce, Asked, Out, RecvHalf, Want};
use crate::frame::Frame;
use crate::ids::GrantId;

impl Connection {
    /// Asks grants back whose memory is wanted elsewhere, and with them all grants of their
    /// streams. Streams go on when there is memory for them again. Each comes back as
    /// [`Event::Landed`](super::Event::Landed) or [`Event::Returned`](super::Event::Returned)
    /// within [`dead_peer`](crate::Config::dead_peer), or the connection ends.
    ///
    /// `wanted`: whether the memory with this key ([`GrantMemory::key`](super::GrantMemory::key))
    /// is wanted.
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
        // What is owed for another reason need not be asked for.
        streams.retain(|id| {
            let key = self.ids.get(id);
            key.is_some_and(|key| {
                matches!(self.streams[*key].recv, RecvHalf::Headers | RecvHalf::Body)
            })
        });
        for (id, grant) in self.grants.iter() {
            if grant.stream != 0 && streams.binary_search(&grant.stream).is_ok() {
                recalled.push(id as u32);
            }
        }
        recalled.into_iter().for_each(|id| self.recall(id));
    }

    pub(super) fn recall(&mut self, id: u32) {
        let frame = self.last_frame() + 1;
        let grant = self.grants.get_mut(id);
        if std::mem::replace(&mut grant.recalled, true) {
            return;
        }
        grant.asked = Owed::by(frame);
        let stream = grant.stream;
        if let Some(&key) = self.ids.get(&stream) {
            self.streams[key].recalled += 1;
        }
        self.push_control(Frame::Recall { id });
        self.expect_answer();
    }

    /// The peer has given back `len` bytes of a grant that was recalled, unwritten: its request
    /// still wants them.
    pub(super) fn want_again(&mut self, key: usize, request: Asked, len: u32) {
        let stream = &mut self.streams[key];
        if !matches!(stream.recv, RecvHalf::Headers | RecvHalf::Body) || len == 0 {
            return;
        }
        let wants = &mut stream.wants;
        let at = wants.iter().position(|want| want.request.number >= request.number);
        let at = at.unwrap_or(wants.len());
        match wants.get_mut(at) {
            Some(want) if want.request.number == request.number => want.rest += u64::from(len),
            _ => wants.insert(at, Want { request, rest: len.into() }),
        }
    }

    /// The peer wants a grant back. One that is not known has just been ended.
    pub(super) fn on_recall(&mut self, id: u32) {
        let Some(&stream) = self.peer_grants.get(&id) else { return };
        if let Some(at) = self.standing.iter().position(|grant| grant.id.0 == id) {
            let grant = self.standing.swap_remove(at);
            self.answers += 1;
            return self.abort_grant(grant.id);
        }
        let bound = match self.ids.get(&stream) {
            Some(&key) => self.streams[key].find_grant(id).map(|place| (key, place)),
            None => {
                self.streams.iter().find_map(|(key, s)| s.find_grant(id).map(|place| (key, place)))
            }
        };
        // None: its DONE is queued.
        let Some((key, (place, at))) = bound else { return };
        let stream = &mut self.streams[key];
        // A standing grant is looked for once.
        self.peer_grants.insert(id, stream.id);
        let in_front = stream.out.iter().skip(place).any(|out| match out {
            Out::Bulk(bulk) => bulk.grants.front().is_some_and(|grant| grant.standing),
            Out::Headers { .. } | Out::Eager { .. } => false,
        });
        let Some(Out::Bulk(bulk)) = stream.out.get_mut(place) else { return };
        let Some(grant) = bulk.grants.get_mut(at) else { return };
        if in_front {
            if !std::mem::replace(&mut grant.recalled, true) {
                stream.hurried += 1;
                self.write_first(key);
            }
            return;
        }
        let (len, used) = (grant.len, grant.used);
        bulk.grants.remove(at);
        bulk.granted -= u64::from(len - used);
        if used > 0 {
            stream.announce.push_back(Announce {
                grant: GrantId(id),
                len: used,
                begin: 0,
                end: false,
            });
            self.mark_send(key);
        } else {
            self.answers += 1;
            self.abort_grant(GrantId(id));
        }
    }

    /// Puts a stream in front of those that wait for their turn to write.
    fn write_first(&mut self, key: usize) {
        if std::mem::take(&mut self.streams[key].in_write_ready) {
            for queue in &mut self.write_ready {
                queue.retain(|k| *k != key);
            }
        }
        self.mark_write(key);
    }
}
