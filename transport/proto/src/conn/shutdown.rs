//! GOAWAY, drain, CLOSE.
//!
//! A draining server sends GOAWAY and still accepts the streams in flight. The client acknowledges
//! after its last new stream, so the server knows that no more will follow. A draining client
//! simply opens no more streams.

use bytes::Bytes;

use super::connection::{Connection, Lifecycle};
use super::types::{Event, Side};
use crate::error::{Breach, CloseCode};
use crate::frame::{Frame, MAX_TEXT};
use crate::ids::StreamId;

impl Connection {
    /// Stops accepting or opening new streams. A server sends GOAWAY. Streams in flight continue.
    /// `text` is truncated to 240 bytes. See [`Connection::is_drained`].
    pub fn go_away(&mut self, code: CloseCode, text: &str) {
        if self.lifecycle != Lifecycle::Open {
            return;
        }
        self.heartbeat.rouse();
        match self.side {
            Side::Server => {
                self.lifecycle = Lifecycle::Draining;
                let frame = Frame::GoAway { ack: false, code: code.to_wire(), text: clip(text) };
                self.output.control.push(frame);
            }
            Side::Client => self.lifecycle = Lifecycle::Drained,
        }
    }

    /// Whether the connection is draining, the peer opens no more streams, and none is left.
    pub fn is_drained(&self) -> bool {
        self.lifecycle == Lifecycle::Drained && self.streams.is_empty() && !self.output.has_output()
    }

    /// Closes the connection. Only a CLOSE frame is still sent, with `text` truncated to 240 bytes;
    /// it may take the last credit. Streams do not end individually.
    pub fn close(&mut self, code: CloseCode, text: &str) {
        if !self.is_live() {
            return;
        }
        self.lifecycle = Lifecycle::Closing;
        self.output.control.close(Frame::Close { code: code.to_wire(), text: clip(text) });
    }

    pub(super) fn on_close(&mut self, code: u32, text: &[u8]) {
        self.end_life();
        let text = String::from_utf8_lossy(text).into_owned();
        self.events.push_back(Event::Closed { code: CloseCode::from_wire(code), text });
    }

    pub(super) fn on_go_away(&mut self, ack: bool, code: u32, text: &[u8]) -> Result<(), Breach> {
        match (self.side, ack) {
            (Side::Server, true) if self.lifecycle == Lifecycle::Draining => {
                self.lifecycle = Lifecycle::Drained;
                Ok(())
            }
            (Side::Client, false) if !self.peer_going_away => {
                self.peer_going_away = true;
                self.refuse_untransmitted();
                self.output.control.push(Frame::GoAway { ack: true, code, text: Bytes::new() });
                let text = String::from_utf8_lossy(text).into_owned();
                self.events.push_back(Event::GoAway { code: CloseCode::from_wire(code), text });
                Ok(())
            }
            (Side::Server, true) | (Side::Client, false) => Err(Breach::UnexpectedGoAway),
            (Side::Server, false) | (Side::Client, true) => Err(Breach::WrongSide("GOAWAY")),
        }
    }

    /// Refuses the streams that the peer does not know of, so that they can be retried elsewhere.
    fn refuse_untransmitted(&mut self) {
        for key in self.streams.unknown_to_peer() {
            let id = StreamId(self.streams[key].id);
            let unsent = self.withdraw(id);
            self.events.push_back(Event::Refused { stream: id, unsent });
            self.remove(key);
        }
    }
}

/// Truncates a text to at most [`MAX_TEXT`] bytes of whole characters.
fn clip(text: &str) -> Bytes {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Bytes::copy_from_slice(&text.as_bytes()[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clip_keeps_whole_characters() {
        let text = "é".repeat(200);
        assert_eq!(clip(&text).len(), MAX_TEXT);
        assert_eq!(clip(&format!("x{text}")).len(), MAX_TEXT - 1);
    }
}
