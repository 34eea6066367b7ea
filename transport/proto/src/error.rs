//! Breaches of the protocol, and the codes of CLOSE.

use crate::ids::{GrantId, StreamId};

/// A breach of the protocol. It is the peer's fault, that is, an error in the peer's implementation
/// or an attack. The connection closes, and nothing else happens (R15).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// A control message is too short, too long, or its length field differs from what was
    /// received.
    #[error("control message of {received} bytes says it has {stated}")]
    MessageLength {
        /// Bytes that arrived.
        received: usize,
        /// The message's own length field.
        stated: usize,
    },
    /// A reserved field is not zero.
    #[error("reserved field of the {0} is not zero")]
    Reserved(&'static str),
    /// A frame reaches over the end of its message.
    #[error("{frame} frame of {stated} bytes in a message with {left} bytes left")]
    FrameLength {
        /// Name of the frame.
        frame: &'static str,
        /// Its length field.
        stated: usize,
        /// What is left of the message.
        left: usize,
    },
    /// The payload of a frame does not have the length that its type prescribes.
    #[error("{frame} frame with a payload of {got} bytes")]
    PayloadLength {
        /// Name of the frame.
        frame: &'static str,
        /// Payload bytes.
        got: usize,
    },
    /// A frame type that this version does not know.
    #[error("unknown frame type {0}")]
    UnknownFrame(u8),
    /// A flag that this frame does not have, or flags that exclude each other.
    #[error("{frame} frame with unknown flags {flags:#04x}")]
    UnknownFlags {
        /// Name of the frame.
        frame: &'static str,
        /// The flags.
        flags: u8,
    },
    /// A frame that only the other side may send.
    #[error("{0} frame from the wrong side")]
    WrongSide(&'static str),
    /// A SEND arrived though the peer had no credit left.
    #[error("SEND without credit")]
    NoCredit,
    /// The peer gave more credits than it may have RECVs.
    #[error("{returned} credits returned, where {room} are left of the RECVs that were announced")]
    CreditOverflow {
        /// Credits in the message.
        returned: u32,
        /// Credits that it might have given.
        room: u32,
    },
    /// A frame names a stream that was never opened, or that the peer cannot know of yet.
    #[error("{frame} frame for {stream}, which was never opened")]
    UnknownStream {
        /// Name of the frame.
        frame: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// A frame names a stream whose sending side has ended, or a new one whose id is not above all
    /// earlier ones.
    #[error("{frame} frame for {stream}, which the sender had closed")]
    ClosedStream {
        /// Name of the frame.
        frame: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// A frame for the connection names a stream, or a frame for a stream names none.
    #[error("{frame} frame with stream id {id}")]
    StreamField {
        /// Name of the frame.
        frame: &'static str,
        /// The id.
        id: u32,
    },
    /// More streams are open than the settings allow.
    #[error("more than {0} streams open")]
    TooManyStreams(u32),
    /// A stream was opened after the peer had acknowledged GOAWAY.
    #[error("{0} opened after GOAWAY was acknowledged")]
    OpenedAfterGoAway(StreamId),
    /// A header block is longer than allowed.
    #[error("header block of {stream} is longer than {limit} bytes")]
    HeaderBlock {
        /// The stream.
        stream: StreamId,
        /// The limit in bytes.
        limit: u32,
    },
    /// Header frames in an order that no call has.
    #[error("{frame} frame for {stream} out of order")]
    FrameOrder {
        /// Name of the frame.
        frame: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// A header block that cannot be decoded.
    #[error("malformed header block: {0}")]
    Headers(&'static str),
    /// More data than the stream's window holds.
    #[error("{len} bytes for {stream} with a window of {window}")]
    Window {
        /// The stream.
        stream: StreamId,
        /// Bytes of the frame.
        len: u32,
        /// Window left.
        window: u32,
    },
    /// A window grew past 2^31 - 1 bytes, or by nothing.
    #[error("window of {0} grew by {1} bytes")]
    WindowUpdate(StreamId, u32),
    /// A transfer longer than the longest message.
    #[error("request for {len} bytes on {stream}, the limit is {limit}")]
    RequestLength {
        /// The stream.
        stream: StreamId,
        /// Bytes asked for.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// More requests are open on a stream than allowed.
    #[error("more than {1} requests open on {0}")]
    TooManyRequests(StreamId, usize),
    /// DONE or ABORT names a grant that is not outstanding.
    #[error("{frame} frame for {grant}, which is not outstanding")]
    UnknownGrant {
        /// Name of the frame.
        frame: &'static str,
        /// The grant.
        grant: GrantId,
    },
    /// A request whose first byte is to lie further behind a multiple of the modulus than there is.
    #[error("request on {stream} begins at {begin} modulo {modulus}")]
    RequestBegin {
        /// The stream.
        stream: StreamId,
        /// The begin stated.
        begin: u32,
        /// Begins are less than this.
        modulus: u32,
    },
    /// DONE of a standing grant that was written from too far behind its first byte on, or of any
    /// other that was not written from its first byte on.
    #[error("DONE of {grant} begins at {begin}, the limit is {limit}")]
    DoneBegin {
        /// The grant.
        grant: GrantId,
        /// The begin stated.
        begin: u32,
        /// The limit: 0 where the grant answered a request.
        limit: u32,
    },
    /// DONE with more bytes than were granted behind its begin, or none.
    #[error("DONE with {len} bytes from {begin} on for {grant} of {granted}")]
    DoneLength {
        /// The grant.
        grant: GrantId,
        /// Where they begin.
        begin: u32,
        /// Bytes stated.
        len: u32,
        /// Bytes granted.
        granted: u32,
    },
    /// DONE names another stream than the grant was given to.
    #[error("DONE of {grant} for {stream}, which it was not granted to")]
    DoneStream {
        /// The grant.
        grant: GrantId,
        /// The stream.
        stream: StreamId,
    },
    /// A stream's half ended while the peer held grants for it, or still waited for some.
    #[error("{0} ended with grants held or asked for")]
    EndWithGrants(StreamId),
    /// A grant of nothing, past the end of the address space, not asked for, too short, or with an
    /// id in use.
    #[error("impossible {grant}: {why}")]
    BadGrant {
        /// The grant.
        grant: GrantId,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The peer causes more answers than this side is willing to queue.
    #[error("more than {0} answers asked for and not collected")]
    Flood(usize),
    /// The client opens streams and resets them before they are answered, faster than any client in
    /// good faith (ENHANCE_YOUR_CALM in HTTP/2).
    #[error(
        "streams reset before they were answered: more than {burst} at once and {per_second} a second (enhance your calm)"
    )]
    RapidReset {
        /// Resets that are allowed at once.
        burst: u64,
        /// Of these, the number that a second allows again.
        per_second: u64,
    },
    /// The peer has not ended its half of a stream that was reset, in time.
    #[error("RESET of {0} was not answered in time")]
    ResetUnanswered(StreamId),
    /// The peer has neither written to a grant that it was asked for, or whose stream is over, nor
    /// given it back, in time.
    #[error("{0} was asked back and kept, with neither DONE nor ABORT in time")]
    GrantKept(GrantId),
    /// GOAWAY for the second time, or an acknowledgement of none.
    #[error("GOAWAY frame that is a repetition or acknowledges none")]
    UnexpectedGoAway,
    /// A PONG that answers no PING of ours.
    #[error("PONG that answers no PING")]
    UnexpectedPong,
}

/// Why a connection closes, as it travels in CLOSE and GOAWAY frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseCode {
    /// No error.
    Ok,
    /// The peer broke the protocol.
    Breach,
    /// The sender had an internal error.
    Internal,
    /// The sender has no resources for the connection.
    Resources,
    /// A code that this version does not know.
    Other(u32),
}

impl CloseCode {
    pub(crate) fn to_wire(self) -> u32 {
        match self {
            CloseCode::Ok => 0,
            CloseCode::Breach => 1,
            CloseCode::Internal => 2,
            CloseCode::Resources => 3,
            CloseCode::Other(code) => code,
        }
    }

    pub(crate) fn from_wire(code: u32) -> Self {
        match code {
            0 => CloseCode::Ok,
            1 => CloseCode::Breach,
            2 => CloseCode::Internal,
            3 => CloseCode::Resources,
            other => CloseCode::Other(other),
        }
    }
}

impl std::fmt::Display for CloseCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CloseCode::Ok => f.write_str("ok"),
            CloseCode::Breach => f.write_str("protocol breach"),
            CloseCode::Internal => f.write_str("internal error"),
            CloseCode::Resources => f.write_str("out of resources"),
            CloseCode::Other(code) => write!(f, "close code {code}"),
        }
    }
}
