//! The time that the peer has to return grants which others want.
//!
//! | the peer owes | from | until |
//! |---|---|---|
//! | the end of a grant that is asked back | RECALL has been sent for it | DONE or ABORT |
//! | the end of a grant whose stream is over | RESET has been sent for the stream; if the peer reset it, GRANT has been sent | DONE or ABORT |
//!
//! A peer answers RESET and RECALL as soon as it receives the frame: a RESET drops the output of
//! the stream, and a RECALL takes back what has not been handed out as WRITE. An answer waits for
//! no reader, memory or other stream, only for what is already on the queue pair. But its process
//! may pause (R24). So as long as nobody else needs the memory, a grant may be kept: it stays
//! charged to this connection. From [`recall_grants`](Connection::recall_grants), which says that
//! others wait for memory, until [`memory_is_unwanted`](Connection::memory_is_unwanted), time is
//! counted. A peer that has kept a grant for [`MAX_TICKS`](super::answer_clock::MAX_TICKS) ticks
//! then loses its connection.
//!
//! The time begins when the frame is handed out, which may be later than when it is queued, for
//! example for lack of a credit.
//!
//! A late tick counts once, because this side could not receive answers while it was stopped.
//!
//! | from | memory is wanted | a tick, and no grant is owed | a tick, and one is owed | memory is unwanted |
//! |---|---|---|---|---|
//! | Idle | Pending | | | Idle |
//! | Pending | Pending | Idle | Ticking | Idle |
//! | Ticking | Ticking | Idle | Ticking; a breach after [`MAX_TICKS`](super::answer_clock::MAX_TICKS) for one grant | Idle |
//!
//! The first tick after Pending is due at once, because the time is not known when memory is
//! wanted.

use std::time::{Duration, Instant};

use super::answer_clock::AnswerClock;
use super::connection::Connection;
use super::stream::RecvState;
use crate::error::{Breach, CloseCode};
use crate::ids::GrantId;

/// Time between ticks.
pub(super) const TICK: Duration = Duration::from_millis(625);

impl Connection {
    /// Starts the clock if it is idle: others want memory that the peer has.
    pub(super) fn start_answer_clock(&mut self) {
        if self.answer_clock == AnswerClock::Idle {
            self.answer_clock = AnswerClock::Pending;
        }
    }

    /// Tells the connection that nobody waits for the memory of its grants any more: see
    /// [`recall_grants`](Connection::recall_grants).
    pub fn memory_is_unwanted(&mut self) {
        self.answer_clock = AnswerClock::Idle;
    }

    /// Returns when the next tick is due.
    pub(super) fn answers_due(&self) -> Option<Instant> {
        match self.answer_clock {
            AnswerClock::Idle => None,
            AnswerClock::Pending => Some(self.heartbeat.last_received()),
            AnswerClock::Ticking { next } => Some(next),
        }
    }

    /// Counts a tick if one is due. A grant that is overdue closes the connection.
    pub(super) fn tick_answers(&mut self, now: Instant) -> Result<(), Breach> {
        match self.answer_clock {
            AnswerClock::Idle => return Ok(()),
            AnswerClock::Ticking { next } if now < next => return Ok(()),
            AnswerClock::Pending | AnswerClock::Ticking { .. } => {}
        }
        let (pending, overdue) = self.count_tick();
        self.answer_clock = match pending {
            true => AnswerClock::Ticking { next: now + TICK },
            false => AnswerClock::Idle,
        };
        match overdue {
            Some(breach) => {
                self.close(CloseCode::Breach, &breach.to_string());
                Err(breach)
            }
            None => Ok(()),
        }
    }

    /// Counts a tick for all grants that the peer owes. Returns whether there are any, and the
    /// breach of the first that is overdue.
    fn count_tick(&mut self) -> (bool, Option<Breach>) {
        let (mut pending, mut overdue) = (false, None);
        let out = self.output.control.handed_out();
        for (id, grant) in self.grants.iter_mut() {
            let stream = self.streams.key(grant.stream).map(|key| &self.streams[key]);
            let since = match stream {
                Some(stream) if stream.recv.state == RecvState::Discarding => {
                    stream.recv.reset_frame
                }
                Some(stream) if stream.recv.state.is_done() => 0,
                None if grant.stream != 0 => 0,
                _ if grant.recalled => 0,
                _ => continue,
            };
            pending = true;
            // The time does not begin before the GRANT or RECALL is handed out.
            if grant.asked.tick(since.max(grant.asked.frame), out) {
                overdue.get_or_insert(Breach::GrantKept(GrantId(id as u32)));
            }
        }
        (pending, overdue)
    }
}
