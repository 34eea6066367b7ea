//! Polls a body that is being sent, and replaces placeholders with the segments of their messages.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use smallvec::SmallVec;
use tonic::Status;
use tonic::body::Body;

use crate::codec::methods::{Call, Method, Used};
use crate::codec::placeholder::{self, HEADER, Key, LOST};
use crate::codec::sink::{Apart, Sink, Taken, without};
use crate::fifo::Fifo;

/// A part of a body that is sent as a unit.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    /// The bytes, in order.
    pub(crate) segments: SmallVec<[Bytes; 3]>,
    /// Total length of all segments in bytes.
    pub(crate) len: usize,
    /// Whether this is one message whose segments were extracted. Otherwise it holds bytes as the
    /// body returned them.
    pub(crate) apart: bool,
    /// Index of the segment that holds the longest `bytes` field, if known.
    pub(crate) longest: Option<usize>,
}

impl Chunk {
    fn whole(bytes: Bytes) -> Self {
        let len = bytes.len();
        Chunk { segments: SmallVec::from_iter([bytes]), len, apart: false, longest: None }
    }
}

/// Result of polling a body.
#[derive(Debug)]
pub(crate) enum Polled {
    /// Number of bytes added, in chunks.
    Data(usize),
    Trailers(HeaderMap),
    End,
    Failed(Status),
}

/// Polls one body, and combines its frames with the segments that the encoder stored.
#[derive(Debug)]
pub(crate) struct BodyEncoder {
    /// None if messages of this body must not be split.
    sink: Option<Sink>,
    call: Option<Call>,
    used: Used,
}

impl BodyEncoder {
    /// An encoder for the body of `call`. Messages of up to `whole` bytes are not split. `apart`
    /// allows splitting, see [`is_plain_grpc`](crate::codec::is_plain_grpc).
    pub(crate) fn new(call: Call, whole: usize, apart: bool) -> Self {
        match apart {
            true => {
                BodyEncoder { sink: Some(Sink::new(whole)), call: Some(call), used: Used::Unknown }
            }
            false => BodyEncoder { sink: None, call: None, used: Used::Plain },
        }
    }

    /// The codec that encoded this body, if known.
    pub(crate) fn used(&self) -> Used {
        self.used
    }

    /// Bytes that this crate's codec copied since the last call: to make segments, and as filling
    /// that shows tonic the true length of a message.
    pub(crate) fn take_copied(&mut self) -> (u64, u64) {
        self.sink.as_mut().map_or((0, 0), Sink::take_copied)
    }

    /// Polls `body` for its next frame, and appends data to `chunks`.
    pub(crate) fn poll(
        &mut self,
        body: &mut Body,
        cx: &mut Context<'_>,
        chunks: &mut Fifo<Chunk>,
    ) -> Poll<Polled> {
        let Some(sink) = &mut self.sink else {
            return without(|| Pin::new(body).poll_frame(cx)).map(|frame| match frame {
                None => Polled::End,
                Some(Err(status)) => Polled::Failed(status),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Polled::Data(push_whole(chunks, data)),
                    Err(frame) => frame.into_trailers().map_or(Polled::Data(0), Polled::Trailers),
                },
            });
        };
        let method = self.call.as_ref().map(Call::method);
        sink.proven = method.map_or(0, |method| method.encodes());
        let frame = sink.set(|| Pin::new(body).poll_frame(cx));
        let polled = match frame {
            Poll::Pending | Poll::Ready(None) if !sink.is_empty() => Polled::Failed(lost()),
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => Polled::End,
            // tonic, too, loses what was encoded before an error.
            Poll::Ready(Some(Err(status))) => {
                sink.clear();
                Polled::Failed(status)
            }
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if sink.is_empty() => {
                    if self.used == Used::Unknown && !data.is_empty() {
                        self.used = if sink.ours { Used::Ours } else { Used::Plain };
                        self.call.iter_mut().for_each(|call| call.learn(self.used));
                    }
                    Polled::Data(push_whole(chunks, data))
                }
                Ok(data) => {
                    if self.used != Used::Ours {
                        self.used = Used::Ours;
                        self.call.iter_mut().for_each(|call| call.learn(Used::Ours));
                    }
                    let method = self.call.as_ref().map(Call::method);
                    let apart = sink.apart.get_or_insert_default();
                    expand(apart, data, method, chunks).map_or_else(Polled::Failed, Polled::Data)
                }
                Err(frame) => {
                    sink.clear();
                    frame.into_trailers().map_or(Polled::Data(0), Polled::Trailers)
                }
            },
        };
        Poll::Ready(polled)
    }
}

fn push_whole(chunks: &mut Fifo<Chunk>, data: Bytes) -> usize {
    let len = data.len();
    if len > 0 {
        chunks.push_back(Chunk::whole(data));
    }
    len
}

fn lost() -> Status {
    tracing::error!("{LOST}");
    Status::internal(LOST)
}

/// Cuts a frame at the placeholders, and replaces each with its message.
fn expand(
    apart: &mut Apart,
    frame: Bytes,
    method: Option<&Arc<Method>>,
    chunks: &mut Fifo<Chunk>,
) -> Result<usize, Status> {
    let (mut at, mut run, mut total) = (0, 0, 0);
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
            total += push_whole(chunks, frame.slice(run..at));
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
            total += chunk.len;
            chunks.push_back(chunk);
            run = at + HEADER + len;
        }
        at += HEADER + len;
    }
    if !apart.out.is_empty() {
        return Err(lost());
    }
    total += push_whole(chunks, frame.slice(run..));
    Ok(total)
}

/// Builds a message with its header. `small` begins with the header, followed by the bytes that are
/// not in segments.
fn together(apart: &mut Apart, taken: &Taken, small: Bytes) -> Chunk {
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
    Chunk { segments, len: HEADER + taken.len, apart: true, longest }
}
