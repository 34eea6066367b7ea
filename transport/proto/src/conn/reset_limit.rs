//! Limits the streams that a client resets before they are answered.
//!
//! A reset stream makes room for the next stream at once, so the limit of open streams does not
//! bound the number of calls that a client starts and cancels (HTTP/2 rapid reset, CVE-2023-44487).
//! Each call costs the server the start of a handler. A budget bounds the resets:
//!
//! | event | change of the budget |
//! |---|---|
//! | start | [`BURST`] times S, which is also the maximum |
//! | RESET from the client before the server's END was sent | less 1; a breach if nothing is left |
//! | a stream that ended with the server's END | plus [`PER_ANSWER`] |
//! | each second | plus [`PER_SECOND`] times S |
//!
//! S is the limit of open streams, or [`MIN_STREAMS`] if that is more. With the default of 1,024
//! streams the budget allows 16,384 resets at once and 10,240 per second. Well-behaved clients stay
//! within the budget:
//!
//! | client | resets before the answer | why it stays within the budget |
//! |---|---|---|
//! | cancels all its calls at once, up to ten times a second | 10 S a second | time alone restores them |
//! | all calls exceed a deadline of 100 ms or more, at a server that answers nothing | at most 10 S a second: S streams, each for 100 ms | time alone restores them |
//! | hedges each call, with up to five attempts (the maximum in gRPC) | 4 per answer | the answer restores them |
//! | drops futures | any share, if one in five calls is answered | the answer restores them |
//!
//! The time that the driver gives for a message may be up to a second old (`Connection::receive`),
//! which delays the restoring. The burst also covers this delay: in a second, well-behaved clients
//! use at most 10 S of it.

use std::time::Instant;

use crate::error::Breach;

/// Maximum budget in multiples of S.
const BURST: u64 = 16;
/// Budget restored per second in multiples of S.
const PER_SECOND: u64 = 10;
/// Budget restored per answered stream.
const PER_ANSWER: u64 = 4;
/// Minimum of S: a low limit of open streams does not make each reset more harmful.
const MIN_STREAMS: u32 = 100;

const SECOND: u64 = 1_000_000_000;

/// The budget of one connection.
#[derive(Debug)]
pub(super) struct ResetLimit {
    left: u64,
    burst: u64,
    per_second: u64,
    /// The time up to which the budget has been restored.
    counted: Instant,
}

impl ResetLimit {
    pub(super) fn new(max_streams: u32, now: Instant) -> Self {
        let streams = u64::from(max_streams.max(MIN_STREAMS));
        let burst = BURST * streams;
        ResetLimit { left: burst, burst, per_second: PER_SECOND * streams, counted: now }
    }

    /// Restores budget for a stream that ended with this side's END.
    pub(super) fn answered(&mut self) {
        self.left = (self.left + PER_ANSWER).min(self.burst);
    }

    /// Charges the budget for a stream that the peer reset before it was answered.
    ///
    /// # Errors
    /// [`Breach::RapidReset`] if the budget is exhausted.
    pub(super) fn charge(&mut self, now: Instant) -> Result<(), Breach> {
        self.restore(now);
        let (burst, per_second) = (self.burst, self.per_second);
        self.left = self.left.checked_sub(1).ok_or(Breach::RapidReset { burst, per_second })?;
        Ok(())
    }

    /// Restores budget for the time that has passed.
    fn restore(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.counted);
        let each = SECOND / self.per_second.min(SECOND);
        let more = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX) / each;
        if self.left + more.min(self.burst) >= self.burst {
            (self.left, self.counted) = (self.burst, self.counted.max(now));
        } else if more > 0 {
            self.left += more;
            // The remainder of the time counts later.
            self.counted += std::time::Duration::from_nanos(more * each);
        }
    }
}
