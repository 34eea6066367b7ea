//! The timer of a connection, and its end.
//!
//! A connection has one timer. The timer is set for the earliest of the protocol's time limits, the
//! waits for landing memory, and the turns that return memory at rest. The timer is set again only
//! after it has expired, or when an earlier deadline may have appeared, because most deadlines are
//! replaced by later ones long before they expire. A connection at rest sets no timer if its link
//! reports the peer's end.
//!
//! | life | event | next |
//! |---|---|---|
//! | Open | the timer expires | Open: the protocol handles its deadlines |
//! | Closing | the last message is out | Dead: the link is disconnected |
//! | Closing | [`LAST_MESSAGE`] has passed | Dead |
//! | Dead | | the queue pair is destroyed and the driver ends |

use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_fabric::{Link, Timer};

use crate::connection::driver::tidy::Tidy;
use crate::connection::lifecycle::Life;
use crate::connection::state::ConnectionState;

/// How long a connection's last message may take when no call is left.
const LAST_MESSAGE: Duration = Duration::from_secs(5);

/// The timer and its current purpose.
pub(super) struct Timers {
    timer: Timer,
    armed: bool,
    /// The state of the protocol's heartbeat when the timer was set.
    heartbeat: Heartbeat,
    tidy: Tidy,
}

/// The states of the heartbeat. When the state changes, an earlier deadline may appear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heartbeat {
    Waits,
    /// The deadline may be the time limit for an answer.
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

    /// Makes the next poll set the timer again.
    #[inline]
    pub(super) fn disarm(&mut self) {
        self.armed = false;
    }

    /// Handles deadlines and the end of the connection. Returns ready when the connection has
    /// ended.
    #[inline]
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, state: &mut ConnectionState) -> Poll<()> {
        if self.is_outdated(state) {
            self.armed = false;
        }
        // A call has begun at rest. Handle the protocol's timer now, because the protocol measures
        // the call's time from now on.
        if state.conn.is_roused() && state.lifecycle.is_open() {
            self.expire(state, state.link.now().into());
        }
        loop {
            match state.lifecycle.life() {
                Life::Dead(_) => return Poll::Ready(()),
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

    /// Whether an earlier deadline has appeared since the timer was set, or the timer is no longer
    /// needed.
    fn is_outdated(&self, state: &mut ConnectionState) -> bool {
        let landing = state.landing.has_new_deadline();
        let heartbeat = match self.heartbeat {
            Heartbeat::Waits => false,
            Heartbeat::Asks => !state.conn.is_asking(),
            Heartbeat::Rests => !state.conn.is_resting(),
        };
        landing || heartbeat
    }

    /// Sets the timer for the earliest deadline, if any.
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

    /// Handles an expired timer of an open connection.
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
