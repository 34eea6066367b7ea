//! The timer of a connection, and the connection's end.
//!
//! A connection has one timer. The timer is set for the earliest of the protocol's time limits, the
//! waits for landing memory, and the turns that return memory at rest. The timer is set again only
//! after it has expired, or when an earlier deadline may have appeared, because most deadlines are
//! replaced by later deadlines long before they expire. After its last turn at rest, a connection
//! sets no timer if its link reports the peer's end and keep-alive does not ping idle connections.
//!
//! | life | event | next |
//! |---|---|---|
//! | Open | the timer expires | Open: the protocol handles its deadlines |
//! | Closing | the last message is out | Dead: the link is disconnected |
//! | Closing | [`LAST_MESSAGE`] has passed | Dead |
//! | Dead | | the queue pair is destroyed ([`Destroying`]) and the driver ends |

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Instant;
use tonic_rdma_fabric::{AnyLink, Link, Timer, off_worker};
use tonic_rdma_memory::Owned;

use crate::connection::lifecycle::Life;
use crate::connection::state::ConnectionState;

/// Time limit for the last message of a connection that is closing.
const LAST_MESSAGE: Duration = Duration::from_secs(5);

/// The connection's timer, and the state that decides when the timer has to be set again.
pub(super) struct Timers {
    timer: Timer,
    armed: bool,
    /// The state of the protocol's heartbeat when the timer was set.
    heartbeat: Heartbeat,
    /// The turns that return memory at rest.
    rest_turns: RestTurns,
}

/// The states of the heartbeat. When the state `Asks` or `Rests` ends, an earlier deadline may
/// appear.
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
        Timers {
            timer,
            armed: false,
            heartbeat: Heartbeat::Waits,
            rest_turns: RestTurns::default(),
        }
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
        // A call has begun at rest. Handle the protocol's timer now, because the protocol counts
        // the time without a message from now on.
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
        let others = [landing, self.rest_turns.deadline()];
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
        if self.rest_turns.is_unused(rests, state.link.memory_used(&state.conn.stats())) {
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
        state.return_unused(now.into_std());
        self.rest_turns.expired(now.into_std(), rests, state.link.memory_used(&state.conn.stats()));
        self.armed = false;
    }
}

/// Time between two turns of a connection at rest.
const PAUSE: Duration = Duration::from_millis(2500);
/// Number of turns, which together take 20 s: 10 s until landing memory is returned, and 10 s for
/// the pool's checks.
const TURNS: u32 = 8;

/// Decides how long a connection at rest continues to wake in order to return memory.
///
/// Landing memory is returned once nothing has landed for ten seconds. The pool's arenas are
/// returned once two checks have found them unused. Both returns happen long after the connection
/// has come to rest. So if the connection has used landing or pool memory since its last rest, it
/// wakes [`TURNS`] more times, and then stops.
///
/// | turns left | the timer expires | to |
/// |---|---|---|
/// | 0 | not at rest | 0 |
/// | more than 0 | not at rest | 0, and memory counts as used at the next rest |
/// | any | at rest, memory has been used | [`TURNS`] |
/// | n | at rest, no memory has been used | n - 1 |
#[derive(Debug, Default)]
struct RestTurns {
    /// The count of uses of memory when the connection came to rest.
    used: u64,
    left: u32,
    next: Option<std::time::Instant>,
}

impl RestTurns {
    /// Counts a turn of the timer. All memory that may be returned by now has been returned. `used`
    /// is the number of uses of memory so far.
    fn expired(&mut self, now: std::time::Instant, at_rest: bool, used: u64) {
        if !at_rest && self.left > 0 {
            // The rest has ended before its last turn. Begin all turns again at the next rest, even
            // if no memory was used until then.
            self.used = u64::MAX;
        }
        self.left = match (at_rest, used == self.used) {
            (false, _) => 0,
            (true, false) => TURNS,
            (true, true) => self.left.saturating_sub(1),
        };
        if at_rest {
            self.used = used;
        }
        self.next = (self.left > 0).then(|| now + PAUSE);
    }

    /// Whether the connection was already at rest at the last turn and has used no memory since.
    /// `used` is the number of uses of memory so far.
    fn is_unused(&self, at_rest: bool, used: u64) -> bool {
        at_rest && self.left > 0 && used == self.used
    }

    /// When the timer must expire.
    fn deadline(&self) -> Option<std::time::Instant> {
        self.next
    }
}

/// A link that is being destroyed. If the destruction may block, it runs on a thread where blocking
/// is allowed. The peer may write until the link is destroyed, so the connection keeps its landing
/// memory until then (R9).
pub(super) struct Destroying {
    /// The link, or `None` once it is destroyed. The lock is held while a thread destroys the link.
    link: Owned<Arc<Mutex<Option<AnyLink>>>>,
    thread: Option<Pin<Box<dyn Future<Output = io::Result<()>> + Send>>>,
}

impl Destroying {
    pub(super) fn new(link: AnyLink) -> Destroying {
        let blocks = link.blocks_on_drop();
        let link = Arc::new(Mutex::new(Some(link)));
        let thread = blocks.then(|| {
            let link = link.clone();
            Box::pin(off_worker(move || destroy(&link))) as _
        });
        Destroying { link: Owned::new(link), thread }
    }

    /// Ready once the link is destroyed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(thread) = &mut self.thread {
            // If the system could not start a thread, the call to `destroy` below destroys the
            // link.
            let _ = ready!(thread.as_mut().poll(cx));
            self.thread = None;
        }
        destroy(&self.link);
        Poll::Ready(())
    }
}

impl Drop for Destroying {
    /// Destroys the link of a dropped driver, because the driver frees the connection's memory
    /// next.
    fn drop(&mut self) {
        if self.link.is_own() {
            destroy(&self.link);
        }
    }
}

/// Destroys the link, or waits until another thread has destroyed it.
fn destroy(link: &Mutex<Option<AnyLink>>) {
    *link.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_has_used_memory_wakes_a_few_times_more() {
        let (mut turns, mut now, mut wakes) = (RestTurns::default(), std::time::Instant::now(), 0);
        for used in [0, 3, 3, 4] {
            let before = turns.used;
            turns.expired(now, false, used);
            assert_eq!(turns.deadline(), None, "not before it rests");
            turns.expired(now, true, used);
            while let Some(at) = turns.deadline() {
                (now, wakes) = (at, wakes + 1);
                turns.expired(now, true, used);
            }
            assert_eq!(std::mem::take(&mut wakes), if used == before { 0 } else { TURNS });
        }
        turns.expired(now, true, 5);
        turns.expired(now, false, 5);
        assert_eq!(turns.deadline(), None, "a call has begun");
        turns.expired(now, true, 5);
        assert!(turns.deadline().is_some(), "the turns before it were not enough");
    }
}
