//! Sending without a WRITE: bytes that lie in memory which the peer has mapped, and reads there.
//!
//! The driver says which bytes of a piece may be lent
//! ([`Payload::last_is_lendable`](crate::Payload::last_is_lendable)). What lies around them goes
//! with them, so that the receiver has the whole piece at once:
//!
//! | the bytes are | on | next |
//! |---|---|---|
//! | queued | [`Connection::provide_lent`] with a place | lent, and told with LENT in their turn |
//! | queued | [`Connection::provide_lent`] without one | sent as any other bytes |
//! | queued | [`Connection::postpone_lend`] | queued again with [`Connection::retry_lends`] |
//! | lent, not told | the stream is reset, or taken back | [`Event::LeaseEnded`] |
//! | told | RETURN | [`Event::LeaseEnded`] |
//! | told | the end of the connection | the driver's: it keeps them as long as the peer may read them |
//!
//! Leases are bounded by number at the receiver, and in bytes by the driver of the owner, whose
//! memory they are: what it does not lend is copied, into landing memory that the windows bound. So
//! a reader that keeps what it was lent costs its peer the zero copy, and nothing else.

use bytes::Bytes;

use super::connection::Connection;
use super::leases::MAX_LEASES;
use super::stream::{Lend, OutputItem, RecvState};
use super::types::Event;
use crate::error::Breach;
use crate::frame::{Frame, LENT_MESSAGE};
use crate::ids::StreamId;
use crate::payload::{LentBody, LentPlace, Payload};

impl Connection {
    /// Whether a segment of the piece may be lent: it is aligned as the peer wants it where it
    /// lands, and the rest of the piece fits a message of a connection at rest, as the frame is not
    /// cut.
    pub(super) fn is_lendable(&self, payload: &Payload) -> bool {
        payload.lendable().is_some_and(|lendable| {
            let around = payload.len() - lendable.len();
            around + LENT_MESSAGE <= self.peer.rest_slot_size as usize
                && (lendable.as_ptr() as usize).is_multiple_of(self.peer.align.into())
                && u32::try_from(lendable.len()).is_ok()
        })
    }

    /// Queues a piece of which a segment may be lent.
    pub(super) fn queue_lendable(&mut self, key: usize, payload: Payload, end: bool) {
        let stream = &mut self.streams[key];
        stream.send.out.push_back(OutputItem::Lend(Box::new(Lend { payload, end, place: None })));
        self.leases.queue.push_back(stream.id);
    }

    /// Returns the next bytes that may be lent. The driver answers with
    /// [`provide_lent`](Self::provide_lent) or [`postpone_lend`](Self::postpone_lend) before it
    /// calls this again.
    pub fn poll_lend(&mut self) -> Option<(StreamId, Bytes)> {
        while let Some(&id) = self.leases.queue.front() {
            if let Some(bytes) = self.undecided(id).and_then(|lend| lend.payload.lendable()) {
                return Some((StreamId(id), bytes.clone()));
            }
            // The output of the stream has been dropped.
            self.leases.queue.pop_front();
        }
        None
    }

    /// What [`poll_lend`](Self::poll_lend) has returned, and its stream behind it, waits for
    /// [`retry_lends`](Self::retry_lends). Other streams go on.
    pub fn postpone_lend(&mut self) {
        self.leases.postponed.extend(self.leases.queue.pop_front());
    }

    /// Whether anything was postponed. The caller sees to it that it is tried again.
    pub fn has_postponed_lends(&self) -> bool {
        !self.leases.postponed.is_empty()
    }

    /// [`poll_lend`](Self::poll_lend) returns again what was postponed, before all else.
    pub fn retry_lends(&mut self) {
        while let Some(id) = self.leases.postponed.pop() {
            self.leases.queue.push_front(id);
        }
    }

    fn undecided(&mut self, id: u32) -> Option<&mut Lend> {
        let key = self.streams.key(id)?;
        self.streams[key].send.out.iter_mut().find_map(|out| match out {
            OutputItem::Lend(lend) if lend.place.is_none() => Some(&mut **lend),
            _ => None,
        })
    }

    /// Lends what [`poll_lend`](Self::poll_lend) has returned, or has it sent in another way. From
    /// here to [`Event::LeaseEnded`] with the number of the lease, or to the end of the connection,
    /// the bytes must not change. Only if [`may_lend`](Self::may_lend).
    pub fn provide_lent(&mut self, id: StreamId, place: Option<LentPlace>) {
        self.leases.queue.pop_front();
        self.leases.out += usize::from(place.is_some());
        let key = self.streams.key(id.0);
        let undecided =
            |out: &OutputItem| matches!(out, OutputItem::Lend(lend) if lend.place.is_none());
        let at = key.and_then(|key| self.streams[key].send.out.iter().position(undecided));
        match (key.zip(at), place) {
            (Some((key, at)), Some(_)) => {
                if let OutputItem::Lend(lend) = &mut self.streams[key].send.out[at] {
                    lend.place = place;
                }
                self.output.mark_send(key, &mut self.streams[key]);
            }
            (Some((key, at)), None) => {
                if let Some(OutputItem::Lend(lend)) = self.streams[key].send.out.remove(at) {
                    self.queue_piece(key, at, lend.payload.not_lendable(), lend.end);
                }
                self.prepare(key);
                self.output.mark_send(key, &mut self.streams[key]);
            }
            (None, Some(LentPlace { lease, .. })) => self.lease_ended(lease),
            (None, None) => {}
        }
    }

    /// Whether the peer may be told of one more lease.
    pub fn may_lend(&self) -> bool {
        self.is_live() && self.leases.out < MAX_LEASES
    }

    pub(super) fn lease_ended(&mut self, lease: u32) {
        self.leases.out -= 1;
        self.events.push_back(Event::LeaseEnded { lease });
    }

    /// Returns a lease of [`Event::Lent`]: nobody reads the bytes any longer. Does nothing if it
    /// has been returned.
    pub fn return_lease(&mut self, lease: u32) {
        if self.leases.borrowed.remove(&lease) {
            self.output.control.push(Frame::Return { lease });
        }
    }

    /// The number of leases that have not ended: this side's, and the peer's.
    pub fn leases(&self) -> (usize, usize) {
        (self.leases.out, self.leases.borrowed.len())
    }

    pub(super) fn on_lent(
        &mut self,
        key: usize,
        lent: Box<LentBody>,
        end: bool,
    ) -> Result<(), Breach> {
        let LentPlace { lease, addr, .. } = lent.place;
        let (stream, len, total) = (StreamId(self.streams[key].id), lent.len, lent.total());
        if !self.config.takes_lent {
            return Err(Breach::NotBorrowing(stream));
        }
        let bad = |why| Err(Breach::BadLease { stream, lease, why });
        if len == 0 {
            return bad("no bytes");
        }
        // These bytes are held until they are read, and count in no window.
        let around = lent.head.len() + lent.tail.len();
        if around + LENT_MESSAGE > self.config.rest_slot_size() as usize {
            return bad("more bytes around it than a message of a connection at rest has");
        }
        if addr.checked_add(len.into()).is_none() {
            return bad("reaches past the end of the address space");
        }
        if self.leases.borrowed.len() >= MAX_LEASES {
            return bad("too many that are not returned");
        }
        if !self.leases.borrowed.insert(lease) {
            return bad("its number is in use");
        }
        self.stats.borrowed += total;
        if self.streams[key].recv.state == RecvState::Discarding {
            self.leases.borrowed.remove(&lease);
            self.output.control.answer(Frame::Return { lease });
        } else {
            self.events.push_back(Event::Lent { stream, lent, end });
        }
        Ok(())
    }

    pub(super) fn on_return(&mut self, lease: u32) -> Result<(), Breach> {
        if !self.leases.lent.remove(&lease) {
            return Err(Breach::UnknownLease(lease));
        }
        self.lease_ended(lease);
        Ok(())
    }
}
