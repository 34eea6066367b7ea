//! More fast connections of one channel, so that threads which make calls do not share one.
//!
//! A connection has one lock, one completion queue and one task that drains it: several threads
//! that make calls take turns at them. With [`Endpoint::connections`](crate::Endpoint::connections)
//! each thread has its place in the row of connections.
//!
//! The first connection is the channel's own: its path is the channel's path, and a call whose own
//! connection is not up goes where a channel with one connection would send it. Another one is set
//! up when a thread whose place it is makes a call while the first is up, and is kept up from then
//! on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::channel::attempt::Fast;
use crate::channel::shared::{Shared, State};

/// Connections of a channel, at most.
pub(super) const MAX: usize = 64;

/// The number of this thread: the first that asks is 0.
fn thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static THREAD: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    THREAD.with(|thread| *thread)
}

/// A channel's connections behind the first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shards(Arc<[Arc<Shared>]>);

impl Shards {
    pub(crate) fn new(shards: Vec<Arc<Shared>>) -> Self {
        Self(shards.into())
    }

    /// The connection of this thread, if it is another than the first, and takes calls.
    pub(crate) fn fast(&self, first: &Shared) -> Option<Fast> {
        if self.0.is_empty() {
            return None;
        }
        self.fast_of(first, thread())
    }

    fn fast_of(&self, first: &Shared, thread: usize) -> Option<Fast> {
        let lane = self.0.get((thread % (self.0.len() + 1)).checked_sub(1)?)?;
        // While the first is down, the others are not begun either: they would fail alike. Those
        // that are up carry on.
        if matches!(&*first.state.borrow(), State::Up(_)) {
            lane.begin();
            // The server is there: who waits for a sign of it need wait no longer.
            lane.saw_answer();
        }
        lane.fast()
    }
}
