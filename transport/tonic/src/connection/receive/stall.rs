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

use std::collections::VecDeque;
use std::time::Duration;

use tonic_rdma_proto::StreamId;

use crate::connection::delay::Delay;

/// A reader that runs has read by then, on a busy machine, too.
const PERIOD: Duration = Duration::from_millis(50);

/// Turns of the runtime's tasks between the end of a delay and what follows from it. Tasks do not
/// run in strict order.
const GRACE: u8 = 8;

/// The operations of a round of the driver after which it copies nothing more of what is unread:
/// the rest is copied in later turns (R20).
pub(crate) const MAX_WORK: usize = 32;

/// Turns that are left until the ends of delays count.
///
/// | turns | on | next |
/// |---|---|---|
/// | 0 | a delay of the landing memory has passed | [`GRACE`] |
/// | more | the driver's task runs | one fewer; with the last, the delays that still run end |
#[derive(Debug, Default)]
pub(crate) struct Grace(u8);

impl Grace {
    pub(super) fn begin(&mut self) {
        if self.0 == 0 {
            self.0 = GRACE;
        }
    }

    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.0 > 0
    }

    /// The driver's task runs. True when the last turn is over.
    pub(super) fn turn(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

/// How a stream is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reading {
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
pub(crate) struct Stall(pub(crate) Delay);

impl Stall {
    /// A stream waits. True when that begins now.
    #[inline]
    pub(crate) fn begin(&mut self) -> bool {
        let begins = self.0.deadline().is_none();
        if begins {
            self.0.begin(PERIOD);
        }
        begins
    }

    /// A stream has memory.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.0.reset();
    }
}

/// The copies that the driver has still to make of what nobody reads, over several turns (R20).
#[derive(Debug, Default)]
pub(crate) struct Relief {
    /// The streams whose payload is copied, in their order.
    pub(super) streams: VecDeque<StreamId>,
    /// The number of bytes after which no other stream is copied.
    pub(super) want: usize,
    pub(super) copied: usize,
    /// A stream has waited for a period: with the last copy, that is over.
    pub(super) ends_stall: bool,
}

impl Relief {
    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        !self.streams.is_empty()
    }

    /// What has landed for a lagging stream is to be copied, whatever else is.
    pub(crate) fn add(&mut self, id: StreamId) {
        self.want = usize::MAX;
        if self.streams.back() != Some(&id) {
            self.streams.push_back(id);
        }
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
