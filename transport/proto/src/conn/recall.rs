//! Recalling grants before the peer has used them.
//!
//! What the peer does is told in `peer_grants`. The bytes that a request loses are wanted again
//! without another REQUEST, since both sides know how many they are. This side restores them at
//! their place among the requests of the stream, and grants none of these until all recalled grants
//! of the stream have ended: the order of GRANTs determines the request that each of them answers.
//!
//! All grants of a stream are recalled together. Otherwise a transfer could keep memory while one
//! in front of it waits for memory, and both might wait for each other.

use super::answer_clock::PendingAnswer;
use super::connection::Connection;
use super::stream::{PeerRequest, RecvState, RequestKey};
use crate::frame::Frame;

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
        let frame = self.output.control.last_frame() + 1;
        let grant = self.grants.get_mut(id);
        if std::mem::replace(&mut grant.recalled, true) {
            return;
        }
        grant.asked = PendingAnswer::by(frame);
        let stream = grant.stream;
        if let Some(key) = self.streams.key(stream) {
            self.streams[key].landing.recalled += 1;
        }
        self.output.control.push(Frame::Recall { id });
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
}
