//! The time of received messages, without reading the clock for each.
//!
//! Reading the clock can be a system call. The protocol's time-outs are seconds, and a message that
//! seems older than it is only makes the protocol send a PING sooner.
//!
//! | from | on | to |
//! |---|---|---|
//! | Read | a message, which gets the current time | Read; Reused at the [`READS`]th |
//! | Reused | a message, which gets the time that was read last | Reused |
//! | Read, Reused | the connection's timer, which expires within an eighth of the dead-peer time, and within [`MAX_AGE`], of a reused time | Read |

use std::time::{Duration, Instant};

/// Reads of the clock between two expiries of the timer. An idle connection has fewer messages, and
/// needs no timer for this.
const READS: u32 = 8;

/// Maximum age of a reused time: not only the heartbeat uses it, but also for instance the check
/// whether landing memory is idle.
const MAX_AGE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(in crate::connection) struct CoarseClock {
    /// Age of a reused time after which the clock is read again.
    max_age: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Read {
        reads: u32,
    },
    Reused {
        at: Instant,
        /// The driver has not taken the deadline.
        is_new: bool,
    },
}

impl CoarseClock {
    #[inline]
    pub(in crate::connection) fn new(dead_peer: Duration) -> Self {
        CoarseClock { max_age: (dead_peer / 8).min(MAX_AGE), state: State::Read { reads: 0 } }
    }

    /// The time of a message that was received now.
    #[inline]
    pub(in crate::connection) fn now(&mut self) -> Instant {
        match self.state {
            State::Read { reads } => {
                // tokio's clock, which tests can stop.
                let at = tokio::time::Instant::now().into_std();
                self.state = match reads + 1 {
                    READS => State::Reused { at, is_new: true },
                    reads => State::Read { reads },
                };
                at
            }
            State::Reused { at, .. } => at,
        }
    }

    /// Whether there is a deadline that the driver has not taken. Takes it.
    #[inline]
    pub(in crate::connection) fn has_new_deadline(&mut self) -> bool {
        match &mut self.state {
            State::Reused { is_new, .. } => std::mem::take(is_new),
            State::Read { .. } => false,
        }
    }

    /// When the connection's timer has to expire.
    #[inline]
    pub(in crate::connection) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Reused { at, .. } => Some(at + self.max_age),
            State::Read { .. } => None,
        }
    }

    /// The connection's timer has expired.
    #[inline]
    pub(in crate::connection) fn expire(&mut self) {
        self.state = State::Read { reads: 0 };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const DEAD: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn one_read_serves_all_messages_until_the_timer() {
        let mut clock = CoarseClock::new(DEAD);
        let mut last = Instant::now();
        for _ in 0..READS {
            assert!(!clock.has_new_deadline() && clock.deadline().is_none(), "a few need no timer");
            advance(DEAD / 100).await;
            last = tokio::time::Instant::now().into_std();
            assert_eq!(clock.now(), last);
        }
        advance(DEAD / 100).await;
        assert_eq!(clock.now(), last);
        assert!(clock.has_new_deadline() && !clock.has_new_deadline(), "once");
        assert_eq!(clock.deadline(), Some(last + DEAD / 8));
        advance(DEAD / 8).await;
        assert_eq!(clock.now(), last);
        assert!(!clock.has_new_deadline());
        clock.expire();
        assert_eq!(clock.deadline(), None);
        assert!(clock.now() > last + DEAD / 8);
    }
}
