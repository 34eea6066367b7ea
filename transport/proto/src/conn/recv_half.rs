//! The half of a stream that this side receives: its header blocks and its window.

use bytes::{BufMut, Bytes, BytesMut};

use crate::error::Breach;
use crate::ids::StreamId;

/// The state of the half: see the table in `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecvState {
    Headers,
    Body,
    Discarding,
    Ended,
    Reset,
}

impl RecvState {
    /// Whether received bytes are delivered to a reader.
    pub(super) fn is_read(self) -> bool {
        matches!(self, RecvState::Headers | RecvState::Body)
    }

    pub(super) fn is_discarded(self) -> bool {
        self == RecvState::Discarding
    }

    pub(super) fn is_done(self) -> bool {
        matches!(self, RecvState::Ended | RecvState::Reset)
    }

    pub(super) fn reset_by_us(self) -> Self {
        if self.is_done() { self } else { RecvState::Discarding }
    }
}

/// The half that this side receives.
#[derive(Debug)]
pub(super) struct RecvHalf {
    pub(super) state: RecvState,
    /// The number of this side's RESET among all control frames. Valid only in
    /// [`RecvState::Discarding`].
    pub(super) reset_frame: u64,
    /// The parts of a header block that have been received.
    pub(super) block: BytesMut,
    /// Maximum bytes of small messages that may be unread. `window` is the part that the peer has
    /// not used.
    pub(super) limit: u32,
    pub(super) window: u32,
    /// Bytes that the application has read, and that no WINDOW frame has returned yet.
    pub(super) unreported: u32,
    /// Whether the application has released the stream, and will not read it any longer.
    pub(super) released: bool,
    /// Whether this side names memory for large messages that it receives.
    pub(super) names: bool,
    /// Whether the application still has to decide about `names`. Nothing is granted until then.
    pub(super) undecided: bool,
}

/// The effect of a HEADERS frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderBlock {
    /// The frame is discarded, because this side has reset the stream.
    Discarded,
    /// The rest of the block follows.
    Incomplete,
    /// The first block of the half is complete.
    First,
    /// The trailers are complete.
    Trailers,
}

impl RecvHalf {
    /// Creates a half that has received nothing.
    pub(super) fn new(window: u32) -> Self {
        RecvHalf {
            state: RecvState::Headers,
            reset_frame: 0,
            block: BytesMut::new(),
            limit: window,
            window,
            unreported: 0,
            released: false,
            names: false,
            undecided: false,
        }
    }

    /// Handles HEADERS. Once the last part of a header block arrives, `block` is the whole header
    /// block. `limit` is the maximum length of a header block.
    ///
    /// # Errors
    /// [`Breach::HeaderBlock`], [`Breach::FrameOrder`].
    #[inline]
    pub(super) fn on_headers(
        &mut self,
        stream: StreamId,
        (end, more): (bool, bool),
        block: &mut Bytes,
        limit: u32,
    ) -> Result<HeaderBlock, Breach> {
        if self.state == RecvState::Discarding {
            return Ok(HeaderBlock::Discarded);
        }
        if self.block.len() + block.len() > limit as usize {
            return Err(Breach::HeaderBlock { stream, limit });
        }
        if more && block.is_empty() {
            return Err(Breach::FrameOrder { frame: "empty HEADERS", stream });
        }
        if more {
            self.block.put_slice(block);
            return Ok(HeaderBlock::Incomplete);
        }
        if !self.block.is_empty() {
            self.block.put_slice(block);
            *block = self.block.split().freeze();
        }
        match self.state {
            RecvState::Headers => {
                self.state = RecvState::Body;
                Ok(HeaderBlock::First)
            }
            _ if end => Ok(HeaderBlock::Trailers),
            _ => Err(Breach::FrameOrder { frame: "second HEADERS", stream }),
        }
    }

    /// Checks that body bytes follow a complete header block.
    #[inline]
    pub(super) fn check_body(&self, frame: &'static str, stream: StreamId) -> Result<(), Breach> {
        if self.state == RecvState::Headers || !self.block.is_empty() {
            return Err(Breach::FrameOrder { frame, stream });
        }
        Ok(())
    }

    /// Handles DATA with `len` bytes.
    ///
    /// # Errors
    /// [`Breach::FrameOrder`], [`Breach::Window`].
    #[inline]
    pub(super) fn on_data(&mut self, stream: StreamId, len: u32) -> Result<(), Breach> {
        self.check_body("DATA", stream)?;
        if len > self.window {
            return Err(Breach::Window { stream, len, window: self.window });
        }
        self.window -= len;
        Ok(())
    }
}
