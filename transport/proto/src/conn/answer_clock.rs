//! The clock of the answers that the peer owes: see [`answer_timeout`](super::answer_timeout).

use std::time::Instant;

/// Ticks after which an answer is overdue. The first tick may follow the frame immediately.
pub(super) const MAX_TICKS: u8 = 7;

/// See the [`answer_timeout`](super::answer_timeout).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerClock {
    #[default]
    Idle,
    Pending,
    Ticking {
        next: Instant,
    },
}

/// An answer that is expected from the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PendingAnswer {
    /// The number of the frame that it answers, counting all control frames
    /// ([`Connection::last_frame`](super::Connection::last_frame)).
    pub(super) frame: u64,
    /// Ticks since that frame was handed out.
    ticks: u8,
}

impl PendingAnswer {
    pub(super) fn by(frame: u64) -> Self {
        PendingAnswer { frame, ticks: 0 }
    }

    /// Counts a tick if all frames up to `since` have been handed out. Returns whether the answer
    /// is overdue.
    pub(super) fn tick(&mut self, since: u64, handed_out: u64) -> bool {
        if since <= handed_out {
            self.ticks += 1;
        }
        self.ticks >= MAX_TICKS
    }
}
