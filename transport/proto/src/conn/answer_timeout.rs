//! The time that the peer has to answer RESET and RECALL.
//!
//! | the peer owes | from | until |
//! |---|---|---|
//! | the end of its half of a stream | RESET has been sent for the stream | END or RESET |
//! | the end of a grant that is asked back | RECALL has been sent for it | DONE or ABORT |
//! | the end of a grant whose stream is over | RESET has been sent for the stream; if the peer reset it, GRANT has been sent | DONE or ABORT |
//!
//! A peer answers each of these as soon as it receives the frame: a RESET drops the output of the
//! stream, and a RECALL takes back what has not been handed out as WRITE. An answer waits for no
//! reader, memory or other stream, only for what is already on the queue pair. A peer that has not
//! answered within three quarters of [`dead_peer`](crate::Config::dead_peer), the time that it has
//! to answer a PING, withholds memory that it was told to return, and the connection ends.
//!
//! The time begins when the frame is handed out, which may be later than when it is queued, for
//! example for lack of a credit.
//!
//! Time is counted in ticks of an eighth of `dead_peer`. A late tick counts once, because this side
//! could not receive answers while it was stopped. The clock runs while an answer is pending:
//!
//! | from | an answer becomes pending | a tick, and none is pending | a tick, and one is pending |
//! |---|---|---|---|
//! | Idle | Pending | | |
//! | Pending | | Idle | Ticking |
//! | Ticking | | Idle | Ticking; a breach after [`MAX_TICKS`](super::answer_clock::MAX_TICKS) for one answer |
//!
//! The first tick after Pending is due at once, because the time is not known when a frame is
//! queued.

use std::time::Instant;

use super::answer_clock::AnswerClock;
use super::connection::Connection;
use super::stream::RecvHalf;
use crate::error::{Breach, CloseCode};
use crate::ids::{GrantId, StreamId};

/// Ticks of `dead_peer`.
const TICKS_IN_DEAD_PEER: u32 = 8;
impl Connection {
    /// The number of the frame queued last, counting all control frames since the start.
    pub(super) fn last_frame(&self) -> u64 {
        self.control_out + self.control.len() as u64
    }

    /// Starts the clock if it is idle: an answer of the peer has become pending.
    pub(super) fn start_answer_clock(&mut self) {
        if self.answer_clock == AnswerClock::Idle {
            self.answer_clock = AnswerClock::Pending;
        }
    }

    /// Returns when the next tick is due.
    pub(super) fn answers_due(&self) -> Option<Instant> {
        match self.answer_clock {
            AnswerClock::Idle => None,
            AnswerClock::Pending => Some(self.heartbeat.last_received()),
            AnswerClock::Ticking { next } => Some(next),
        }
    }

    /// Counts a tick if one is due. An overdue answer closes the connection.
    pub(super) fn tick_answers(&mut self, now: Instant) -> Result<(), Breach> {
        match self.answer_clock {
            AnswerClock::Idle => return Ok(()),
            AnswerClock::Ticking { next } if now < next => return Ok(()),
            AnswerClock::Pending | AnswerClock::Ticking { .. } => {}
        }
        let (pending, overdue) = self.count_tick();
        self.answer_clock = match pending {
            true => AnswerClock::Ticking { next: now + self.config.dead_peer / TICKS_IN_DEAD_PEER },
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

    /// Counts a tick for all pending answers. Returns whether there are any, and the breach of the
    /// first that is overdue.
    fn count_tick(&mut self) -> (bool, Option<Breach>) {
        let (mut pending, mut overdue) = (false, None);
        let out = self.control_out;
        for (_, stream) in &mut self.streams {
            if stream.recv == RecvHalf::Discarding {
                pending = true;
                let since = stream.reset.frame;
                if stream.reset.tick(since, out) {
                    overdue.get_or_insert(Breach::ResetUnanswered(StreamId(stream.id)));
                }
            }
        }
        for (id, grant) in self.grants.iter_mut() {
            let stream = self.ids.get(&grant.stream).map(|key| &self.streams[*key]);
            let since = match stream {
                Some(stream) if stream.recv == RecvHalf::Discarding => stream.reset.frame,
                Some(stream) if stream.recv.is_done() => 0,
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
