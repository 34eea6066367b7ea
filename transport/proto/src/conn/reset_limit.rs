//! How many streams a client may reset before they were answered.
//!
//! A stream that is reset makes room for the next one at once, so the limit of open streams does
//! not bound how many calls a client begins and gives up (HTTP/2 rapid reset, CVE-2023-44487). Each
//! of them costs the server the start of a handler. A budget bounds it:
//!
//! | what | budget |
//! |---|---|
//! | at the start, and at most | [`BURST`] times S |
//! | RESET from the client before the server's END has gone out | less 1; a breach when nothing is left |
//! | a stream that ended with the server's END | plus [`PER_ANSWER`] |
//! | time | plus [`PER_SECOND`] times S a second |
//!
//! S is the limit of open streams, or [`MIN_STREAMS`] if that is more: 16,384 resets and 10,240 a
//! second with the default of 1,024 streams. What clients do in good faith stays below that:
//!
//! | client | resets before the answer | why it is never cut off |
//! |---|---|---|
//! | gives up all its calls at once, up to ten times a second | 10 S a second | time alone restores them |
//! | all calls run into a deadline of 100 ms or more, at a server that answers nothing | 10 S a second at most: S streams, each for 100 ms | likewise |
//! | hedges each call, with up to five attempts (the most that gRPC allows) | 4 for each answer | the answer restores them |
//! | drops futures | any share, of calls of which one in five is answered | likewise |
//!
//! The burst also covers the age that the time of a message may have (`Connection::receive`): in an
//! eighth of the dead-peer time, 0.6 s by default, clients in good faith use less than half of it.

use std::time::Instant;

use crate::error::Breach;

/// Budget in multiples of the streams that may be open.
const BURST: u64 = 16;
/// What a second restores, in the same multiples.
const PER_SECOND: u64 = 10;
/// What an answered stream restores.
const PER_ANSWER: u64 = 4;
/// A low limit of open streams does not make each of them more dangerous: they are taken for as
/// many at least.
const MIN_STREAMS: u32 = 100;

const SECOND: u64 = 1_000_000_000;

/// The budget of one connection. See the module's docs.
#[derive(Debug)]
pub(super) struct ResetLimit {
    left: u64,
    burst: u64,
    per_second: u64,
    /// Up to here time has been counted.
    counted: Instant,
}

impl ResetLimit {
    pub(super) fn new(max_streams: u32, now: Instant) -> Self {
        let streams = u64::from(max_streams.max(MIN_STREAMS));
        let burst = BURST * streams;
        ResetLimit { left: burst, burst, per_second: PER_SECOND * streams, counted: now }
    }

    /// A stream has ended with this side's END.
    pub(super) fn answered(&mut self) {
        self.left = (self.left + PER_ANSWER).min(self.burst);
    }

    /// The peer has reset a stream that was not answered.
    ///
    /// # Errors
    /// [`Breach::RapidReset`]: the budget is used up.
    pub(super) fn charge(&mut self, now: Instant) -> Result<(), Breach> {
        self.restore(now);
        let (burst, per_second) = (self.burst, self.per_second);
        self.left = self.left.checked_sub(1).ok_or(Breach::RapidReset { burst, per_second })?;
        Ok(())
    }

    /// Counts the time that has passed.
    fn restore(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.counted);
        let each = SECOND / self.per_second.min(SECOND);
        let more = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX) / each;
        if self.left + more.min(self.burst) >= self.burst {
            (self.left, self.counted) = (self.burst, self.counted.max(now));
        } else if more > 0 {
            self.left += more;
            // What is left of the time counts later.
            self.counted += std::time::Duration::from_nanos(more * each);
        }
    }
}
