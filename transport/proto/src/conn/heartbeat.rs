//! PING and the dead-peer timer.
//!
//! Any message proves that the peer lives. After half of `dead_peer` without one a PING asks; after the
//! other half without an answer the peer is dead. The second half counts from the PING, so that a process
//! that was itself stopped asks before it judges.

use std::time::{Duration, Instant};

use crate::error::Breach;

#[derive(Debug)]
pub(super) struct Heartbeat {
    half: Duration,
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
        Heartbeat { half: dead_peer / 2, last_received: now, asked: None, outstanding: 0 }
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.asked = None;
    }

    pub(super) fn pong(&mut self) -> Result<(), Breach> {
        self.outstanding = self.outstanding.checked_sub(1).ok_or(Breach::UnexpectedPong)?;
        Ok(())
    }

    pub(super) fn deadline(&self) -> Instant {
        self.asked.unwrap_or(self.last_received) + self.half
    }

    pub(super) fn timeout(&mut self, now: Instant) -> Beat {
        if now < self.deadline() {
            return Beat::Nothing;
        }
        if self.asked.is_some() {
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

    #[test]
    fn asks_then_judges() {
        let t = Instant::now();
        let s = Duration::from_secs(1);
        let mut h = Heartbeat::new(4 * s, t);
        assert_eq!(h.timeout(t + s), Beat::Nothing);
        assert_eq!(h.timeout(t + 2 * s), Beat::Ping);
        assert_eq!(h.timeout(t + 3 * s), Beat::Nothing);
        h.received(t + 3 * s);
        assert_eq!(h.timeout(t + 4 * s), Beat::Nothing);
        // Stopped for a long time: asks first.
        assert_eq!(h.timeout(t + 100 * s), Beat::Ping);
        assert_eq!(h.timeout(t + 101 * s), Beat::Nothing);
        assert_eq!(h.timeout(t + 102 * s), Beat::Dead);
        h.pong().unwrap();
        h.pong().unwrap();
        assert_eq!(h.pong(), Err(Breach::UnexpectedPong));
    }
}
