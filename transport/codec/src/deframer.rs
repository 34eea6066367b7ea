//! Finds the messages in a received body, and replaces messages that can stay where they landed
//! with placeholders.

use std::cell::Cell;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use tonic_rdma_memory::Landed;

use crate::body_encoder::Fifo;
use crate::methods::{Method, Used};
use crate::named::message::{Gather, Gathered};
use crate::pending_messages::{self, ArrivedMessage, Kept, LentPiece};
use crate::placeholder::{self, HEADER, Key};

/// Messages of at least this many bytes stay where they landed. Copying a shorter message costs
/// less.
const MIN: usize = 4096;
/// Size in bytes of the allocations that placeholders share.
const SHARE: usize = 1024;

/// Maximum number of bytes copied out of landing memory at once, so that the decoder's own copy
/// reads from the first-level cache.
pub(super) const SLICE: usize = 16 * 1024;
/// Maximum number of bytes passed to the decoder at once if nothing is copied.
const HANDED: usize = 64 * 1024;

/// If a message is longer than this, its header is passed to tonic alone. tonic then sizes its
/// buffer for the message once. If message bytes followed the header at once, the buffer would
/// first grow to hold these bytes, and then grow again by the whole length. A message that fits
/// into tonic's initial buffer needs no separate header.
const ALONE: usize = 8 * 1024 - HEADER;

thread_local! {
    /// The buffer of the last long piece, which its reader has usually copied by now. A reused
    /// buffer is in the cache and causes no page faults.
    static BUFFER: Cell<BytesMut> = Cell::new(BytesMut::new());
}

/// The bytes that pad a placeholder to the length of its message.
static FILLING: [u8; HANDED] = [0; HANDED];

/// A part of a received body.
#[derive(Debug)]
pub enum Part {
    /// The part arrived in control messages, and was copied to memory that the peer cannot write
    /// to.
    Eager(Bytes),
    /// The part arrived by RDMA WRITE.
    Landed(Landed),
    /// The part lies in memory that the peer has lent, except for its ends.
    Lent(Box<LentPiece>),
}

#[expect(clippy::len_without_is_empty, reason = "nothing asks")]
impl Part {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Part::Eager(bytes) => bytes.len(),
            Part::Landed(landed) => landed.len(),
            Part::Lent(piece) => piece.len(),
        }
    }

    /// Whether the part keeps landing memory in use.
    pub fn is_in_pool(&self) -> bool {
        matches!(self, Part::Landed(landed) if landed.is_in_pool())
    }
}

/// Parser position within the sequence of messages.
#[derive(Clone, Copy, Debug)]
pub(super) enum At {
    /// Within a header: the bytes received so far, and their number.
    Header([u8; HEADER], usize),
    /// After a header that is not passed on yet. The message after the header has this length, is
    /// complete, and can stay where it landed.
    Whole(usize),
    /// Within a message that is passed on as it arrives.
    Message { left: usize, long: bool },
    /// Within a message that is gathered: its missing bytes, and the padding of its placeholder.
    Gather { left: usize, fill: usize },
    /// The body is passed on unparsed.
    Through,
    /// Like `Through`, but the bytes are passed on in the memory where they landed. The reader
    /// copies them before it parses them.
    InPlace,
}

impl At {
    /// Before the first byte of a header.
    pub(super) const NEXT: At = At::Header([0; HEADER], 0);

    /// Advances by `len` bytes within this header or message.
    pub(super) fn pass(&mut self, len: usize) {
        match self {
            At::Header(header, got) => {
                *got += len;
                if *got == HEADER {
                    let left = placeholder::read_header(header).map_or(0, |(_, left)| left);
                    *self = At::Message { left, long: left >= MIN };
                    self.pass(0);
                }
            }
            At::Message { left, .. } => {
                *left -= len;
                if *left == 0 {
                    *self = At::NEXT;
                }
            }
            At::Whole(_) | At::Gather { .. } | At::Through | At::InPlace => {}
        }
    }
}

/// Bytes copied for the decoder, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Bytes for another crate's codec, which copies its input, and bytes of bodies that are passed
    /// on unparsed.
    pub plain: u64,
    /// Bytes copied because the codec is not known yet, and bytes of padding, by which tonic's
    /// limit is learnt.
    pub learning: u64,
    /// Bytes of messages that landed in several parts, which tonic joins.
    pub joined: u64,
    /// Bytes of messages that are too short for a placeholder.
    pub short: u64,
    /// Bytes copied to a buffer that the caller has named.
    pub named: u64,
}

/// Deframer of one received body.
///
/// Only this crate's decoder, and a reader for which the deframer was made by
/// [`in_place`](Self::in_place), receive landed bytes. For any other reader, landed bytes are
/// copied out first, in pieces of at most `SLICE` bytes. Each header is read once, into `at`, and
/// passed on as it was read. So tonic finds the same message boundaries even if the peer overwrites
/// headers later.
#[derive(Debug)]
pub struct Deframer {
    method: Arc<Method>,
    pub(super) at: At,
    /// Bytes received and not yet passed on.
    pub(super) part: Part,
    /// The parts after `part`, in order.
    later: Fifo<Part>,
    /// The reader's codec.
    pub(super) used: Used,
    /// Bytes of padding that still have to follow a placeholder.
    filling: usize,
    /// Length of the header that was passed on alone just before the next piece, otherwise 0. The
    /// next piece is shorter by this length, which keeps source and destination of the copies
    /// aligned.
    ahead: usize,
    /// Keys of the placeholders that were passed on. Some of these placeholders may already have
    /// been decoded.
    keys: Fifo<Key>,
    pub(super) share: BytesMut,
    pub(super) delivered: Delivered,
    /// The first message while it is being received, if the call has a buffer for its field.
    pub(super) gather: Option<Box<Gather>>,
    pub(super) gathered: Gathered,
}

impl Deframer {
    /// Creates a deframer for a call to `method`. `messages` tells whether the body is a sequence
    /// of plain gRPC messages: see [`is_plain_grpc`](crate::is_plain_grpc).
    pub fn new(method: Arc<Method>, messages: bool) -> Self {
        Deframer {
            method,
            at: if messages { At::NEXT } else { At::Through },
            part: Part::Eager(Bytes::new()),
            later: Fifo::default(),
            used: Used::Unknown,
            filling: 0,
            ahead: 0,
            keys: Fifo::default(),
            share: BytesMut::new(),
            delivered: Delivered::default(),
            gather: None,
            gathered: Gathered::default(),
        }
    }

    /// Creates a deframer for a reader that copies the body before it parses anything, because the
    /// peer may still write to the bytes.
    pub fn in_place(method: Arc<Method>) -> Self {
        let mut deframer = Self::new(method, false);
        deframer.at = At::InPlace;
        deframer
    }

    /// Returns the next bytes for the decoder, at most [`HANDED`], or `None` if nothing is left.
    /// The decoder copies these bytes.
    pub fn pop(&mut self) -> Option<Bytes> {
        let popped = self.pop_part();
        if self.later.is_empty() { popped } else { self.pop_later(popped) }
    }

    /// Continues with later parts once nothing is left of the current part.
    #[cold]
    fn pop_later(&mut self, mut popped: Option<Bytes>) -> Option<Bytes> {
        while self.is_part_empty()
            && let Some(part) = self.later.pop_front()
        {
            self.begin(part);
            if popped.is_some() {
                break;
            }
            popped = self.pop_part();
        }
        popped
    }

    fn pop_part(&mut self) -> Option<Bytes> {
        if self.filling > 0 {
            let len = self.filling.min(HANDED);
            self.filling -= len;
            return Some(Bytes::from_static(&FILLING[..len]));
        }
        if self.gather.is_some()
            && let Some(popped) = self.pop_gathered()
        {
            return popped;
        }
        match &mut self.part {
            Part::Eager(bytes) if bytes.is_empty() => None,
            Part::Eager(bytes) if bytes.len() > HANDED => Some(bytes.split_to(HANDED)),
            Part::Eager(bytes) => Some(std::mem::take(bytes)),
            part @ Part::Lent(_) => match std::mem::replace(part, Part::Eager(Bytes::new())) {
                Part::Lent(piece) => Some(self.placeholder(piece.len() - HEADER, piece.into())),
                _ => None,
            },
            Part::Landed(landed) if landed.is_empty() => None,
            Part::Landed(landed) if matches!(self.at, At::InPlace) => {
                Some(landed.split_to(landed.len().min(HANDED)).lend())
            }
            Part::Landed(landed) => {
                let mut landed = std::mem::take(landed);
                let copied = self.copy_out(&mut landed);
                let bytes = match self.at {
                    At::Whole(len) if copied.is_empty() => {
                        self.at = At::NEXT;
                        self.placeholder(len, landed.split_to(len).into())
                    }
                    _ => copied,
                };
                self.part = Part::Landed(landed);
                Some(bytes)
            }
        }
    }

    /// The method whose messages these are.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Whether nothing is left to pop.
    pub fn is_empty(&self) -> bool {
        self.is_part_empty() && self.later.is_empty()
    }

    fn is_part_empty(&self) -> bool {
        let is_due = matches!(self.at, At::Gather { left: 0, .. });
        self.filling == 0 && self.part.len() == 0 && !is_due
    }

    /// Returns the bytes copied since the function was last called.
    pub fn take_delivered(&mut self) -> Delivered {
        let named = self.take_named();
        Delivered { named, ..std::mem::take(&mut self.delivered) }
    }

    /// Adds the next part of the body, once all earlier parts have been popped. `used` is the
    /// reader's codec.
    pub fn push(&mut self, part: Part, used: Used) {
        debug_assert!(self.is_empty(), "a part in front of it would be lost");
        self.used = used;
        self.method.has_transferred(part.len());
        match part {
            Part::Lent(piece) if !self.is_whole(&piece) => {
                let LentPiece { head, lent, tail } = *piece;
                self.later.push_back(Part::Landed(lent));
                self.later.push_back(Part::Eager(tail));
                self.begin(Part::Eager(head));
            }
            part => self.begin(part),
        }
    }

    fn begin(&mut self, part: Part) {
        if let Part::Eager(bytes) = &part
            && (self.gather.is_none() || self.used != Used::Ours)
        {
            self.follow(bytes);
        }
        self.part = part;
    }

    /// Whether the piece is exactly one message, which can stay where it is.
    fn is_whole(&self, piece: &LentPiece) -> bool {
        let header = piece.head.first_chunk::<HEADER>();
        let message = header.and_then(|header| placeholder::read_header(header));
        matches!(self.at, At::Header(_, 0))
            && self.used == Used::Ours
            && self.gather.is_none()
            && message.is_some_and(|(flag, len)| flag == 0 && HEADER + len == piece.len())
    }

    /// Tracks message boundaries in bytes that are passed on unchanged.
    fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = match &mut self.at {
                At::Through | At::InPlace | At::Whole(_) | At::Gather { .. } => return,
                At::Message { left, .. } => (*left).min(bytes.len()),
                At::Header(header, got) => {
                    let len = (HEADER - *got).min(bytes.len());
                    header[*got..*got + len].copy_from_slice(&bytes[..len]);
                    len
                }
            };
            bytes = &bytes[len..];
            self.at.pass(len);
        }
    }

    /// Copies landed bytes, so that they can be parsed. Stops before a message that can stay where
    /// it is, and after the header of a long message.
    fn copy_out(&mut self, landed: &mut Landed) -> Bytes {
        let most = SLICE - std::mem::take(&mut self.ahead);
        let mut out = CopyBuffer::default();
        while !landed.is_empty() && out.bytes.len() < most - HEADER {
            let len = match &mut self.at {
                At::Whole(_) | At::Gather { .. } => break,
                At::Through | At::InPlace => landed.len(),
                At::Message { left, .. } => (*left).min(landed.len()),
                At::Header(header, got) => {
                    let (begin, len) = (*got, (HEADER - *got).min(landed.len()));
                    landed.copy_to(&mut header[begin..begin + len]);
                    landed.advance(len);
                    let header = *header;
                    if len == HEADER
                        && self.used == Used::Ours
                        && let Some((0, message)) = placeholder::read_header(&header)
                        && (MIN..=landed.len()).contains(&message)
                    {
                        self.at = At::Whole(message);
                        break;
                    }
                    self.at.pass(len);
                    self.count(len);
                    let alone = matches!(self.at, At::Message { left, .. } if left > ALONE);
                    let more = if alone { 0 } else { landed.len() };
                    out.reserve((len + more).min(most - out.bytes.len()));
                    out.bytes.put_slice(&header[begin..begin + len]);
                    if alone {
                        self.ahead = HEADER;
                        break;
                    }
                    continue;
                }
            }
            .min(most - out.bytes.len());
            out.reserve(len);
            landed.move_to(len, &mut out.bytes);
            self.count(len);
            self.at.pass(len);
        }
        out.finish()
    }

    /// Counts `len` landed bytes that are copied for the decoder.
    fn count(&mut self, len: usize) {
        let counter = match (&self.at, self.used) {
            (At::Through, _) | (_, Used::Plain) => &mut self.delivered.plain,
            (_, Used::Unknown) => &mut self.delivered.learning,
            (At::Message { long: true, .. }, Used::Ours) => &mut self.delivered.joined,
            (_, Used::Ours) => &mut self.delivered.short,
        };
        *counter += len as u64;
    }

    /// Builds the placeholder of `message`, which has `len` bytes, and stores the message for the
    /// decoder.
    fn placeholder(&mut self, len: usize, message: ArrivedMessage) -> Bytes {
        let fill = self.padding(len);
        if self.share.capacity() < HEADER + placeholder::LEN {
            self.share.reserve(SHARE);
        }
        self.share.put_slice(&placeholder::header((placeholder::LEN + fill) as u32));
        self.keep(message, fill)
    }

    /// Returns the padding of the placeholder for a message of `len` bytes. If tonic is not known
    /// to accept that length, the placeholder gets the message's length, so that tonic checks it.
    pub(super) fn padding(&self, len: usize) -> usize {
        if len > self.method.decodes() { len.saturating_sub(placeholder::LEN) } else { 0 }
    }

    /// Ends a placeholder, padded with `fill` bytes, and stores its message for the decoder.
    pub(super) fn keep(&mut self, message: ArrivedMessage, fill: usize) -> Bytes {
        let key = Key::fresh();
        while self.keys.front_mut().is_some_and(|key| !pending_messages::holds(*key)) {
            self.keys.pop_front();
        }
        self.keys.push_back(key);
        let method = (fill > 0).then(|| self.method.clone());
        pending_messages::put(key, Kept { message, method });
        self.share.put_slice(&placeholder::IN);
        self.share.put_slice(&key.0);
        self.filling = fill;
        self.delivered.learning += fill as u64;
        self.share.split().freeze()
    }
}

/// A buffer into which landed bytes are copied.
#[derive(Debug, Default)]
struct CopyBuffer {
    bytes: BytesMut,
    /// Whether the memory of `bytes` comes from [`BUFFER`].
    reused: bool,
}

impl CopyBuffer {
    /// Reserves `len` more bytes. A piece that begins short gets its own allocation, so that a
    /// reader that keeps it does not keep a whole `SLICE`.
    fn reserve(&mut self, len: usize) {
        if self.bytes.capacity() > 0 {
            self.bytes.reserve(len);
        } else if len < SLICE / 2 {
            self.bytes = BytesMut::with_capacity(len);
        } else {
            self.reused = true;
            self.bytes = BUFFER.take();
            // `reserve` allocates if a reader still holds the last piece.
            self.bytes.reserve(SLICE);
        }
    }

    fn finish(mut self) -> Bytes {
        if !self.reused {
            return self.bytes.freeze();
        }
        let bytes = self.bytes.split().freeze();
        BUFFER.set(self.bytes);
        bytes
    }
}

impl Drop for Deframer {
    fn drop(&mut self) {
        // Remove the messages that were never decoded.
        while let Some(key) = self.keys.pop_front() {
            if pending_messages::take(key).is_some() {
                self.method.has_left_a_message();
            }
        }
    }
}
