//! Receiving by WRITE into memory that this side names: application memory for one field of one
//! message.
//!
//! A REQUEST states where the message's longest `bytes` field lies. For a stream that names memory,
//! the grants end where the field begins and ends. The field lands in the named memory, which
//! counts in no window, and the bytes around it in landing memory. A sender that knows that its
//! peer names memory sends the few bytes around the field by DATA, and requests memory for the
//! field alone. A message then takes one grant instead of three. A server learns from LANDS that
//! its peer names memory. A client learns that its peer names memory from the first grant that ends
//! where a field begins and has fewer than [`MIN_GRANT`] bytes. Landing memory for a part of a
//! message is never that short.
//!
//! | the stream | on | next |
//! |---|---|---|
//! | does not want named memory | its next byte belongs to a field, and none of its grants is recalled | queued |
//! | queued | `Connection::poll_named` | naming |
//! | naming | `Connection::provide_named`, and the memory is still wanted for the same byte | granted: does not want named memory |
//! | naming | `Connection::provide_named`, and a recalled grant has not ended or has returned earlier bytes | the memory comes back: does not want named memory |
//! | naming | `Connection::refuse_named` | the message lands as any other |
//! | naming | the end of the stream | memory provided later comes back as [`Event::Returned`](super::Event::Returned) |

use super::control::Control;
use super::grants::NewGrant;
use super::landing::Landing;
use super::requests::{PeerRequest, Section};
use super::stream::Stream;
use super::streams::Streams;
use super::types::{GrantMemory, NamedWant};
use crate::frame::MIN_GRANT;
use crate::ids::StreamId;

impl Landing {
    /// Returns the next want of named memory. Each want is returned once.
    pub(super) fn poll_named(&mut self, streams: &mut Streams) -> Option<NamedWant> {
        while let Some(key) = self.named_queue.pop_front() {
            let stream = &mut streams[key];
            stream.queues.naming = false;
            if let Some((field, offset, _)) = wanted(stream) {
                stream.landing.naming = stream.landing.requests.front().map(PeerRequest::next_byte);
                return Some(NamedWant { stream: StreamId(stream.id), field, offset });
            }
        }
        None
    }

    /// Grants memory for a want that [`poll_named`](Self::poll_named) has returned. Returns whether
    /// the memory was taken.
    pub(super) fn provide_named(
        &mut self,
        id: StreamId,
        memory: GrantMemory,
        streams: &mut Streams,
        control: &mut Control,
    ) -> bool {
        let Some((key, stream)) = streams.find(id) else { return false };
        let given = named_grant(stream, memory.len);
        if let Some(given) = given {
            self.grants.give(given, memory, control);
        }
        self.queue(key, stream);
        given.is_some()
    }

    /// Refuses a want of named memory. The rest of the message lands in landing memory.
    pub(super) fn refuse_named(&mut self, id: StreamId, streams: &mut Streams) {
        if let Some((key, stream)) = streams.find(id) {
            if let Some(asked) = stream.landing.naming.take() {
                stream.landing.forget_field(asked.number);
            }
            self.queue(key, stream);
        }
    }

    pub(super) fn queue_for_naming(&mut self, key: usize, stream: &mut Stream) {
        if !stream.queues.naming && wanted(stream).is_some() {
            stream.queues.naming = true;
            self.named_queue.push_back(key);
        }
    }
}

/// Determines the part of `len` bytes of named memory that is granted. Grants nothing unless the
/// next byte that the peer will write is still the byte for which the driver was asked for memory,
/// because the memory belongs to that place in the field.
fn named_grant(stream: &mut Stream, len: u32) -> Option<NewGrant> {
    let asked = stream.landing.naming.take()?;
    if stream.landing.requests.front().map(PeerRequest::next_byte) != Some(asked) {
        return None;
    }
    let (.., left) = wanted(stream)?;
    let len = len.min(left);
    if len < left.min(MIN_GRANT) {
        stream.landing.forget_field(asked.number);
        return None;
    }
    let request = stream.landing.take_request(len)?;
    Some(NewGrant { stream: stream.id, begin: 0, len, request, named: true })
}

/// Returns the [`section`] of the stream, if named memory is wanted for it now.
fn wanted(stream: &Stream) -> Option<(u32, u32, u32)> {
    let is_read = stream.recv.state.is_read();
    let waits =
        stream.landing.naming.is_some() || stream.recv.undecided || stream.landing.recalled > 0;
    section(stream).filter(|_| is_read && !waits)
}

/// Returns the length of the field that the request's next byte belongs to, and the offset and
/// length of the rest of this field.
fn section(stream: &Stream) -> Option<(u32, u32, u32)> {
    let wanted = stream.landing.requests.front()?;
    match (wanted.request.field, wanted.section(stream.recv.names)) {
        (Some(field), Section::Field { offset, len }) => Some((field.len, offset, len)),
        _ => None,
    }
}
