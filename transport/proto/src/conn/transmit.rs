//! Sending: composes messages and hands out WRITEs.

use super::connection::Connection;
use super::send_half::ComposedFrame;
use super::types::{Event, Room, Transmit, Write};
use crate::frame::Composer;
use crate::ids::{ResetCode, StreamId};

#[derive(PartialEq, Eq)]
enum Composed {
    /// The stream has nothing more to send in a message now.
    Idle,
    /// The message is full.
    Full,
}

impl Connection {
    /// Returns the next work to post. `slot` is a free SEND slot, if there is one. If
    /// [`Transmit::Send`] is returned, the message is at the beginning of the slot. WRITEs respect
    /// `room`. `None` if there is nothing to do, or no room or credit for it.
    pub fn poll_transmit(&mut self, slot: Option<&mut [u8]>, room: Room) -> Option<Transmit> {
        if !self.is_live() {
            return slot.and_then(|slot| self.compose_close(slot)).map(Transmit::Send);
        }
        // SENDs and WRITEs alternate, so that neither small messages nor bulk transfers starve
        // (R13).
        if self.output.wrote_last {
            if let Some(len) = slot.and_then(|slot| self.compose(slot)) {
                self.output.wrote_last = false;
                return Some(Transmit::Send(len));
            }
            return self.next_write(room).map(Transmit::Write);
        }
        if let Some(write) = self.next_write(room) {
            self.output.wrote_last = true;
            return Some(Transmit::Write(write));
        }
        slot.and_then(|slot| self.compose(slot)).map(Transmit::Send)
    }

    /// Whether the caller has to act for this connection: send, grant memory, decide about lending,
    /// or take events. Credits to return do not count: they become due with received messages.
    pub fn wants_flush(&self) -> bool {
        self.output.has_output()
            || self.has_events()
            || self.landing.wants_memory(&self.streams)
            || self.leases.has_queued()
            || self.output.control.has_close()
    }

    /// Whether [`Connection::poll_event`] returns anything.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether [`Connection::poll_landing`] or [`Connection::poll_named`] may return anything, now
    /// or under another [limit](Connection::limit_standing). False while a connection carries only
    /// small calls.
    #[inline]
    pub fn may_want_memory(&self) -> bool {
        self.landing.grants.gives_standing() || self.landing.streams_want(&self.streams)
    }

    /// Whether [`Connection::poll_lend`] returns anything.
    #[inline]
    pub fn has_queued_lends(&self) -> bool {
        self.leases.has_queued()
    }

    /// Whether [`Connection::poll_lend`] may return anything, now or after
    /// [`Connection::retry_lends`].
    #[inline]
    pub fn waits_to_lend(&self) -> bool {
        self.leases.has_queued() || self.leases.has_postponed()
    }

    /// Like [`Connection::wants_flush`], but also true while credits are due to be returned, and
    /// until the client's first message has been sent or received.
    pub fn is_due(&self) -> bool {
        self.wants_flush() || self.credits.return_due() || !self.life.greeted
    }

    /// Whether any payload that must be staged waits to be written.
    pub fn waits_to_stage(&self) -> bool {
        self.output.has_staged()
    }

    /// Whether any payload waits to be written to memory that the peer has granted.
    pub fn waits_to_write(&self) -> bool {
        self.output.has_writes()
    }

    /// Composes CLOSE, if it is due and has not been sent.
    fn compose_close(&mut self, slot: &mut [u8]) -> Option<usize> {
        if !self.credits.may_close() || self.life.awaits_greeting() {
            return None;
        }
        let frame = self.output.control.take_close()?;
        let mut message = self.credits.composer(slot);
        message.add(&frame);
        self.end_life();
        self.stats.messages_sent += 1;
        Some(self.credits.finish(message))
    }

    fn compose(&mut self, slot: &mut [u8]) -> Option<usize> {
        let greeting = self.life.owes_greeting();
        let wanted = greeting || self.output.has_frames() || self.credits.return_due();
        if !wanted || self.life.awaits_greeting() {
            return None;
        }
        if !self.credits.may_send() {
            self.stats.credit_waits += u64::from(!self.output.wait_for_credit());
            return None;
        }
        let mut message = self.credits.composer(slot);
        let composed = match self.output.control.fill(&mut message) {
            true => self.compose_streams(&mut message),
            false => Composed::Full,
        };
        if message.is_empty() && !greeting && !self.credits.return_due() {
            // Send nothing, because all streams wait for their windows.
            return None;
        }
        // If the output did not fit into the short RECV of a peer at rest, the flag WAITED asks for
        // longer RECVs.
        let is_cut = composed == Composed::Full && self.credits.is_next_short();
        if self.output.take_waited() || is_cut {
            message.waited();
        }
        self.life.greeted = true;
        self.stats.messages_sent += 1;
        Some(self.credits.finish(message))
    }

    fn compose_streams(&mut self, message: &mut Composer<'_>) -> Composed {
        while let Some(key) = self.output.take_stream(&mut self.streams) {
            let composed = self.compose_stream(key, message);
            // The stream is gone if it has ended.
            let Some((stream, is_known)) = self.streams.get_mut(key) else { continue };
            if composed == Composed::Full {
                self.output.put_back(key, stream, is_known);
                return Composed::Full;
            }
            self.output.mark_write(key, stream);
        }
        Composed::Idle
    }

    fn compose_stream(&mut self, key: usize, message: &mut Composer<'_>) -> Composed {
        let mut is_known = self.streams.is_known(self.streams[key].id);
        loop {
            let stream = &mut self.streams[key];
            let end = match stream.compose(is_known, message, &mut self.output.fields) {
                ComposedFrame::Idle => return Composed::Idle,
                ComposedFrame::Full => return Composed::Full,
                ComposedFrame::Request => continue,
                ComposedFrame::Done { grant, end } => {
                    self.peer_grants.done(grant);
                    if !end {
                        continue;
                    }
                    end
                }
                ComposedFrame::Lent { lease, len, end } => {
                    self.leases.told(lease);
                    self.stats.lent += len as u64;
                    self.sent_bytes(key, len);
                    end
                }
                ComposedFrame::Headers { more, end } => {
                    if !is_known {
                        self.transmitted(key);
                        is_known = true;
                    }
                    if more {
                        return Composed::Full;
                    }
                    end
                }
                ComposedFrame::Data { len, around, end } => {
                    self.stats.eager_sent += len as u64;
                    self.stats.around_sent += if around { len as u64 } else { 0 };
                    self.sent_bytes(key, len);
                    end
                }
            };
            if end {
                self.ended(key);
                return Composed::Idle;
            }
            self.prepare(key);
        }
    }

    /// Handles the emission of a stream's first frame.
    #[inline]
    fn transmitted(&mut self, key: usize) {
        let stream = &self.streams[key];
        let id = stream.id;
        self.stats.streams += 1;
        // Report room, because the body may have been waiting until the peer knows the stream.
        if stream.send.state.accepts() {
            self.events.push_back(Event::Writable { stream: StreamId(id) });
        }
        self.streams.transmitted(id);
    }

    /// Handles the emission of END.
    fn ended(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if stream.end_emitted(self.life.side) {
            self.output.control.reset(stream, ResetCode::NO_ERROR);
        }
        self.remove_if_done(key);
    }

    fn next_write(&mut self, room: Room) -> Option<Write> {
        if !self.waits_to_write() {
            return None;
        }
        let chunk = room.chunk.max(self.terms.own.write_chunk as usize);
        let taken = self.output.take_write(&mut self.streams, room, chunk)?;
        self.stats.count_write(&taken.write);
        let stream = &mut self.streams[taken.key];
        if taken.has_room {
            self.events.push_back(Event::Writable { stream: StreamId(stream.id) });
        }
        if taken.is_last {
            self.peer_grants.prepare(taken.key, stream, &mut self.output);
            self.output.mark_write(taken.key, stream);
        }
        Some(taken.write)
    }
}
