//! What nobody reads makes room, when a stream has waited long for landing memory.
//!
//! Payload that has landed and is not read keeps the connection's own landing memory from the
//! streams that are read (R13). So the driver copies it to the heap, the streams in their order,
//! until there is room for the stream that waits.
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | a stream wants landing memory, and there is none; or a chunk that goes back is not free although its grants were recalled | Running |
//! | Running | a stream gets some | Idle |
//! | Running | [`PERIOD`] has passed | Over: the streams that were unread at the end of the period before, too, are copied |
//! | Over | | Running or Idle, by the first line |
//!
//! A stream is **lagging** once it was copied, until it is read: what lands for it meanwhile is
//! copied as it is delivered.
//!
//! Where there is nothing to copy and to wait for, since the application holds all that there is,
//! the account [starves](tonic_rdma_memory::Landing::starve).
//!
//! A busy runtime is no stall: before the driver acts on a delay, it lets all other tasks run
//! [`GRACE`] times, readers that were woken among them ([`Grace`]).

use std::time::Duration;

use crate::connection::delay::Delay;
use crate::connection::state::ConnectionState;

/// A reader that runs has read by then, on a busy machine, too.
const PERIOD: Duration = Duration::from_millis(50);

/// Turns of the runtime's tasks between the end of a delay and what follows from it. Tasks do not
/// run in strict order.
const GRACE: u8 = 8;

/// Turns that are left until the ends of delays count.
///
/// | turns | on | next |
/// |---|---|---|
/// | 0 | a delay of the landing memory has passed | [`GRACE`] |
/// | more | the driver's task runs | one fewer; with the last, the delays that still run end |
#[derive(Debug, Default)]
pub(in crate::connection) struct Grace(u8);

impl Grace {
    fn begin(&mut self) {
        if self.0 == 0 {
            self.0 = GRACE;
        }
    }

    /// Whether the driver has to run again soon.
    #[inline]
    pub(in crate::connection) fn is_running(&self) -> bool {
        self.0 > 0
    }

    /// The driver's task runs. True when the last turn is over.
    fn turn(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

/// How a stream is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::connection) enum Reading {
    /// Since the end of the last period, or nothing was unread then.
    #[default]
    UpToDate,
    /// Nothing was read since the end of the last period.
    Suspected,
    /// What is unread was copied, and so is what follows.
    Lagging,
}

/// The delay of the table.
#[derive(Debug, Default)]
pub(in crate::connection) struct Stall(pub(in crate::connection) Delay);

impl Stall {
    /// A stream waits. True when that begins now.
    #[inline]
    pub(in crate::connection) fn begin(&mut self) -> bool {
        let begins = self.0.deadline().is_none();
        if begins {
            self.0.begin(PERIOD);
        }
        begins
    }

    /// A stream has memory.
    #[inline]
    pub(in crate::connection) fn end(&mut self) {
        self.0.reset();
    }
}

impl ConnectionState {
    /// The connection's timer has expired. Has the driver run again if that concerns landing
    /// memory.
    pub(in crate::connection) fn landing_timeout(&mut self, now: tokio::time::Instant) {
        let delays = [&self.landing.wait.0, &self.landing.stall.0];
        if delays.iter().any(|delay| delay.deadline().is_some_and(|at| at <= now)) {
            self.landing.grace.begin();
            self.wake_driver();
        }
    }

    /// The driver's task runs.
    #[inline]
    pub(in crate::connection) fn grace_turn(&mut self) {
        if self.landing.grace.is_running() && self.landing.grace.turn() {
            let now = tokio::time::Instant::now();
            self.landing.wait.0.expire(now);
            self.relieve_stall(now);
            self.flush();
        }
    }

    /// Makes room, if a stream has waited for a period.
    fn relieve_stall(&mut self, now: tokio::time::Instant) {
        if !self.landing.stall.0.expire(now) {
            return;
        }
        let want = self.conn.poll_landing().map_or(0, |want| want.want as usize);
        let suspects = self.suspect_readers();
        let mut copied = 0;
        for id in suspects {
            let Some(io) = self.streams.io.get_mut(&id) else { continue };
            io.reading = Reading::Lagging;
            copied += io.unread.copy_out();
            // A chunk that goes back has to be free as a whole.
            if copied >= want && self.landing.give_back.0.is_idle() {
                break;
            }
        }
        self.usage.copied.pressure += copied as u64;
        // What the peer is about to write, or is about to be read, comes free by itself.
        let moves = !self.landing.granted.is_empty()
            || self.streams.io.values().any(|io| io.unread.has_landed());
        if copied == 0 && !moves && self.landing.is_short {
            self.landing.account.starve();
        }
        self.landing.stall.end();
    }

    /// The streams that nobody has read since the last call although something was unread, in their
    /// order. Marks those that have something unread now.
    fn suspect_readers(&mut self) -> Vec<tonic_rdma_proto::StreamId> {
        let mut suspects = Vec::new();
        for (id, io) in self.streams.io.iter_mut().filter(|(_, io)| io.unread.has_landed()) {
            match io.reading {
                Reading::UpToDate => io.reading = Reading::Suspected,
                Reading::Suspected | Reading::Lagging => suspects.push(*id),
            }
        }
        suspects.sort_unstable();
        suspects
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn others_have_their_turns_before_a_delay_ends() {
        let mut grace = Grace::default();
        assert!(!grace.is_running());
        grace.begin();
        for _ in 1..GRACE {
            assert!(grace.is_running() && !grace.turn());
            grace.begin();
        }
        assert!(grace.turn() && !grace.is_running());
    }

    /// The table.
    #[tokio::test(start_paused = true)]
    async fn a_stall_lasts_until_a_stream_has_memory() {
        let mut stall = Stall::default();
        assert!(stall.begin() && !stall.begin());
        tokio::time::advance(PERIOD / 2).await;
        assert!(!stall.0.expire(Instant::now()));
        stall.end();
        assert!(stall.begin(), "it begins anew");
        tokio::time::advance(PERIOD).await;
        assert!(stall.0.expire(Instant::now()) && !stall.0.expire(Instant::now()), "once");
        assert!(stall.begin(), "the next period");
    }
}
