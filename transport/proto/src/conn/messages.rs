//! The messages of a connection, and its timers.
//!
//! Each received frame goes to the part whose state it changes. A message that is sent consists of
//! control frames and of the frames that streams compose. A timer that is due sends a PING, asks
//! for a proof, recalls grants, or ends the connection.

use std::time::Instant;

use bytes::Bytes;

use super::connection::Connection;
use super::credits::Returned;
use super::heartbeat::Beat;
use super::keep_alive::KeepAliveCheck;
use super::lifecycle::Lifecycle;
use super::recv_half::HeaderBlock;
use super::send_half::ComposedFrame;
use super::stream::PeerReset;
use super::transfers::{PeerGrant, QueuedRequest};
use super::types::{Event, Pending, Room, Side, Transmit, Write};
use crate::error::{Breach, CloseCode};
use crate::frame::{Composer, Frame, Reader};
use crate::ids::{GrantId, ResetCode, StreamId};
use crate::payload::LentBody;

/// Why no more frames of a stream are added to a message.
#[derive(PartialEq, Eq)]
enum Composed {
    /// The stream has nothing more to send in a message now.
    Idle,
    /// The message is full.
    Full,
}

impl Connection {
    /// Processes one received message. The message's RECV slot must have been posted again before
    /// this call (R1), unless [`recv_gone`](Self::recv_gone) follows. So `message` is a copy, or
    /// lies in memory that is not posted.
    ///
    /// `now` may be the time of an earlier message of this connection, up to a second ago. The next
    /// probe or PING is then due that much earlier, and idle periods seem that much longer.
    ///
    /// # Errors
    /// The peer broke the protocol. The connection is closing: a CLOSE frame that names the breach
    /// is the only output left. The message's frames after the breach have had no effect.
    pub fn receive(&mut self, now: Instant, message: Bytes) -> Result<(), Breach> {
        match self.life.stage {
            Lifecycle::Open | Lifecycle::Draining | Lifecycle::Drained => {}
            Lifecycle::Closed => return Ok(()),
            Lifecycle::Closing => {
                // Read only the credits, because CLOSE may still wait for a credit. Breaches no
                // longer matter.
                let len = message.len();
                let _ = Reader::new(message)
                    .and_then(|reader| self.credits.received(Returned::by(&reader), len));
                return Ok(());
            }
        }
        let result = self.receive_frames(now, message);
        if let Err(breach) = &result {
            self.close(CloseCode::Breach, &breach.to_string());
        }
        result
    }

    fn receive_frames(&mut self, now: Instant, message: Bytes) -> Result<(), Breach> {
        self.timers.received(now);
        self.stats.messages_received += 1;
        if self.life.side == Side::Server {
            self.life.greeted = true;
        }
        let len = message.len();
        let mut reader = Reader::new(message)?;
        self.credits.received(Returned::by(&reader), len)?;
        if reader.waited {
            self.credits.peer_ran_short();
            self.timers.active(now);
        }
        while let Some(frame) = reader.next_frame()? {
            self.on_frame(frame, now)?;
            if self.life.stage == Lifecycle::Closed {
                return Ok(());
            }
        }
        self.output.control.check_flood(self.terms.own.max_streams)
    }

    fn on_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Breach> {
        let name = frame.name();
        match frame {
            Frame::Ping { .. } => self.check_quiet(now),
            _ => self.timers.active(now),
        }
        match frame {
            Frame::Headers { stream, end, more, indexed: false, lands, block } => {
                self.on_headers(stream, end, more, lands, block)
            }
            Frame::Headers { stream, end, more, indexed: true, lands, block } => {
                let begun = |key| !self.streams[key].recv.block.is_empty();
                if self.streams.key(stream).is_some_and(begun) {
                    return Err(Breach::FrameOrder {
                        frame: "indexed HEADERS",
                        stream: StreamId(stream),
                    });
                }
                // Expand the block even if the stream is discarded, because both sides' header
                // tables must stay equal.
                let limit = self.terms.own.max_headers;
                let breach = Breach::HeaderBlock { stream: StreamId(stream), limit };
                let block = self.received_fields.expand(&block, limit as usize)?.ok_or(breach)?;
                self.on_headers(stream, end, more, lands, block)
            }
            Frame::Data { stream, end, data } => self.on_data(stream, end, data),
            Frame::Window { stream, increment } => self.on_window(stream, increment),
            Frame::Reset { stream, code } => self.on_reset(stream, ResetCode(code), now),
            Frame::Request { stream, len, begin, field } => {
                let key = self.streams.receiving(name, stream)?;
                let request = QueuedRequest { len, begin, field };
                let control = &mut self.output.control;
                self.landing.on_request(key, request, now, &mut self.streams, control)
            }
            Frame::Grant { stream, id, rkey, len, addr } => {
                let grant = PeerGrant::new(GrantId(id), stream == 0, rkey, len, addr);
                self.peer_grants.on_grant(stream, grant, &mut self.streams, &mut self.output)
            }
            Frame::Done { stream, end, id, len, begin } => {
                let key = self.streams.receiving(name, stream)?;
                let stream = &mut self.streams[key];
                stream.recv.check_body(name, StreamId(stream.id))?;
                let landed = self.landing.on_done(key, stream, id, (begin, len), end, now)?;
                self.events.push_back(landed);
                self.stats.write_received += u64::from(len);
                self.on_end(key, end)
            }
            Frame::Lent { stream, end, lent } => {
                let key = self.streams.receiving(name, stream)?;
                self.streams[key].recv.check_body(name, StreamId(stream))?;
                self.on_lent(key, lent, end)?;
                self.on_end(key, end)
            }
            Frame::Return { lease } => {
                self.leases.on_return(lease)?;
                self.events.push_back(Event::LeaseEnded { lease });
                Ok(())
            }
            Frame::Decline { stream, own: true } => {
                let key = self.streams.receiving(name, stream)?;
                self.streams[key].landing.decline();
                Ok(())
            }
            Frame::Decline { stream, own: false } => {
                if let Some(key) = self.streams.known(name, stream)? {
                    self.output.send_data_from_now_on(key, &mut self.streams[key]);
                }
                Ok(())
            }
            Frame::Abort { id } => {
                let memory = self.landing.on_abort(id, &mut self.streams)?;
                self.events.push_back(Event::Returned { memory });
                Ok(())
            }
            Frame::Recall { id } => {
                self.peer_grants.on_recall(id, &mut self.streams, &mut self.output);
                Ok(())
            }
            Frame::Ping { ack: false, token } => {
                self.output.control.answer(Frame::Ping { ack: true, token });
                Ok(())
            }
            Frame::Ping { ack: true, .. } => self.timers.heartbeat.pong(),
            Frame::GoAway { ack, code, text } => self.on_go_away(ack, code, &text),
            Frame::Close { code, text } => {
                self.on_close(code, &text);
                Ok(())
            }
        }
    }

    fn on_headers(
        &mut self,
        id: u32,
        end: bool,
        more: bool,
        lands: bool,
        mut block: Bytes,
    ) -> Result<(), Breach> {
        let stream_id = StreamId(id);
        let is_server = self.life.side == Side::Server;
        let opens = is_server && !self.streams.is_known(id);
        if lands && !opens {
            return Err(Breach::FrameOrder { frame: "HEADERS with LANDS", stream: stream_id });
        }
        let key = match opens {
            true => self.accept_stream(id)?,
            false => self.streams.receiving("HEADERS", id)?,
        };
        let stream = &mut self.streams[key];
        stream.send.peer_names |= lands;
        let limit = self.terms.own.max_headers;
        match stream.recv.on_headers(stream_id, (end, more), &mut block, limit)? {
            HeaderBlock::Incomplete => return Ok(()),
            HeaderBlock::Discarded => {}
            HeaderBlock::First if is_server => {
                self.events.push_back(Event::Opened { stream: stream_id, block, end });
            }
            HeaderBlock::First | HeaderBlock::Trailers => {
                self.events.push_back(Event::Headers { stream: stream_id, block, end });
            }
        }
        self.on_end(key, end)
    }

    fn accept_stream(&mut self, id: u32) -> Result<usize, Breach> {
        self.life.check_accepts(StreamId(id))?;
        let key = self.streams.accept(id, &self.terms.own)?;
        self.stats.streams += 1;
        Ok(key)
    }

    fn on_data(&mut self, id: u32, end: bool, data: Bytes) -> Result<(), Breach> {
        let key = self.streams.receiving("DATA", id)?;
        let recv = &mut self.streams[key].recv;
        let (stream, len) = (StreamId(id), data.len() as u32);
        recv.on_data(stream, len)?;
        self.stats.eager_received += u64::from(len);
        if !recv.state.is_discarded() && (len > 0 || end) {
            self.events.push_back(Event::Data { stream, data, end });
        }
        self.on_end(key, end)
    }

    /// Ends the peer's half if `end` is set.
    fn on_end(&mut self, key: usize, end: bool) -> Result<(), Breach> {
        if end {
            self.streams[key].on_end()?;
            self.remove_if_done(key);
        }
        Ok(())
    }

    fn on_window(&mut self, id: u32, increment: u32) -> Result<(), Breach> {
        // Ignore WINDOW for a stream that has ended on this side, because the peer may still read
        // the stream.
        let Some(key) = self.streams.known("WINDOW", id)? else { return Ok(()) };
        self.streams[key].send.on_window(StreamId(id), increment)?;
        self.output.mark_send(key, &mut self.streams[key]);
        Ok(())
    }

    fn on_reset(&mut self, id: u32, code: ResetCode, now: Instant) -> Result<(), Breach> {
        // Ignore a RESET that crossed this side's END.
        let Some(key) = self.streams.known("RESET", id)? else { return Ok(()) };
        let PeerReset { dropped, is_answered, is_read } =
            self.streams[key].on_reset(self.life.side);
        self.give_up(dropped);
        if is_answered {
            self.output.control.answer(Frame::Reset { stream: id, code: ResetCode::CANCEL.0 });
        }
        if is_read {
            self.events.push_back(Event::Reset { stream: StreamId(id), code });
        }
        self.remove_if_done(key);
        match (self.life.side, is_answered) {
            (Side::Server, true) => self.streams.resets.charge(now),
            _ => Ok(()),
        }
    }

    pub(super) fn on_lent(
        &mut self,
        key: usize,
        lent: Box<LentBody>,
        end: bool,
    ) -> Result<(), Breach> {
        let stream = StreamId(self.streams[key].id);
        self.leases.on_lent(stream, &lent, &self.terms.own)?;
        self.stats.borrowed += lent.total();
        if self.streams[key].recv.state.is_discarded() {
            let lease = lent.place.lease;
            self.leases.give_back(lease);
            self.output.control.answer(Frame::Return { lease });
        } else {
            self.events.push_back(Event::Lent { stream, lent, end });
        }
        Ok(())
    }

    pub(super) fn on_go_away(&mut self, ack: bool, code: u32, text: &[u8]) -> Result<(), Breach> {
        if self.life.on_go_away(ack)? {
            self.refuse(self.streams.unknown_to_peer());
            let answer = Frame::GoAway { ack: true, code, text: Bytes::new() };
            self.output.control.push(answer);
            let text = String::from_utf8_lossy(text).into_owned();
            self.events.push_back(Event::GoAway { code: CloseCode::from_wire(code), text });
        }
        Ok(())
    }

    pub(super) fn on_close(&mut self, code: u32, text: &[u8]) {
        let text = String::from_utf8_lossy(text).into_owned();
        self.die(Event::Closed { code: CloseCode::from_wire(code), text });
    }

    /// Ends the connection, and reports the cause.
    fn die(&mut self, cause: Event) {
        self.end_life();
        self.events.push_back(cause);
    }

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
        let Some((mut stream, mut is_known)) = self.streams.get_mut(key) else {
            return Composed::Idle;
        };
        let id = StreamId(stream.id);
        loop {
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
                    if self.output.sent(stream, len) {
                        self.events.push_back(Event::Writable { stream: id });
                    }
                    end
                }
                ComposedFrame::Headers { more, end } => {
                    if !is_known {
                        is_known = true;
                        self.stats.streams += 1;
                        // Report room, because the body may have been waiting until the peer knows
                        // the stream.
                        if stream.send.state.accepts() {
                            self.events.push_back(Event::Writable { stream: id });
                        }
                        self.streams.transmitted(id.0);
                        stream = &mut self.streams[key];
                    }
                    if more {
                        return Composed::Full;
                    }
                    end
                }
                ComposedFrame::Data { len, around, end } => {
                    self.stats.eager_sent += len as u64;
                    self.stats.around_sent += if around { len as u64 } else { 0 };
                    if self.output.sent(stream, len) {
                        self.events.push_back(Event::Writable { stream: id });
                    }
                    end
                }
            };
            if end {
                self.ended(key);
                return Composed::Idle;
            }
            self.peer_grants.prepare(key, stream, &mut self.output);
        }
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

    /// Returns when [`Connection::handle_timeout`] is due next.
    pub fn next_timeout(&self) -> Option<Instant> {
        if !self.is_live() {
            return None;
        }
        let answers = self.landing.clock.deadline(self.timers.heartbeat.last_received());
        let others = [self.landing.grants.recall_deadline(), answers];
        others.into_iter().chain([self.timers.deadline()]).flatten().min()
    }

    /// Handles the timers. Received messages must be passed to [`receive`](Self::receive) first.
    ///
    /// # Errors
    /// The peer has kept memory for too long while others wait for it. The connection is closing,
    /// as after a breach in [`receive`](Self::receive).
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Breach> {
        if !self.is_live() {
            return Ok(());
        }
        if self.timers.is_silent(now) {
            self.check_quiet(now);
        }
        match self.timers.heartbeat.timeout(now, self.is_idle()) {
            Beat::Nothing | Beat::Rest => {}
            Beat::Probe => self.events.push_back(Event::Probe),
            Beat::Dead => {
                self.die(Event::Dead);
                return Ok(());
            }
        }
        match self.timers.check_keep_alive(now, !self.streams.is_empty()) {
            KeepAliveCheck::Nothing => {}
            KeepAliveCheck::Ping => self.send_ping(),
            KeepAliveCheck::Dead => {
                self.die(Event::KeepAliveTimedOut);
                return Ok(());
            }
        }
        if self.landing.grants.recall_deadline().is_some_and(|at| now >= at) {
            self.recall_standing();
        }
        if self.timers.retires_recv(now, self.credits.has_extra()) {
            self.send_ping();
        }
        let handed_out = self.output.control.handed_out();
        let owed = self.landing.tick(now, &self.streams, handed_out);
        if let Err(breach) = &owed {
            self.close(CloseCode::Breach, &breach.to_string());
        }
        owed
    }

    /// Sends a PING, unless an earlier PING is unanswered. Callers use a PING if they need some
    /// message to be sent.
    pub fn send_ping(&mut self) {
        if self.is_live() && !self.timers.heartbeat.awaits_pong() {
            self.timers.heartbeat.count_ping();
            let token = self.stats.messages_received;
            self.output.control.push(Frame::Ping { ack: false, token });
        }
    }

    /// Whether the connection may rest: it is quiet, and neither side waits for the other side or
    /// holds any of its memory. A connection does not rest before the client's first message, or
    /// when either side is going away.
    fn is_idle(&self) -> bool {
        let is_open = self.life.is_open() && self.life.greeted;
        let owes = self.output.has_output()
            || self.timers.heartbeat.awaits_pong()
            || self.has_extra_recvs();
        is_open && !owes && self.timers.is_quiet() && self.pending() == Pending::default()
    }

    /// Checks whether the connection has become quiet. Called when the timer finds that nothing has
    /// been received for a while, and when a PING or the answer to a PING has been received.
    fn check_quiet(&mut self, now: Instant) {
        if self.timers.becomes_quiet(now, self.credits.has_extra()) {
            self.streams.shrink();
            self.credits.clear_short();
            self.events.push_back(Event::Quiet);
        }
    }
}
