//! One stream: its two halves, its output queue and its windows.
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
//! When a server's END is emitted while its receiving half is in Headers or Body, that half changes
//! to Discarding, and the client receives RESET with NO_ERROR: the response is complete without the
//! rest of the request.
//!
//! A side that has reset a stream keeps it in Discarding until the peer has also ended its half:
//! every RESET is answered by END or RESET. So no HEADERS, DATA, DONE, LENT or REQUEST is in flight
//! for a closed stream, and such a frame for a closed stream is always a breach, never a race.
//! WINDOW, RESET and DECLINE without OWN may be in flight, and are ignored.
//!
//! # Without landing memory
//!
//! Without landing memory, the rest of a body is sent by DATA, within the stream's window. Each
//! direction of a stream changes to DATA separately, and does not change back:
//!
//! | a stream's body is received | on | next |
//! |---|---|---|
//! | by WRITE and DATA | `Connection::decline_landing`: DECLINE is sent | by DATA |
//! | by WRITE and DATA | DECLINE with OWN | by DATA |
//!
//! | a stream's body is sent | on | next |
//! |---|---|---|
//! | by WRITE and DATA | DECLINE | by DATA |
//! | by WRITE and DATA | a GRANT of memory that this side cannot write to (`Connection::cannot_write`): ABORT, and DECLINE with OWN | by DATA |
//!
//! Memory that was granted before the change is written, and ends with DONE or, after a RECALL,
//! with ABORT. After that, the rest of the current message and all later messages are sent by DATA.
//! The receiver forgets REQUESTs that cross its DECLINE.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use super::requests::StreamLanding;
use super::transfers::{Bulk, Transfers};
use crate::config::Terms;
use crate::ids::GrantId;
use crate::payload::{LentPlace, Payload};

/// Maximum number of bytes around a field that are sent by SEND to a peer that names memory for the
/// field. These bytes are not split for lack of room in a message.
const MAX_AROUND: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendState {
    Open,
    Ending,
    Ended,
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecvState {
    Headers,
    Body,
    Discarding,
    Ended,
    Reset,
}

impl SendState {
    pub(super) fn is_done(self) -> bool {
        matches!(self, SendState::Ended | SendState::Reset)
    }

    pub(super) fn accepts(self) -> bool {
        self == SendState::Open
    }

    pub(super) fn reset_by_us(self) -> Self {
        if self == SendState::Ended { self } else { SendState::Reset }
    }
}

impl RecvState {
    /// Whether received bytes are delivered to a reader.
    pub(super) fn is_read(self) -> bool {
        matches!(self, RecvState::Headers | RecvState::Body)
    }

    pub(super) fn is_discarded(self) -> bool {
        self == RecvState::Discarding
    }

    pub(super) fn is_done(self) -> bool {
        matches!(self, RecvState::Ended | RecvState::Reset)
    }

    pub(super) fn reset_by_us(self) -> Self {
        if self.is_done() { self } else { RecvState::Discarding }
    }
}

/// An element of a stream's output queue.
#[derive(Debug)]
pub(super) enum OutputItem {
    Headers {
        block: Bytes,
        end: bool,
        /// Whether a part of the block has been sent.
        begun: bool,
    },
    Eager {
        payload: Payload,
        end: bool,
        /// Whether these bytes lie around a field that is sent by WRITE.
        around: bool,
    },
    /// A piece that is sent by WRITE. The piece is boxed, because most elements are of the other
    /// kinds, which are small.
    Bulk(Box<Bulk>),
    /// A piece with a segment that may be lent.
    Lend(Box<Lend>),
}

/// A piece with a segment that may be lent, or has been lent.
#[derive(Debug)]
pub(super) struct Lend {
    pub(super) payload: Payload,
    pub(super) end: bool,
    /// Where the segment lies, once it is lent.
    pub(super) place: Option<LentPlace>,
}

/// Resources of a stream's dropped output, which have to be given up.
#[derive(Debug, Default)]
pub(super) struct DroppedOutput {
    pub(super) grants: Vec<GrantId>,
    pub(super) leases: Vec<u32>,
    /// Body bytes that were counted in the [`OutputQueue`](super::output_queue::OutputQueue).
    pub(super) queued: usize,
}

/// The half that this side sends.
#[derive(Debug)]
pub(super) struct SendHalf {
    pub(super) state: SendState,
    pub(super) out: VecDeque<OutputItem>,
    /// Body bytes in `out`.
    pub(super) queued: usize,
    /// Whether the driver was told that the stream has no room, and waits for room.
    pub(super) full: bool,
    /// Bytes of small messages that the peer still accepts.
    pub(super) window: u32,
    /// Whether the peer names memory for large messages, so that this side uses no standing grants.
    pub(super) peer_names: bool,
    /// Whether the rest of the body is sent by DATA, because the peer grants no memory, or only
    /// memory that this side cannot write to.
    pub(super) sends_data: bool,
}

impl SendHalf {
    /// The first piece that may be lent in part and that the driver has not decided about, with its
    /// place in `out`.
    pub(super) fn undecided(&self) -> Option<(usize, &Payload)> {
        self.out.iter().enumerate().find_map(|(at, out)| match out {
            OutputItem::Lend(lend) if lend.place.is_none() => Some((at, &lend.payload)),
            _ => None,
        })
    }

    /// Queues a piece of a body at this place. Returns whether the piece is sent by WRITE, because
    /// it is longer than a SEND. If the peer names memory for the field, the few bytes around the
    /// field are sent by SEND, instead of in separate grants and WRITEs.
    pub(super) fn queue_piece(
        &mut self,
        at: usize,
        mut payload: Payload,
        end: bool,
        terms: &Terms,
    ) -> bool {
        if payload.len() <= terms.eager_limit() || self.sends_data {
            self.out.insert(at, OutputItem::Eager { payload, end, around: false });
            return false;
        }
        let around = if self.peer_names { payload.cut_to_field(MAX_AROUND) } else { None };
        let (head, tail) = around.unwrap_or_default();
        let ends = |tail: &Payload| end && tail.is_empty();
        let bulk = Bulk::new(payload, ends(&tail), terms.peer.align);
        if !tail.is_empty() {
            self.out.insert(at, OutputItem::Eager { payload: tail, end, around: true });
        }
        self.out.insert(at, OutputItem::Bulk(Box::new(bulk)));
        if !head.is_empty() {
            self.out.insert(at, OutputItem::Eager { payload: head, end: false, around: true });
        }
        true
    }

    /// Lends the piece at this place, or lets it be sent in another way.
    pub(super) fn decide_lend(&mut self, at: usize, place: Option<LentPlace>, terms: &Terms) {
        match (place, self.out.get_mut(at)) {
            (Some(_), Some(OutputItem::Lend(lend))) => lend.place = place,
            (None, _) => {
                if let Some(OutputItem::Lend(lend)) = self.out.remove(at) {
                    self.queue_piece(at, lend.payload.not_lendable(), lend.end, terms);
                }
            }
            (Some(_), _) => {}
        }
    }
}

/// The half that this side receives.
#[derive(Debug)]
pub(super) struct RecvHalf {
    pub(super) state: RecvState,
    /// The number of this side's RESET among all control frames. Valid only in
    /// [`RecvState::Discarding`].
    pub(super) reset_frame: u64,
    /// The parts of a header block that have been received.
    pub(super) block: BytesMut,
    /// Maximum bytes of small messages that may be unread. `window` is the part that the peer has
    /// not used.
    pub(super) limit: u32,
    pub(super) window: u32,
    /// Bytes that the application has read, and that no WINDOW frame has returned yet.
    pub(super) unreported: u32,
    /// Whether the application has released the stream, and will not read it any longer.
    pub(super) released: bool,
    /// Whether this side names memory for large messages that it receives.
    pub(super) names: bool,
    /// Whether the application still has to decide about `names`. Nothing is granted until then.
    pub(super) undecided: bool,
}

/// The queues of the connection that the stream is in. Each queue holds a stream at most once.
#[derive(Debug, Default)]
pub(super) struct InQueues {
    /// Whether the stream waits until the peer allows one more stream. `send` is then true as well,
    /// although the stream is in none of the queues.
    pub(super) waits: bool,
    pub(super) send: bool,
    pub(super) write: bool,
    pub(super) landing: bool,
    pub(super) parked: bool,
    pub(super) naming: bool,
}

impl InQueues {
    /// Keeps a new stream out of all queues until the peer allows it.
    pub(super) fn wait(&mut self) {
        (self.waits, self.send) = (true, true);
    }
}

/// A stream: its two halves, the frames that its transfers by WRITE still owe the peer, the landing
/// memory that it wants and holds, and the queues that it is in.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: u32,
    pub(super) send: SendHalf,
    pub(super) recv: RecvHalf,
    pub(super) transfers: Transfers,
    pub(super) landing: StreamLanding,
    pub(super) queues: InQueues,
}

impl Stream {
    /// Creates a stream with both halves open. `out` must be empty.
    pub(super) fn new(
        id: u32,
        out: VecDeque<OutputItem>,
        send_window: u32,
        recv_window: u32,
    ) -> Self {
        Stream {
            id,
            send: SendHalf {
                state: SendState::Open,
                out,
                queued: 0,
                full: false,
                window: send_window,
                peer_names: false,
                sends_data: false,
            },
            recv: RecvHalf {
                state: RecvState::Headers,
                reset_frame: 0,
                block: BytesMut::new(),
                limit: recv_window,
                window: recv_window,
                unreported: 0,
                released: false,
                names: false,
                undecided: false,
            },
            transfers: Transfers::default(),
            landing: StreamLanding::default(),
            queues: InQueues::default(),
        }
    }

    /// Whether the source of the next WRITE is pinned; `None` if the head of the queue needs no
    /// WRITE or has no memory for it.
    pub(super) fn can_write(&self) -> Option<bool> {
        match self.send.out.front() {
            Some(OutputItem::Bulk(bulk)) if !bulk.grants.is_empty() => {
                bulk.payload.front().map(|(_, pinned)| pinned)
            }
            _ => None,
        }
    }

    /// Finds a bound grant. Returns the index of its transfer in `out`, and the index of the grant
    /// in the transfer.
    pub(super) fn find_grant(&self, id: u32) -> Option<(usize, usize)> {
        self.send.out.iter().enumerate().find_map(|(place, out)| match out {
            OutputItem::Bulk(bulk) => {
                bulk.grants.iter().position(|grant| grant.id.0 == id).map(|at| (place, at))
            }
            OutputItem::Headers { .. } | OutputItem::Eager { .. } | OutputItem::Lend(_) => None,
        })
    }

    /// Drops all output. Returns the grants and leases that must be given up.
    pub(super) fn drop_output(&mut self) -> DroppedOutput {
        let grants = self.transfers.dones.drain(..).map(|a| a.grant).collect();
        let queued = if self.queues.waits { 0 } else { self.send.queued };
        let mut dropped = DroppedOutput { grants, leases: Vec::new(), queued };
        for out in self.send.out.drain(..) {
            match out {
                OutputItem::Bulk(bulk) => dropped.grants.extend(bulk.grants.iter().map(|g| g.id)),
                OutputItem::Lend(lend) => {
                    dropped.leases.extend(lend.place.map(|place| place.lease))
                }
                OutputItem::Headers { .. } | OutputItem::Eager { .. } => {}
            }
        }
        self.transfers.requests.clear();
        self.send.queued = 0;
        self.transfers.urgent = 0;
        dropped
    }
}
