//! Control frames: the frames that no stream's queue holds.

use std::collections::VecDeque;

use super::stream::Stream;
use crate::error::Breach;
use crate::frame::{Composer, Frame};
use crate::ids::ResetCode;

/// The control frames that wait to be sent, and CLOSE after them.
#[derive(Debug, Default)]
pub(super) struct Control {
    frames: VecDeque<Frame>,
    /// The number of frames taken out of `frames` since the start.
    taken: u64,
    /// An upper bound for the number of frames in `frames` that answer the peer.
    answers: usize,
    /// The CLOSE frame, until it has been sent.
    close: Option<Frame>,
    /// Whether the connection is closing or closed, so that no more frames are queued.
    is_shut: bool,
}

impl Control {
    /// Queues a frame, unless the connection is closing.
    pub(super) fn push(&mut self, frame: Frame) {
        if !self.is_shut {
            self.frames.push_back(frame);
        }
    }

    /// Queues a frame that answers the peer.
    pub(super) fn answer(&mut self, frame: Frame) {
        self.answers += 1;
        self.push(frame);
    }

    /// Queues RESET for a stream, whose rest is discarded from now on.
    pub(super) fn reset(&mut self, stream: &mut Stream, code: ResetCode) {
        self.push(Frame::Reset { stream: stream.id, code: code.0 });
        stream.recv.reset_frame = self.last_frame();
    }

    /// Drops the queued frames, and queues CLOSE.
    pub(super) fn close(&mut self, close: Frame) {
        self.frames.clear();
        self.close = Some(close);
        self.shut();
    }

    /// Shuts the queue: later calls queue nothing.
    pub(super) fn shut(&mut self) {
        self.is_shut = true;
    }

    pub(super) fn take_close(&mut self) -> Option<Frame> {
        self.close.take()
    }

    pub(super) fn has_close(&self) -> bool {
        self.close.is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The number of the frame queued last, counting all frames since the start.
    pub(super) fn last_frame(&self) -> u64 {
        self.taken + self.frames.len() as u64
    }

    /// The number of frames that have been handed out.
    pub(super) fn handed_out(&self) -> u64 {
        self.taken
    }

    /// Moves frames to a message. Returns whether all frames fit.
    #[inline]
    pub(super) fn fill(&mut self, message: &mut Composer<'_>) -> bool {
        while let Some(frame) = self.frames.front() {
            if !message.add(frame) {
                break;
            }
            self.frames.pop_front();
            self.taken += 1;
        }
        self.answers = self.answers.min(self.frames.len());
        self.frames.is_empty()
    }

    /// Limits how many answers to the peer's frames may be queued (R15).
    ///
    /// # Errors
    /// [`Breach::Flood`] if too many answers are queued.
    pub(super) fn check_flood(&self, max_streams: u32) -> Result<(), Breach> {
        let limit = 4096 + 16 * max_streams as usize;
        if self.answers > limit { Err(Breach::Flood(limit)) } else { Ok(()) }
    }

    #[cfg(test)]
    pub(super) fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter()
    }
}
