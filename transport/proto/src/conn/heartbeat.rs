//! PING and the dead-peer timer.
//!
//! Any message proves that the peer is alive. While something is open (a stream, a grant, an
//! answer), this side sends a PING after a quarter of `dead_peer` without a message, and after
//! another three quarters without a message the peer is dead. So a peer that is gone is detected
//! within `dead_peer`, and one that pauses for less than three quarters of it survives.
//!
//! A connection with nothing open rests. Where the link tells of the peer's end by itself
//! ([`Config::link_tells_end`](crate::Config::link_tells_end)), a connection at rest sends no PING
//! and sets no timer. Elsewhere the peer is asked once in [`REST`] times `dead_peer`; so one that
//! disappears meanwhile is detected within [`REST`] + 1 times `dead_peer`, or, by a call, within
//! `dead_peer` of the call's begin.
//!
//! | from | event | to |
//! |---|---|---|
//! | Alert | a message | Alert, from now on |
//! | Alert | a quarter without a message, something is open | Asking; PING |
//! | Alert | a quarter without a message, nothing is open | Resting |
//! | Asking | a message | Alert |
//! | Asking | three quarters without a message | dead |
//! | Resting | a message of PINGs alone | Resting, from now on |
//! | Resting | any other message | Alert |
//! | Resting | this side opens something | Roused |
//! | Resting | [`REST`] times `dead_peer` without a message | Asking; PING |
//! | Roused | a message | Alert |
//! | Roused | the timer, which is due at once | Alert |
//!
//! Roused exists because this side opens streams without reading the clock: the time counts from
//! the timer that follows.
//!
//! The driver's timer may be late by a 32nd of its wait, and so is what follows from it. If it is
//! late by a quarter of `dead_peer`, this side was stopped or short of processor time. It then
//! sends another PING before it declares the peer dead.

use std::time::{Duration, Instant};

use crate::error::Breach;

/// A peer of a connection at rest is asked once in this many times `dead_peer`, unless the link
/// tells of its end: every two minutes by default. An answer wakes both ends.
pub(super) const REST: u32 = 24;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Alert { since: Instant },
    Asking { since: Instant },
    Resting,
    Roused,
}

#[derive(Debug)]
pub(super) struct Heartbeat {
    quarter: Duration,
    /// How long a connection at rest waits before it asks; `None`: for ever.
    rest: Option<Duration>,
    last_received: Instant,
    state: State,
    /// PINGs that have not been answered.
    outstanding: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Beat {
    Nothing,
    /// The connection rests from now on.
    Rest,
    Ping,
    Dead,
}

impl Heartbeat {
    /// `link_tells_end`: the peer of a connection at rest is not asked.
    pub(super) fn new(dead_peer: Duration, link_tells_end: bool, now: Instant) -> Self {
        Heartbeat {
            quarter: dead_peer / 4,
            rest: (!link_tells_end).then_some(dead_peer * REST),
            last_received: now,
            state: State::Alert { since: now },
            outstanding: 0,
        }
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        if self.state != State::Resting {
            self.state = State::Alert { since: now };
        }
    }

    /// What was received is more than PINGs.
    pub(super) fn active(&mut self, now: Instant) {
        self.state = State::Alert { since: now };
    }

    /// This side opens something that the peer has to answer, or may keep.
    pub(super) fn rouse(&mut self) {
        if self.state == State::Resting {
            self.state = State::Roused;
        }
    }

    /// When the last message was received.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Whether a PING has not been answered.
    pub(super) fn awaits_pong(&self) -> bool {
        self.outstanding > 0
    }

    /// Whether the timer has sent a PING and nothing has been received since.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.state, State::Asking { .. })
    }

    pub(super) fn is_resting(&self) -> bool {
        self.state == State::Resting
    }

    /// Whether this side has opened something at rest, and the timer has not run since.
    pub(super) fn is_roused(&self) -> bool {
        self.state == State::Roused
    }

    /// Counts a PING that is sent for another reason.
    pub(super) fn count_ping(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn pong(&mut self) -> Result<(), Breach> {
        self.outstanding = self.outstanding.checked_sub(1).ok_or(Breach::UnexpectedPong)?;
        Ok(())
    }

    /// `None`: the peer of a connection at rest is not asked.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Alert { since } => Some(since + self.quarter),
            State::Asking { since } => Some(since + self.quarter * 3),
            State::Resting => self.rest.map(|rest| self.last_received + rest),
            State::Roused => Some(self.last_received),
        }
    }

    /// `is_idle`: nothing is open.
    pub(super) fn timeout(&mut self, now: Instant, is_idle: bool) -> Beat {
        let Some(deadline) = self.deadline().filter(|deadline| now >= *deadline) else {
            return Beat::Nothing;
        };
        match self.state {
            State::Roused => {
                self.state = State::Alert { since: now };
                return Beat::Nothing;
            }
            State::Alert { .. } if is_idle => {
                self.state = State::Resting;
                return Beat::Rest;
            }
            State::Asking { .. } if now < deadline + self.quarter => return Beat::Dead,
            State::Alert { .. } | State::Asking { .. } | State::Resting => {}
        }
        self.state = State::Asking { since: now };
        self.outstanding += 1;
        Beat::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD_PEER: Duration = Duration::from_secs(4);

    fn beat() -> (Heartbeat, impl Fn(u64) -> Instant) {
        beat_over(false)
    }

    fn beat_over(link_tells_end: bool) -> (Heartbeat, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |ms: u64| start + Duration::from_millis(ms);
        (Heartbeat::new(DEAD_PEER, link_tells_end, start), at)
    }

    #[test]
    fn pings_then_declares_dead() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(999), false), Beat::Nothing);
        assert_eq!(h.timeout(at(1_000), false), Beat::Ping);
        assert_eq!(h.timeout(at(3_999), false), Beat::Nothing);
        assert_eq!(h.timeout(at(4_000), false), Beat::Dead);
    }

    #[test]
    fn a_busy_connection_survives_a_pause_of_its_peer() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(1_000), false), Beat::Ping);
        // The peer stopped just before, and went on after nearly three seconds.
        assert_eq!(h.timeout(at(3_900), false), Beat::Nothing);
        h.received(at(3_900));
        h.pong().unwrap();
        assert_eq!(h.timeout(at(4_000), false), Beat::Nothing);
        assert_eq!(h.deadline(), Some(at(4_900)));
    }

    #[test]
    fn a_late_timer_pings_again_first() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(100_000), false), Beat::Ping);
        assert_eq!(h.timeout(at(101_000), false), Beat::Nothing);
        // Stopped again, with the question open.
        assert_eq!(h.timeout(at(200_000), false), Beat::Ping);
        assert_eq!(h.timeout(at(203_000), false), Beat::Dead);
        h.pong().unwrap();
        h.pong().unwrap();
        assert_eq!(h.pong(), Err(Breach::UnexpectedPong));
    }

    #[test]
    fn at_rest_the_peer_is_asked_rarely_and_judged_as_soon() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(1_000), true), Beat::Rest);
        let ask = u64::from(REST) * 4_000;
        assert_eq!(h.deadline(), Some(at(ask)));
        assert_eq!(h.timeout(at(ask - 1), true), Beat::Nothing);
        // The peer asks: this side need not.
        h.received(at(5_000));
        assert_eq!(h.deadline(), Some(at(5_000 + ask)));
        assert_eq!(h.timeout(at(5_000 + ask), true), Beat::Ping);
        assert!(h.is_asking());
        assert_eq!(h.timeout(at(5_000 + ask + 2_999), true), Beat::Nothing);
        assert_eq!(h.timeout(at(5_000 + ask + 3_000), true), Beat::Dead);
    }

    #[test]
    fn a_link_that_tells_of_the_end_is_not_asked() {
        let (mut h, at) = beat_over(true);
        assert_eq!(h.timeout(at(1_000), true), Beat::Rest);
        assert_eq!((h.deadline(), h.timeout(at(1 << 40), true)), (None, Beat::Nothing));
        h.received(at(5_000));
        assert!(h.is_resting() && h.deadline().is_none(), "a PING of the peer's");
        h.active(at(6_000));
        assert_eq!(h.deadline(), Some(at(7_000)));
        assert_eq!(h.timeout(at(7_000), false), Beat::Ping, "as long as something is open");
    }

    #[test]
    fn what_begins_at_rest_has_its_time_from_then_on() {
        for link_tells_end in [true, false] {
            let (mut h, at) = beat_over(link_tells_end);
            assert_eq!(h.timeout(at(1_000), true), Beat::Rest);
            h.rouse();
            assert!(h.is_roused() && h.deadline().unwrap() <= at(50_000), "due at once");
            assert_eq!(h.timeout(at(50_000), false), Beat::Nothing);
            assert_eq!(h.deadline(), Some(at(51_000)));
            assert_eq!(h.timeout(at(51_000), false), Beat::Ping);
            assert_eq!(h.timeout(at(54_000), false), Beat::Dead);
        }
    }
}
