//! Receiving messages: every frame is checked against the state of the connection (R15).

use std::time::Instant;

use bytes::Bytes;

use super::connection::Connection;
use super::credits::Returned;
use super::lifecycle::Lifecycle;
use super::recv_half::HeaderBlock;
use super::stream::PeerReset;
use super::transfers::{PeerGrant, QueuedRequest};
use super::types::{Event, Side};
use crate::error::{Breach, CloseCode};
use crate::frame::{Frame, Reader};
use crate::ids::{GrantId, ResetCode, StreamId};
use crate::payload::LentBody;

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
        block: Bytes,
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
        match stream.recv.on_headers(stream_id, (end, more), block, limit)? {
            HeaderBlock::Incomplete => return Ok(()),
            HeaderBlock::Discarded => {}
            HeaderBlock::First(block) if is_server => {
                self.events.push_back(Event::Opened { stream: stream_id, block, end });
            }
            HeaderBlock::First(block) | HeaderBlock::Trailers(block) => {
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

    pub(super) fn on_lent(
        &mut self,
        key: usize,
        lent: Box<LentBody>,
        end: bool,
    ) -> Result<(), Breach> {
        let stream = StreamId(self.streams[key].id);
        if !self.terms.own.takes_lent {
            return Err(Breach::NotBorrowing(stream));
        }
        self.leases.on_lent(stream, &lent, self.terms.own.rest_slot_size())?;
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

    pub(super) fn on_close(&mut self, code: u32, text: &[u8]) {
        self.end_life();
        let text = String::from_utf8_lossy(text).into_owned();
        self.events.push_back(Event::Closed { code: CloseCode::from_wire(code), text });
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

    /// Refuses streams that the peer does not know of, so that they can be retried elsewhere.
    pub(super) fn refuse(&mut self, streams: Vec<usize>) {
        for key in streams {
            let id = StreamId(self.streams[key].id);
            let unsent = self.withdraw(id);
            self.events.push_back(Event::Refused { stream: id, unsent });
            self.remove(key);
        }
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
}
