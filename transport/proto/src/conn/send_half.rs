//! The half of a stream that this side sends: its output queue and its window.

use std::collections::VecDeque;

use bytes::Bytes;

use super::transfers::Bulk;
use crate::config::Terms;
use crate::error::Breach;
use crate::ids::StreamId;
use crate::payload::{LentPlace, Payload};

/// Maximum number of bytes around a field that are sent by SEND to a peer that names memory for the
/// field. These bytes are not split for lack of room in a message.
const MAX_AROUND: usize = 256;

/// The state of the half: see the table in `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendState {
    Open,
    Ending,
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
    /// Creates an open half. `out` must be empty.
    pub(super) fn new(out: VecDeque<OutputItem>, window: u32) -> Self {
        SendHalf {
            state: SendState::Open,
            out,
            queued: 0,
            full: false,
            window,
            peer_names: false,
            sends_data: false,
        }
    }

    /// Queues a header block. With `end`, nothing follows it.
    #[inline]
    pub(super) fn queue_headers(&mut self, block: Bytes, end: bool) {
        self.out.push_back(OutputItem::Headers { block, end, begun: false });
        if end {
            self.state = SendState::Ending;
        }
    }

    /// Handles WINDOW.
    ///
    /// # Errors
    /// [`Breach::WindowUpdate`].
    pub(super) fn on_window(&mut self, stream: StreamId, increment: u32) -> Result<(), Breach> {
        match self.window.checked_add(increment) {
            Some(window) if increment > 0 && window <= i32::MAX as u32 => self.window = window,
            _ => return Err(Breach::WindowUpdate(stream, increment)),
        }
        Ok(())
    }

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
