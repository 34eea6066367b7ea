//! Answers that the peer owes, and the time that it has for them.
//!
//! | the peer owes | from | until |
//! |---|---|---|
//! | the end of its half of a stream | RESET has been sent for the stream | END or RESET |
//! | the end of a grant that is asked back | RECALL has been sent for it | DONE or ABORT |
//! | the end of a grant whose stream is over | RESET has been sent for the stream; if the peer reset it, GRANT has been sent | DONE or ABORT |
//!
//! Every one of these is answered as soon as it arrives: a RESET drops the output of the stream, a
//! RECALL cuts off what has not been handed out as WRITE. An answer waits for no reader, no memory
//! and no other stream, only for what is on the queue pair already. So a peer that has had three
//! quarters of [`dead_peer`](crate::Config::dead_peer), the time that it has for the answer to a
//! PING, keeps memory that it was told to give back, and the connection ends.
//!
//! A frame that has not been handed out, for want of a credit say, is not answered by anyone: its
//! time begins when it is.
//!
//! Time is counted in ticks, an eighth of `dead_peer` apart. However late a tick comes, it counts
//! once: while this side was stopped it could not take answers, either. The count runs while
//! something is owed:
//!
//! | from | something begins to be owed | a tick, and nothing is owed | a tick, and something is owed |
//! |---|---|---|---|
//! | Idle | Pending | | |
//! | Pending | | Idle | Ticking |
//! | Ticking | | Idle | Ticking; a breach after [`TICKS`](super::answer_clock::TICKS) for one answer |
//!
//! The first tick after Pending is due at once: nobody told the time when the frame was queued.

use std::time::Instant;

use super::answer_clock::AnswerClock;
use super::connection::Connection;
use super::stream::RecvHalf;
use crate::error::{Breach, CloseCode};
use crate::ids::{GrantId, StreamId};

/// Ticks of `dead_peer`.
const PARTS: u32 = 8;
impl Connection {
    /// Place of the frame that was queued last, among all control frames since the start.
    pub(super) fn last_frame(&self) -> u64 {
        self.control_out + self.control.len() as u64
    }

    /// The peer has just been asked for something, or is about to be.
    pub(super) fn expect_answer(&mut self) {
        if self.answer_clock == AnswerClock::Idle {
            self.answer_clock = AnswerClock::Pending;
        }
    }

    /// When the next tick is due.
    pub(super) fn answers_due(&self) -> Option<Instant> {
        match self.answer_clock {
            AnswerClock::Idle => None,
            AnswerClock::Pending => Some(self.heartbeat.last_received()),
            AnswerClock::Ticking { next } => Some(next),
        }
    }

    /// Counts a tick, if one is due. An answer that is overdue closes the connection.
    pub(super) fn tick_answers(&mut self, now: Instant) -> Result<(), Breach> {
        match self.answer_clock {
            AnswerClock::Idle => return Ok(()),
            AnswerClock::Ticking { next } if now < next => return Ok(()),
            AnswerClock::Pending | AnswerClock::Ticking { .. } => {}
        }
        let (owed, overdue) = self.count_tick();
        self.answer_clock = match owed {
            true => AnswerClock::Ticking { next: now + self.config.dead_peer / PARTS },
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

    /// Whether anything is owed, and the first answer that is overdue.
    fn count_tick(&mut self) -> (bool, Option<Breach>) {
        let (mut owed, mut overdue) = (false, None);
        let out = self.control_out;
        for (_, stream) in &mut self.streams {
            if stream.recv == RecvHalf::Discarding {
                owed = true;
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
            owed = true;
            // Neither before the GRANT or RECALL is out.
            if grant.asked.tick(since.max(grant.asked.frame), out) {
                overdue.get_or_insert(Breach::GrantKept(GrantId(id as u32)));
            }
        }
        (owed, overdue)
    }
}
