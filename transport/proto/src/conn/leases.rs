//! Sending without a WRITE: the peer reads the bytes in place, in memory that it has mapped.
//!
//! The driver says which bytes of a piece may be lent
//! ([`Payload::last_is_lendable`](crate::Payload::last_is_lendable)). The bytes around the lent
//! bytes are sent in the same frame, so the receiver has the whole piece at once:
//!
//! | the bytes are | on | next |
//! |---|---|---|
//! | queued | `Connection::provide_lent` with a place | lent; LENT announces them to the peer in their turn |
//! | queued | `Connection::provide_lent` without a place | sent like any other bytes |
//! | queued | `Connection::postpone_lend` | queued again with `Connection::retry_lends` |
//! | lent, not announced | the stream is reset or withdrawn | [`Event::LeaseEnded`](super::Event::LeaseEnded) |
//! | announced | RETURN | `Event::LeaseEnded` |
//! | announced | the end of the connection | the driver keeps them as long as the peer may read them |
//!
//! The receiver bounds the number of leases, and the owner's driver bounds their bytes. Bytes that
//! are not lent are copied into landing memory, which the windows bound. So if a reader keeps lent
//! bytes, the only effect is that its peer copies later bytes.

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasherDefault;

use bytes::Bytes;

use super::send_half::OutputItem;
use super::stream::Stream;
use super::streams::Streams;
use crate::config::Config;
use crate::error::Breach;
use crate::frame::LENT_MESSAGE;
use crate::ids::IdHasher;
use crate::ids::StreamId;
use crate::payload::{LentBody, LentPlace};

/// Maximum number of leases that a side may hold from the other side.
pub(super) const MAX_LEASES: usize = 4096;

type LeaseSet = HashSet<u32, BuildHasherDefault<IdHasher>>;

/// The leases that the sides have given each other.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// Ids of streams with pieces that the driver has to decide about. An id is in the queue once
    /// for each such piece.
    queue: VecDeque<u32>,
    /// Streams taken out of `queue`, whose first undecided piece waits until the peer has mapped
    /// the piece's memory.
    postponed: Vec<u32>,
    /// The number of leases that were provided and have not ended.
    out: usize,
    /// The leases that a LENT has announced to the peer.
    lent: LeaseSet,
    /// Leases that the peer has given and this side has not returned.
    borrowed: LeaseSet,
}

impl Leases {
    /// Whether the driver has to decide about a piece.
    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Records that the driver has to decide about one more piece of a stream.
    pub(super) fn queue(&mut self, stream: &Stream) {
        self.queue.push_back(stream.id);
    }

    /// Records that the driver has to decide about the pieces of a stream that has waited for the
    /// peer to allow one more stream.
    pub(super) fn queue_all(&mut self, stream: &Stream) {
        let pieces = stream.send.out.iter().filter(|out| matches!(out, OutputItem::Lend(_)));
        self.queue.extend(pieces.map(|_| stream.id));
    }

    /// Returns the next bytes about which the driver has to decide.
    pub(super) fn poll(&mut self, streams: &Streams) -> Option<(StreamId, Bytes)> {
        while let Some(&id) = self.queue.front() {
            let stream = streams.key(id).map(|key| &streams[key]);
            if let Some(bytes) = stream.and_then(|stream| stream.send.undecided()?.1.lendable()) {
                return Some((StreamId(id), bytes.clone()));
            }
            // Skip the stream, because its output has been dropped.
            self.queue.pop_front();
        }
        None
    }

    /// Makes the first piece, and its stream with it, wait for [`retry`](Self::retry).
    pub(super) fn postpone(&mut self) {
        self.postponed.extend(self.queue.pop_front());
    }

    pub(super) fn has_postponed(&self) -> bool {
        !self.postponed.is_empty()
    }

    pub(super) fn retry(&mut self) {
        while let Some(id) = self.postponed.pop() {
            self.queue.push_front(id);
        }
    }

    /// Records the driver's decision about the first piece: whether it is lent.
    pub(super) fn decide(&mut self, is_lent: bool) {
        self.queue.pop_front();
        self.out += usize::from(is_lent);
    }

    /// Whether this side may lend again, because fewer than [`MAX_LEASES`] of its leases are open.
    pub(super) fn may_lend(&self) -> bool {
        self.out < MAX_LEASES
    }

    /// Records that a LENT announces a lease to the peer.
    pub(super) fn told(&mut self, lease: u32) {
        self.lent.insert(lease);
    }

    /// Records the end of a lease that no LENT has announced to the peer.
    pub(super) fn ended(&mut self) {
        self.out -= 1;
    }

    /// Handles RETURN.
    ///
    /// # Errors
    /// [`Breach::UnknownLease`].
    pub(super) fn on_return(&mut self, lease: u32) -> Result<(), Breach> {
        if !self.lent.remove(&lease) {
            return Err(Breach::UnknownLease(lease));
        }
        self.out -= 1;
        Ok(())
    }

    /// Handles LENT.
    ///
    /// # Errors
    /// [`Breach::NotBorrowing`], [`Breach::BadLease`].
    pub(super) fn on_lent(
        &mut self,
        stream: StreamId,
        lent: &LentBody,
        config: &Config,
    ) -> Result<(), Breach> {
        if !config.takes_lent {
            return Err(Breach::NotBorrowing(stream));
        }
        let LentPlace { lease, addr, .. } = lent.place;
        let bad = |why| Err(Breach::BadLease { stream, lease, why });
        if lent.len == 0 {
            return bad("no bytes");
        }
        // Limit the bytes that surround the lent bytes: this side holds the surrounding bytes until
        // they are read, and they count in no window.
        let around = lent.head.len() + lent.tail.len();
        if around + LENT_MESSAGE > config.rest_slot_size() as usize {
            return bad("more bytes around it than a message of a connection at rest has");
        }
        if addr.checked_add(lent.len.into()).is_none() {
            return bad("reaches past the end of the address space");
        }
        if self.borrowed.len() >= MAX_LEASES {
            return bad("too many that are not returned");
        }
        if !self.borrowed.insert(lease) {
            return bad("its number is in use");
        }
        Ok(())
    }

    /// Removes one of the peer's leases, whose bytes nobody reads any longer. Returns whether the
    /// lease was open.
    pub(super) fn give_back(&mut self, lease: u32) -> bool {
        self.borrowed.remove(&lease)
    }

    /// The number of leases that have not ended: this side's, and the peer's.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.out, self.borrowed.len())
    }
}
