//! One stream: two halves, what waits to be sent, and windows.
//!
//! The sending half:
//!
//! | from | END queued | END emitted | reset by this side | RESET from the peer |
//! |---|---|---|---|---|
//! | Open | Ending | | Reset | Reset |
//! | Ending | | Ended | Reset | Reset |
//! | Ended | | | Ended | Ended |
//! | Reset | | | Reset | Reset |
//!
//! The receiving half:
//!
//! | from | first header block | END | RESET from the peer | reset by this side |
//! |---|---|---|---|---|
//! | Headers | Body | Ended | Reset | Discarding |
//! | Body | (trailers: END) | Ended | Reset | Discarding |
//! | Discarding | Discarding | Ended | Reset | Discarding |
//! | Ended | breach | breach | Ended | Ended |
//! | Reset | breach | breach | Reset | Reset |
//!
//! When a server's END is emitted while its receiving half is in Headers or Body, that half goes to
//! Discarding, and the client is told by RESET with NO_ERROR: the response is complete without the
//! rest of the request.
//!
//! A side that has reset a stream keeps it in Discarding until the peer has ended its half too:
//! every RESET is answered, by END or RESET. So a closed stream has no frames on the way, and a
//! frame for one is a breach and not a race.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::answer_clock::Owed;
use super::phase::{self, Modulus};
use crate::ids::GrantId;
use crate::payload::Payload;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendHalf {
    Open,
    Ending,
    Ended,
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecvHalf {
    Headers,
    Body,
    Discarding,
    Ended,
    Reset,
}

impl SendHalf {
    pub(super) fn is_done(self) -> bool {
        matches!(self, SendHalf::Ended | SendHalf::Reset)
    }

    pub(super) fn accepts(self) -> bool {
        self == SendHalf::Open
    }

    pub(super) fn reset_by_us(self) -> Self {
        if self == SendHalf::Ended { self } else { SendHalf::Reset }
    }
}

impl RecvHalf {
    pub(super) fn is_done(self) -> bool {
        matches!(self, RecvHalf::Ended | RecvHalf::Reset)
    }

    pub(super) fn reset_by_us(self) -> Self {
        if self.is_done() { self } else { RecvHalf::Discarding }
    }
}

/// Landing memory of the peer, as granted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerGrant {
    pub(super) id: GrantId,
    pub(super) rkey: u32,
    pub(super) len: u32,
    pub(super) addr: u64,
    /// Bytes of a bound standing grant that were left out in front of `addr`, and are not in `len`.
    pub(super) begin: u32,
    /// Bytes for which a WRITE has been handed out.
    pub(super) used: u32,
    /// It was advertised beforehand.
    pub(super) standing: bool,
    /// The peer has asked for it back, and it is written first.
    pub(super) recalled: bool,
}

/// A piece of a body that goes by WRITE.
#[derive(Debug)]
pub(super) struct Bulk {
    pub(super) payload: Payload,
    pub(super) end: bool,
    /// Memory has been bound or asked for.
    pub(super) prepared: bool,
    /// Bytes of grants received for it.
    pub(super) granted: u64,
    pub(super) len: u64,
    /// Where it begins at the peer: see [`phase`](super::phase).
    pub(super) begin: u32,
    pub(super) grants: VecDeque<PeerGrant>,
}

impl Bulk {
    /// To a peer that asks for `align`.
    pub(super) fn new(payload: Payload, end: bool, align: u16) -> Self {
        let (len, begin) = (payload.len() as u64, phase::begin(&payload, align));
        Bulk { payload, end, prepared: false, granted: 0, len, begin, grants: VecDeque::new() }
    }
}

/// What waits to be sent on a stream, in order.
#[derive(Debug)]
pub(super) enum Out {
    Headers {
        block: Bytes,
        end: bool,
        /// A piece of it has gone out.
        begun: bool,
    },
    Eager {
        payload: Payload,
        end: bool,
    },
    /// Boxed: what is small is moved about, and is most often there.
    Bulk(Box<Bulk>),
}

/// A DONE that follows its WRITE.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announce {
    pub(super) grant: GrantId,
    pub(super) len: u32,
    /// How far into the grant the bytes begin.
    pub(super) begin: u32,
    pub(super) end: bool,
}

/// A transfer that memory is to be asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) len: u64,
    pub(super) begin: u32,
}

/// A request of the peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asked {
    /// Its place among all of the connection.
    pub(super) number: u64,
    /// Where the byte behind its last is to lie, modulo the modulus: what is left of it begins as
    /// far in front of this as it is long.
    pub(super) end: u32,
}

/// A transfer that the peer has asked memory for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) request: Asked,
    /// Bytes that are not granted.
    pub(super) rest: u64,
}

impl Want {
    /// Where the next byte of it is to lie.
    pub(super) fn begin(&self, modulus: Modulus) -> u32 {
        modulus.rest(u64::from(self.request.end).wrapping_sub(self.rest))
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u32,
    pub(super) send: SendHalf,
    pub(super) recv: RecvHalf,
    /// The answer to the RESET, in [`RecvHalf::Discarding`].
    pub(super) reset: Owed,

    pub(super) out: VecDeque<Out>,
    pub(super) announce: VecDeque<Announce>,
    pub(super) requests: VecDeque<Ask>,
    /// Body bytes in `out`.
    pub(super) queued: usize,
    /// `queued` has reached the mark and the driver waits for room.
    pub(super) full: bool,
    pub(super) send_window: u32,
    /// Grants in `out` that the peer has asked back, and that are written before those of other
    /// streams.
    pub(super) hurried: u32,

    pub(super) recv_window: u32,
    /// Bytes read by the application that the peer has not been told of.
    pub(super) unreported: u32,
    pub(super) block: BytesMut,
    /// What is not granted yet, in the order of the requests.
    pub(super) wants: VecDeque<Want>,
    /// Bytes granted on request or landed and not read.
    pub(super) held: u64,
    /// The application reads nothing of it any more.
    pub(super) released: bool,
    /// Grants on request that the peer has not ended.
    pub(super) open_grants: u32,
    /// Of these, how many have been asked back.
    pub(super) recalled: u32,

    /// In the queue of that name; kept true so that a stream is in each queue at most once.
    pub(super) in_send_ready: bool,
    pub(super) in_write_ready: bool,
    pub(super) in_landing_queue: bool,
}

impl Stream {
    /// `out` is empty.
    pub(super) fn new(
        id: u32,
        recv: RecvHalf,
        out: VecDeque<Out>,
        send_window: u32,
        recv_window: u32,
    ) -> Self {
        Stream {
            id,
            send: SendHalf::Open,
            recv,
            reset: Owed::default(),
            out,
            announce: VecDeque::new(),
            requests: VecDeque::new(),
            queued: 0,
            full: false,
            send_window,
            hurried: 0,
            recv_window,
            unreported: 0,
            block: BytesMut::new(),
            wants: VecDeque::new(),
            held: 0,
            released: false,
            open_grants: 0,
            recalled: 0,
            in_send_ready: false,
            in_write_ready: false,
            in_landing_queue: false,
        }
    }

    /// If the head of the queue waits for WRITEs and has memory for them: whether the next source
    /// is pinned.
    pub(super) fn can_write(&self) -> Option<bool> {
        match self.out.front() {
            Some(Out::Bulk(bulk)) if !bulk.grants.is_empty() => {
                bulk.payload.front().map(|(_, pinned)| pinned)
            }
            _ => None,
        }
    }

    /// Where a grant of the peer is bound: which of `out`, and which of its grants.
    pub(super) fn find_grant(&self, id: u32) -> Option<(usize, usize)> {
        self.out.iter().enumerate().find_map(|(place, out)| match out {
            Out::Bulk(bulk) => {
                bulk.grants.iter().position(|grant| grant.id.0 == id).map(|at| (place, at))
            }
            Out::Headers { .. } | Out::Eager { .. } => None,
        })
    }

    /// Empties the sending half; returns the grants that must be aborted.
    pub(super) fn drop_output(&mut self) -> Vec<GrantId> {
        let mut grants: Vec<GrantId> = self.announce.drain(..).map(|a| a.grant).collect();
        for out in self.out.drain(..) {
            if let Out::Bulk(bulk) = out {
                grants.extend(bulk.grants.iter().map(|g| g.id));
            }
        }
        self.requests.clear();
        self.queued = 0;
        self.hurried = 0;
        grants
    }
}
