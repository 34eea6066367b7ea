//! The timer of a connection, and its end.
//!
//! A connection has one timer, set for the first of the protocol's time-outs, the waits for landing
//! memory, and what is left to tidy up at rest. It is set again only when it has
//! expired, or when an earlier deadline may have come up: most time-outs move on long before they
//! expire. A connection at rest over a link that tells of the peer's end has no timer set.
//!
//! | life | event | next |
//! |---|---|---|
//! | Open | the timer expires | Open: the protocol handles its time-outs |
//! | Closing | the last message is out | Dead: the link is disconnected |
//! | Closing | [`LAST_MESSAGE`] has passed | Dead |
//! | Dead | | the queue pair is destroyed, and the driver ends |

use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_fabric::{Link, Timer};

use crate::connection::driver::tidy::Tidy;
use crate::connection::lifecycle::Life;
use crate::connection::state::ConnectionState;
use crate::path::reason::Reason;

/// How long the last message of a connection may take, when no call is left in it.
const LAST_MESSAGE: Duration = Duration::from_secs(5);

/// The timer, and what it is set for.
pub(super) struct Timers {
    timer: Timer,
    armed: bool,
    /// What the protocol waited for when the timer was set.
    heartbeat: Heartbeat,
    tidy: Tidy,
}

/// What decides whether an earlier deadline may come up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heartbeat {
    Waits,
    /// The deadline may be that of an answer.
    Asks,
    Rests,
}

impl Heartbeat {
    fn of(state: &ConnectionState) -> Self {
        match (state.conn.is_asking(), state.conn.is_resting()) {
            (true, _) => Heartbeat::Asks,
            (_, true) => Heartbeat::Rests,
            (false, false) => Heartbeat::Waits,
        }
    }
}

impl Timers {
    pub(super) fn new(timer: Timer) -> Self {
        Timers { timer, armed: false, heartbeat: Heartbeat::Waits, tidy: Tidy::default() }
    }

    /// The timer is set anew at the next poll.
    #[inline]
    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }

    /// Handles time-outs and the end of the connection. Ready when the connection has ended.
    #[inline]
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        state: &mut ConnectionState,
    ) -> Poll<Reason> {
        if self.is_outdated(state) {
            self.armed = false;
        }
        // A call has begun at rest: its time counts from now on.
        if state.conn.is_roused() && state.lifecycle.is_open() {
            self.expire(state, state.link.now().into());
        }
        loop {
            match state.lifecycle.life() {
                Life::Dead(reason) => {
                    let reason = reason.clone();
                    state.destroy();
                    return Poll::Ready(reason);
                }
                Life::Closing(reason) if state.link.is_idle() => {
                    let reason = reason.clone();
                    if let Some(link) = state.link.get_mut() {
                        link.disconnect();
                    }
                    state.end(Life::Dead(reason));
                    continue;
                }
                Life::Closing(_) if !self.armed => {
                    self.timer.set(Instant::now().into_std() + LAST_MESSAGE);
                    self.armed = true;
                }
                Life::Open if !self.armed => self.arm(state),
                _ => {}
            }
            if !self.armed {
                return Poll::Pending;
            }
            let Poll::Ready(now) = self.timer.poll(cx) else { return Poll::Pending };
            self.armed = false;
            match state.lifecycle.life() {
                Life::Closing(reason) => {
                    let reason = reason.clone();
                    state.end(Life::Dead(reason));
                }
                _ => self.expire(state, now.into()),
            }
        }
    }

    /// A deadline has come up since the timer was set, or what it was set for has happened.
    fn is_outdated(&self, state: &mut ConnectionState) -> bool {
        let landing = state.landing.has_new_deadline();
        let heartbeat = match self.heartbeat {
            Heartbeat::Waits => false,
            Heartbeat::Asks => !state.conn.is_asking(),
            Heartbeat::Rests => !state.conn.is_resting(),
        };
        landing || heartbeat
    }

    /// Sets the timer for the first deadline, if there is one.
    fn arm(&mut self, state: &ConnectionState) {
        let landing = state.landing.deadline().map(Instant::into_std);
        let others = [landing, self.tidy.deadline()];
        let deadlines = state.conn.next_timeout().into_iter().chain(others.into_iter().flatten());
        if let Some(at) = deadlines.min() {
            self.timer.set(at);
            self.armed = true;
            self.heartbeat = Heartbeat::of(state);
        }
    }

    /// The timer of an open connection has expired.
    fn expire(&mut self, state: &mut ConnectionState, now: Instant) {
        let judged = state.conn.handle_timeout(now.into_std());
        let rests = state.conn.is_resting();
        if self.tidy.is_unused(rests, state.link.memory_used(&state.conn.stats())) {
            state.spare_sends();
        }
        if state.landing.timed_out(now) {
            state.tasks.wake_driver();
        }
        state.landing.recall_reclaimed(&mut state.conn, now);
        state.dispatch();
        if let Err(breach) = judged {
            state.breached(&breach);
        }
        state.flush();
        state.record();
        state.tidy(now.into_std());
        self.tidy.expired(now.into_std(), rests, state.link.memory_used(&state.conn.stats()));
        self.armed = false;
    }
}
