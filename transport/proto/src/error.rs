//! Breaches of the protocol, and the codes of CLOSE.

use crate::ids::{GrantId, StreamId};

/// A breach of the protocol: a bug in the peer's implementation, or an attack. A breach closes the
/// connection and has no other effect (R15).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// A control message is shorter than its header, or its length field differs from the received
    /// length.
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
    /// A frame extends beyond the end of its message.
    #[error("{frame} frame of {stated} bytes in a message with {left} bytes left")]
    FrameLength {
        /// Name of the frame.
        frame: &'static str,
        /// Its length field.
        stated: usize,
        /// Bytes left in the message.
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
    /// An unknown frame type.
    #[error("unknown frame type {0}")]
    UnknownFrame(u8),
    /// Flags that this frame type does not define, or that exclude each other.
    #[error("{frame} frame with unknown flags {flags:#04x}")]
    UnknownFlags {
        /// Name of the frame.
        frame: &'static str,
        /// The flags field as received.
        flags: u8,
    },
    /// A frame that only the other side is allowed to send.
    #[error("{0} frame from the wrong side")]
    WrongSide(&'static str),
    /// A SEND arrived although the peer had no credit left.
    #[error("SEND without credit")]
    NoCredit,
    /// A message is longer than the RECV of its credit.
    #[error("message of {len} bytes for a RECV of {recv} (credits tell the sizes of RECVs)")]
    LongerThanItsRecv {
        /// Bytes of the message.
        len: usize,
        /// Bytes of the RECV.
        recv: u32,
    },
    /// The peer returned more credits than it may have RECVs.
    #[error("{returned} credits returned, where {room} are left of the RECVs that were announced")]
    CreditOverflow {
        /// Credits in the message.
        returned: u32,
        /// Maximum credits that the message could have returned.
        room: u32,
    },
    /// A frame names a stream that was never opened, or that the peer cannot know yet.
    #[error("{frame} frame for {stream}, which was never opened")]
    UnknownStream {
        /// Name of the frame.
        frame: &'static str,
        /// Stream that the frame names.
        stream: StreamId,
    },
    /// A frame names a stream on which the peer has already ended its half, or opens a stream whose
    /// id is not above all earlier ids.
    #[error("{frame} frame for {stream}, which the sender had closed")]
    ClosedStream {
        /// Name of the frame.
        frame: &'static str,
        /// Stream that the frame names.
        stream: StreamId,
    },
    /// A connection frame names a stream, or a stream frame names no stream.
    #[error("{frame} frame with stream id {id}")]
    StreamField {
        /// Name of the frame.
        frame: &'static str,
        /// Stream id in the frame's header.
        id: u32,
    },
    /// The peer has opened more streams than the settings allow.
    #[error("more than {0} streams open")]
    TooManyStreams(u32),
    /// The peer has opened a stream after acknowledging GOAWAY.
    #[error("{0} opened after GOAWAY was acknowledged")]
    OpenedAfterGoAway(StreamId),
    /// A header block exceeds the limit.
    #[error("header block of {stream} is longer than {limit} bytes")]
    HeaderBlock {
        /// Stream that the frame names.
        stream: StreamId,
        /// The limit in bytes.
        limit: u32,
    },
    /// A HEADERS frame, or a frame with body bytes, that is not allowed at this point of a stream.
    #[error("{frame} frame for {stream} out of order")]
    FrameOrder {
        /// Name of the frame.
        frame: &'static str,
        /// Stream that the frame names.
        stream: StreamId,
    },
    /// A header block cannot be decoded.
    #[error("malformed header block: {0}")]
    Headers(&'static str),
    /// Data exceeds the stream's window.
    #[error("{len} bytes for {stream} with a window of {window}")]
    Window {
        /// Stream that the frame names.
        stream: StreamId,
        /// Length of the data in bytes.
        len: u32,
        /// Bytes left in the window.
        window: u32,
    },
    /// A window grew beyond 2^31 - 1 bytes, or by 0.
    #[error("window of {0} grew by {1} bytes")]
    WindowUpdate(StreamId, u32),
    /// A REQUEST asks for 0 bytes.
    #[error("request for no bytes on {0}")]
    EmptyRequest(StreamId),
    /// The peer has more requests open on a stream than allowed.
    #[error("more than {1} requests open on {0}")]
    TooManyRequests(StreamId, usize),
    /// DONE or ABORT names a grant that is not outstanding.
    #[error("{frame} frame for {grant}, which is not outstanding")]
    UnknownGrant {
        /// Name of the frame.
        frame: &'static str,
        /// Grant that the frame names.
        grant: GrantId,
    },
    /// A REQUEST whose begin is not less than the modulus.
    #[error("request on {stream} begins at {begin} modulo {modulus}")]
    RequestBegin {
        /// Stream that the frame names.
        stream: StreamId,
        /// The begin stated.
        begin: u32,
        /// This side's modulus.
        modulus: u32,
    },
    /// A REQUEST that states a field which extends beyond the requested bytes.
    #[error("request on {stream} of {len} bytes states a field that ends at {end}")]
    RequestField {
        /// Stream that the frame names.
        stream: StreamId,
        /// Bytes requested.
        len: u64,
        /// Where the field ends.
        end: u64,
    },
    /// DONE whose begin is not less than the modulus for a standing grant, or not 0 for a grant
    /// that answered a request.
    #[error("DONE of {grant} begins at {begin}, the limit is {limit}")]
    DoneBegin {
        /// Grant that the frame names.
        grant: GrantId,
        /// The begin stated.
        begin: u32,
        /// The maximum: 0 if the grant answered a request.
        limit: u32,
    },
    /// DONE states no bytes, or more than were granted after its begin.
    #[error("DONE with {len} bytes from {begin} on for {grant} of {granted}")]
    DoneLength {
        /// Grant that the frame names.
        grant: GrantId,
        /// Offset of the first byte.
        begin: u32,
        /// Bytes stated.
        len: u32,
        /// Bytes granted.
        granted: u32,
    },
    /// DONE names a stream other than the stream of its grant.
    #[error("DONE of {grant} for {stream}, which it was not granted to")]
    DoneStream {
        /// Grant that the frame names.
        grant: GrantId,
        /// Stream that the frame names.
        stream: StreamId,
    },
    /// The peer ended its half of a stream while it held grants for this stream, or waited for
    /// grants.
    #[error("{0} ended with grants held or asked for")]
    EndWithGrants(StreamId),
    /// A GRANT that is empty, exceeds the address space, was not requested, is too long or too
    /// short, has an id in use, or is one standing grant too many.
    #[error("impossible {grant}: {why}")]
    BadGrant {
        /// Grant that the frame names.
        grant: GrantId,
        /// The rule that the peer broke.
        why: &'static str,
    },
    /// A LENT frame that lends no bytes, exceeds the address space, has too many bytes around the
    /// lent bytes, reuses a lease that has not been returned, or exceeds the number of leases that
    /// a peer may have open.
    #[error("impossible lease {lease} on {stream}: {why}")]
    BadLease {
        /// Stream that the frame names.
        stream: StreamId,
        /// Lease that the frame names.
        lease: u32,
        /// The rule that the peer broke.
        why: &'static str,
    },
    /// A LENT frame for a side that does not [accept leases](crate::Config::takes_lent).
    #[error(
        "LENT on {0}: this side does not borrow (ContextBuilder::borrowing, and no copy_on_delivery)"
    )]
    NotBorrowing(StreamId),
    /// RETURN names a lease that the peer does not have.
    #[error("RETURN of lease {0}, which is not out")]
    UnknownLease(u32),
    /// The peer's frames require more replies than this side queues.
    #[error("more than {0} answers asked for and not collected")]
    Flood(usize),
    /// The client opens streams and resets them before they are answered, faster than any
    /// well-behaved client (ENHANCE_YOUR_CALM in HTTP/2).
    #[error(
        "streams reset before they were answered: more than {burst} at once and {per_second} a second (enhance your calm); Server::max_concurrent_streams raises both limits"
    )]
    RapidReset {
        /// Maximum number of resets at once.
        burst: u64,
        /// Number of resets restored per second.
        per_second: u64,
    },
    /// While others waited for memory, the peer kept a grant for too long after it was recalled or
    /// its stream had ended.
    #[error(
        "{0} was asked back for others that wait, and kept, with neither DONE nor ABORT in time"
    )]
    GrantKept(GrantId),
    /// A second GOAWAY, or an acknowledgement without a GOAWAY.
    #[error("GOAWAY frame that is a repetition or acknowledges none")]
    UnexpectedGoAway,
    /// A PONG without a PING.
    #[error("PONG that answers no PING")]
    UnexpectedPong,
}

/// Why a connection closes, as sent in CLOSE and GOAWAY frames.
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
    /// An unknown code.
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
