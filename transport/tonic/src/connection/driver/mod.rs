//! The driver: polls the link, keeps the timers, ends the connection.

pub(in crate::connection) mod coarse_clock;
mod dispatch;
mod yield_policy;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;
use tonic_rdma_fabric::{Link, LinkError, Timer, WakeGate};
use tonic_rdma_proto::{CloseCode, Side};

use crate::connection::call::stream::Opened;
use crate::connection::driver::yield_policy::Turns;
use crate::connection::state::{Inner, Life, Shared};
use crate::path::Path;
use crate::path::reason::{Reason, ReasonCode};

/// While there are streams, metrics are told once in so many turns, and when a timer ends.
const UNTOLD: usize = 64;
/// Rounds of completions before other tasks get their turn.
const ROUNDS: usize = 16;
/// Of those that copy, where only long messages go.
const COPIES: usize = 4;

/// Looks for the completion of the last message of a connection whose driver is dropped.
const GOODBYE: usize = 1000;

/// Runs a connection until it has ended; `serve` gets the streams that the peer opens, and `drain`
/// asks for an orderly end. Returns why it ended; everything that the device could touch is free by
/// then.
pub(in crate::connection) async fn drive(
    shared: Arc<Shared>,
    mut serve: impl FnMut(Opened),
    drain: impl Future<Output = ()>,
) -> Reason {
    let (mut drain, mut asked) = (pin!(drain), WakeGate::new());
    let timer = shared.lock().link.as_ref().map(Link::timer).unwrap_or_default();
    let mut driver = Driver {
        timer,
        armed: false,
        asking: false,
        draining: false,
        untold: 0,
        turns: Turns::new(),
        gave_way: false,
        opened: Vec::new(),
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
    shared: Arc<Shared>,
    timer: Timer,
    armed: bool,
    /// When it was armed, the peer was to answer by then.
    asking: bool,
    draining: bool,
    /// Since metrics were told.
    untold: usize,
    turns: Turns,
    /// Others had their turn before a copy the last time.
    gave_way: bool,
    /// To be served once the lock is free.
    opened: Vec<Opened>,
    _teardown: Teardown,
}

/// A driver that is dropped, with its runtime for instance, says goodbye and leaves nothing under
/// the device.
struct Teardown(Arc<Shared>);

impl Drop for Teardown {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.say_goodbye();
        let lost = || Reason::new(ReasonCode::LinkLost, "the connection's driver was dropped");
        let reason = inner.end_reason().cloned().unwrap_or_else(lost);
        inner.end(Life::Dead(reason));
        inner.destroy();
        let reason = inner.end_reason().cloned();
        drop(inner);
        self.0.closed.send_replace(reason);
        self.0.stream_room.notify_waiters();
    }
}

impl Driver {
    fn poll(&mut self, cx: &mut Context<'_>, serve: &mut impl FnMut(Opened)) -> Poll<Reason> {
        let shared = self.shared.clone();
        self.turns.begin();
        for round in 1..=ROUNDS {
            let mut over = Vec::new();
            let mut inner = shared.lock();
            if inner.driver.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                inner.driver = Some(cx.waker().clone());
                inner.landing.register_waker(cx.waker());
            }
            inner.driver_called = false;
            inner.left = 0;
            let idle = inner.poll_link(cx);
            inner.make_room_elsewhere();
            // Whoever has just got something does not wait for a copy, once.
            let nobody = inner.wakes.is_empty() && inner.opened.is_empty();
            self.gave_way = inner.pauses && !(nobody || self.gave_way);
            if inner.conn.is_due() || inner.landing_waits {
                match self.gave_way {
                    true => inner.flush_messages(),
                    false => inner.flush(),
                }
            }
            while let Some((id, block)) = inner.opened.pop_front() {
                let stream = Opened::new(&shared, &mut inner, id, block);
                // A call that was reset, or whose connection has ended, is not begun for nobody.
                match inner.wants_answer(id) {
                    true => self.opened.push(stream),
                    false => over.push(stream),
                }
            }
            if inner.conn.is_drained() && inner.life == Life::Open {
                let reason = Reason::new(ReasonCode::GoAway, "closed in good order");
                inner.conn.close(CloseCode::Ok, "closed in good order");
                inner.end(Life::Closing(reason));
                inner.flush();
                self.armed = false;
            }
            let room = inner.room_wanted && inner.conn.has_stream_room();
            inner.room_wanted &= !room;
            let ended = self.poll_end(cx, &mut inner);
            self.untold += 1;
            // Before the tasks of the last calls are woken: whoever has an answer finds it counted.
            if (idle && self.untold >= UNTOLD) || inner.conn.pending().streams == 0 {
                self.untold = 0;
                inner.tell();
            }
            let (again, unfinished) = (inner.driver_called, inner.unfinished);
            let goes_on = unfinished && !inner.pauses && round < COPIES;
            drop(inner);
            drop(over);
            if room {
                shared.stream_room.notify_waiters();
            }
            self.opened.drain(..).for_each(&mut *serve);
            if let Poll::Ready(reason) = ended {
                return Poll::Ready(reason);
            }
            if goes_on {
                continue;
            }
            if unfinished && !again {
                self.turns.again(cx);
            }
            if idle || again || unfinished {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Timers and the end.
    fn poll_end(&mut self, cx: &mut Context<'_>, inner: &mut Inner) -> Poll<Reason> {
        let (landing_wait, clock) = (inner.landing_wait.0.is_news(), inner.clock.is_news());
        let answered = self.asking && !inner.conn.is_asking();
        let give_back = inner.give_back.0.is_news();
        if landing_wait || clock || answered || give_back {
            self.armed = false;
        }
        loop {
            match &inner.life {
                Life::Dead(reason) => {
                    let reason = reason.clone();
                    inner.destroy();
                    return Poll::Ready(reason);
                }
                Life::Closing(reason) if inner.sends.is_idle() => {
                    let reason = reason.clone();
                    if let Some(link) = &mut inner.link {
                        link.disconnect();
                    }
                    inner.end(Life::Dead(reason));
                    continue;
                }
                Life::Closing(_) if !self.armed => {
                    // The last messages may take as long to get away as any: a peer that pauses
                    // gets them.
                    self.timer.set(Instant::now().into_std() + inner.conn.dead_peer());
                    self.armed = true;
                }
                Life::Open if !self.armed => {
                    let landing_wait = inner.landing_wait.0.deadline().map(Instant::into_std);
                    let give_back = inner.give_back.0.deadline().map(Instant::into_std);
                    let others =
                        [landing_wait, give_back, inner.clock.deadline()].into_iter().flatten();
                    if let Some(at) = inner.conn.next_timeout().into_iter().chain(others).min() {
                        self.timer.set(at);
                        self.armed = true;
                        self.asking = inner.conn.is_asking();
                    }
                }
                _ => {}
            }
            if !self.armed || self.timer.poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.armed = false;
            match &inner.life {
                Life::Closing(reason) => {
                    let reason = reason.clone();
                    inner.end(Life::Dead(reason));
                }
                _ => {
                    let now = Instant::now();
                    let judged = inner.conn.handle_timeout(now.into_std());
                    inner.landing_wait.0.expire(now);
                    inner.recall_excess(now);
                    inner.clock.expire();
                    inner.dispatch();
                    if let Err(breach) = judged {
                        inner.breached(&breach);
                    }
                    inner.flush();
                    inner.tell();
                    inner.tidy(now.into_std());
                }
            }
        }
    }
}

impl Inner {
    /// Takes what the link has. True when it has nothing more for now.
    fn poll_link(&mut self, cx: &mut Context<'_>) -> bool {
        let mut error = self.failed.take();
        let mut idle = true;
        if let (Some(link), None) = (&mut self.link, &error) {
            match link.poll(cx, &mut self.completions) {
                Poll::Pending => {}
                Poll::Ready(result) => {
                    idle = false;
                    error = result.err();
                }
            }
            self.meter.polled(self.completions.len());
            // What came before an error counts.
            let result = self.complete();
            error = error.or(result.err());
        }
        if let Some(error) = error {
            let reason = self.why(&error);
            tracing::debug!(%reason, "connection ended");
            self.end(Life::Dead(reason));
        }
        idle
    }

    /// Tells the peer of an end that is none of its calls' concern: a client gives its own calls
    /// up, a server has none. Other ends cut calls off, which is a loss, and are left to look like
    /// one.
    fn say_goodbye(&mut self) {
        let is_clean = self.conn.side() == Side::Client || self.conn.pending().streams == 0;
        if self.life != Life::Open || !is_clean {
            return;
        }
        let text = "the runtime has ended";
        self.conn.close(CloseCode::Ok, text);
        self.end(Life::Closing(Reason::new(ReasonCode::GoAway, text)));
        self.flush();
        // Nobody polls any more, and a device takes a moment; without it the peer hears of the end
        // all the same.
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..GOODBYE {
            if self.sends.is_idle() || matches!(self.life, Life::Dead(_)) {
                break;
            }
            std::thread::yield_now();
            self.poll_link(&mut cx);
        }
    }

    fn why(&self, error: &LinkError) -> Reason {
        if let Some(reason) = self.end_reason() {
            return reason.clone();
        }
        match error {
            LinkError::Closed { .. }
                if self.conn.pending().streams == 0 || !self.conn.takes_streams() =>
            {
                Reason::from_peer(ReasonCode::GoAway, format!("disconnected ({})", self.peer))
            }
            // Nothing but a process that lets go of it ends shared memory so, and here no call is
            // hurt.
            LinkError::Disconnected { peer }
                if Path::of(peer) == Path::Shm
                    && self.conn.side() == Side::Server
                    && self.conn.pending().streams == 0 =>
            {
                Reason::from_peer(ReasonCode::GoAway, format!("{error}, with no call in flight"))
            }
            _ => self.lost(error),
        }
    }

    /// Deregisters what has not been needed for a while (R12).
    fn tidy(&mut self, now: std::time::Instant) {
        if self.conn.lands_nothing(now) {
            self.landing.trim();
        }
        self.pool.trim(now);
    }
}
