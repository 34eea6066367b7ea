//! Further fast connections of one channel, so that calling threads do not share one.
//!
//! A connection has one lock, one completion queue and one task that drains it, for which several
//! calling threads contend. With [`Endpoint::connections`](crate::Endpoint::connections) each
//! thread has its own connection, assigned in the order of the threads' first calls.
//!
//! The first connection is the channel's own: its path is the channel's path, and a call whose own
//! connection is not up goes where a channel with one connection would send it. A further
//! connection is set up when one of its threads makes a call while the first is up, and is kept up
//! from then on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::channel::attempt::Fast;
use crate::channel::shared::{Shared, State};

/// Maximum number of connections of a channel.
pub(super) const MAX_CONNECTIONS: usize = 64;

/// The number of this thread, in the order of first use.
fn thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static THREAD: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    THREAD.with(|thread| *thread)
}

/// A channel's further connections, without the first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shards(Arc<[Arc<Shared>]>);

impl Shards {
    pub(crate) fn new(shards: Vec<Arc<Shared>>) -> Self {
        Self(shards.into())
    }

    /// The connection of this thread, unless that is the first one or takes no calls.
    pub(crate) fn fast(&self, first: &Shared) -> Option<Fast> {
        if self.0.is_empty() {
            return None;
        }
        self.fast_of(first, thread())
    }

    fn fast_of(&self, first: &Shared, thread: usize) -> Option<Fast> {
        let shard = self.0.get((thread % (self.0.len() + 1)).checked_sub(1)?)?;
        // While the first is down, start no other: it would fail alike. Connections that are up
        // stay.
        if matches!(&*first.state.borrow(), State::Up(_)) {
            shard.begin();
            // The first connection is up, so the server is reachable.
            shard.tcp.saw_answer();
        }
        shard.fast()
    }
}
