//! The life of a connection: the client's first message, GOAWAY, drain, CLOSE.
//!
//! A draining server sends GOAWAY and still accepts the streams in flight. The client acknowledges
//! after its last new stream, so the server knows that no further stream follows. A draining client
//! opens no new streams. Streams that it opened earlier, and that wait for the server to allow one
//! more stream, still begin in order.

use bytes::Bytes;

use super::types::Side;
use crate::error::Breach;
use crate::frame::MAX_TEXT;
use crate::ids::StreamId;

/// The stage that a connection has reached.
///
/// | from | go_away here | GOAWAY acknowledged | close here | CLOSE emitted | CLOSE received, dead peer |
/// |---|---|---|---|---|---|
/// | Open | server Draining, client Drained | breach | Closing | | Closed |
/// | Draining | | Drained | Closing | | Closed |
/// | Drained | | breach | Closing | | Closed |
/// | Closing | | | | Closed | |
/// | Closed | | | | | |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lifecycle {
    Open,
    /// GOAWAY has been queued, and the peer may still open streams (server).
    Draining,
    /// The client opens no more streams.
    Drained,
    /// CLOSE is still to be sent, and nothing else happens.
    Closing,
    Closed,
}

/// The stage of a connection, and which opening and closing messages were exchanged.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) side: Side,
    pub(super) stage: Lifecycle,
    /// Whether the client's first message has been sent (client) or received (server). The client
    /// sends this message even if it is empty, and the server sends nothing until the message has
    /// arrived.
    pub(super) greeted: bool,
    /// Whether the peer's GOAWAY has been received.
    pub(super) peer_going_away: bool,
}

impl Life {
    pub(super) fn new(side: Side) -> Self {
        Life { side, stage: Lifecycle::Open, greeted: false, peer_going_away: false }
    }

    /// Whether the connection is neither closed nor closing.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self.stage, Lifecycle::Closing | Lifecycle::Closed)
    }

    /// Whether neither side is going away.
    pub(super) fn is_open(&self) -> bool {
        self.stage == Lifecycle::Open && !self.peer_going_away
    }

    /// Whether streams that this side has opened may begin.
    pub(super) fn admits(&self) -> bool {
        self.is_live() && !self.peer_going_away
    }

    /// Whether the client's first message is due.
    pub(super) fn owes_greeting(&self) -> bool {
        self.side == Side::Client && !self.greeted
    }

    /// Whether this side has to wait for the client's first message.
    pub(super) fn awaits_greeting(&self) -> bool {
        self.side == Side::Server && !self.greeted
    }

    /// Checks that the peer may open a stream.
    ///
    /// # Errors
    /// [`Breach::OpenedAfterGoAway`].
    #[inline]
    pub(super) fn check_accepts(&self, stream: StreamId) -> Result<(), Breach> {
        match self.stage {
            Lifecycle::Drained => Err(Breach::OpenedAfterGoAway(stream)),
            _ => Ok(()),
        }
    }

    /// Stops taking new streams. Returns whether GOAWAY is to be sent.
    pub(super) fn go_away(&mut self) -> bool {
        let is_server = self.side == Side::Server;
        self.stage = if is_server { Lifecycle::Draining } else { Lifecycle::Drained };
        is_server
    }

    /// Begins to close the connection: CLOSE is due.
    pub(super) fn close(&mut self) {
        self.stage = Lifecycle::Closing;
    }

    /// Ends the connection: nothing more is sent or expected.
    pub(super) fn end(&mut self) {
        self.stage = Lifecycle::Closed;
    }

    /// Handles GOAWAY. Returns whether the GOAWAY must be acknowledged.
    ///
    /// # Errors
    /// [`Breach::UnexpectedGoAway`], [`Breach::WrongSide`].
    pub(super) fn on_go_away(&mut self, ack: bool) -> Result<bool, Breach> {
        match (self.side, ack) {
            (Side::Server, true) if self.stage == Lifecycle::Draining => {
                self.stage = Lifecycle::Drained;
                Ok(false)
            }
            (Side::Client, false) if !self.peer_going_away => {
                self.peer_going_away = true;
                Ok(true)
            }
            (Side::Server, true) | (Side::Client, false) => Err(Breach::UnexpectedGoAway),
            (Side::Server, false) | (Side::Client, true) => Err(Breach::WrongSide("GOAWAY")),
        }
    }
}

/// Truncates a text to at most [`MAX_TEXT`] bytes of whole characters.
pub(super) fn clip(text: &str) -> Bytes {
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
