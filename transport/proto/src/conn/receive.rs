//! Messages in: every frame is checked against the state it meets (R15).

use std::time::Instant;

use bytes::{BufMut, Bytes};

use super::stream::{PeerGrant, RecvHalf, SendHalf};
use super::{Connection, Event, Phase, Side};
use crate::error::{Breach, CloseCode};
use crate::frame::{Frame, Reader};
use crate::ids::{GrantId, ResetCode, StreamId};

impl Connection {
    /// Takes one received message. Its RECV slot has been reposted before (R1): `message` is a copy, or
    /// memory that is not posted.
    ///
    /// # Errors
    /// The peer broke the protocol. The connection is closing: a CLOSE frame that names the breach is the
    /// only output left, and nothing of the message after the breach has had an effect.
    pub fn receive(&mut self, now: Instant, message: Bytes) -> Result<(), Breach> {
        if matches!(self.phase, Phase::Closing | Phase::Closed) {
            return Ok(());
        }
        let result = self.receive_frames(now, message);
        if let Err(breach) = &result {
            self.close(CloseCode::Breach, &breach.to_string());
        }
        result
    }

    fn receive_frames(&mut self, now: Instant, message: Bytes) -> Result<(), Breach> {
        self.heartbeat.received(now);
        self.stats.messages_received += 1;
        if self.side == Side::Server {
            self.greeted = true;
        }
        let mut reader = Reader::new(message)?;
        self.credits.received(reader.credits)?;
        while let Some(frame) = reader.next_frame()? {
            self.on_frame(frame, now)?;
            if self.phase == Phase::Closed {
                break;
            }
        }
        self.check_flood()
    }

    fn on_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Breach> {
        let name = frame.name();
        match frame {
            Frame::Headers { stream, end, more, block } => self.on_headers(stream, end, more, block),
            Frame::Data { stream, end, data } => self.on_data(stream, end, data),
            Frame::Window { stream, increment } => self.on_window(stream, increment),
            Frame::Reset { stream, code } => self.on_reset(stream, ResetCode(code)),
            Frame::Request { stream, len } => {
                let key = self.sending_peer_stream(name, stream)?;
                self.on_request(key, len, now)
            }
            Frame::Grant { stream, id, rkey, len, addr } => {
                self.on_grant(stream, PeerGrant { id: GrantId(id), rkey, len, addr, used: 0 })
            }
            Frame::Done { stream, end, id, len } => {
                let key = self.sending_peer_stream(name, stream)?;
                self.check_body(name, key)?;
                self.on_done(key, id, len, end, now)?;
                self.on_end(key, end);
                Ok(())
            }
            Frame::Abort { id } => self.on_abort(id),
            Frame::Recall { id } => {
                self.on_recall(id);
                Ok(())
            }
            Frame::Ping { ack: false, token } => {
                self.control.push_back(Frame::Ping { ack: true, token });
                Ok(())
            }
            Frame::Ping { ack: true, .. } => self.heartbeat.pong(),
            Frame::GoAway { ack, code, text } => self.on_go_away(ack, code, &text),
            Frame::Close { code, text } => {
                self.phase = Phase::Closed;
                let text = String::from_utf8_lossy(&text).into_owned();
                self.events.push_back(Event::Closed { code: CloseCode::from_wire(code), text });
                Ok(())
            }
        }
    }

    /// The stream of a frame that only the sender of an open half may send.
    fn sending_peer_stream(&self, frame: &'static str, id: u32) -> Result<usize, Breach> {
        let stream = StreamId(id);
        match self.ids.get(&id) {
            Some(&key) if !self.streams[key].recv.is_done() => Ok(key),
            _ if id > self.last_stream => Err(Breach::UnknownStream { frame, stream }),
            _ => Err(Breach::ClosedStream { frame, stream }),
        }
    }

    /// Body bytes come after a whole header block.
    fn check_body(&self, frame: &'static str, key: usize) -> Result<(), Breach> {
        let stream = &self.streams[key];
        if stream.recv == RecvHalf::Headers || !stream.block.is_empty() {
            return Err(Breach::FrameOrder { frame, stream: StreamId(stream.id) });
        }
        Ok(())
    }

    fn on_headers(&mut self, id: u32, end: bool, more: bool, block: Bytes) -> Result<(), Breach> {
        let stream_id = StreamId(id);
        let key = match self.ids.get(&id) {
            Some(_) => self.sending_peer_stream("HEADERS", id)?,
            None if id <= self.last_stream => {
                return Err(Breach::ClosedStream { frame: "HEADERS", stream: stream_id });
            }
            None => self.accept_stream(id)?,
        };
        let limit = self.config.max_header_block;
        let stream = &mut self.streams[key];
        if stream.recv == RecvHalf::Discarding {
            self.on_end(key, end && !more);
            return Ok(());
        }
        if stream.block.len() + block.len() > limit as usize {
            return Err(Breach::HeaderBlock { stream: stream_id, limit });
        }
        if more && block.is_empty() {
            return Err(Breach::FrameOrder { frame: "empty HEADERS", stream: stream_id });
        }
        if more {
            stream.block.put_slice(&block);
            return Ok(());
        }
        let block = if stream.block.is_empty() {
            block
        } else {
            stream.block.put_slice(&block);
            stream.block.split().freeze()
        };
        let event = match stream.recv {
            RecvHalf::Headers => {
                stream.recv = RecvHalf::Body;
                if self.side == Side::Server {
                    Event::Opened { stream: stream_id, block, end }
                } else {
                    Event::Headers { stream: stream_id, block, end }
                }
            }
            _ if end => Event::Headers { stream: stream_id, block, end },
            _ => return Err(Breach::FrameOrder { frame: "second HEADERS", stream: stream_id }),
        };
        self.events.push_back(event);
        self.on_end(key, end);
        Ok(())
    }

    fn accept_stream(&mut self, id: u32) -> Result<usize, Breach> {
        let stream = StreamId(id);
        if self.side == Side::Client {
            return Err(Breach::UnknownStream { frame: "HEADERS", stream });
        }
        if id <= self.last_stream {
            return Err(Breach::StreamOrder { stream, last: self.last_stream });
        }
        if self.phase == Phase::Drained {
            return Err(Breach::OpenedAfterGoAway(stream));
        }
        if self.streams.len() >= self.config.max_streams as usize {
            return Err(Breach::TooManyStreams(self.config.max_streams));
        }
        self.last_stream = id;
        let key = self.insert(id, RecvHalf::Headers);
        self.streams[key].transmitted = true;
        Ok(key)
    }

    fn on_data(&mut self, id: u32, end: bool, data: Bytes) -> Result<(), Breach> {
        let key = self.sending_peer_stream("DATA", id)?;
        self.check_body("DATA", key)?;
        let stream = &mut self.streams[key];
        let (stream_id, len) = (StreamId(id), data.len() as u32);
        if len > stream.recv_window {
            return Err(Breach::Window { stream: stream_id, len, window: stream.recv_window });
        }
        stream.recv_window -= len;
        self.stats.eager_received += u64::from(len);
        if stream.recv != RecvHalf::Discarding && (len > 0 || end) {
            self.events.push_back(Event::Data { stream: stream_id, data, end });
        }
        self.on_end(key, end);
        Ok(())
    }

    /// The peer's half ends.
    fn on_end(&mut self, key: usize, end: bool) {
        if end {
            let stream = &mut self.streams[key];
            stream.recv = RecvHalf::Ended;
            stream.wants.clear();
            self.remove_if_done(key);
        }
    }

    fn on_window(&mut self, id: u32, increment: u32) -> Result<(), Breach> {
        let stream_id = StreamId(id);
        if id > self.last_stream {
            return Err(Breach::UnknownStream { frame: "WINDOW", stream: stream_id });
        }
        // A stream that has ended here may still be read there.
        let Some(&key) = self.ids.get(&id) else { return Ok(()) };
        let stream = &mut self.streams[key];
        match stream.send_window.checked_add(increment) {
            Some(window) if increment > 0 && window <= i32::MAX as u32 => stream.send_window = window,
            _ => return Err(Breach::WindowUpdate(stream_id, increment)),
        }
        self.mark_send(key);
        Ok(())
    }

    fn on_reset(&mut self, id: u32, code: ResetCode) -> Result<(), Breach> {
        let stream_id = StreamId(id);
        if id > self.last_stream {
            return Err(Breach::UnknownStream { frame: "RESET", stream: stream_id });
        }
        // It may cross our END.
        let Some(&key) = self.ids.get(&id) else { return Ok(()) };
        let stream = &mut self.streams[key];
        let known = stream.recv == RecvHalf::Discarding;
        if !stream.recv.is_done() {
            stream.recv = RecvHalf::Reset;
        }
        stream.wants.clear();
        stream.block.clear();
        let grants = stream.drop_output();
        let answer = !stream.send.is_done();
        if answer {
            stream.send = SendHalf::Reset;
        }
        self.abort_all(grants);
        if answer {
            self.control.push_back(Frame::Reset { stream: id, code: ResetCode::CANCEL.0 });
        }
        if !known {
            self.events.push_back(Event::Reset { stream: stream_id, code });
        }
        self.remove_if_done(key);
        Ok(())
    }

    fn on_go_away(&mut self, ack: bool, code: u32, text: &[u8]) -> Result<(), Breach> {
        match (self.side, ack) {
            (Side::Server, true) if self.phase == Phase::Draining => {
                self.phase = Phase::Drained;
                Ok(())
            }
            (Side::Client, false) if !self.peer_going_away => {
                self.peer_going_away = true;
                self.refuse_untransmitted();
                self.control.push_back(Frame::GoAway { ack: true, code, text: Bytes::new() });
                let text = String::from_utf8_lossy(text).into_owned();
                self.events.push_back(Event::GoAway { code: CloseCode::from_wire(code), text });
                Ok(())
            }
            _ => Err(Breach::WrongSide("GOAWAY")),
        }
    }

    /// Streams that the peer has not heard of stay unheard of: they can be retried elsewhere.
    fn refuse_untransmitted(&mut self) {
        let keys: Vec<usize> = self.streams.iter().filter(|(_, s)| !s.transmitted).map(|(k, _)| k).collect();
        for key in keys {
            let grants = self.streams[key].drop_output();
            self.abort_all(grants);
            self.events.push_back(Event::Refused { stream: StreamId(self.streams[key].id) });
            self.remove(key);
        }
    }
}
