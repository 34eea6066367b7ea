//! Receiving by WRITE into memory that this side names: the application's, for one field of one
//! message.
//!
//! A REQUEST states where the message's longest `bytes` field lies. For a stream that names memory,
//! the grants end where the field begins and ends: what lies around it lands in landing memory, and
//! the field in the memory that is named, which counts in no window. A sender that knows of it
//! sends the few bytes around by DATA, and requests memory for the field alone, so that a message
//! takes one grant instead of three: a server knows by LANDS, a client by the first grant that ends
//! where a field begins.
//!
//! | the stream | on | next |
//! |---|---|---|
//! | does not want named memory | its next byte is of a field, and none of its grants is recalled | queued |
//! | queued | [`Connection::poll_named`] | naming |
//! | naming | [`Connection::provide_named`] | granted: does not want any |
//! | naming | [`Connection::refuse_named`] | the message lands as any other |
//! | naming | the end of the stream | what is provided comes back as [`Event::Returned`] |

use super::connection::Connection;
use super::landing::NewGrant;
use super::stream::{RecvState, Section, Stream};
use super::types::{Event, GrantMemory, NamedWant};
use crate::frame::MIN_GRANT;
use crate::ids::StreamId;

impl Connection {
    /// This side names memory for the large messages that it receives on a stream. To be called
    /// right after [`open`](Self::open) (client only): the head tells the peer. For servers see
    /// [`decide_naming`](Self::decide_naming).
    pub fn name_memory(&mut self, id: StreamId) {
        if let Some(key) = self.streams.key(id.0) {
            self.streams[key].recv.names = true;
        }
    }

    /// Decides whether this side names memory for the large messages that it receives on a stream.
    /// A server with [`Config::names_requests`](crate::Config::names_requests) does so once for
    /// each stream that was opened.
    pub fn decide_naming(&mut self, id: StreamId, names: bool) {
        if let Some(key) = self.streams.key(id.0) {
            (self.streams[key].recv.names, self.streams[key].recv.undecided) = (names, false);
            self.queue_for_landing(key);
        }
    }

    /// The length of the field in the next message that the peer wants to write on a stream, if it
    /// has told.
    pub fn next_field(&self, id: StreamId) -> Option<u32> {
        let stream = &self.streams[self.streams.key(id.0)?];
        Some(stream.landing.requests.front()?.request.field?.len)
    }

    /// Returns the next want of named memory, once. The driver answers with
    /// [`Connection::provide_named`] or [`Connection::refuse_named`], at any time.
    pub fn poll_named(&mut self) -> Option<NamedWant> {
        if !self.is_live() {
            return None;
        }
        while let Some(key) = self.named_queue.pop_front() {
            let stream = &mut self.streams[key];
            stream.queues.naming = false;
            if let Some((field, offset, _)) = wanted(stream) {
                stream.landing.naming = true;
                return Some(NamedWant { stream: StreamId(stream.id), field, offset });
            }
        }
        None
    }

    /// Grants memory for what [`Connection::poll_named`] has returned, from the stated offset in
    /// the field on. Memory that is longer is granted in part; the rest of the field is wanted
    /// after shorter memory. What is no longer wanted, or shorter than a grant may be, comes back
    /// as [`Event::Returned`].
    pub fn provide_named(&mut self, id: StreamId, memory: GrantMemory) {
        match self.named_grant(id, memory.len) {
            Some(grant) => self.give(grant, memory),
            None => {
                self.events.push_back(Event::Returned { memory: memory.key });
                self.refuse_named(id);
            }
        }
        if let Some(key) = self.streams.key(id.0) {
            self.queue_for_landing(key);
        }
    }

    fn named_grant(&mut self, id: StreamId, len: u32) -> Option<NewGrant> {
        let key = self.streams.key(id.0).filter(|_| self.is_live())?;
        let stream = &mut self.streams[key];
        if !stream.landing.naming {
            return None;
        }
        let (.., left) = section(stream)?;
        let len = len.min(left);
        if len < left.min(MIN_GRANT) {
            return None;
        }
        stream.landing.naming = false;
        let wanted = stream.landing.requests.front_mut()?;
        let request = wanted.request;
        wanted.rest -= u64::from(len);
        if wanted.rest == 0 {
            stream.landing.requests.pop_front();
        }
        stream.landing.open_grants += 1;
        Some(NewGrant { stream: id.0, begin: 0, len, request, named: true })
    }

    /// Has no memory for what [`Connection::poll_named`] has returned: the rest of the message
    /// lands in landing memory.
    pub fn refuse_named(&mut self, id: StreamId) {
        let Some(key) = self.streams.key(id.0) else { return };
        let stream = &mut self.streams[key];
        if std::mem::take(&mut stream.landing.naming)
            && section(stream).is_some()
            && let Some(wanted) = stream.landing.requests.front_mut()
        {
            wanted.request.field = None;
        }
        self.queue_for_landing(key);
    }

    pub(super) fn queue_for_naming(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.queues.naming && wanted(stream).is_some() {
            stream.queues.naming = true;
            self.named_queue.push_back(key);
        }
    }
}

/// As [`section`], if it is wanted now.
fn wanted(stream: &Stream) -> Option<(u32, u32, u32)> {
    let is_read = matches!(stream.recv.state, RecvState::Headers | RecvState::Body);
    let waits = stream.landing.naming || stream.recv.undecided || stream.landing.recalled > 0;
    section(stream).filter(|_| is_read && !waits)
}

/// The length of the field that the next byte of the request belongs to, and of what is left of it
/// the offset and the length.
fn section(stream: &Stream) -> Option<(u32, u32, u32)> {
    let wanted = stream.landing.requests.front()?;
    match (wanted.request.field, wanted.section(stream.recv.names)) {
        (Some(field), Section::Field { offset, len }) => Some((field.len, offset, len)),
        _ => None,
    }
}
