//! The types that the driver and the connection exchange.

use bytes::Bytes;

use crate::error::CloseCode;
use crate::ids::{ResetCode, StreamId};
use crate::payload::Payload;

/// Which side of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Connects, opens streams, sends first (iWARP wants the connecting side to).
    Client,
    /// Accepts.
    Server,
}

/// How received bytes are accounted until [`Connection::consume`](super::Connection::consume) is
/// told that they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Against the stream's window.
    Window,
    /// Against what the stream may hold of requested grants.
    Bulk,
}

/// What the driver has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The client opened a stream (server only).
    Opened {
        /// The stream.
        stream: StreamId,
        /// Its header block.
        block: Bytes,
        /// The client's half has ended.
        end: bool,
    },
    /// The response's header block, or trailers.
    Headers {
        /// The stream.
        stream: StreamId,
        /// The block.
        block: Bytes,
        /// The peer's half has ended: these are trailers, or a response of trailers only.
        end: bool,
    },
    /// Body bytes that came in a control message; counts as [`Flow::Window`].
    Data {
        /// The stream.
        stream: StreamId,
        /// The bytes: a slice of the message.
        data: Bytes,
        /// The peer's half has ended.
        end: bool,
    },
    /// Body bytes have been written to landing memory, which now belongs to this side again.
    Landed {
        /// The stream.
        stream: StreamId,
        /// The driver's key of the memory ([`GrantMemory::key`]).
        memory: usize,
        /// Where in the memory the bytes begin. Less than the larger of 64 and
        /// [`Config::align`](crate::Config::align).
        begin: u32,
        /// Bytes written, from there on; all lie in the memory.
        len: u32,
        /// How they count.
        flow: Flow,
        /// The peer's half has ended.
        end: bool,
    },
    /// Landing memory came back unused, or for a stream that nobody reads any more.
    Returned {
        /// The driver's key of the memory.
        memory: usize,
    },
    /// The peer reset the stream: it sends no more and wants no more. If its half had ended before,
    /// only this side's output is unwanted.
    Reset {
        /// The stream.
        stream: StreamId,
        /// Why.
        code: ResetCode,
    },
    /// More output may be queued: a stream at its high-water mark has room again, or the head of a
    /// new stream has been handed out, so that the peer knows of it.
    Writable {
        /// The stream.
        stream: StreamId,
    },
    /// The stream was opened here but never transmitted, and will not be: the peer is going away.
    Refused {
        /// The stream.
        stream: StreamId,
        /// What had been queued behind its head.
        unsent: Vec<Unsent>,
    },
    /// The peer takes no new streams.
    GoAway {
        /// Why.
        code: CloseCode,
        /// Its text.
        text: String,
    },
    /// The peer closed the connection with an error.
    Closed {
        /// Why.
        code: CloseCode,
        /// Its text.
        text: String,
    },
    /// The connection has become quiet: nothing but PINGs was received for a quarter of
    /// [`dead_peer`](crate::Config::dead_peer). What only a busy connection needs may be released.
    /// An extra RECV is released once its next message, now a PING, has been received
    /// ([`Connection::recv_gone`](super::Connection::recv_gone)).
    Quiet,
    /// The peer has sent nothing for [`dead_peer`](crate::Config::dead_peer), not even in answer to
    /// a PING.
    Dead,
}

/// Output that had been queued on a stream that the peer does not know of, to be sent another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// A piece of the body.
    Data(Payload),
    /// The header block of trailers.
    Trailers(Bytes),
}

/// Landing memory that the driver gives to the connection to grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMemory {
    /// The driver's key, returned in [`Event::Landed`] or [`Event::Returned`].
    pub key: usize,
    /// Address as the peer's WRITE names it, a multiple of the larger of 64 and
    /// [`Config::align`](crate::Config::align), as the memory's own address is.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes.
    pub len: u32,
}

/// The purpose for which landing memory is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantKey {
    /// A stream's request.
    Stream(StreamId),
    /// A standing grant.
    Standing,
}

/// Landing memory that is wanted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LandingWant {
    /// For what.
    pub key: WantKey,
    /// Best length in bytes. Of longer memory no more than this is granted to a stream. Bytes in
    /// front of the place where the sender wants to begin are included, in `min`, too; they are not
    /// granted.
    pub want: u32,
    /// Shortest length in bytes that is accepted.
    pub min: u32,
}

/// How much work the driver can accept now. A WRITE is not cut shorter than 16 KiB, so `write` must
/// be at least that when nothing is in flight. Staging memory is used however short it is.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes of WRITEs.
    pub write: usize,
    /// Bytes of staging memory for one source that is not pinned.
    pub staging: usize,
    /// Bytes of one WRITE of a pinned source, where that is more than
    /// [`write_chunk`](crate::Config::write_chunk): nothing else waits for its turn.
    pub chunk: usize,
}

/// A WRITE to post.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What to write.
    pub src: Bytes,
    /// Whether the source was said to lie in pinned memory; otherwise it is staged.
    pub pinned: bool,
    /// Where to.
    pub addr: u64,
    /// The key to it.
    pub rkey: u32,
}

/// Work to post, in the order in which it was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// The slot holds a message of this many bytes.
    Send(usize),
    /// A WRITE.
    Write(Write),
}

/// Why output was not accepted. `TooLong` and `HeadersTooLong` are faults of the caller; the others
/// are ordinary states of the stream or the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The stream is closed for sending: reset, ended, or unknown.
    #[error("stream is closed for sending")]
    Closed,
    /// The peer takes no new streams: it is going away, or the connection is closed.
    #[error("the peer takes no new streams")]
    GoingAway,
    /// The peer's limit of streams is reached; a stream that ends makes room.
    #[error("the peer's limit of {0} streams is reached")]
    TooManyStreams(u32),
    /// A piece longer than the longest message that both sides allow.
    #[error("message of {len} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes.
        len: u64,
        /// The lower of both sides' limits.
        limit: u64,
    },
    /// A header block longer than allowed.
    #[error("header block of {len} bytes, the limit is {limit}")]
    HeadersTooLong {
        /// Bytes.
        len: usize,
        /// The limit.
        limit: u32,
    },
    /// Stream ids are used up (2^32 - 1); the connection must be replaced.
    #[error("stream ids are used up")]
    IdsUsedUp,
}

/// Counters of one connection, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Streams whose head was transmitted (client) or that were accepted (server).
    pub streams: u64,
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Body bytes sent in control messages.
    pub eager_sent: u64,
    /// Body bytes received in control messages.
    pub eager_received: u64,
    /// WRITEs handed out.
    pub writes: u64,
    /// Body bytes handed out as WRITEs.
    pub write_sent: u64,
    /// WRITEs of pinned sources with [`LONG_WRITE`](Stats::LONG_WRITE) bytes or more.
    pub long_writes: u64,
    /// Of these, those whose source and destination are equal modulo 64.
    pub long_writes_in_phase: u64,
    /// Body bytes received by WRITE.
    pub write_received: u64,
    /// Times that output began to wait for a credit.
    pub credit_waits: u64,
    /// Grants given.
    pub grants_given: u64,
}

impl Stats {
    /// Length, in bytes, from which on WRITEs are counted as long.
    pub const LONG_WRITE: usize = 4096;

    /// Body bytes sent and received, by either way.
    pub fn body_bytes(&self) -> u64 {
        self.eager_sent + self.eager_received + self.write_sent + self.write_received
    }
}

/// What is still open, for draining, and for tests that everything has been returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Open streams.
    pub streams: usize,
    /// Grants that the peer holds.
    pub grants: usize,
    /// Grants of the peer that this side holds, standing or bound to a transfer.
    pub peer_grants: usize,
}
