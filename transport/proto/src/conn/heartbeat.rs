//! PING and the dead-peer timer.
//!
//! Any message proves that the peer lives. After a quarter of `dead_peer` without one a PING asks;
//! after the other three without an answer the peer is dead. So a peer that is gone is noticed
//! within `dead_peer`, and one that pauses for less than three quarters of it lives on, also on a
//! link that carried nothing before.
//!
//! The answer is waited for from the PING on, and a timer that comes late says that this side was
//! stopped, or short of processor time: then it asks once more before it judges.

use std::time::{Duration, Instant};

use crate::error::Breach;

#[derive(Debug)]
pub(super) struct Heartbeat {
    quarter: Duration,
    last_received: Instant,
    asked: Option<Instant>,
    /// PINGs without their answer.
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
        Heartbeat { quarter: dead_peer / 4, last_received: now, asked: None, outstanding: 0 }
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.asked = None;
    }

    /// When the last message came, as far as was told.
    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// A PING has no answer yet.
    pub(super) fn waits(&self) -> bool {
        self.outstanding > 0
    }

    /// The peer is asked for a sign of life, and nothing has come since.
    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// A PING goes out for another reason.
    pub(super) fn asked(&mut self) {
        self.outstanding += 1;
    }

    pub(super) fn pong(&mut self) -> Result<(), Breach> {
        self.outstanding = self.outstanding.checked_sub(1).ok_or(Breach::UnexpectedPong)?;
        Ok(())
    }

    pub(super) fn deadline(&self) -> Instant {
        match self.asked {
            Some(asked) => asked + self.quarter * 3,
            None => self.last_received + self.quarter,
        }
    }

    pub(super) fn timeout(&mut self, now: Instant) -> Beat {
        let deadline = self.deadline();
        if now < deadline {
            return Beat::Nothing;
        }
        if self.asked.is_some() && now < deadline + self.quarter {
            return Beat::Dead;
        }
        self.asked = Some(now);
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
    fn asks_then_judges() {
        let (mut h, at) = beat();
        assert_eq!(h.timeout(at(999)), Beat::Nothing);
        assert_eq!(h.timeout(at(1_000)), Beat::Ping);
        assert_eq!(h.timeout(at(3_999)), Beat::Nothing);
        assert_eq!(h.timeout(at(4_000)), Beat::Dead);
    }

    #[test]
    fn an_idle_link_outlives_a_pause_of_its_peer() {
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
    fn who_was_stopped_asks_before_it_judges() {
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
