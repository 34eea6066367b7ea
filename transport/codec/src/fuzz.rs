//! Both directions of the codec without a connection, for fuzzing and property tests.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BufMut, Bytes};
use http::{StatusCode, Uri};
use http_body::{Body as HttpBody, Frame};
use prost::encoding::{DecodeContext, WireType};
use prost::{DecodeError, Message};
use tonic::body::Body;
use tonic::codec::{Codec, EncodeBody, Streaming};
use tonic::{Code, Status};
use tonic_rdma_memory::test_util::{SharedArena, Watched};

use crate::body_encoder::{BodyChunk, BodyEncoder, Fifo};
use crate::deframer::{Deframer, Part};
use crate::methods::{Call, Methods, Used};
use crate::pending_messages::LentPiece;
use crate::placeholder::HEADER;
use crate::prost_codec::ProstCodec;

/// How a piece of a body arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// The piece arrives in control messages.
    InMessages,
    /// The piece lands by WRITE.
    Landed,
    /// The piece is lent, except for a few bytes at its ends.
    Lent,
}

/// One method, with the limits and the codec learnt over several calls.
#[derive(Debug, Default)]
pub struct OneMethod(Arc<Methods>);

impl OneMethod {
    /// Like [`encode`], but for consecutive calls to one method.
    ///
    /// # Errors
    /// The codec's status.
    pub fn encode<M>(
        &self,
        messages: Vec<M>,
        whole: usize,
        limit: Option<usize>,
    ) -> Result<Vec<Vec<Bytes>>, Status>
    where
        M: Message + Default + Send + 'static,
    {
        let source = ready(messages);
        let encoder = ProstCodec::<M, M>::new().encoder();
        let body = Body::new(EncodeBody::new_client(encoder, source, None, limit));
        send(body, &mut BodyEncoder::new(self.call(), whole, true))
    }

    /// Like [`decode`], but for consecutive calls to one method.
    pub fn decode<M>(
        &self,
        pieces: Vec<(Bytes, Came)>,
        limit: usize,
    ) -> Vec<Result<M, (Code, String)>>
    where
        M: Message + Default + Send + 'static,
    {
        let deframer = Deframer::new(self.call().method().clone(), true);
        let body = Received { deframer, pieces: pieces.into(), ended: false };
        let decoder = ProstCodec::<M, M>::new().decoder();
        let mut stream = Streaming::new_response(decoder, body, StatusCode::OK, None, Some(limit));
        let (mut messages, mut cx) = (Vec::new(), Context::from_waker(Waker::noop()));
        loop {
            let Poll::Ready(next) = pin!(stream.message()).poll(&mut cx) else { break };
            match next {
                Ok(Some(message)) => messages.push(Ok(message)),
                Ok(None) => break,
                Err(status) => {
                    messages.push(Err((status.code(), status.message().to_owned())));
                    break;
                }
            }
        }
        messages
    }

    fn call(&self) -> Call {
        self.0.call(&Uri::from_static("/fuzz"))
    }
}

/// Encodes `messages` into the pieces in which they are sent. Messages of up to `whole` bytes are
/// not split.
///
/// # Errors
/// The codec's status.
pub fn encode<M>(
    messages: Vec<M>,
    whole: usize,
    limit: Option<usize>,
) -> Result<Vec<Vec<Bytes>>, Status>
where
    M: Message + Default + Send + 'static,
{
    OneMethod::default().encode(messages, whole, limit)
}

/// Polls a body to its end.
pub(super) fn send(mut body: Body, tap: &mut BodyEncoder) -> Result<Vec<Vec<Bytes>>, Status> {
    let (mut chunks, mut cx) = (Fifo::<BodyChunk>::default(), Context::from_waker(Waker::noop()));
    loop {
        match tap.poll(&mut body, &mut cx, &mut chunks) {
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if data.is_empty() => {}
                Ok(data) => chunks.push_back(BodyChunk::whole(data)),
                Err(_) => break,
            },
            Poll::Ready(Some(Err(status))) => return Err(status),
            _ => break,
        }
    }
    Ok(std::iter::from_fn(|| chunks.pop_front()).map(|chunk| chunk.segments.into_vec()).collect())
}

/// Decodes a body that arrives in `pieces`, up to the first error.
pub fn decode<M>(pieces: Vec<(Bytes, Came)>, limit: usize) -> Vec<Result<M, (Code, String)>>
where
    M: Message + Default + Send + 'static,
{
    OneMethod::default().decode(pieces, limit)
}

/// Like [`decode`], but the sender writes to `arena`, where the pieces landed, after each read by
/// prost. The arena holds the plan of these writes.
///
/// # Panics
/// If prost is given bytes of the arena itself instead of a copy.
pub fn decode_watched<M>(
    pieces: Vec<(Bytes, Came)>,
    limit: usize,
    arena: &SharedArena,
) -> Vec<Result<M, (Code, String)>>
where
    M: Message + Default + Send + 'static,
{
    LANDED.set(Some(arena.clone()));
    let messages = decode::<Seen<M>>(pieces, limit);
    LANDED.set(None);
    messages.into_iter().map(|message| message.map(|Seen(message)| message)).collect()
}

thread_local! {
    /// The memory in which the message that is being decoded landed.
    static LANDED: RefCell<Option<SharedArena>> = const { RefCell::new(None) };
}

/// A message that is decoded from a [`Watched`] buffer.
#[derive(Debug, Default)]
struct Seen<M>(M);

impl<M: Message> Message for Seen<M> {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.0.encode_raw(buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        LANDED.with_borrow(|arena| match arena {
            Some(arena) => self.0.merge_field(tag, wire_type, &mut Watched { buf, arena }, ctx),
            None => self.0.merge_field(tag, wire_type, buf, ctx),
        })
    }

    fn encoded_len(&self) -> usize {
        self.0.encoded_len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

/// A body as the transport delivers it.
pub(super) struct Received {
    pub(super) deframer: Deframer,
    pub(super) pieces: VecDeque<(Bytes, Came)>,
    pub(super) ended: bool,
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(bytes) = self.deframer.pop() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let Some((piece, came)) = self.pieces.pop_front() else {
                let ended = std::mem::replace(&mut self.ended, true);
                return Poll::Ready((!ended).then(|| Ok(Frame::trailers(ok()))));
            };
            let part = match came {
                Came::InMessages => Part::Eager(piece),
                Came::Landed => Part::Landed(piece.into()),
                Came::Lent => lent(&piece),
            };
            self.deframer.push(part, Used::Ours);
        }
    }
}

/// Returns a piece whose bytes are lent, except for copies of its first and last bytes. The copies
/// are short enough for one control message.
fn lent(piece: &Bytes) -> Part {
    let head = piece.len().min(HEADER + piece.len() % 40);
    let tail = (piece.len() - head).min(piece.len() % 30);
    let (begin, end) = (head, piece.len() - tail);
    Part::Lent(Box::new(LentPiece {
        head: Bytes::copy_from_slice(&piece[..begin]),
        lent: piece.slice(begin..end).into(),
        tail: Bytes::copy_from_slice(&piece[end..]),
    }))
}

fn ok() -> http::HeaderMap {
    http::HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )])
}

/// A stream whose items are ready at once.
pub(super) fn ready<M: Send + 'static>(
    messages: Vec<M>,
) -> impl futures_core::Stream<Item = Result<M, Status>> + Send + 'static {
    struct Ready<M>(std::vec::IntoIter<M>);
    impl<M> Unpin for Ready<M> {}
    impl<M> futures_core::Stream for Ready<M> {
        type Item = Result<M, Status>;
        fn poll_next(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Self::Item>> {
            Poll::Ready(self.0.next().map(Ok))
        }
    }
    Ready(messages.into_iter())
}
