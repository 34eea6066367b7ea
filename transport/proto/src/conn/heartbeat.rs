//! Rest, and proof that the peer's end of the link still exists (R24).
//!
//! A silent peer is not dead: its process may be stopped, or busy. So silence alone ends nothing.
//! Any message proves that the peer is there. While something is open (a stream, a grant, an
//! answer) and no message has arrived for [`QUIET`], this side asks for a proof that does not
//! involve the peer's process ([`Event::Probe`](super::Event::Probe)): the device of the peer's
//! host answers. [`Liveness`] says whether the link needs probes, and how long an answer may take.
//! A link that detects a lost path itself ends earlier. The time limit for an answer serves devices
//! that never detect a lost path.
//!
//! A connection with nothing open rests. A connection at rest sets no timer if the link itself
//! reports that the peer's end is gone. Otherwise the connection asks for a proof every [`REST`].
//!
//! | from | event | to |
//! |---|---|---|
//! | Alert | a message, a proof | Alert, from now on |
//! | Alert | [`QUIET`] has passed, something is open | Asking; a probe. Alert if the link reports the end itself |
//! | Alert | [`QUIET`] has passed, nothing is open | Resting |
//! | Asking | a message, a proof | Alert |
//! | Asking | [`QUIET`] has passed, and less than the time for an answer since the first probe | Asking; a probe |
//! | Asking | the time for an answer has passed | dead |
//! | Resting | a message of PINGs alone, a proof | Resting, from now on |
//! | Resting | any other message | Alert |
//! | Resting | this side opens something | Roused |
//! | Resting | [`REST`] without a message or a proof | Asking; a probe |
//! | Roused | a message | Alert |
//! | Roused | the timer, which is due at once | Alert |
//!
//! Roused exists because this side opens streams without reading the clock. The driver's timer is
//! then due at once, and [`QUIET`] counts from the moment at which that timer runs.
//!
//! The driver's timer, and with it every deadline here, may be late by a 32nd of its wait. If the
//! timer is late by [`QUIET`], this side was stopped or short of processor time. This side then
//! asks once more before it declares the path gone.

use std::time::{Duration, Instant};

use crate::config::Liveness;
use crate::error::Breach;

/// After this time without a message, a connection with nothing open comes to rest, and a
/// connection with something open asks for a proof that the peer's end exists.
pub(super) const QUIET: Duration = Duration::from_millis(1250);
/// How often a connection at rest asks for a proof.
pub(super) const REST: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeartbeatState {
    Alert { since: Instant },
    Asking { first: Instant, since: Instant },
    Resting,
    Roused,
}

#[derive(Debug)]
pub(super) struct Heartbeat {
    liveness: Liveness,
    /// When the last message, or proof, was received.
    last_received: Instant,
    state: HeartbeatState,
    /// Number of PINGs that have not been answered.
    outstanding: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Beat {
    Nothing,
    /// The connection rests from now on.
    Rest,
    Probe,
    Dead,
}

impl Heartbeat {
    pub(super) fn new(liveness: Liveness, now: Instant) -> Self {
        Heartbeat {
            liveness,
            last_received: now,
            state: HeartbeatState::Alert { since: now },
            outstanding: 0,
        }
    }

    /// Records that a message or a proof was received.
    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        if self.state != HeartbeatState::Resting {
            self.state = HeartbeatState::Alert { since: now };
        }
    }

    /// Records that the received message holds a frame other than PING, or the flag WAITED.
    pub(super) fn active(&mut self, now: Instant) {
        self.state = HeartbeatState::Alert { since: now };
    }

    /// Records that this side opens something that the peer has to answer or may keep, such as a
    /// stream or a grant.
    pub(super) fn rouse(&mut self) {
        if self.state == HeartbeatState::Resting {
            self.state = HeartbeatState::Roused;
        }
    }

    /// When the last message, or proof, was received.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Whether a PING has not been answered.
    pub(super) fn awaits_pong(&self) -> bool {
        self.outstanding > 0
    }

    /// Whether a proof was asked for and nothing has been received since.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.state, HeartbeatState::Asking { .. })
    }

    pub(super) fn is_resting(&self) -> bool {
        self.state == HeartbeatState::Resting
    }

    /// Whether this side has opened something while the connection was at rest, and the timer has
    /// not run since.
    pub(super) fn is_roused(&self) -> bool {
        self.state == HeartbeatState::Roused
    }

    /// Counts a PING that is sent.
    pub(super) fn count_ping(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn pong(&mut self) -> Result<(), Breach> {
        self.outstanding = self.outstanding.checked_sub(1).ok_or(Breach::UnexpectedPong)?;
        Ok(())
    }

    /// When [`timeout`](Self::timeout) is due. `None` for a connection at rest that asks for no
    /// proofs.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            HeartbeatState::Alert { since } | HeartbeatState::Asking { since, .. } => {
                Some(since + QUIET)
            }
            HeartbeatState::Resting => {
                (self.liveness != Liveness::Told).then(|| self.last_received + REST)
            }
            HeartbeatState::Roused => Some(self.last_received),
        }
    }

    /// Handles the timer. `is_idle` says that nothing is open.
    pub(super) fn timeout(&mut self, now: Instant, is_idle: bool) -> Beat {
        let Some(deadline) = self.deadline().filter(|deadline| now >= *deadline) else {
            return Beat::Nothing;
        };
        let asks = |first: Instant| match self.liveness {
            Liveness::Asked(limit) => deadline - first < limit,
            Liveness::Told => false,
        };
        let first = match self.state {
            HeartbeatState::Alert { .. } if is_idle => {
                self.state = HeartbeatState::Resting;
                return Beat::Rest;
            }
            HeartbeatState::Alert { .. } | HeartbeatState::Resting
                if self.liveness != Liveness::Told =>
            {
                now
            }
            HeartbeatState::Alert { .. } | HeartbeatState::Resting | HeartbeatState::Roused => {
                self.state = HeartbeatState::Alert { since: now };
                return Beat::Nothing;
            }
            HeartbeatState::Asking { first, .. } if !asks(first) && now < deadline + QUIET => {
                return Beat::Dead;
            }
            HeartbeatState::Asking { first, .. } => first,
        };
        self.state = HeartbeatState::Asking { first, since: now };
        Beat::Probe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMED: Liveness = Liveness::Asked(Duration::from_millis(3_750));

    fn beat(liveness: Liveness) -> (Heartbeat, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |ms: u64| start + Duration::from_millis(ms);
        (Heartbeat::new(liveness, start), at)
    }

    #[test]
    fn it_asks_then_declares_dead() {
        let (mut h, at) = beat(TIMED);
        assert_eq!(h.timeout(at(1_249), false), Beat::Nothing);
        for asked in [1_250, 2_500, 3_750] {
            assert_eq!(h.timeout(at(asked), false), Beat::Probe);
            assert_eq!(h.timeout(at(asked + 1_249), false), Beat::Nothing);
        }
        assert_eq!(h.timeout(at(5_000), false), Beat::Dead);
    }

    #[test]
    fn a_proof_is_as_good_as_a_message() {
        let (mut h, at) = beat(TIMED);
        for round in 0..100 {
            let start = round * 6_000;
            assert_eq!(h.timeout(at(start + 1_250), false), Beat::Probe);
            assert!(h.is_asking());
            h.received(at(start + 4_900));
            assert!(!h.is_asking());
            assert_eq!(h.timeout(at(start + 5_000), false), Beat::Nothing);
            h.received(at(start + 6_000));
        }
    }

    #[test]
    fn a_device_that_never_judges_is_not_asked_for_ever() {
        let (mut h, at) = beat(Liveness::Asked(Duration::from_secs(10)));
        for round in 1..9 {
            assert_eq!(h.timeout(at(round * 1_250), false), Beat::Probe);
        }
        assert_eq!(h.timeout(at(11_250), false), Beat::Dead);
    }

    #[test]
    fn a_late_timer_asks_again_first() {
        let (mut h, at) = beat(TIMED);
        for late in [100_000, 200_000, 300_000, 400_000, 500_000] {
            assert_eq!(h.timeout(at(late), false), Beat::Probe);
        }
        assert_eq!(h.timeout(at(501_250), false), Beat::Dead);
    }

    #[test]
    fn pongs_are_counted() {
        let (mut h, _) = beat(TIMED);
        h.count_ping();
        assert!(h.awaits_pong());
        h.pong().unwrap();
        assert!(!h.awaits_pong());
        assert_eq!(h.pong(), Err(Breach::UnexpectedPong));
    }

    #[test]
    fn at_rest_the_peer_is_asked_rarely_and_judged_as_soon() {
        let (mut h, at) = beat(TIMED);
        assert_eq!(h.timeout(at(1_250), true), Beat::Rest);
        assert_eq!(h.deadline(), Some(at(120_000)));
        assert_eq!(h.timeout(at(119_999), true), Beat::Nothing);
        // A PING from the peer is a proof, so this side need not ask.
        h.received(at(5_000));
        assert_eq!(h.deadline(), Some(at(125_000)));
        for asked in [125_000, 126_250, 127_500] {
            assert_eq!(h.timeout(at(asked), true), Beat::Probe);
        }
        assert_eq!(h.timeout(at(128_750), true), Beat::Dead);
    }

    #[test]
    fn a_link_that_tells_of_the_end_is_not_asked() {
        let (mut h, at) = beat(Liveness::Told);
        for round in 1..100 {
            assert_eq!(h.timeout(at(round * 1_250), false), Beat::Nothing);
            assert!(!h.is_asking());
        }
        assert_eq!(h.timeout(at(125_000), true), Beat::Rest);
        assert_eq!((h.deadline(), h.timeout(at(1 << 40), true)), (None, Beat::Nothing));
        h.received(at(130_000));
        assert!(h.is_resting() && h.deadline().is_none(), "a PING of the peer's");
        h.active(at(131_000));
        assert_eq!(h.deadline(), Some(at(132_250)));
    }

    #[test]
    fn what_begins_at_rest_has_its_time_from_then_on() {
        for liveness in [Liveness::Told, TIMED] {
            let (mut h, at) = beat(liveness);
            assert_eq!(h.timeout(at(1_250), true), Beat::Rest);
            h.rouse();
            assert!(h.is_roused() && h.deadline().unwrap() <= at(50_000), "due at once");
            assert_eq!(h.timeout(at(50_000), false), Beat::Nothing);
            assert_eq!(h.deadline(), Some(at(51_250)));
            let asks = liveness != Liveness::Told;
            assert_eq!(h.timeout(at(51_250), false) == Beat::Probe, asks);
        }
    }
}
