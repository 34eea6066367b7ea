//! Shows a channel and its connections to an operator.

use std::sync::{Arc, Weak};

use tonic_rdma_memory::Owned;

use crate::channel::balanced::Members;
use crate::channel::rails::Rails;
use crate::channel::shared::{ChannelState, Fast};
use crate::channel::{Channel, ChannelKind};
use crate::connection::usage::ConnectionInfo;
use crate::path::PathInfo;
use crate::telemetry::stats::{Counters, TransportStats};

impl Channel {
    /// The established fast-path connections, one for each rail in use. The connection that decides
    /// [`path`](Channel::path) comes first. A [balanced](Channel::balance_list) channel returns the
    /// connections of all its endpoints. The list is empty while all calls go over TCP, because
    /// tonic owns the TCP connection.
    ///
    /// A connection that only waits for its last calls to end is not listed.
    ///
    /// # Blocking
    ///
    /// Locks one connection at a time to read its numbers. Calls hold the same lock while they post
    /// their messages.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.observer().connections().unwrap_or_default()
    }

    /// Returns an observer, which shows this channel without keeping the channel open.
    pub fn observer(&self) -> ChannelObserver {
        if !self.0.is_own() {
            return ChannelObserver(Owned::new(Observed::Inherited));
        }
        ChannelObserver(Owned::new(match &*self.0 {
            ChannelKind::One(one) => Observed::One {
                shared: Arc::downgrade(&one.shared),
                rails: Arc::downgrade(&one.rails),
            },
            ChannelKind::Balanced(balanced) => Observed::Balanced {
                members: Arc::downgrade(&balanced.members),
                counters: balanced.counters.clone(),
            },
        }))
    }
}

/// Shows a channel and its connections. [`Channel::observer`] returns it.
///
/// An observer does not keep the channel open. Once all clones of the channel are dropped and their
/// calls have ended, all methods return `None`, as they do in a child of fork(2).
#[derive(Debug, Clone)]
pub struct ChannelObserver(Owned<Observed>);

#[derive(Debug, Clone)]
enum Observed {
    One {
        shared: Weak<ChannelState>,
        rails: Weak<Rails>,
    },
    Balanced {
        members: Weak<Members>,
        counters: Arc<Counters>,
    },
    /// The channel belongs to a parent process.
    Inherited,
}

impl ChannelObserver {
    /// The path that a call would take now, as [`Channel::path`] returns it.
    pub fn path(&self) -> Option<PathInfo> {
        match self.observed() {
            Observed::One { shared, .. } => Some(shared.upgrade()?.state.borrow().info()),
            Observed::Balanced { members, .. } => Some(members.upgrade()?.info()),
            Observed::Inherited => None,
        }
    }

    /// The counters, as [`Channel::stats`] returns them.
    pub fn stats(&self) -> Option<TransportStats> {
        match self.observed() {
            Observed::One { shared, .. } => Some(shared.upgrade()?.counters.snapshot()),
            Observed::Balanced { members, counters } => {
                members.upgrade().map(|_| counters.snapshot())
            }
            Observed::Inherited => None,
        }
    }

    /// The established connections, as [`Channel::connections`] returns them.
    pub fn connections(&self) -> Option<Vec<ConnectionInfo>> {
        let established = match self.observed() {
            Observed::One { shared, rails } => rails.upgrade()?.established(&*shared.upgrade()?),
            Observed::Balanced { members, .. } => members.upgrade()?.established(),
            Observed::Inherited => return None,
        };
        Some(established.iter().filter_map(|Fast { client, .. }| client.info()).collect())
    }

    fn observed(&self) -> &Observed {
        if self.0.is_own() { &self.0 } else { &Observed::Inherited }
    }
}
