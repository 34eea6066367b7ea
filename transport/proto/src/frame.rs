//! Control messages: frames as values, and their encoding.
//!
//! One SEND carries one message: a header and any number of frames. `docs/protocol.md` has the
//! layouts, and explains each frame. `golden/frames.txt` has the bytes of each frame.
//!
//! | module | content |
//! |---|---|
//! | `kind` | codes, names and flags of the frames |
//! | `display` | frames as lines of a log |

mod display;
mod kind;

use bytes::{Buf, Bytes};

use self::kind::LENT;
pub use self::kind::{ACK, END, FrameKind, INDEXED, LANDS, MAX_TEXT, MORE, OWN};
use crate::error::Breach;
use crate::headers::table::Sent;
pub use crate::payload::Field;
use crate::payload::{LentBody, LentPlace, Payload, Segment};

/// Bytes of a message header.
pub const MESSAGE_HEADER: usize = 8;
/// Flag: the sender's output has waited for a credit, or for a longer RECV.
const WAITED: u8 = 1;
/// Flag: the credits are for full-length RECV slots.
const FULL: u8 = 2;
/// Bytes of a frame header.
pub const FRAME_HEADER: usize = 8;
/// Maximum length of a header block in bytes, unless
/// [`Config::max_headers`](crate::Config::max_headers) says otherwise.
pub const MAX_HEADER_BLOCK: usize = 65_536;
/// Bytes of a message with a LENT frame, not counting the frame's head and tail.
pub(crate) const LENT_MESSAGE: usize = MESSAGE_HEADER + FRAME_HEADER + LENT;
/// Minimum length, in bytes, of a GRANT that answers a REQUEST without completing it, unless the
/// grant ends where the REQUEST's field begins or ends. The minimum bounds the number of grants per
/// requested byte. With any begin, a grant of this length fits into 16 KiB of memory.
pub const MIN_GRANT: u32 = 12 * 1024;

/// A frame as received. Payloads are slices of the message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "docs/protocol.md has the fields")]
pub enum Frame {
    /// A piece of a header block.
    Headers { stream: u32, end: bool, more: bool, indexed: bool, lands: bool, block: Bytes },
    /// Bytes of the body.
    Data { stream: u32, end: bool, data: Bytes },
    /// Increases the stream's window.
    Window { stream: u32, increment: u32 },
    /// Aborts the stream.
    Reset { stream: u32, code: u32 },
    /// Requests landing memory.
    Request { stream: u32, len: u64, begin: u32, field: Option<Field> },
    /// Grants landing memory.
    Grant { stream: u32, id: u32, rkey: u32, len: u32, addr: u64 },
    /// Ends a grant whose memory has been written.
    Done { stream: u32, end: bool, id: u32, len: u32, begin: u32 },
    /// Ends a grant whose memory will not be written.
    Abort { id: u32 },
    /// Asks for a grant to be returned.
    Recall { id: u32 },
    /// Asks whether the peer is alive. With `ack`, the frame is the reply.
    Ping { ack: bool, token: u64 },
    /// Asks the peer to open no new streams. With `ack`, the frame is the reply, and its sender
    /// opens no more streams.
    GoAway { ack: bool, code: u32, text: Bytes },
    /// Ends the connection.
    Close { code: u32, text: Bytes },
    /// A piece of the body, most of which lies in the sender's memory. Boxed, so that other frames
    /// stay short.
    Lent { stream: u32, end: bool, lent: Box<LentBody> },
    /// Ends a lease: the receiver of LENT no longer reads the memory.
    Return { lease: u32 },
    /// Announces that the rest of a body is sent by DATA. With `own`, the frame's sender sends this
    /// body. Without `own`, the frame's sender receives this body.
    Decline { stream: u32, own: bool },
}

impl Frame {
    /// The name of the frame in error messages.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// The kind, which gives code, name and flags.
    pub fn kind(&self) -> FrameKind {
        match self {
            Frame::Headers { .. } => FrameKind::Headers,
            Frame::Data { .. } => FrameKind::Data,
            Frame::Window { .. } => FrameKind::Window,
            Frame::Reset { .. } => FrameKind::Reset,
            Frame::Request { .. } => FrameKind::Request,
            Frame::Grant { .. } => FrameKind::Grant,
            Frame::Done { .. } => FrameKind::Done,
            Frame::Abort { .. } => FrameKind::Abort,
            Frame::Recall { .. } => FrameKind::Recall,
            Frame::Ping { .. } => FrameKind::Ping,
            Frame::GoAway { .. } => FrameKind::GoAway,
            Frame::Close { .. } => FrameKind::Close,
            Frame::Lent { .. } => FrameKind::Lent,
            Frame::Return { .. } => FrameKind::Return,
            Frame::Decline { .. } => FrameKind::Decline,
        }
    }

    /// Bytes of the frame on the wire, its header included.
    pub fn wire_len(&self) -> usize {
        FRAME_HEADER
            + match self {
                Frame::Headers { block, .. } => block.len(),
                Frame::Data { data, .. } => data.len(),
                Frame::Window { .. }
                | Frame::Reset { .. }
                | Frame::Abort { .. }
                | Frame::Recall { .. }
                | Frame::Return { .. } => 4,
                Frame::Decline { .. } => 0,
                Frame::Ping { .. } => 8,
                Frame::Request { .. } => 20,
                Frame::Done { .. } => 12,
                Frame::Grant { .. } => 24,
                Frame::Lent { lent, .. } => LENT + lent.head.len() + lent.tail.len(),
                Frame::GoAway { text, .. } | Frame::Close { text, .. } => 4 + text.len(),
            }
    }
}

/// Composes a message in a SEND slot.
#[derive(Debug)]
pub struct Composer<'a> {
    slot: &'a mut [u8],
    len: usize,
    flags: u8,
}

impl<'a> Composer<'a> {
    /// Starts a message. The slot must have at least 512 bytes ([`crate::Config::check`]).
    pub fn new(slot: &'a mut [u8]) -> Self {
        debug_assert!(slot.len() >= MESSAGE_HEADER);
        Composer { slot, len: MESSAGE_HEADER, flags: 0 }
    }

    /// Bytes left for frames, including their headers.
    pub fn room(&self) -> usize {
        self.slot.len() - self.len
    }

    /// Whether no frame has been added.
    pub fn is_empty(&self) -> bool {
        self.len == MESSAGE_HEADER
    }

    /// Sets the flag WAITED: output has waited for a credit, or for a longer RECV.
    pub fn waited(&mut self) {
        self.flags |= WAITED;
    }

    /// Sets the flag FULL: the credits are for full-length RECV slots.
    pub fn full(&mut self) {
        self.flags |= FULL;
    }

    fn put(&mut self, bytes: &[u8]) {
        self.slot[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn header(&mut self, kind: FrameKind, flags: u8, len: usize, stream: u32) {
        let mut head = [kind.code(), flags, 0, 0, 0, 0, 0, 0];
        head[2..4].copy_from_slice(&(len as u16).to_le_bytes());
        head[4..].copy_from_slice(&stream.to_le_bytes());
        self.put(&head);
    }

    /// Adds a frame. Returns false, and adds nothing, if the frame does not fit.
    pub fn add(&mut self, frame: &Frame) -> bool {
        let wire = frame.wire_len();
        if wire > self.room() {
            return false;
        }
        let (kind, len) = (frame.kind(), wire - FRAME_HEADER);
        match frame {
            Frame::Headers { stream, end, more, indexed, lands, block } => {
                let flags = (u8::from(*end) * END)
                    | (u8::from(*more) * MORE)
                    | (u8::from(*indexed) * INDEXED)
                    | (u8::from(*lands) * LANDS);
                self.header(kind, flags, len, *stream);
                self.put(block);
            }
            Frame::Data { stream, end, data } => {
                self.header(kind, u8::from(*end) * END, len, *stream);
                self.put(data);
            }
            Frame::Window { stream, increment: word } | Frame::Reset { stream, code: word } => {
                self.header(kind, 0, len, *stream);
                self.put(&word.to_le_bytes());
            }
            Frame::Request { stream, len: wanted, begin, field } => {
                self.header(kind, 0, len, *stream);
                self.put(&wanted.to_le_bytes());
                let Field { at, len } = field.unwrap_or(Field { at: 0, len: 0 });
                for word in [*begin, at, len] {
                    self.put(&word.to_le_bytes());
                }
            }
            Frame::Grant { stream, id, rkey, len: granted, addr } => {
                self.header(kind, 0, len, *stream);
                for word in [*id, *rkey, *granted, 0] {
                    self.put(&word.to_le_bytes());
                }
                self.put(&addr.to_le_bytes());
            }
            Frame::Lent { stream, end, lent } => {
                self.header(kind, u8::from(*end) * END, len, *stream);
                let LentBody { head, place, len, tail } = &**lent;
                self.put_lent(*place, *len, head.len());
                self.put(head);
                self.put(tail);
            }
            Frame::Done { stream, end, id, len: written, begin } => {
                self.header(kind, u8::from(*end) * END, len, *stream);
                for word in [*id, *written, *begin] {
                    self.put(&word.to_le_bytes());
                }
            }
            Frame::Abort { id } | Frame::Recall { id } | Frame::Return { lease: id } => {
                self.header(kind, 0, len, 0);
                self.put(&id.to_le_bytes());
            }
            Frame::Decline { stream, own } => self.header(kind, u8::from(*own) * OWN, len, *stream),
            Frame::Ping { ack, token } => {
                self.header(kind, u8::from(*ack) * ACK, len, 0);
                self.put(&token.to_le_bytes());
            }
            Frame::GoAway { ack, code, text } => {
                self.header(kind, u8::from(*ack) * ACK, len, 0);
                self.put(&code.to_le_bytes());
                self.put(text);
            }
            Frame::Close { code, text } => {
                self.header(kind, 0, len, 0);
                self.put(&code.to_le_bytes());
                self.put(text);
            }
        }
        true
    }

    fn put_lent(&mut self, place: LentPlace, len: u32, head: usize) {
        let LentPlace { lease, key, addr } = place;
        for word in [lease, key, len, head as u32] {
            self.put(&word.to_le_bytes());
        }
        self.put(&addr.to_le_bytes());
    }

    /// Adds a LENT frame for a payload whose lendable segment lies at `place`. Returns false, and
    /// adds nothing, if the frame does not fit.
    pub(crate) fn add_lent(
        &mut self,
        stream: u32,
        end: bool,
        place: LentPlace,
        payload: &Payload,
    ) -> bool {
        let Some((head, lent, tail)) = payload.around_lendable() else { return false };
        let len = |segments: &[Segment]| segments.iter().map(|s| s.bytes.len()).sum::<usize>();
        let (head_len, tail_len) = (len(head), len(tail));
        let wire = LENT + head_len + tail_len;
        if FRAME_HEADER + wire > self.room() {
            return false;
        }
        self.header(FrameKind::Lent, u8::from(end) * END, wire, stream);
        self.put_lent(place, lent.len() as u32, head_len);
        head.iter().chain(tail).for_each(|segment| self.put(&segment.bytes));
        true
    }

    /// Adds a HEADERS frame with a complete block, compressed with the header table. The
    /// uncompressed block must fit.
    pub(crate) fn add_block(
        &mut self,
        stream: u32,
        (end, lands): (bool, bool),
        block: &[u8],
        table: &mut Sent,
    ) {
        let at = self.len + FRAME_HEADER;
        let shortened = table.shorten(block, &mut self.slot[at..]);
        let flags = (u8::from(end) * END)
            | (u8::from(shortened.is_some()) * INDEXED)
            | (u8::from(lands) * LANDS);
        self.header(FrameKind::Headers, flags, shortened.unwrap_or(block.len()), stream);
        match shortened {
            Some(len) => self.len += len,
            None => self.put(block),
        }
    }

    /// Adds a DATA frame with the next `len` bytes of `payload`, gathered from its segments. `len`
    /// is at most [`Composer::room`] less the frame header, and at most the length of the payload.
    pub(crate) fn add_data(&mut self, stream: u32, end: bool, len: usize, payload: &mut Payload) {
        self.header(FrameKind::Data, u8::from(end) * END, len, stream);
        let mut left = len;
        while left > 0 {
            let piece = payload.take(left);
            debug_assert!(!piece.is_empty());
            self.put(&piece);
            left -= piece.len();
        }
    }

    /// Writes the message header, and returns the length of the message.
    pub fn finish(self, credits: u16) -> usize {
        self.slot[..2].copy_from_slice(&credits.to_le_bytes());
        self.slot[2..4].copy_from_slice(&[self.flags, 0]);
        self.slot[4..8].copy_from_slice(&(self.len as u32).to_le_bytes());
        self.len
    }
}

/// Reads the frames of one received message.
#[derive(Debug)]
pub struct Reader {
    /// Credits that the message returns.
    pub credits: u16,
    /// Whether these credits are for full-length RECV slots.
    pub full: bool,
    /// Whether the sender's output has waited for a credit, or for a longer RECV.
    pub waited: bool,
    message: Bytes,
    /// Bytes read so far.
    at: usize,
}

impl Reader {
    /// Checks the message header.
    ///
    /// # Errors
    /// [`Breach::MessageLength`], [`Breach::Reserved`].
    pub fn new(message: Bytes) -> Result<Self, Breach> {
        let received = message.len();
        let Some([c0, c1, flags, reserved, len @ ..]) = message.first_chunk::<MESSAGE_HEADER>()
        else {
            return Err(Breach::MessageLength { received, stated: MESSAGE_HEADER });
        };
        if flags & !(WAITED | FULL) != 0 || *reserved != 0 {
            return Err(Breach::Reserved("message header"));
        }
        let stated = u32::from_le_bytes(*len) as usize;
        if stated != received {
            return Err(Breach::MessageLength { received, stated });
        }
        let credits = u16::from_le_bytes([*c0, *c1]);
        let (waited, full) = (flags & WAITED != 0, flags & FULL != 0);
        Ok(Reader { credits, full, waited, message, at: MESSAGE_HEADER })
    }

    /// Returns the next frame. Checks everything that needs no connection state.
    ///
    /// # Errors The frame is invalid. Nothing after it is read.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Breach> {
        let rest = self.message.get(self.at..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(None);
        }
        let Some((&[code, flags, l0, l1, s0, s1, s2, s3], rest)) =
            rest.split_first_chunk::<FRAME_HEADER>()
        else {
            return Err(Breach::FrameLength { frame: "?", stated: FRAME_HEADER, left: rest.len() });
        };
        let len = usize::from(u16::from_le_bytes([l0, l1]));
        let stream = u32::from_le_bytes([s0, s1, s2, s3]);
        let kind = FrameKind::from_code(code).ok_or(Breach::UnknownFrame(code))?;
        let Some(mut p) = rest.get(..len) else {
            return Err(Breach::FrameLength { frame: kind.name(), stated: len, left: rest.len() });
        };
        if !kind.allows_flags(flags) {
            return Err(Breach::UnknownFlags { frame: kind.name(), flags });
        }
        if !kind.allows_stream(stream) {
            return Err(Breach::StreamField { frame: kind.name(), id: stream });
        }
        if !kind.allows_payload(len) {
            return Err(Breach::PayloadLength { frame: kind.name(), got: len });
        }
        let from = self.at + FRAME_HEADER;
        self.at = from + len;
        let bytes = |skip: usize| self.message.slice(from + skip..from + len);
        let end = flags & END != 0;
        Ok(Some(match kind {
            FrameKind::Headers => Frame::Headers {
                stream,
                end,
                more: flags & MORE != 0,
                indexed: flags & INDEXED != 0,
                lands: flags & LANDS != 0,
                block: bytes(0),
            },
            FrameKind::Data => Frame::Data { stream, end, data: bytes(0) },
            FrameKind::Window => Frame::Window { stream, increment: p.get_u32_le() },
            FrameKind::Reset => Frame::Reset { stream, code: p.get_u32_le() },
            FrameKind::Request => {
                let (len, begin) = (p.get_u64_le(), p.get_u32_le());
                let field = Field { at: p.get_u32_le(), len: p.get_u32_le() };
                if field.len == 0 && field.at != 0 {
                    return Err(Breach::Reserved("REQUEST frame"));
                }
                Frame::Request { stream, len, begin, field: (field.len > 0).then_some(field) }
            }
            FrameKind::Grant => {
                let (id, rkey, len, reserved) =
                    (p.get_u32_le(), p.get_u32_le(), p.get_u32_le(), p.get_u32_le());
                if reserved != 0 {
                    return Err(Breach::Reserved("GRANT frame"));
                }
                Frame::Grant { stream, id, rkey, len, addr: p.get_u64_le() }
            }
            FrameKind::Done => Frame::Done {
                stream,
                end,
                id: p.get_u32_le(),
                len: p.get_u32_le(),
                begin: p.get_u32_le(),
            },
            FrameKind::Abort => Frame::Abort { id: p.get_u32_le() },
            FrameKind::Recall => Frame::Recall { id: p.get_u32_le() },
            FrameKind::Ping => Frame::Ping { ack: flags & ACK != 0, token: p.get_u64_le() },
            FrameKind::GoAway => {
                Frame::GoAway { ack: flags & ACK != 0, code: p.get_u32_le(), text: bytes(4) }
            }
            FrameKind::Close => Frame::Close { code: p.get_u32_le(), text: bytes(4) },
            FrameKind::Lent => {
                let (lease, key, lent) = (p.get_u32_le(), p.get_u32_le(), p.get_u32_le());
                let (head, reserved, addr) =
                    (usize::from(p.get_u16_le()), p.get_u16_le(), p.get_u64_le());
                if reserved != 0 {
                    return Err(Breach::Reserved("LENT frame"));
                }
                if LENT + head > len {
                    return Err(Breach::PayloadLength { frame: kind.name(), got: len });
                }
                let (mut tail, place) = (bytes(LENT), LentPlace { lease, key, addr });
                let lent = LentBody { head: tail.split_to(head), place, len: lent, tail };
                Frame::Lent { stream, end, lent: Box::new(lent) }
            }
            FrameKind::Return => Frame::Return { lease: p.get_u32_le() },
            FrameKind::Decline => Frame::Decline { stream, own: flags & OWN != 0 },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_frame() -> Vec<Frame> {
        let text = Bytes::from_static(b"text");
        vec![
            Frame::Headers {
                stream: 1,
                end: false,
                more: true,
                indexed: false,
                lands: true,
                block: text.clone(),
            },
            Frame::Data { stream: 1, end: true, data: text.clone() },
            Frame::Window { stream: 1, increment: 9 },
            Frame::Reset { stream: 1, code: 8 },
            Frame::Decline { stream: 1, own: true },
            Frame::Decline { stream: 1, own: false },
            Frame::Request { stream: 1, len: 1 << 40, begin: 42, field: None },
            Frame::Request {
                stream: 1,
                len: 1 << 40,
                begin: 42,
                field: Some(Field { at: 9, len: 8 }),
            },
            Frame::Grant { stream: 0, id: 1, rkey: 2, len: 3, addr: 1 << 50 },
            Frame::Done { stream: 1, end: true, id: 1, len: 3, begin: 4095 },
            Frame::Abort { id: 1 },
            Frame::Recall { id: 1 },
            Frame::Ping { ack: true, token: 7 },
            Frame::GoAway { ack: false, code: 0, text: text.clone() },
            Frame::Close { code: 1, text },
            Frame::Lent {
                stream: 1,
                end: true,
                lent: Box::new(LentBody {
                    head: Bytes::from_static(b"he"),
                    place: LentPlace { lease: 4, key: 5, addr: 1 << 50 },
                    len: 6,
                    tail: Bytes::from_static(b"ad"),
                }),
            },
            Frame::Return { lease: 4 },
        ]
    }

    fn compose(frames: &[Frame]) -> Vec<u8> {
        let mut slot = vec![0xff; 4096];
        let mut c = Composer::new(&mut slot);
        for f in frames {
            assert!(c.add(f));
        }
        let len = c.finish(5);
        slot.truncate(len);
        slot
    }

    fn read(message: Vec<u8>) -> Result<Vec<Frame>, Breach> {
        let mut r = Reader::new(message.into())?;
        let mut out = Vec::new();
        while let Some(f) = r.next_frame()? {
            out.push(f);
        }
        Ok(out)
    }

    #[test]
    fn frames_round_trip() {
        let frames = every_frame();
        assert_eq!(read(compose(&frames)).unwrap(), frames);
    }

    #[test]
    fn truncation_is_always_found() {
        let full = compose(&every_frame());
        for len in 0..full.len() {
            assert!(read(full[..len].to_vec()).is_err(), "{len}");
        }
    }

    #[test]
    fn single_bytes_changed_never_panic() {
        let full = compose(&every_frame());
        for at in 0..full.len() {
            for value in [0, 1, 2, 0x7f, 0x80, 0xff] {
                let mut message = full.clone();
                message[at] = value;
                let _ = read(message);
            }
        }
    }

    #[test]
    fn breaches_are_named() {
        let mut m = compose(&[Frame::Abort { id: 1 }]);
        m[8] = 16;
        assert_eq!(read(m).unwrap_err(), Breach::UnknownFrame(16));
        let mut m = compose(&[Frame::Abort { id: 1 }]);
        m[9] = 1;
        assert_eq!(read(m).unwrap_err(), Breach::UnknownFlags { frame: "ABORT", flags: 1 });
        let mut m = compose(&[Frame::Abort { id: 1 }]);
        m[10] = 200;
        assert_eq!(
            read(m).unwrap_err(),
            Breach::FrameLength { frame: "ABORT", stated: 200, left: 4 }
        );
        let mut m = compose(&[Frame::Abort { id: 1 }]);
        m[12] = 3;
        assert_eq!(read(m).unwrap_err(), Breach::StreamField { frame: "ABORT", id: 3 });
    }

    #[test]
    fn a_full_slot_refuses_and_stays_whole() {
        let mut slot = [0; 64];
        let mut c = Composer::new(&mut slot);
        assert!(c.add(&Frame::Ping { ack: false, token: 1 }));
        assert!(!c.add(&Frame::Data { stream: 1, end: false, data: Bytes::from(vec![0; 64]) }));
        let len = c.finish(0);
        assert_eq!(read(slot[..len].to_vec()).unwrap().len(), 1);
    }

    #[test]
    fn the_message_header_round_trips() {
        for (waited, full) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut slot = [0xee; 64];
            let mut c = Composer::new(&mut slot);
            if waited {
                c.waited();
            }
            if full {
                c.full();
            }
            let len = c.finish(300);
            let message = Bytes::copy_from_slice(&slot[..len]);
            let reader = Reader::new(message.clone()).unwrap();
            assert_eq!((reader.credits, reader.waited, reader.full), (300, waited, full));
            for at in [2, 3] {
                let mut wrong = message.to_vec();
                wrong[at] |= 4;
                assert_eq!(
                    Reader::new(wrong.into()).unwrap_err(),
                    Breach::Reserved("message header")
                );
            }
        }
    }
}
