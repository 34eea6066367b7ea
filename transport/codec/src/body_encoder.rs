//! Polls a body that is being sent, and replaces placeholders with the segments of their messages.
//! Also has the queue for the resulting chunks.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use smallvec::SmallVec;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_memory::throttled;

use crate::methods::{Call, Method, Used};
use crate::placeholder::{self, HEADER, Key, LOST};
use crate::sink::{Apart, Sink, SplitMessage, without};

/// A part of a body that is sent as a unit.
#[derive(Clone, Debug)]
pub struct BodyChunk {
    /// The bytes, in order.
    pub segments: SmallVec<[Bytes; 3]>,
    /// Total length of all segments in bytes.
    pub len: usize,
    /// Whether this is one message whose segments were extracted. Otherwise the chunk holds bytes
    /// exactly as the body returned them.
    pub apart: bool,
    /// Index of the segment that holds the longest `bytes` field, if known.
    pub longest: Option<usize>,
}

impl BodyChunk {
    /// Creates a chunk of bytes that a body returned, unchanged.
    pub fn whole(bytes: Bytes) -> Self {
        let len = bytes.len();
        BodyChunk { segments: SmallVec::from_iter([bytes]), len, apart: false, longest: None }
    }
}

/// The result of polling a body.
pub type Polled = Option<Result<Frame<Bytes>, Status>>;

/// Polls one body, and combines its frames with the segments that the encoder stored.
#[derive(Debug)]
pub struct BodyEncoder {
    /// `None` if messages of this body must not be split.
    sink: Option<Sink>,
    call: Option<Call>,
    used: Used,
}

impl BodyEncoder {
    /// Creates an encoder for the body of `call`. Messages of up to `whole` bytes are not split.
    /// `apart` says whether messages may be split at all: see
    /// [`is_plain_grpc`](crate::is_plain_grpc).
    pub fn new(call: Call, whole: usize, apart: bool) -> Self {
        match apart {
            true => {
                BodyEncoder { sink: Some(Sink::new(whole)), call: Some(call), used: Used::Unknown }
            }
            false => BodyEncoder { sink: None, call: None, used: Used::Plain },
        }
    }

    /// The codec that encoded this body, if known.
    pub fn used(&self) -> Used {
        self.used
    }

    /// Records that `len` bytes of the body were sent in one piece.
    #[inline]
    pub fn has_sent(&self, len: usize) {
        if let Some(call) = &self.call {
            call.method().has_transferred(len);
        }
    }

    /// Returns two counts of this crate's codec since the function was last called: the bytes
    /// copied to make segments, and the bytes of padding that show tonic the true length of a
    /// message.
    pub fn take_copied(&mut self) -> (u64, u64) {
        self.sink.as_mut().map_or((0, 0), Sink::take_copied)
    }

    /// Polls `body` for its next frame. If messages in the frame were split, the frame is returned
    /// empty, and all of its bytes are appended to `chunks`.
    pub fn poll(
        &mut self,
        body: &mut Body,
        cx: &mut Context<'_>,
        chunks: &mut Fifo<BodyChunk>,
    ) -> Poll<Polled> {
        let Some(sink) = &mut self.sink else {
            return without(|| Pin::new(body).poll_frame(cx));
        };
        let method = self.call.as_ref().map(Call::method);
        sink.proven = method.map_or(0, |method| method.encodes());
        let frame = sink.set(|| Pin::new(body).poll_frame(cx));
        let data = match &frame {
            Poll::Pending | Poll::Ready(None) if !sink.is_empty() => {
                return Poll::Ready(Some(Err(lost())));
            }
            Poll::Ready(Some(Ok(frame))) => frame.data_ref(),
            Poll::Pending | Poll::Ready(None | Some(Err(_))) => None,
        };
        let Some(data) = data else {
            // Drop the messages that were encoded before the error, because tonic also loses them.
            sink.clear();
            return frame;
        };
        if sink.is_empty() {
            if self.used == Used::Unknown && !data.is_empty() {
                self.used = if sink.ours { Used::Ours } else { Used::Plain };
                self.call.iter_mut().for_each(|call| call.learn(self.used));
            }
            return frame;
        }
        if self.used != Used::Ours {
            self.used = Used::Ours;
            self.call.iter_mut().for_each(|call| call.learn(Used::Ours));
        }
        let method = self.call.as_ref().map(Call::method);
        let apart = sink.apart.get_or_insert_default();
        let expanded = expand(apart, data.clone(), method, chunks);
        Poll::Ready(Some(expanded.map(|()| Frame::data(Bytes::new()))))
    }
}

fn push_whole(chunks: &mut Fifo<BodyChunk>, data: Bytes) {
    if !data.is_empty() {
        chunks.push_back(BodyChunk::whole(data));
    }
}

fn lost() -> Status {
    throttled!(error, "{LOST}");
    Status::internal(LOST)
}

/// Cuts a frame at the placeholders, and replaces each placeholder with its message.
fn expand(
    apart: &mut Apart,
    frame: Bytes,
    method: Option<&Arc<Method>>,
    chunks: &mut Fifo<BodyChunk>,
) -> Result<(), Status> {
    let (mut at, mut run) = (0, 0);
    while at < frame.len() {
        let message = frame.get(at + HEADER..).unwrap_or_default();
        let Some((_, len)) =
            placeholder::read_header(&frame[at..]).filter(|(_, len)| *len <= message.len())
        else {
            return Err(lost());
        };
        let next = apart.out.front().filter(|taken| {
            taken.placeholder == len && Key::read(&placeholder::OUT, message) == Some(taken.key)
        });
        if next.is_some()
            && let Some(taken) = apart.out.pop_front()
        {
            push_whole(chunks, frame.slice(run..at));
            if taken.placeholder == taken.len
                && let Some(method) = method
            {
                // The placeholder had the message's true length, and tonic accepted it.
                method.has_encoded(taken.len);
            }
            let chunk = together(
                apart,
                &taken,
                frame.slice(at + HEADER + placeholder::LEN..at + HEADER + len),
            );
            chunks.push_back(chunk);
            run = at + HEADER + len;
        }
        at += HEADER + len;
    }
    if !apart.out.is_empty() {
        return Err(lost());
    }
    push_whole(chunks, frame.slice(run..));
    Ok(())
}

/// Builds a message with its header. `small` begins with the header, followed by the bytes that are
/// not in segments.
fn together(apart: &mut Apart, taken: &SplitMessage, small: Bytes) -> BodyChunk {
    let mut segments = SmallVec::new();
    let mut from = 0;
    let mut until = |to: usize, segments: &mut SmallVec<[Bytes; 3]>| {
        if to > from {
            segments.push(small.slice(from..to));
            from = to;
        }
    };
    let mut longest: Option<(usize, usize)> = None;
    for segment in apart.segments.drain(..taken.segments) {
        until(HEADER + segment.at, &mut segments);
        let len = segment.bytes.len();
        if segment.is_buf && longest.is_none_or(|(_, longest)| longest < len) {
            longest = Some((segments.len(), len));
        }
        segments.push(segment.bytes);
    }
    until(HEADER + taken.small, &mut segments);
    let longest = longest.map(|(at, _)| at);
    BodyChunk { segments, len: HEADER + taken.len, apart: true, longest }
}

/// A FIFO queue. The first element is stored inline, so a queue that never holds a second element
/// allocates nothing.
#[derive(Clone, Debug)]
pub struct Fifo<T> {
    /// `None` if the queue is empty.
    first: Option<T>,
    /// The elements behind the first element. The memory for these elements is allocated when the
    /// queue first holds a second element, and is then kept.
    #[expect(
        clippy::box_collection,
        reason = "queues are moved with their owners, and most have no second element"
    )]
    rest: Option<Box<VecDeque<T>>>,
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Fifo { first: None, rest: None }
    }
}

impl<T> Fifo<T> {
    /// Appends an element.
    pub fn push_back(&mut self, value: T) {
        match self.first {
            None => self.first = Some(value),
            Some(_) => self.rest.get_or_insert_default().push_back(value),
        }
    }

    /// Removes and returns the first element.
    pub fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() {
            // Return early, because `Option::take` copies the room for an element even if the
            // `Option` is `None`.
            return None;
        }
        match &mut self.rest {
            None => self.first.take(),
            Some(rest) => std::mem::replace(&mut self.first, rest.pop_front()),
        }
    }

    /// The first element.
    pub fn front_mut(&mut self) -> Option<&mut T> {
        self.first.as_mut()
    }

    /// Whether the queue has no element.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Iterates from the oldest element to the newest.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(self.rest.iter_mut().flat_map(|rest| rest.iter_mut()))
    }

    /// Iterates from the oldest element to the newest.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(self.rest.iter().flat_map(|rest| rest.iter()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_a_queue(steps in proptest::collection::vec(any::<Option<u8>>(), 0..50)) {
            let (mut fifo, mut model) = (Fifo::default(), VecDeque::new());
            for step in steps {
                match step {
                    Some(value) => {
                        fifo.push_back(value);
                        model.push_back(value);
                    }
                    None => prop_assert_eq!(fifo.pop_front(), model.pop_front()),
                }
                prop_assert_eq!(fifo.is_empty(), model.is_empty());
                prop_assert_eq!(fifo.front_mut(), model.front_mut());
                prop_assert!(fifo.iter().eq(&model));
            }
        }
    }
}
