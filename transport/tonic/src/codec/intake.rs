//! Finds the messages in a received body, and puts stand-ins in the place of those that can stay where they landed.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::aside::{self, Kept};
use super::methods::{Method, Used};
use super::stand_in::{self, HEADER, Key};
use crate::fifo::Fifo;

/// Messages of at least this many bytes stay where they landed. Shorter ones cost less to copy.
const MIN: usize = 4096;
/// Stand-ins share allocations of this many bytes.
const SHARE: usize = 1024;

/// The most that a decoder copies at a time.
const SLICE: usize = 64 * 1024;

/// What fills a stand-in up to the length of its message.
static FILLING: [u8; SLICE] = [0; SLICE];

/// Where in its messages a body is.
#[derive(Debug)]
enum At {
    /// Within a header: this much of it has come.
    Header([u8; HEADER], usize),
    /// Within a message that is handed on as it comes.
    Message { left: usize, long: bool },
    /// Messages are not looked for.
    Through,
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

/// What goes to the decoder.
#[derive(Debug)]
enum Ready {
    Bytes(Bytes),
    /// Behind a stand-in, up to the length of its message.
    Filling(usize),
}

/// One received body.
#[derive(Debug)]
pub(crate) struct Intake {
    method: Arc<Method>,
    at: At,
    ready: Fifo<Ready>,
    /// Of messages that have been handed on as stand-ins, and may wait for their decoder.
    keys: Fifo<Key>,
    share: BytesMut,
    delivered: Delivered,
}

impl Intake {
    /// Of a call of `method`. `messages`: the body is a sequence of plain gRPC messages, see
    /// [`is_plain_grpc`](super::is_plain_grpc).
    pub(crate) fn new(method: Arc<Method>, messages: bool) -> Self {
        Intake {
            method,
            at: if messages { At::Header([0; HEADER], 0) } else { At::Through },
            ready: Fifo::default(),
            keys: Fifo::default(),
            share: BytesMut::new(),
            delivered: Delivered::default(),
        }
    }

    /// The next bytes for the decoder, which copies them: no more than [`SLICE`].
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        match self.ready.front_mut()? {
            Ready::Filling(left) if *left > FILLING.len() => {
                *left -= FILLING.len();
                Some(Bytes::from_static(&FILLING))
            }
            Ready::Bytes(bytes) if bytes.len() > SLICE => Some(bytes.split_to(SLICE)),
            _ => match self.ready.pop_front()? {
                Ready::Bytes(bytes) => Some(bytes),
                Ready::Filling(left) => Some(Bytes::from_static(&FILLING[..left])),
            },
        }
    }

    /// Nothing is left to pop.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// What was handed on since the last call.
    pub(crate) fn take_delivered(&mut self) -> Delivered {
        std::mem::take(&mut self.delivered)
    }

    /// Takes a received piece. `used`: the codec of the one who reads. `landed`: the piece came by WRITE; others are
    /// short, and have been copied.
    pub(crate) fn push(&mut self, piece: Bytes, used: Used, landed: bool) {
        if used == Used::Plain {
            // It does not change within a call.
            self.at = At::Through;
        }
        // Long messages among what is handed on as it is.
        let mut joined = false;
        let (mut at, mut run) = (0, 0);
        while at < piece.len() {
            match &mut self.at {
                At::Through => break,
                At::Message { left, long } => {
                    joined |= *long;
                    let len = (*left).min(piece.len() - at);
                    *left -= len;
                    at += len;
                    if *left == 0 {
                        self.at = At::Header([0; HEADER], 0);
                    }
                }
                At::Header(_, 0) if landed && used == Used::Ours => match whole(&piece[at..]) {
                    Some(len) if len >= MIN => {
                        self.hand_on(piece.slice(run..at), used, landed, std::mem::take(&mut joined));
                        self.stand_in(piece.slice(at + HEADER..at + HEADER + len));
                        at += HEADER + len;
                        run = at;
                    }
                    _ => at = self.header(&piece, at),
                },
                At::Header(..) => at = self.header(&piece, at),
            }
        }
        self.hand_on(piece.slice(run..), used, landed, joined);
    }

    /// Reads on in a header. Returns where the piece goes on.
    fn header(&mut self, piece: &Bytes, at: usize) -> usize {
        let At::Header(header, got) = &mut self.at else { return at };
        let len = (HEADER - *got).min(piece.len() - at);
        header[*got..*got + len].copy_from_slice(&piece[at..at + len]);
        *got += len;
        if *got == HEADER
            && let Some((_, left)) = stand_in::read_header(header)
        {
            self.at =
                if left == 0 { At::Header([0; HEADER], 0) } else { At::Message { left, long: left >= MIN } };
        }
        at + len
    }

    /// Hands bytes on as they are.
    fn hand_on(&mut self, bytes: Bytes, used: Used, landed: bool, joined: bool) {
        if bytes.is_empty() {
            return;
        }
        if landed {
            let len = bytes.len() as u64;
            match (&self.at, used) {
                (At::Through, _) | (_, Used::Plain) => self.delivered.plain += len,
                (_, Used::Unknown) => self.delivered.learning += len,
                (_, Used::Ours) if joined => self.delivered.joined += len,
                (_, Used::Ours) => self.delivered.short += len,
            }
        }
        self.ready.push_back(Ready::Bytes(bytes));
    }

    fn stand_in(&mut self, message: Bytes) {
        let len = message.len();
        let fill = if len > self.method.decodes() { len - stand_in::LEN } else { 0 };
        let key = Key::random();
        while self.keys.front_mut().is_some_and(|key| !aside::holds(*key)) {
            self.keys.pop_front();
        }
        self.keys.push_back(key);
        let method = (fill > 0).then(|| self.method.clone());
        aside::put(key, Kept { message, method });
        if self.share.capacity() < HEADER + stand_in::LEN {
            self.share.reserve(SHARE);
        }
        self.share.put_slice(&stand_in::header((stand_in::LEN + fill) as u32));
        self.share.put_slice(&stand_in::IN);
        self.share.put_slice(&key.0);
        self.ready.push_back(Ready::Bytes(self.share.split().freeze()));
        if fill > 0 {
            self.ready.push_back(Ready::Filling(fill));
            self.delivered.learning += fill as u64;
        }
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        // What was never decoded.
        while let Some(key) = self.keys.pop_front() {
            drop(aside::take(key));
        }
    }
}

/// The length of the message that begins here, if it is not compressed and all of it is here.
fn whole(bytes: &[u8]) -> Option<usize> {
    let (flag, len) = stand_in::read_header(bytes)?;
    (flag == 0 && bytes.len() - HEADER >= len).then_some(len)
}
