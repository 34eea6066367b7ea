//! The application's side of streams: open, send, reset and consume.

use bytes::Bytes;

use super::connection::Connection;
use super::send_half::{QueuedPiece, SendState};
use super::stream::DroppedOutput;
use super::types::{Event, Flow, SendError, Side, Unsent};
use crate::frame::Frame;
use crate::hello::PeerSettings;
use crate::ids::{ResetCode, StreamId};
use crate::payload::Payload;

impl Connection {
    /// Opens a stream with a header block (client only). `end` means that no body follows.
    ///
    /// If the peer allows no more streams, the stream waits: nothing of it is sent until other
    /// streams have ended. Streams begin in the order in which they were opened.
    ///
    /// # Errors
    /// [`SendError::GoingAway`], [`SendError::HeadersTooLong`]. On an error the connection is
    /// unchanged.
    pub fn open(&mut self, block: Bytes, end: bool) -> Result<StreamId, SendError> {
        if self.life.side == Side::Server || !self.takes_streams() {
            return Err(SendError::GoingAway);
        }
        check_block(&block, &self.terms.peer)?;
        let (id, key) = self.streams.open().ok_or(SendError::GoingAway)?;
        self.streams[key].send.peer_names = self.peer_grants.names_requests();
        self.timers.heartbeat.rouse();
        self.push_headers(key, block, end);
        Ok(StreamId(id))
    }

    fn push_headers(&mut self, key: usize, block: Bytes, end: bool) {
        let stream = &mut self.streams[key];
        stream.send.queue_headers(block, end);
        self.output.mark_send(key, stream);
    }

    fn open_for_sending(&self, id: StreamId) -> Result<usize, SendError> {
        let key = self.streams.key(id.0).ok_or(SendError::Closed)?;
        if self.is_live() && self.streams[key].send.state.accepts() {
            Ok(key)
        } else {
            Err(SendError::Closed)
        }
    }

    /// Queues a header block: response headers, or trailers with `end`.
    ///
    /// # Errors
    /// [`SendError::Closed`], [`SendError::HeadersTooLong`].
    pub fn send_headers(&mut self, id: StreamId, block: Bytes, end: bool) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        check_block(&block, &self.terms.peer)?;
        self.push_headers(key, block, end);
        Ok(())
    }

    /// Like [`Connection::send_payload`], for a piece in one segment. `pinned` means that the piece
    /// lies in memory that the device can read.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn send_data(
        &mut self,
        id: StreamId,
        bytes: Bytes,
        pinned: bool,
        end: bool,
    ) -> Result<(), SendError> {
        let mut payload = Payload::new();
        payload.push(bytes, pinned);
        self.send_payload(id, payload, end)
    }

    /// Queues a piece of the body. If [`Connection::has_room`] is false, the caller should wait for
    /// [`Event::Writable`] first, but the piece is accepted in any case.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn send_payload(
        &mut self,
        id: StreamId,
        payload: Payload,
        end: bool,
    ) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        if payload.is_empty() && !end {
            return Ok(());
        }
        let stream = &mut self.streams[key];
        self.output.add(stream, payload.len());
        let queued = stream.send.queue_payload(payload, end, &self.terms);
        if !stream.queues.waits {
            match queued {
                QueuedPiece::Eager => {}
                QueuedPiece::Bulk => self.peer_grants.prepare(key, stream, &mut self.output),
                QueuedPiece::Lend => self.leases.queue(stream),
            }
        }
        self.output.mark_send(key, stream);
        Ok(())
    }

    /// Ends this side's half of the stream after the queued output.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn finish(&mut self, id: StreamId) -> Result<(), SendError> {
        self.send_payload(id, Payload::new(), true)
    }

    /// Whether more output may be queued without waiting. False for a closed stream. If an open
    /// stream has no room, [`Event::Writable`] follows once it has room.
    pub fn has_room(&mut self, id: StreamId) -> bool {
        let Ok(key) = self.open_for_sending(id) else { return false };
        self.output.has_room(&mut self.streams[key])
    }

    /// Whether the stream accepts output at all.
    pub fn is_open_for_sending(&self, id: StreamId) -> bool {
        self.open_for_sending(id).is_ok()
    }

    /// Records that `len` bytes of output have been handed out.
    pub(super) fn sent_bytes(&mut self, key: usize, len: usize) {
        let stream = &mut self.streams[key];
        if self.output.sent(stream, len) {
            self.events.push_back(Event::Writable { stream: StreamId(stream.id) });
        }
    }

    /// Binds memory to the transfers of a stream, or requests memory for them.
    pub(super) fn prepare(&mut self, key: usize) {
        self.peer_grants.prepare(key, &mut self.streams[key], &mut self.output);
    }

    /// Resets a stream: drops its output, discards bytes that still arrive, and sends RESET. Does
    /// nothing for streams that are unknown or have ended.
    pub fn reset(&mut self, id: StreamId, code: ResetCode) {
        let Some(key) = self.streams.key(id.0) else { return };
        let Some(dropped) = self.streams[key].reset_by_us() else { return };
        self.give_up(dropped);
        if !self.streams.is_known(id.0) {
            // Send no RESET, because the peer does not know the stream.
            self.remove(key);
            return;
        }
        self.output.control.reset(&mut self.streams[key], code);
        self.remove_if_done(key);
    }

    /// Takes back the output that was queued on a stream after its header block. Returns nothing if
    /// the peer may know the stream, or if there is no such stream.
    pub fn withdraw(&mut self, id: StreamId) -> Vec<Unsent> {
        let Some(key) = self.streams.key(id.0).filter(|_| !self.streams.is_known(id.0)) else {
            return Vec::new();
        };
        let (unsent, dropped) = self.streams[key].take_unsent();
        self.give_up(dropped);
        unsent
    }

    /// Releases a stream that the application has dropped and will read no further, even if the
    /// stream has ended. Like [`Connection::reset`], except that a server still sends a response
    /// that has been queued completely.
    pub fn release(&mut self, id: StreamId, code: ResetCode) {
        match self.streams.find(id) {
            Some((_, stream)) => stream.recv.released = true,
            None => self.landing.unread.release_ended(id),
        }
        let ending = |key| self.streams[key].send.state == SendState::Ending;
        if self.life.side == Side::Client || !self.streams.key(id.0).is_some_and(ending) {
            self.reset(id, code);
        }
    }

    pub(super) fn give_up(&mut self, dropped: DroppedOutput) {
        self.output.dropped(dropped.queued);
        for grant in dropped.grants {
            self.peer_grants.abort(grant, &mut self.output.control);
        }
        for lease in dropped.leases {
            self.lease_ended(lease);
        }
    }

    /// Records that the application has read `len` bytes of a stream, accounted as `flow`. The
    /// stream may have ended. Does nothing for unknown streams.
    pub fn consume(&mut self, id: StreamId, len: u32, flow: Flow) {
        match (self.streams.find(id), flow) {
            (Some((key, stream)), Flow::Bulk) => self.landing.consume(key, stream, len),
            (None, Flow::Bulk) => self.landing.unread.read_of_ended(id, len),
            (Some((_, stream)), Flow::Window) => {
                if let Some(increment) = self.landing.unread.read_small(stream, len) {
                    self.output.control.push(Frame::Window { stream: id.0, increment });
                }
            }
            (None, Flow::Window) | (_, Flow::Named | Flow::Lent) => {}
        }
    }
}

/// Checks the length of a header block against the peer's limit.
fn check_block(block: &Bytes, peer: &PeerSettings) -> Result<(), SendError> {
    let (len, limit) = (block.len(), peer.max_headers);
    if len > limit as usize { Err(SendError::HeadersTooLong { len, limit }) } else { Ok(()) }
}
