//! The half of a stream that this side sends: its output queue and its window.

use std::collections::VecDeque;

use bytes::Bytes;

use super::transfers::Bulk;
use crate::config::Terms;
use crate::error::Breach;
use crate::frame::{Composer, FRAME_HEADER, Frame};
use crate::headers::table::Sent;
use crate::ids::{GrantId, StreamId};
use crate::payload::{LentPlace, Payload};

/// Maximum number of bytes around a field that are sent by SEND to a peer that names memory for the
/// field. These bytes are not split for lack of room in a message.
const MAX_AROUND: usize = 256;

/// Minimum bytes of a part that is split off a longer piece. If the message has less room, the
/// piece waits for the next message.
const MIN_SPLIT: usize = 256;

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

/// The way in which a queued piece of a body is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuedPiece {
    /// SENDs carry the piece.
    Eager,
    /// WRITEs carry the piece, once there is memory for it.
    Bulk,
    /// The peer reads the piece where it lies, if the driver lends it.
    Lend,
}

/// A stream's next frame, which has been added to a message, or the reason why there is no frame.
/// `len` counts body bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum ComposedFrame {
    /// The stream has nothing more to send in a message now.
    Idle,
    /// The message has no room for the frame.
    Full,
    Request,
    Done {
        grant: GrantId,
        end: bool,
    },
    Lent {
        lease: u32,
        len: usize,
        end: bool,
    },
    /// If `more` is set, the rest of the block follows in the next message.
    Headers {
        more: bool,
        end: bool,
    },
    /// If `around` is set, the bytes lie around a field that is sent by WRITE.
    Data {
        len: usize,
        around: bool,
        end: bool,
    },
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

    /// Queues a piece of the body behind all other output.
    #[inline]
    pub(super) fn queue_payload(
        &mut self,
        payload: Payload,
        end: bool,
        terms: &Terms,
    ) -> QueuedPiece {
        if end {
            self.state = SendState::Ending;
        }
        if terms.is_lendable(&payload) {
            self.out.push_back(OutputItem::Lend(Box::new(Lend { payload, end, place: None })));
            return QueuedPiece::Lend;
        }
        match self.queue_piece(self.out.len(), payload, end, terms) {
            true => QueuedPiece::Bulk,
            false => QueuedPiece::Eager,
        }
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

    /// Adds the first frame of the queue to a message of the stream `id`. `lands` says whether this
    /// side names memory for the messages that it receives on the stream.
    #[inline]
    pub(super) fn compose(
        &mut self,
        id: u32,
        is_known: bool,
        lands: bool,
        message: &mut Composer<'_>,
        fields: &mut Sent,
    ) -> ComposedFrame {
        let Some(room) = message.room().checked_sub(FRAME_HEADER) else {
            return ComposedFrame::Full;
        };
        loop {
            return match self.out.front_mut() {
                Some(OutputItem::Bulk(bulk)) if self.sends_data && bulk.grants.is_empty() => {
                    let payload = std::mem::take(&mut bulk.payload);
                    self.out[0] = OutputItem::Eager { payload, end: bulk.end, around: false };
                    continue;
                }
                None | Some(OutputItem::Bulk(_)) => ComposedFrame::Idle,
                Some(OutputItem::Lend(lend)) => {
                    // Send nothing more until the driver has decided about the piece.
                    let Some(place) = lend.place else { return ComposedFrame::Idle };
                    let (len, end) = (lend.payload.len(), lend.end);
                    if !message.add_lent(id, end, place, &lend.payload) {
                        return ComposedFrame::Full;
                    }
                    self.out.pop_front();
                    ComposedFrame::Lent { lease: place.lease, len, end }
                }
                Some(OutputItem::Headers { block, end, begun }) => {
                    if room < block.len().min(MIN_SPLIT) {
                        return ComposedFrame::Full;
                    }
                    let (more, end) = (block.len() > room, *end);
                    let lands = lands && !*begun && !is_known;
                    if more || *begun {
                        let block = block.split_to(block.len().min(room));
                        let end = end && !more;
                        let stream = id;
                        message.add(&Frame::Headers {
                            stream,
                            end,
                            more,
                            indexed: false,
                            lands,
                            block,
                        });
                        *begun = true;
                    } else {
                        message.add_block(id, (end, lands), block, fields);
                    }
                    if !more {
                        self.out.pop_front();
                    }
                    ComposedFrame::Headers { more, end }
                }
                Some(OutputItem::Eager { payload, end, around }) => {
                    let allowed = payload.len().min(self.window as usize);
                    if allowed == 0 && !payload.is_empty() {
                        return ComposedFrame::Idle;
                    }
                    if room < allowed.min(MIN_SPLIT) {
                        return ComposedFrame::Full;
                    }
                    let (len, around) = (allowed.min(room), *around);
                    let last = payload.len() == len;
                    let end = *end && last;
                    message.add_data(id, end, len, payload);
                    self.window -= len as u32;
                    if last {
                        self.out.pop_front();
                    }
                    ComposedFrame::Data { len, around, end }
                }
            };
        }
    }
}
