//! One stream: its two halves, its transfers, and the landing memory that it wants and holds.
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

use bytes::BytesMut;

use super::recv_half::{RecvHalf, RecvState};
use super::requests::StreamLanding;
use super::send_half::{ComposedFrame, OutputItem, SendHalf, SendState};
use super::transfers::{PendingDone, QueuedRequest, Transfers};
use super::types::{Side, Unsent};
use crate::error::Breach;
use crate::frame::{Composer, Frame};
use crate::headers::table::Sent;
use crate::ids::{GrantId, StreamId};

/// Resources of a stream's dropped output, which have to be given up.
#[derive(Debug, Default)]
pub(super) struct DroppedOutput {
    pub(super) grants: Vec<GrantId>,
    pub(super) leases: Vec<u32>,
    /// Body bytes that were counted in the [`OutputQueue`](super::output_queue::OutputQueue).
    pub(super) queued: usize,
}

/// The effect of a RESET from the peer.
#[derive(Debug)]
pub(super) struct PeerReset {
    /// The output that the RESET has dropped.
    pub(super) dropped: DroppedOutput,
    /// Whether this side has to answer with RESET, because its half was open.
    pub(super) is_answered: bool,
    /// Whether the application reads the stream, and so has to be told.
    pub(super) is_read: bool,
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
            send: SendHalf::new(out, send_window),
            recv: RecvHalf::new(recv_window),
            transfers: Transfers::default(),
            landing: StreamLanding::default(),
            queues: InQueues::default(),
        }
    }

    /// Adds the stream's next frame to a message: a DONE or REQUEST that its transfers owe, or the
    /// first frame of its output.
    #[inline]
    pub(super) fn compose(
        &mut self,
        is_known: bool,
        message: &mut Composer<'_>,
        fields: &mut Sent,
    ) -> ComposedFrame {
        let stream = self.id;
        if let Some(&PendingDone { grant, len, begin, end }) = self.transfers.dones.front() {
            if !message.add(&Frame::Done { stream, end, id: grant.0, len, begin }) {
                return ComposedFrame::Full;
            }
            self.transfers.dones.pop_front();
            return ComposedFrame::Done { grant, end };
        }
        if is_known
            && let Some(&QueuedRequest { len, begin, field }) = self.transfers.requests.front()
        {
            if !message.add(&Frame::Request { stream, len, begin, field }) {
                return ComposedFrame::Full;
            }
            self.transfers.requests.pop_front();
            return ComposedFrame::Request;
        }
        self.send.compose(stream, is_known, self.recv.names, message, fields)
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

    /// Drops all output, and takes out of it what was queued after the header block.
    pub(super) fn take_unsent(&mut self) -> (Vec<Unsent>, DroppedOutput) {
        let (mut unsent, mut dropped) = (Vec::new(), DroppedOutput::default());
        for (place, out) in self.send.out.drain(..).enumerate() {
            match out {
                OutputItem::Headers { .. } if place == 0 => {}
                OutputItem::Headers { block, .. } => unsent.push(Unsent::Trailers(block)),
                OutputItem::Eager { payload, .. } => unsent.push(Unsent::Data(payload)),
                OutputItem::Bulk(bulk) => {
                    dropped.grants.extend(bulk.grants.iter().map(|grant| grant.id));
                    unsent.push(Unsent::Data(bulk.payload));
                }
                OutputItem::Lend(lend) => {
                    dropped.leases.extend(lend.place.map(|place| place.lease));
                    unsent.push(Unsent::Data(lend.payload));
                }
            }
        }
        let rest = self.drop_output();
        dropped.grants.extend(rest.grants);
        dropped.queued = rest.queued;
        (unsent, dropped)
    }

    /// Resets both halves, because this side resets the stream. Returns the dropped output, or
    /// `None` if the stream has already been reset.
    pub(super) fn reset_by_us(&mut self) -> Option<DroppedOutput> {
        if self.send.state == SendState::Reset || self.recv.state == RecvState::Discarding {
            return None;
        }
        let dropped = self.drop_output();
        // Forget the peer's requests, because data that it still sends is discarded.
        self.landing.requests.clear();
        self.send.state = self.send.state.reset_by_us();
        self.recv.state = self.recv.state.reset_by_us();
        Some(dropped)
    }

    /// Handles RESET.
    pub(super) fn on_reset(&mut self, side: Side) -> PeerReset {
        // The application needs no event if it does not read the stream any longer, or has never
        // seen the stream.
        let is_read = match self.recv.state {
            RecvState::Discarding => false,
            RecvState::Headers => side == Side::Client,
            RecvState::Body | RecvState::Ended | RecvState::Reset => true,
        };
        if !self.recv.state.is_done() {
            self.recv.state = RecvState::Reset;
        }
        self.landing.requests.clear();
        self.recv.block = BytesMut::new();
        let dropped = self.drop_output();
        let is_answered = !self.send.state.is_done();
        if is_answered {
            self.send.state = SendState::Reset;
        }
        PeerReset { dropped, is_answered, is_read }
    }

    /// Ends the receiving half. By then all memory that the peer requested on the stream must have
    /// been granted, and the peer must have ended these grants. Otherwise the peer would keep
    /// memory that cannot be recalled.
    ///
    /// # Errors
    /// [`Breach::EndWithGrants`].
    #[inline]
    pub(super) fn on_end(&mut self) -> Result<(), Breach> {
        if self.landing.open_grants > 0 || !self.landing.requests.is_empty() {
            return Err(Breach::EndWithGrants(StreamId(self.id)));
        }
        self.recv.state = RecvState::Ended;
        Ok(())
    }

    /// Records that END has been emitted. Returns whether the rest of the peer's half is discarded
    /// from now on: the response is complete, so the rest of the request is not needed.
    #[inline]
    pub(super) fn end_emitted(&mut self, side: Side) -> bool {
        self.send.state = SendState::Ended;
        let discards = side == Side::Server && self.recv.state.is_read();
        if discards {
            self.recv.state = RecvState::Discarding;
            self.landing.requests.clear();
        }
        discards
    }

    /// Whether both halves have ended.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.send.state.is_done() && self.recv.state.is_done()
    }
}
