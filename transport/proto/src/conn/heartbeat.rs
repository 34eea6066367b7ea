//! PING and the dead-peer timer.
//!
//! Any message proves that the peer is alive. After a quarter of `dead_peer` without a message this
//! side sends a PING, and after another three quarters without a message the peer is dead. So a
//! peer that is gone is detected within `dead_peer`, and one that pauses for less than three
//! quarters of it survives, even on an idle connection.
//!
//! If the timer fires late, this side was stopped or short of processor time. It then sends another
//! PING before it declares the peer dead.

use std::time::{Duration, Instant};

use crate::error::Breach;

#[derive(Debug)]
pub(super) struct Heartbeat {
    quarter: Duration,
    last_received: Instant,
    pinged_at: Option<Instant>,
    /// PINGs that have not been answered.
    outstanding: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Beat {
    Nothing,
    Ping,
    Dead,
}

impl Heartbeat {
    pub(super) fn new(dead_peer: Duration, now: Instant) -> Self {
        Heartbeat { quarter: dead_peer / 4, last_received: now, pinged_at: None, outstanding: 0 }
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.pinged_at = None;
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
        self.pinged_at.is_some()
    }

    /// Counts a PING that is sent for another reason.
    pub(super) fn count_ping(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn pong(&mut self) -> Result<(), Breach> {
        self.outstanding = self.outstanding.checked_sub(1).ok_or(Breach::UnexpectedPong)?;
        Ok(())
    }

    pub(super) fn deadline(&self) -> Instant {
        match self.pinged_at {
            Some(pinged_at) => pinged_at + self.quarter * 3,
            None => self.last_received + self.quarter,
        }
    }

    pub(super) fn timeout(&mut self, now: Instant) -> Beat {
        let deadline = self.deadline();
        if now < deadline {
            return Beat::Nothing;
        }
        if self.pinged_at.is_some() && now < deadline + self.quarter {
            return Beat::Dead;
        }
        self.pinged_at = Some(now);
        self.outstanding += 1;
        Beat::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat() -> (Heartbeat, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |ms: u64| start + Duration::from_millis(ms);
        (Heartbeat::new(Duration::from_secs(4), start), at)
    }

    #[test]
    fn pings_then_declares_dead() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(999)), Beat::Nothing);
        assert_eq!(h.timeout(at(1_000)), Beat::Ping);
        assert_eq!(h.timeout(at(3_999)), Beat::Nothing);
        assert_eq!(h.timeout(at(4_000)), Beat::Dead);
    }

    #[test]
    fn an_idle_connection_survives_a_pause_of_its_peer() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(1_000)), Beat::Ping);
        // The peer stopped just before, and went on after nearly three seconds.
        assert_eq!(h.timeout(at(3_900)), Beat::Nothing);
        h.received(at(3_900));
        h.pong().unwrap();
        assert_eq!(h.timeout(at(4_000)), Beat::Nothing);
        assert_eq!(h.deadline(), at(4_900));
    }

    #[test]
    fn a_late_timer_pings_again_first() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(100_000)), Beat::Ping);
        assert_eq!(h.timeout(at(101_000)), Beat::Nothing);
        // Stopped again, with the question open.
        assert_eq!(h.timeout(at(200_000)), Beat::Ping);
        assert_eq!(h.timeout(at(203_000)), Beat::Dead);
        h.pong().unwrap();
        h.pong().unwrap();
        assert_eq!(h.pong(), Err(Breach::UnexpectedPong));
    }
}
