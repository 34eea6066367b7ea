//! Limits how long the peer may keep grants whose memory others want.
//!
//! | the peer owes | from | until |
//! |---|---|---|
//! | the end of a recalled grant | RECALL has been sent for it | DONE or ABORT |
//! | the end of a grant whose stream is over | RESET has been sent for the stream; if the peer reset it, GRANT has been sent | DONE or ABORT |
//!
//! A peer answers RESET and RECALL as soon as it receives the frame: a RESET drops the output of
//! the stream, and a RECALL takes back the bytes that have not been handed out as WRITE. An answer
//! waits only for work that is already on the queue pair, not for a reader, memory or another
//! stream. But the peer's process may pause (R24). So the peer may keep a grant as long as nobody
//! else needs the memory. The grant stays charged to this connection. The clock runs from
//! `Connection::recall_grants`, which says that others wait for memory, until
//! `Connection::memory_is_unwanted`. A peer that has kept a grant for [`MAX_TICKS`] ticks loses its
//! connection.
//!
//! Ticks count from when the frame is handed out. A queued frame may be handed out later, for
//! example if there is no credit.
//!
//! A late tick counts once, because this side could not receive answers while it was stopped.
//!
//! | from | memory is wanted | a tick, and no grant is owed | a tick, and a grant is owed | memory is unwanted |
//! |---|---|---|---|---|
//! | Idle | Pending | | | Idle |
//! | Pending | Pending | Idle | Ticking | Idle |
//! | Ticking | Ticking | Idle | Ticking; a breach after [`MAX_TICKS`] for one grant | Idle |
//!
//! The first tick after Pending is due at once, because `start` does not know the time.

use std::time::{Duration, Instant};

/// Time between ticks.
pub(super) const TICK: Duration = Duration::from_millis(625);
/// Ticks after which an answer is overdue. The first tick may follow the frame immediately.
pub(super) const MAX_TICKS: u8 = 7;

/// The clock for the answers that the peer owes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum AnswerClock {
    #[default]
    Idle,
    Pending,
    Ticking {
        next: Instant,
    },
}

impl AnswerClock {
    /// Records that others want memory that the peer holds.
    pub(super) fn start(&mut self) {
        if *self == AnswerClock::Idle {
            *self = AnswerClock::Pending;
        }
    }

    /// Records that nobody wants the memory any more.
    pub(super) fn stop(&mut self) {
        *self = AnswerClock::Idle;
    }

    /// Returns when the next tick is due. In Pending, the result is `last_received`, a time that
    /// has passed, so the tick is due at once.
    pub(super) fn deadline(&self, last_received: Instant) -> Option<Instant> {
        match *self {
            AnswerClock::Idle => None,
            AnswerClock::Pending => Some(last_received),
            AnswerClock::Ticking { next } => Some(next),
        }
    }

    /// Whether a tick is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        match *self {
            AnswerClock::Idle => false,
            AnswerClock::Pending => true,
            AnswerClock::Ticking { next } => now >= next,
        }
    }

    /// Records a tick. `pending` says whether answers are still pending after it.
    pub(super) fn ticked(&mut self, now: Instant, pending: bool) {
        *self = match pending {
            true => AnswerClock::Ticking { next: now + TICK },
            false => AnswerClock::Idle,
        };
    }
}

/// An answer that is expected from the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PendingAnswer {
    /// The number, among all control frames, of the frame that requires the answer
    /// ([`Control::last_frame`](super::control::Control::last_frame)).
    frame: u64,
    /// Ticks since that frame was handed out.
    ticks: u8,
}

impl PendingAnswer {
    pub(super) fn by(frame: u64) -> Self {
        PendingAnswer { frame, ticks: 0 }
    }

    /// Counts a tick if the answer's frame and all frames up to number `since` have been handed
    /// out. Returns whether the answer is overdue.
    pub(super) fn tick(&mut self, since: u64, handed_out: u64) -> bool {
        if since.max(self.frame) <= handed_out {
            self.ticks += 1;
        }
        self.ticks >= MAX_TICKS
    }
}
