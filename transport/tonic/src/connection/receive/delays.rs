//! The delays of a connection's landing memory.
//!
//! | delay | effect when it ends |
//! |---|---|
//! | [`Stall`] | unread data is copied, to make room for a stream that has waited long |
//! | [`LandingWait`] | messages land in parts instead of in one piece |
//! | [`ReclaimDelay`] | grants in chunks that were chosen for return are recalled |
//!
//! A busy runtime must not count as a stall. So before the driver handles the end of a `Stall` or a
//! `LandingWait`, it lets all other tasks run [`GRACE`] times, including readers that were woken
//! ([`Grace`]).

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_memory::Reclaim;
use tonic_rdma_proto::StreamId;

/// Time that a stream waits before unread data is copied. A running reader has read within this
/// time, even on a busy machine.
const PERIOD: Duration = Duration::from_millis(50);

/// Number of turns that the runtime's other tasks get between the end of a delay and its effect.
/// One turn is not enough, because tasks do not run in a strict order.
const GRACE: u8 = 8;

/// Number of operations in a round after which the driver copies no more unread data. The rest is
/// copied in later turns (R20).
pub(crate) const MAX_WORK: usize = 32;

/// A one-time delay before an action.
///
/// | from | on | to |
/// |---|---|---|
/// | Idle | [`begin`](Delay::begin) | Running |
/// | Running | the time has passed | Over |
/// | any | [`reset`](Delay::reset) | Idle |
#[derive(Debug, Default)]
pub(crate) enum Delay {
    #[default]
    Idle,
    Running {
        until: Instant,
        /// Whether the driver has not taken the deadline yet.
        is_new: bool,
    },
    Over,
}

impl Delay {
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        matches!(self, Self::Over)
    }

    #[inline]
    pub(crate) fn begin(&mut self, time: Duration) {
        *self = Self::Running { until: Instant::now() + time, is_new: true };
    }

    #[inline]
    pub(crate) fn reset(&mut self) {
        *self = Self::Idle;
    }

    /// When the delay ends.
    #[inline]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Running { until, .. } => Some(*until),
            Self::Idle | Self::Over => None,
        }
    }

    /// Returns true if a deadline exists that the driver has not taken, and marks the deadline as
    /// taken.
    #[inline]
    pub(crate) fn has_new_deadline(&mut self) -> bool {
        match self {
            Self::Running { is_new, .. } => std::mem::take(is_new),
            Self::Idle | Self::Over => false,
        }
    }

    /// Returns true once, when the delay ends.
    #[inline]
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        let over = self.deadline().is_some_and(|until| until <= now);
        if over {
            *self = Self::Over;
        }
        over
    }
}

/// The number of turns until expired delays take effect.
///
/// | turns left | on | next |
/// |---|---|---|
/// | 0 | a [`Stall`] or a [`LandingWait`] expires | [`GRACE`] |
/// | more | the driver's task runs | one turn fewer; after the last turn, the expired delays take effect |
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
    /// The stream has been read since the end of the last period, or had no unread data at that
    /// time.
    #[default]
    UpToDate,
    /// The stream had unread data at the end of the last period, and has not been read since.
    Suspected,
    /// Unread data was copied, and later data is copied as well.
    Lagging,
}

/// The delay after which unread data is copied to make room.
///
/// Unread payload occupies landing memory that other streams need (R13). So the driver copies
/// unread payload to the heap, one stream after another, until the stream that waits has room.
///
/// | the delay | on | next |
/// |---|---|---|
/// | Idle, Over | a stream wants landing memory and gets none, or a chunk to be returned is still in use although its grants were recalled | Running |
/// | Running | a stream gets landing memory | Idle |
/// | Running | [`PERIOD`] has passed | Over: streams that were already unread at the end of the previous period are copied |
/// | Over | the driver has made the copies | Idle |
///
/// A copied stream is **lagging** until the application reads it. Data that lands for a lagging
/// stream is copied on delivery.
///
/// If the application holds all memory, neither a copy nor a wait helps, and the account
/// [starves](tonic_rdma_memory::Landing::starve).
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
    /// The streams whose payload is copied, in this order.
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

/// Maximum wait for a whole piece. At 3 Gb/s and more, a message of 16 MiB in flight lands within
/// this time.
const MAX_WAIT: Duration = Duration::from_millis(50);

/// How long a message waits for landing memory in one piece before it lands in parts.
///
/// Parts have to be joined by a copy, into memory that the kernel may have to provide page by page.
/// So a message waits for a whole piece while other messages free memory. The wait is short,
/// because readers may keep their messages.
///
/// | the delay | on | next |
/// |---|---|---|
/// | Idle | no whole piece is free | Running |
/// | Running | [`MAX_WAIT`] has passed | Over |
/// | Idle, Running | memory in one piece cannot be registered | Over |
/// | any | the longest-waiting stream gets a whole piece | Idle |
///
/// In the state Over, messages land in parts without a wait.
#[derive(Debug, Default)]
pub(crate) struct LandingWait(pub(crate) Delay);

impl LandingWait {
    #[inline]
    pub(crate) fn takes_parts(&self) -> bool {
        self.0.is_over()
    }

    /// Begins to wait, because no whole piece is free. Returns true if the wait begins now.
    #[inline]
    pub(crate) fn short(&mut self) -> bool {
        let begins = self.0.is_idle();
        if begins {
            self.0.begin(MAX_WAIT);
        }
        begins
    }

    /// Ends the wait, because memory in one piece cannot be registered.
    pub(crate) fn impossible(&mut self) {
        self.0 = Delay::Over;
    }

    /// Resets the wait, because the longest-waiting stream has got a whole piece.
    #[inline]
    pub(crate) fn whole(&mut self) {
        self.0.reset();
    }
}

/// Time for data in flight to land before grants are recalled. At 3 Gb/s and more, 16 MiB land
/// within this time.
const DRAIN: Duration = Duration::from_millis(50);

/// The delay before grants are recalled from a connection that holds more than its share of landing
/// memory while another connection waits.
///
/// Chunks that are chosen for return are not granted any more. If the peer is fast, data in flight
/// lands within [`DRAIN`] and the readers free its memory. Then the remaining grants are recalled.
/// The protocol ends the connection of a peer that keeps recalled grants while others wait
/// ([`Connection::recall_grants`](tonic_rdma_proto::Connection::recall_grants)).
///
/// | the delay | on | next |
/// |---|---|---|
/// | Idle | chunks are chosen for return | Running |
/// | Running | [`DRAIN`] has passed | Over: the chunks' grants are recalled |
/// | Over | more chunks are chosen | Running |
/// | any | no chunk is chosen | Idle |
#[derive(Debug, Default)]
pub(crate) struct ReclaimDelay(pub(crate) Delay);

impl ReclaimDelay {
    /// Starts the delay if chunks were chosen for return, and resets the delay if no chunk was
    /// chosen.
    #[inline]
    pub(crate) fn chosen(&mut self, reclaim: Reclaim) {
        match reclaim {
            Reclaim::None => self.0.reset(),
            Reclaim::Pending if self.0.is_over() => {}
            Reclaim::Pending | Reclaim::New if self.0.deadline().is_some() => {}
            Reclaim::Pending | Reclaim::New => self.0.begin(DRAIN),
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

    /// Goes through the table of [`Stall`].
    #[tokio::test(start_paused = true)]
    async fn a_stall_lasts_until_a_stream_has_memory() {
        let mut stall = Stall::default();
        assert!(stall.begin() && !stall.begin());
        tokio::time::advance(PERIOD / 2).await;
        assert!(!stall.0.expire(Instant::now()));
        stall.end();
        assert!(stall.begin(), "it begins again");
        tokio::time::advance(PERIOD).await;
        assert!(stall.0.expire(Instant::now()) && !stall.0.expire(Instant::now()), "once");
        assert!(stall.begin(), "the next period");
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_ends_and_begins_again() {
        let mut landing_wait = LandingWait::default();
        assert!(!landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
        assert!(landing_wait.short(), "begins");
        assert!(!landing_wait.short(), "once");
        assert!(landing_wait.0.has_new_deadline());
        assert!(!landing_wait.0.has_new_deadline());
        tokio::time::advance(MAX_WAIT / 2).await;
        landing_wait.0.expire(Instant::now());
        assert!(!landing_wait.takes_parts());
        tokio::time::advance(MAX_WAIT / 2).await;
        landing_wait.0.expire(Instant::now());
        assert!(landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
        assert!(!landing_wait.short());
        landing_wait.whole();
        assert!(!landing_wait.takes_parts());
        assert!(landing_wait.short());
        landing_wait.impossible();
        assert!(landing_wait.takes_parts() && landing_wait.0.deadline().is_none());
    }

    /// Goes through the table of [`ReclaimDelay`].
    #[tokio::test(start_paused = true)]
    async fn it_drains_then_asks() {
        let mut state = ReclaimDelay::default();
        state.chosen(Reclaim::None);
        assert!(state.0.is_idle() && state.0.deadline().is_none() && !state.0.has_new_deadline());
        for reclaim in [Reclaim::New, Reclaim::Pending] {
            state.chosen(reclaim);
            let until = state.0.deadline().unwrap();
            assert_eq!(until, Instant::now() + DRAIN);
            assert!(state.0.has_new_deadline() && !state.0.has_new_deadline());
            tokio::time::advance(DRAIN / 2).await;
            for reclaim in [Reclaim::New, Reclaim::Pending] {
                state.chosen(reclaim);
                assert_eq!(state.0.deadline(), Some(until), "it is not put off");
            }
            assert!(!state.0.expire(Instant::now()));
            tokio::time::advance(DRAIN / 2).await;
            assert!(state.0.expire(Instant::now()) && !state.0.expire(Instant::now()), "once");
            state.chosen(Reclaim::Pending);
            assert!(!state.0.is_idle() && state.0.deadline().is_none());
            state.chosen(Reclaim::New);
            assert!(state.0.deadline().is_some());
            state.chosen(Reclaim::None);
            assert!(state.0.is_idle());
        }
    }
}
