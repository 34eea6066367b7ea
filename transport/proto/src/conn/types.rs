//! The types that the driver and the connection exchange.

use bytes::Bytes;

use crate::error::CloseCode;
use crate::ids::{ResetCode, StreamId};
use crate::payload::{LentBody, Payload};

/// Which side of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Connects, opens streams, and sends first, as iWARP requires.
    Client,
    /// Accepts the connection and its streams.
    Server,
}

/// How received bytes are accounted until [`Connection::consume`](super::Connection::consume)
/// reports that they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The bytes count against the stream's window.
    Window,
    /// The bytes count against the stream's limit on granted or unread bytes
    /// ([`Config::bulk_window`](crate::Config::bulk_window)).
    Bulk,
    /// The bytes do not count, because they lie in memory that this side has named.
    Named,
    /// The bytes do not count, because they lie in memory that the peer has lent.
    Lent,
}

/// An event for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The client opened a stream (server only).
    Opened {
        /// Stream that the event is about.
        stream: StreamId,
        /// The stream's header block.
        block: Bytes,
        /// Whether the client's half has ended.
        end: bool,
    },
    /// The header block of the response, or trailers.
    Headers {
        /// Stream that the event is about.
        stream: StreamId,
        /// The encoded header block.
        block: Bytes,
        /// Whether the peer's half has ended: the block then has trailers, or is a trailers-only
        /// response.
        end: bool,
    },
    /// Body bytes from a control message; counted as [`Flow::Window`].
    Data {
        /// Stream that the event is about.
        stream: StreamId,
        /// The bytes: a slice of the message.
        data: Bytes,
        /// Whether the peer's half has ended.
        end: bool,
    },
    /// Body bytes that a WRITE has put into granted memory. The memory now belongs to this side
    /// again.
    Landed {
        /// Stream that the event is about.
        stream: StreamId,
        /// The driver's key of the memory ([`GrantMemory::key`]).
        memory: usize,
        /// Offset of the bytes in the memory. Less than the larger of 64 and
        /// [`Config::align`](crate::Config::align).
        begin: u32,
        /// Number of bytes written, all within the memory.
        len: u32,
        /// How the bytes are accounted.
        flow: Flow,
        /// Whether the peer's half has ended.
        end: bool,
    },
    /// A piece of the body, most of which lies in the peer's memory; counted as [`Flow::Lent`]. The
    /// driver calls [`Connection::return_lease`](super::Connection::return_lease) once nobody reads
    /// that memory any longer.
    Lent {
        /// Stream that the event is about.
        stream: StreamId,
        /// The piece. The ends of the piece are slices of the message. Boxed, so that other events
        /// stay short.
        lent: Box<LentBody>,
        /// Whether the peer's half has ended.
        end: bool,
    },
    /// A lease that the driver has [provided](super::Connection::provide_lent) has ended: the peer
    /// has returned the lease, or its bytes were dropped before a LENT announced it.
    LeaseEnded {
        /// The lease's number.
        lease: u32,
    },
    /// Returns landing memory or named memory that is unused, or that holds bytes of a stream that
    /// is no longer read.
    Returned {
        /// The driver's key of the memory.
        memory: usize,
    },
    /// The peer reset the stream, and sends and accepts nothing more. After the end of the peer's
    /// half, the reset only means that the peer accepts no more output.
    Reset {
        /// Stream that the event is about.
        stream: StreamId,
        /// The reason.
        code: ResetCode,
    },
    /// More output may be queued: a stream at its high-water mark has room again, or the first
    /// frame of a new stream has been handed out, so the peer knows the stream.
    Writable {
        /// Stream that the event is about.
        stream: StreamId,
    },
    /// This side opened the stream but never transmitted it, and will not transmit it: the
    /// peer is going away, or [`Connection::refuse_waiting`](super::Connection::refuse_waiting)
    /// was called.
    Refused {
        /// Stream that the event is about.
        stream: StreamId,
        /// Output that was queued after the stream's header block.
        unsent: Vec<Unsent>,
    },
    /// The peer accepts no new streams.
    GoAway {
        /// The reason.
        code: CloseCode,
        /// Text for people, as the peer sent it.
        text: String,
    },
    /// The peer closed the connection.
    Closed {
        /// The reason.
        code: CloseCode,
        /// Text for people, as the peer sent it.
        text: String,
    },
    /// Reports that the connection has become quiet: only PINGs were received for 1.25 s. The
    /// driver may release resources that only a busy connection needs. The driver again posts the
    /// short RECVs that were left out
    /// ([`Connection::rest_recvs_posted`](super::Connection::rest_recvs_posted)). The driver
    /// releases each extra RECV once a PING has arrived in that RECV
    /// ([`Connection::recv_gone`](super::Connection::recv_gone)).
    Quiet,
    /// The driver should ask for a proof that the peer's end of the link exists, in a way that does
    /// not involve the peer's process, and report it with
    /// [`Connection::peer_exists`](super::Connection::peer_exists). The driver need not act on this
    /// event while an earlier probe is on its way.
    Probe,
    /// No proof came in time ([`Liveness::Asked`](crate::Liveness::Asked)), so the path or the
    /// peer's host is gone.
    Dead,
    /// The peer's process did not answer a [keep-alive](crate::Config::keep_alive) PING in time.
    KeepAliveTimedOut,
}

/// Output of a stream that the peer does not know, which can be sent on another connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// A piece of the body.
    Data(Payload),
    /// The header block of trailers.
    Trailers(Bytes),
}

/// Landing memory, or memory that this side names, for the connection to grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMemory {
    /// The driver's key, returned in [`Event::Landed`] or [`Event::Returned`].
    pub key: usize,
    /// Address that the peer uses in WRITEs. In landing memory, this address and the local address
    /// are multiples of the larger of 64 and [`Config::align`](crate::Config::align).
    pub addr: u64,
    /// The remote key for the memory.
    pub rkey: u32,
    /// Length of the memory in bytes.
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

/// A want: landing memory that is needed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LandingWant {
    /// The purpose.
    pub key: WantKey,
    /// Preferred length in bytes. If the memory is longer, the bytes beyond this length are not
    /// granted to a stream. `want` and `min` include the bytes in front of the address where the
    /// sender has to begin, which are not granted.
    pub want: u32,
    /// Minimum length in bytes.
    pub min: u32,
}

/// A want of memory that this side [names](super::Connection::name_memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedWant {
    /// The stream whose message is to land.
    pub stream: StreamId,
    /// The length of the whole field in bytes.
    pub field: u32,
    /// The offset in the field of the first byte for which memory is wanted. 0, unless memory for
    /// the bytes before it was granted.
    pub offset: u32,
}

/// The amount of work that the driver can accept now. A WRITE is not split below 16 KiB, so `write`
/// must be at least 16 KiB when nothing is in flight. Staging memory may have any length.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes that may be handed out as WRITEs.
    pub write: usize,
    /// Bytes of staging memory for one source that is not pinned.
    pub staging: usize,
    /// Maximum bytes of a WRITE, if more than [`write_chunk`](crate::Config::write_chunk).
    /// `staging` also limits the WRITEs of sources that are not pinned.
    pub chunk: usize,
}

/// A WRITE to post.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The bytes to write.
    pub src: Bytes,
    /// Whether the source is in pinned memory; otherwise it is staged.
    pub pinned: bool,
    /// The remote address.
    pub addr: u64,
    /// The remote key.
    pub rkey: u32,
}

/// Work to post, in the order in which it is returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// The slot holds a message of this many bytes.
    Send(usize),
    /// A WRITE into memory that the peer has granted.
    Write(Write),
}

/// Why output was not accepted. `HeadersTooLong` is the caller's mistake. The others are ordinary
/// states of the stream or the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The stream is closed for sending: reset, ended, or unknown.
    #[error("stream is closed for sending")]
    Closed,
    /// No stream can be opened: one of the sides is going away, the connection is closing or
    /// closed, all stream ids (2^32 - 1) are used, or this side is the server.
    #[error("the peer takes no new streams")]
    GoingAway,
    /// A header block exceeds the limit.
    #[error("header block of {len} bytes, the limit is {limit}")]
    HeadersTooLong {
        /// Length of the block in bytes.
        len: usize,
        /// Maximum length in bytes.
        limit: u32,
    },
}

/// Counters of one connection, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Streams that were transmitted (client) or accepted (server).
    pub streams: u64,
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Body bytes sent in control messages.
    pub eager_sent: u64,
    /// Bytes of `eager_sent` that lie around a field sent by WRITE.
    pub around_sent: u64,
    /// Body bytes received in control messages.
    pub eager_received: u64,
    /// WRITEs handed out.
    pub writes: u64,
    /// Body bytes handed out as WRITEs.
    pub write_sent: u64,
    /// WRITEs of pinned sources with [`LONG_WRITE`](Stats::LONG_WRITE) bytes or more.
    pub long_writes: u64,
    /// WRITEs of `long_writes` whose source and destination addresses are equal modulo 64.
    pub long_writes_in_phase: u64,
    /// Body bytes received by WRITE.
    pub write_received: u64,
    /// Body bytes of pieces sent by LENT, including the bytes around the lent bytes.
    pub lent: u64,
    /// Body bytes of pieces received by LENT, including the bytes around the lent bytes.
    pub borrowed: u64,
    /// Number of times that output had to wait for a credit.
    pub credit_waits: u64,
    /// Grants given to the peer.
    pub grants_given: u64,
}

impl Stats {
    /// Minimum length of a long WRITE in bytes.
    pub const LONG_WRITE: usize = 4096;

    /// Body bytes of short messages sent.
    pub fn short_sent(&self) -> u64 {
        self.eager_sent - self.around_sent
    }

    /// Body bytes sent and received by any method.
    pub fn body_bytes(&self) -> u64 {
        let sent = self.eager_sent + self.write_sent + self.lent;
        sent + self.eager_received + self.write_received + self.borrowed
    }
}

/// Open resources, for draining, and to test that everything has been returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Open streams.
    pub streams: usize,
    /// Grants that the peer holds.
    pub grants: usize,
    /// Grants from the peer that this side holds, standing or bound to a transfer.
    pub peer_grants: usize,
}

/// The messages that each side may send before it gets more credits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreditCounts {
    /// Messages that this side may send.
    pub own: u32,
    /// Messages that the peer may send, with the credits that it has received.
    pub peer: u32,
}
