//! The driver of a connection: the task that polls the link, keeps the timers, and ends the
//! connection.
//!
//! | file | what |
//! |---|---|
//! | `handle` | the way for calls to reach the driver's task |
//! | `link_events` | completions, and the end of a link |
//! | `dispatch` | passes received messages to the protocol, and its events to their streams |
//! | `timers` | the connection's one timer, and the connection's end |
//! | `yield_policy` | how the driver yields while more is left to copy |

mod dispatch;
pub(super) mod handle;
mod link_events;
mod timers;
mod yield_policy;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tonic_rdma_fabric::{WakeGate, turn};
use tonic_rdma_proto::CloseCode;

use crate::connection::call::Opened;
use crate::connection::copy_scheduler::AfterFlush;
use crate::connection::driver::timers::{Destroying, Timers};
use crate::connection::driver::yield_policy::YieldPolicy;
use crate::connection::lifecycle::{Life, inherited};
use crate::connection::shared::SharedConnection;
use crate::connection::state::ConnectionState;
use crate::path::reason::{Reason, ReasonCode};

/// Maximum number of rounds in one turn. After a turn, other tasks run.
const MAX_ROUNDS: usize = 16;
/// While streams are open, metrics are recorded in the first round without completions after this
/// number of rounds, and when timers expire.
const MAX_UNRECORDED: usize = 64;

/// An event that the driver passes to the client or the server that runs the driver.
pub(crate) enum Turn {
    /// The peer has opened a stream.
    Serve(Opened),
    /// The connection has become quiet. Memory that only a busy connection needs may be freed.
    Rest,
}

/// Runs a connection until it has ended, and returns the reason. `serve` receives each [`Turn`].
/// The completion of `drain` requests an orderly end. On return the queue pair is destroyed, and
/// landing memory is free or queued for the pool's thread to free.
pub(crate) async fn drive(
    shared: Arc<SharedConnection>,
    mut serve: impl FnMut(Turn),
    drain: impl Future<Output = ()>,
) -> Reason {
    let (mut drain, mut asked) = (pin!(drain), WakeGate::new());
    let timer = shared.lock().link.timer();
    let mut driver = Driver {
        timers: Timers::new(timer),
        draining: false,
        unrecorded: 0,
        yields: YieldPolicy::new(),
        opened: Vec::new(),
        destroying: None,
        _teardown: Teardown(shared.clone()),
        shared,
    };
    poll_fn(|cx| {
        if !driver.draining && asked.poll(cx, |cx| drain.as_mut().poll(cx)).is_ready() {
            driver.draining = true;
            driver.shared.lock().conn.go_away(CloseCode::Ok, "shutting down");
        }
        driver.poll(cx, &mut serve)
    })
    .await
}

struct Driver {
    shared: Arc<SharedConnection>,
    timers: Timers,
    draining: bool,
    /// Rounds since metrics were last recorded.
    unrecorded: usize,
    yields: YieldPolicy,
    /// Streams to serve after the lock is released.
    opened: Vec<Opened>,
    /// The link, once the connection has ended. The link is dropped before the teardown frees
    /// memory.
    destroying: Option<Destroying>,
    _teardown: Teardown,
}

/// Ends the connection when the driver is dropped, for example with its runtime. The teardown tells
/// the peer if that costs the peer no call, and leaves no memory in use by the device.
struct Teardown(Arc<SharedConnection>);

impl Drop for Teardown {
    fn drop(&mut self) {
        if !self.0.is_own() {
            return;
        }
        let mut state = self.0.lock();
        state.say_goodbye();
        let lost = || Reason::new(ReasonCode::LinkLost, "the connection's driver was dropped");
        let reason = state.lifecycle.end_reason().cloned().unwrap_or_else(lost);
        state.end(Life::Dead(reason));
        state.destroy();
        let reason = state.lifecycle.end_reason().cloned();
        drop(state);
        self.0.closed.send_replace(reason);
    }
}

impl Driver {
    fn poll(&mut self, cx: &mut Context<'_>, serve: &mut impl FnMut(Turn)) -> Poll<Reason> {
        let shared = self.shared.clone();
        if !shared.is_own() {
            return Poll::Ready(Reason::new(ReasonCode::Forked, inherited().message()));
        }
        if self.destroying.is_some() {
            return self.poll_destroyed(cx);
        }
        self.yields.runs();
        for round in 1..=MAX_ROUNDS {
            let mut state = shared.lock();
            state.tasks.work = 0;
            if state.tasks.driver.runs(cx) {
                state.landing.register_waker(cx.waker());
            }
            let idle = state.poll_link(cx);
            if round == 1 {
                state.grace_turn();
            }
            state.transmit();
            let refused = self.take_opened(&mut state);
            let ended = self.poll_end(cx, &mut state);
            self.report(&mut state, idle);
            let rests = state.tasks.driver.take_quiet();
            let (called, next) = (state.tasks.driver.is_called(), state.copies.next(round));
            let graced = state.landing.runs_soon();
            let mut work = state.tasks.work;
            drop(state);

            if graced {
                // Run the driver again after the other tasks have had a turn.
                cx.waker().wake_by_ref();
            }

            drop(refused);
            self.opened.drain(..).map(Turn::Serve).for_each(&mut *serve);
            if rests {
                self.opened = Vec::new();
                serve(Turn::Rest);
            }
            if ended.is_ready() {
                return self.poll_destroyed(cx);
            }
            match next {
                AfterFlush::Yield if !called => self.yields.yield_now(cx),
                AfterFlush::Yield => {}
                AfterFlush::Wait if idle || called => {}
                AfterFlush::Flush | AfterFlush::Wait => {
                    ready!(turn::charge(cx, &mut work));
                    continue;
                }
            }
            return Poll::Pending;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes the streams that the peer has opened, to serve them. Returns the streams whose calls
    /// never begin: those that were reset, or all streams if the connection has ended. The caller
    /// must drop these streams after releasing the lock.
    #[inline]
    fn take_opened(&mut self, state: &mut ConnectionState) -> Vec<Opened> {
        let mut refused = Vec::new();
        while let Some((id, block)) = state.streams.opened.pop_front() {
            let stream = Opened::new(&self.shared, state, id, block);
            match state.wants_answer(id) {
                true => self.opened.push(stream),
                false => refused.push(stream),
            }
        }
        refused
    }

    /// Closes a connection that has drained, then handles timers and the end. Returns ready once
    /// the connection has ended.
    #[inline]
    fn poll_end(&mut self, cx: &mut Context<'_>, state: &mut ConnectionState) -> Poll<()> {
        if state.conn.is_drained() && state.lifecycle.is_open() {
            let reason = Reason::new(ReasonCode::GoAway, "closed in good order");
            state.conn.close(CloseCode::Ok, "closed in good order");
            state.end(Life::Closing(reason));
            state.flush();
            self.timers.disarm();
        }
        ready!(self.timers.poll(cx, state));
        self.destroying = state.link.take().map(Destroying::new);
        Poll::Ready(())
    }

    /// Waits until the link is destroyed, then frees the memory that the peer could write to (R9).
    #[cold]
    fn poll_destroyed(&mut self, cx: &mut Context<'_>) -> Poll<Reason> {
        if let Some(destroying) = &mut self.destroying {
            ready!(destroying.poll(cx));
        }
        let mut state = self.shared.lock();
        state.destroy();
        let reason = state.lifecycle.end_reason().cloned();
        let lost = || Reason::new(ReasonCode::LinkLost, "the connection ended");
        Poll::Ready(reason.unwrap_or_else(lost))
    }

    /// Records metrics before the tasks of the last calls are woken, so that the metrics include a
    /// call when its caller gets the answer.
    #[inline]
    fn report(&mut self, state: &mut ConnectionState, idle: bool) {
        self.unrecorded += 1;
        if (idle && self.unrecorded >= MAX_UNRECORDED) || state.conn.pending().streams == 0 {
            self.unrecorded = 0;
            state.record();
        }
    }
}
