//! Copies unread data to make room, when a stream has waited long for landing memory.
//!
//! Unread payload occupies landing memory that other streams need (R13). So the driver copies
//! unread payload to the heap, one stream after another, until the stream that waits has room.
//!
//! | the delay | on | next |
//! |---|---|---|
//! | Idle | a stream wants landing memory and gets none, or a chunk to be returned is still in use although its grants were recalled | Running |
//! | Running | a stream gets some | Idle |
//! | Running | [`PERIOD`] has passed | Over: streams that were already unread at the end of the previous period are copied |
//! | Over | | Running or Idle, by the first row |
//!
//! A copied stream is **lagging** until the application reads it. Data that lands for a lagging
//! stream is copied on delivery.
//!
//! If the application holds all memory, no copy and no wait would help, and the account
//! [starves](tonic_rdma_memory::Landing::starve).
//!
//! A busy runtime is not a stall. Before the driver handles an expired delay, it lets all other
//! tasks run [`GRACE`] times, including readers that were woken ([`Grace`]).

use std::collections::VecDeque;
use std::time::Duration;

use tonic_rdma_proto::StreamId;

use crate::connection::delay::Delay;

/// Time that a stream waits before unread data is copied. A running reader has read within this
/// time, even on a busy machine.
const PERIOD: Duration = Duration::from_millis(50);

/// Number of turns that the runtime's other tasks get between the end of a delay and its effect.
/// One turn is not enough, because tasks do not run in a strict order.
const GRACE: u8 = 8;

/// Number of operations in a round after which the driver copies no more unread data. The rest is
/// copied in later turns (R20).
pub(crate) const MAX_WORK: usize = 32;

/// The number of turns until expired delays take effect.
///
/// | turns left | on | next |
/// |---|---|---|
/// | 0 | a delay of the landing memory expires | [`GRACE`] |
/// | more | the driver's task runs | one fewer; after the last, the delays that still run end |
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

    /// Counts one run of the driver's task. Returns true if no turn is left.
    pub(super) fn turn(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

/// Whether a stream's reader keeps up with the received data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reading {
    /// The stream was read since the end of the last period, or had no unread data then.
    #[default]
    UpToDate,
    /// The stream was not read since the end of the last period.
    Suspected,
    /// Unread data was copied, and later data is copied as well.
    Lagging,
}

/// The delay of the module's table.
#[derive(Debug, Default)]
pub(crate) struct Stall(pub(crate) Delay);

impl Stall {
    /// Starts the delay for a waiting stream, unless the delay is running. Returns true if the
    /// delay was not running.
    #[inline]
    pub(crate) fn begin(&mut self) -> bool {
        let begins = self.0.deadline().is_none();
        if begins {
            self.0.begin(PERIOD);
        }
        begins
    }

    /// Resets the delay, because a stream has got memory.
    #[inline]
    pub(crate) fn end(&mut self) {
        self.0.reset();
    }
}

/// The copies of unread data that the driver still has to make, over several turns (R20).
#[derive(Debug, Default)]
pub(crate) struct Relief {
    /// The streams whose payload is copied, in their order.
    pub(super) streams: VecDeque<StreamId>,
    /// Number of copied bytes after which no further stream is copied.
    pub(super) want: usize,
    pub(super) copied: usize,
    /// Whether the stall delay has expired. The delay is reset after the last copy.
    pub(super) ends_stall: bool,
}

impl Relief {
    /// Whether the driver has to run again soon.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Adds a lagging stream, whose landed data is copied in any case.
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

    /// Goes through the table.
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
