//! The keep-alive that a program asks for, which works like hyper's for HTTP/2.
//!
//! A PING is sent when nothing was received for [`KeepAlive::interval`]. The peer then has
//! [`KeepAlive::timeout`] to answer. Any message counts as the answer. The peer's process answers
//! PING, so a peer that pauses for longer loses its calls.
//!
//! | from | event | to |
//! |---|---|---|
//! | Waits | the interval has passed, no stream is open, and [`KeepAlive::while_idle`] is not set | Waits, from now on |
//! | Waits | the interval has passed, and a stream is open or [`KeepAlive::while_idle`] is set | Asked; PING |
//! | Asked | a message | Waits |
//! | Asked | the time-out has passed | dead |

use std::time::Instant;

use crate::config::KeepAlive;

#[derive(Debug)]
pub(super) struct KeepAliveTimer {
    config: KeepAlive,
    /// The time from which the interval counts, unless a message was received later.
    checked: Instant,
    /// When the unanswered PING was sent.
    asked: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeepAliveCheck {
    Nothing,
    Ping,
    Dead,
}

impl KeepAliveTimer {
    pub(super) fn new(config: KeepAlive, now: Instant) -> Self {
        KeepAliveTimer { config, checked: now, asked: None }
    }

    pub(super) fn received(&mut self) {
        self.asked = None;
    }

    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Returns when a check is due. `None` if nothing is due before the connection is roused.
    /// `rests` says whether the connection is at rest.
    pub(super) fn deadline(&self, last_received: Instant, rests: bool) -> Option<Instant> {
        match self.asked {
            Some(asked) => Some(asked + self.config.timeout),
            None if rests && !self.config.while_idle => None,
            None => Some(last_received.max(self.checked) + self.config.interval),
        }
    }

    pub(super) fn timeout(
        &mut self,
        now: Instant,
        last_received: Instant,
        streams: bool,
    ) -> KeepAliveCheck {
        if self.deadline(last_received, false).is_none_or(|deadline| now < deadline) {
            return KeepAliveCheck::Nothing;
        }
        if self.asked.is_some() {
            return KeepAliveCheck::Dead;
        }
        self.checked = now;
        if !streams && !self.config.while_idle {
            return KeepAliveCheck::Nothing;
        }
        self.asked = Some(now);
        KeepAliveCheck::Ping
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn timer(while_idle: bool) -> (KeepAliveTimer, Instant) {
        let now = Instant::now();
        let config = KeepAlive { interval: SECOND * 10, timeout: SECOND * 2, while_idle };
        (KeepAliveTimer::new(config, now), now)
    }

    #[test]
    fn it_asks_after_the_interval_and_ends_after_the_time_out() {
        let (mut timer, start) = timer(false);
        assert_eq!(timer.timeout(start + SECOND * 9, start, true), KeepAliveCheck::Nothing);
        assert_eq!(timer.timeout(start + SECOND * 10, start, true), KeepAliveCheck::Ping);
        assert_eq!(timer.deadline(start, false), Some(start + SECOND * 12));
        assert_eq!(timer.timeout(start + SECOND * 11, start, true), KeepAliveCheck::Nothing);
        assert_eq!(timer.timeout(start + SECOND * 12, start, true), KeepAliveCheck::Dead);
    }

    #[test]
    fn any_message_is_an_answer() {
        let (mut timer, start) = timer(false);
        assert_eq!(timer.timeout(start + SECOND * 10, start, true), KeepAliveCheck::Ping);
        timer.received();
        assert!(!timer.is_asking());
        let received = start + SECOND * 11;
        assert_eq!(timer.deadline(received, false), Some(start + SECOND * 21));
        assert_eq!(timer.timeout(start + SECOND * 12, received, true), KeepAliveCheck::Nothing);
        assert_eq!(timer.timeout(start + SECOND * 21, received, true), KeepAliveCheck::Ping);
    }

    #[test]
    fn without_a_stream_it_asks_only_if_it_was_told_to() {
        for while_idle in [false, true] {
            let (mut timer, start) = timer(while_idle);
            assert_eq!(timer.deadline(start, true).is_some(), while_idle);
            let asked = timer.timeout(start + SECOND * 10, start, false);
            assert_eq!(asked == KeepAliveCheck::Ping, while_idle);
            if !while_idle {
                assert_eq!(timer.deadline(start, false), Some(start + SECOND * 20));
            }
        }
    }
}
