//! Finds the messages in a received body, and puts placeholders in the place of those that can stay
//! where they landed.

use std::cell::Cell;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use tonic_rdma_memory::Landed;

use crate::codec::methods::{Method, Used};
use crate::codec::pending_messages::{self, Kept};
use crate::codec::placeholder::{self, HEADER, Key};
use crate::fifo::Fifo;

/// Messages of at least this many bytes stay where they landed. Shorter ones cost less to copy.
const MIN: usize = 4096;
/// Placeholders share allocations of this many bytes.
const SHARE: usize = 1024;

/// Bytes that are copied out of landing memory at a time. The decoder copies them again, out of the
/// first-level cache.
pub(super) const SLICE: usize = 16 * 1024;
/// Bytes that are handed on at a time where nothing is copied.
const HANDED: usize = 64 * 1024;

/// The header of a message longer than this is handed on alone. tonic reads it and makes its buffer
/// as long as the message, once; with bytes of the message behind it the buffer would grow to these
/// first, and then by the whole length. What fits into the buffer that tonic begins with needs no
/// second piece.
const ALONE: usize = 8 * 1024 - HEADER;

thread_local! {
    /// The buffer of the last long piece, which its reader has copied, most often: what is reused
    /// is in the cache, and not taken from the kernel page by page.
    static BUFFER: Cell<BytesMut> = Cell::new(BytesMut::new());
}

/// What fills a placeholder up to the length of its message.
static FILLING: [u8; HANDED] = [0; HANDED];

/// A part of a received body.
#[derive(Debug)]
pub(crate) enum Part {
    /// It came in control messages, and has been copied out of the peer's reach.
    Eager(Bytes),
    /// It came by WRITE.
    Landed(Landed),
}

impl Part {
    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Part::Eager(bytes) => bytes.len(),
            Part::Landed(landed) => landed.len(),
        }
    }

    /// Whether it keeps landing memory.
    pub(crate) fn is_in_pool(&self) -> bool {
        matches!(self, Part::Landed(landed) if landed.is_in_pool())
    }
}

/// Where in its messages a body is.
#[derive(Debug)]
enum At {
    /// Within a header: this much of it has come.
    Header([u8; HEADER], usize),
    /// Behind a header that nobody else has seen, of a message of this length that can stay where
    /// it landed. All of it is here.
    Whole(usize),
    /// Within a message that is handed on as it comes.
    Message { left: usize, long: bool },
    /// Messages are not looked for.
    Through,
}

impl At {
    /// Before the first byte of a header.
    const NEXT: At = At::Header([0; HEADER], 0);

    /// Goes on by `len` bytes of this header, or of this message.
    fn pass(&mut self, len: usize) {
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
            At::Whole(_) | At::Through => {}
        }
    }
}

/// Bytes handed on, by what becomes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delivered {
    /// To a plain codec, which copies them.
    pub(crate) plain: u64,
    /// To a codec that is not known yet, or to learn tonic's limit.
    pub(crate) learning: u64,
    /// Of messages in several parts, which tonic joins.
    pub(crate) joined: u64,
    /// Of messages so short that copying costs less.
    pub(crate) short: u64,
}

/// One received body.
///
/// Nobody but the decoder of this crate gets landed bytes: what it is not known to read is copied
/// out first, by at most [`SLICE`] at a time. Each header is read once, into `at`, and handed on as
/// it was read: tonic finds the messages where this has found them, whatever the peer writes
/// meanwhile.
#[derive(Debug)]
pub(crate) struct Deframer {
    method: Arc<Method>,
    at: At,
    /// What has been received and not handed on.
    part: Part,
    /// The codec of the one who reads.
    used: Used,
    /// Bytes behind a placeholder, up to the length of its message.
    filling: usize,
    /// Bytes that have been handed on in front of the next piece, which ends as if they were part
    /// of it: so source and destination of a copy remain aligned.
    ahead: usize,
    /// Of messages that have been handed on as placeholders, and may wait for their decoder.
    keys: Fifo<Key>,
    share: BytesMut,
    delivered: Delivered,
}

impl Deframer {
    /// Of a call of `method`. `messages`: the body is a sequence of plain gRPC messages, see
    /// [`is_plain_grpc`](crate::codec::is_plain_grpc).
    pub(crate) fn new(method: Arc<Method>, messages: bool) -> Self {
        Deframer {
            method,
            at: if messages { At::NEXT } else { At::Through },
            part: Part::Eager(Bytes::new()),
            used: Used::Unknown,
            filling: 0,
            ahead: 0,
            keys: Fifo::default(),
            share: BytesMut::new(),
            delivered: Delivered::default(),
        }
    }

    /// The next bytes for the decoder, which copies them: no more than [`HANDED`]. None: all has
    /// been handed on.
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        if self.filling > 0 {
            let len = self.filling.min(HANDED);
            self.filling -= len;
            return Some(Bytes::from_static(&FILLING[..len]));
        }
        match &mut self.part {
            Part::Eager(bytes) if bytes.is_empty() => None,
            Part::Eager(bytes) if bytes.len() > HANDED => Some(bytes.split_to(HANDED)),
            Part::Eager(bytes) => Some(std::mem::take(bytes)),
            Part::Landed(landed) if landed.is_empty() => None,
            Part::Landed(landed) => {
                let mut landed = std::mem::take(landed);
                let copied = self.copy_out(&mut landed);
                let bytes = match self.at {
                    At::Whole(len) if copied.is_empty() => {
                        self.at = At::NEXT;
                        self.placeholder(landed.split_to(len))
                    }
                    _ => copied,
                };
                self.part = Part::Landed(landed);
                Some(bytes)
            }
        }
    }

    /// Nothing is left to pop.
    pub(crate) fn is_empty(&self) -> bool {
        self.filling == 0 && self.part.len() == 0
    }

    /// What was handed on since the last call.
    pub(crate) fn take_delivered(&mut self) -> Delivered {
        std::mem::take(&mut self.delivered)
    }

    /// Takes the next part of the body, when all of those before has been popped. `used`: the codec
    /// of the one who reads.
    pub(crate) fn push(&mut self, part: Part, used: Used) {
        debug_assert!(self.is_empty(), "a part in front of it would be lost");
        self.used = used;
        if let Part::Eager(bytes) = &part {
            self.follow(bytes);
        }
        self.part = part;
    }

    /// Finds the ends of messages that are handed on as they are.
    fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let len = match &mut self.at {
                At::Through | At::Whole(_) => return,
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

    /// Copies landed bytes, so that they can be parsed, up to a message that can stay where it is
    /// and up to the end of a long message's header.
    fn copy_out(&mut self, landed: &mut Landed) -> Bytes {
        let most = SLICE - std::mem::take(&mut self.ahead);
        let mut out = CopyBuffer::default();
        while !landed.is_empty() && out.bytes.len() < most - HEADER {
            let len = match &mut self.at {
                At::Whole(_) => break,
                At::Through => landed.len(),
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

    /// So many landed bytes are handed on as they are.
    fn count(&mut self, len: usize) {
        let counter = match (&self.at, self.used) {
            (At::Through, _) | (_, Used::Plain) => &mut self.delivered.plain,
            (_, Used::Unknown) => &mut self.delivered.learning,
            (At::Message { long: true, .. }, Used::Ours) => &mut self.delivered.joined,
            (_, Used::Ours) => &mut self.delivered.short,
        };
        *counter += len as u64;
    }

    /// What is handed on in the place of a message.
    fn placeholder(&mut self, message: Landed) -> Bytes {
        let len = message.len();
        let fill = if len > self.method.decodes() { len - placeholder::LEN } else { 0 };
        let key = Key::random();
        while self.keys.front_mut().is_some_and(|key| !pending_messages::holds(*key)) {
            self.keys.pop_front();
        }
        self.keys.push_back(key);
        let method = (fill > 0).then(|| self.method.clone());
        pending_messages::put(key, Kept { message, method });
        if self.share.capacity() < HEADER + placeholder::LEN {
            self.share.reserve(SHARE);
        }
        self.share.put_slice(&placeholder::header((placeholder::LEN + fill) as u32));
        self.share.put_slice(&placeholder::IN);
        self.share.put_slice(&key.0);
        self.filling = fill;
        self.delivered.learning += fill as u64;
        self.share.split().freeze()
    }
}

/// A piece that is being copied.
#[derive(Debug, Default)]
struct CopyBuffer {
    bytes: BytesMut,
    /// Its memory is [`BUFFER`]'s.
    reused: bool,
}

impl CopyBuffer {
    /// Makes room for so many more bytes. A piece that begins short has memory of its own: whoever
    /// keeps it keeps little more.
    fn reserve(&mut self, len: usize) {
        if self.bytes.capacity() > 0 {
            self.bytes.reserve(len);
        } else if len < SLICE / 2 {
            self.bytes = BytesMut::with_capacity(len);
        } else {
            self.reused = true;
            self.bytes = BUFFER.take();
            // New memory if somebody still has the last piece.
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
        // What was never decoded.
        while let Some(key) = self.keys.pop_front() {
            drop(pending_messages::take(key));
        }
    }
}
