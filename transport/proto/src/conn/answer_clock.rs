//! The clock of the answers that the peer owes: see [`answers`](super::answers).

use std::time::Instant;

/// Ticks after which an answer is overdue: the first may follow the frame at once.
pub(super) const TICKS: u8 = 7;

/// See the [`answers`](super::answers).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerClock {
    #[default]
    Idle,
    Pending,
    Ticking {
        next: Instant,
    },
}

/// An answer that the peer owes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owed {
    /// Place of the frame that asks for it among all control frames ([`Connection::last_frame`](super::Connection::last_frame)).
    pub(super) frame: u64,
    /// Ticks since that frame was handed out.
    ticks: u8,
}

impl Owed {
    pub(super) fn by(frame: u64) -> Self {
        Owed { frame, ticks: 0 }
    }

    /// Counts a tick, if all frames up to `since` are out. True when the answer is overdue.
    pub(super) fn tick(&mut self, since: u64, handed_out: u64) -> bool {
        if since <= handed_out {
            self.ticks += 1;
        }
        self.ticks >= TICKS
    }
}
