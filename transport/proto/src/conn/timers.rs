//! The timers that count from the last received message: rest, proof of life, keep-alive, and the
//! removal of extra RECVs.

use std::time::{Duration, Instant};

use super::heartbeat::{Heartbeat, QUIET};
use super::keep_alive::{KeepAliveCheck, KeepAliveTimer};
use crate::config::Config;

/// Time between the PINGs of a quiet connection with extra RECVs. Each PING retires one RECV.
pub(super) const RETIRE_INTERVAL: Duration = Duration::from_micros(156_250);

/// Tracks when messages were received, and what is due because no message has been received since.
#[derive(Debug)]
pub(super) struct Timers {
    pub(super) heartbeat: Heartbeat,
    keep_alive: Option<KeepAliveTimer>,
    /// When a frame other than PING, or the flag WAITED, was last received; `None` once the
    /// connection is quiet.
    last_activity: Option<Instant>,
    /// When the next PING is due to retire an extra RECV of a quiet connection.
    retire_recv_at: Option<Instant>,
}

impl Timers {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        let keep_alive =
            config.keep_alive.map(|keep| KeepAliveTimer::new(keep.within_a_day(), now));
        Timers {
            heartbeat: Heartbeat::new(config.liveness, now),
            keep_alive,
            last_activity: None,
            retire_recv_at: None,
        }
    }

    /// Records a received message.
    pub(super) fn received(&mut self, now: Instant) {
        self.heartbeat.received(now);
        if let Some(keep_alive) = &mut self.keep_alive {
            keep_alive.received();
        }
    }

    /// Records that a received message holds a frame other than PING, or the flag WAITED.
    pub(super) fn active(&mut self, now: Instant) {
        (self.last_activity, self.retire_recv_at) = (Some(now), None);
        self.heartbeat.active(now);
    }

    /// Whether a proof, or the answer to a keep-alive PING, is awaited.
    pub(super) fn is_asking(&self) -> bool {
        self.heartbeat.is_asking() || self.keep_alive.as_ref().is_some_and(|k| k.is_asking())
    }

    /// Whether nothing but PINGs was received for a while.
    pub(super) fn is_quiet(&self) -> bool {
        self.last_activity.is_none()
    }

    /// When the first of the timers is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let keep_alive = self.keep_alive.as_ref().and_then(|keep_alive| {
            keep_alive.deadline(self.heartbeat.last_received(), self.heartbeat.is_resting())
        });
        let all = [self.heartbeat.deadline(), keep_alive, self.retire_recv_at];
        all.into_iter().flatten().min()
    }

    /// Whether the heartbeat is due, because nothing was received for a while or the connection was
    /// roused.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.heartbeat.deadline().is_some_and(|at| now >= at)
    }

    /// Checks whether the connection has become quiet just now. If the connection has extra RECVs,
    /// PINGs then retire them.
    pub(super) fn becomes_quiet(&mut self, now: Instant, has_extra_recvs: bool) -> bool {
        let quiet = self.last_activity.is_some_and(|at| now.saturating_duration_since(at) >= QUIET);
        if quiet {
            self.last_activity = None;
            self.retire_recv_at = has_extra_recvs.then_some(now);
        }
        quiet
    }

    /// Runs the program's keep-alive. `streams` says whether streams are open.
    pub(super) fn check_keep_alive(&mut self, now: Instant, streams: bool) -> KeepAliveCheck {
        let last = self.heartbeat.last_received();
        match &mut self.keep_alive {
            Some(keep_alive) => keep_alive.timeout(now, last, streams),
            None => KeepAliveCheck::Nothing,
        }
    }

    /// Whether a PING is due to retire an extra RECV. Sets the timer for the next PING.
    pub(super) fn retires_recv(&mut self, now: Instant, has_extra_recvs: bool) -> bool {
        let due = self.retire_recv_at.is_some_and(|at| now >= at);
        if due {
            self.retire_recv_at = has_extra_recvs.then(|| now + RETIRE_INTERVAL);
        }
        due
    }
}
