//! The rails of a channel: where both ends have several devices, it has a connection on each.
//!
//! | module | what |
//! |---|---|
//! | `order` | pairs the devices of this host with the places of a server |
//!
//! Channels begin at different rails, in turn. A channel has one connection until calls that
//! transfer bulk overlap; then it makes the others, one on each rail that shares no device with
//! those in use, and such a call goes where the fewest calls are in flight. All other calls keep to
//! the first connection: they gain nothing from another one, and share its messages and wake-ups.
//!
//! The first connection decides the channel's path. When it is lost, one on another rail takes its
//! place, if there is one. A rail that failed is tried behind the others for a while.

mod order;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use http::Uri;
pub(super) use order::Rail;
use tonic_rdma_fabric::LocalAddress;

use crate::bootstrap::client::Place;
use crate::channel::fast::Fast;
use crate::channel::shared::Shared;
use crate::context::RailHealth;

/// Maximum number of connections of a channel, and its default.
pub(super) const MAX_RAILS: usize = 8;

/// Maximum number of rails of one path that an attempt tries.
const MAX_TRIES: usize = 8;

/// What the connections of one channel know of each other. The first one is number 0.
#[derive(Debug)]
pub(crate) struct Rails {
    turn: usize,
    /// Maximum number of connections.
    most: usize,
    in_use: Mutex<Vec<(usize, Rail)>>,
    /// Set once the first connection has found several rails.
    others: OnceLock<Vec<Arc<Shared>>>,
}

impl Rails {
    /// `turn`: which of the rails is the first one. `most`: maximum number of connections.
    pub(super) fn new(turn: usize, most: usize) -> Self {
        let most = most.clamp(1, MAX_RAILS);
        Self { turn, most, in_use: Mutex::default(), others: OnceLock::new() }
    }

    fn in_use(&self) -> MutexGuard<'_, Vec<(usize, Rail)>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rails to these places of one path, in the order in which a connection tries them: those
    /// that have failed lately last, and before them those that another connection uses. A further
    /// connection has none but rails of its own.
    pub(super) fn order(
        &self,
        connection: usize,
        places: Vec<Place>,
        (sources, named): (&[LocalAddress], bool),
        health: &RailHealth,
    ) -> Vec<Rail> {
        let mut rails = order::rails(places, sources, named, self.turn);
        let in_use = self.in_use();
        let is_used = |rail: &Rail| in_use.iter().any(|(_, used)| rail.meets(used));
        if connection > 0 {
            rails.retain(|rail| !is_used(rail));
        }
        rails.sort_by_key(|rail| (health.is_avoided(&rail.key()), is_used(rail)));
        rails.truncate(MAX_TRIES);
        rails
    }

    /// A connection is up on a rail, which leaves through the device `local`.
    pub(super) fn uses(&self, connection: usize, mut rail: Rail, local: &str) {
        rail.local = Some(local.to_owned());
        let mut in_use = self.in_use();
        in_use.retain(|(other, _)| *other != connection);
        in_use.push((connection, rail));
    }

    /// A connection has ended. Returns its rail.
    pub(super) fn left(&self, connection: usize) -> Option<Rail> {
        let mut in_use = self.in_use();
        let at = in_use.iter().position(|(other, _)| *other == connection)?;
        Some(in_use.swap_remove(at).1)
    }

    /// Makes the state of further connections, at the first time that there is a rail for them.
    /// `open` makes one.
    pub(super) fn open_others(&self, mut open: impl FnMut(usize) -> Arc<Shared>) {
        if self.others.get().is_some() {
            return;
        }
        let apart = self.in_use().iter().find(|(n, _)| *n == 0).map_or(1, |(_, rail)| rail.apart);
        if apart.min(self.most) > 1 {
            let others = (1..apart.min(self.most)).map(&mut open).collect();
            // Only the manager of the first connection comes here.
            let _ = self.others.set(others);
        }
    }

    /// The connection of the next call, where the channel has, or is to have, several.
    pub(super) fn pick(&self, first: &Shared, uri: &Uri) -> Option<Fast> {
        let others = self.others.get()?;
        let own = first.fast();
        if own.is_some() && !first.tcp.methods.transfers_bulk(uri) {
            return own;
        }
        let mut least = own.as_ref().map_or(usize::MAX, |fast| fast.client.calls_in_flight());
        let mut best = own;
        for other in others {
            if least == 0 {
                break;
            }
            // While the first is down, start no other: it would fail alike.
            if best.is_some() {
                other.begin();
            }
            if let Some(fast) = other.fast() {
                let calls = fast.client.calls_in_flight();
                if calls < least {
                    (least, best) = (calls, Some(fast));
                }
            }
        }
        best
    }

    /// Takes a connection that is up, to be the first one.
    pub(super) fn promote(&self) -> Option<Fast> {
        let mut others = self.others.get()?.iter().zip(1..);
        let (fast, number) =
            others.find_map(|(other, number)| Some((other.hand_over()?, number)))?;
        let mut in_use = self.in_use();
        in_use.iter_mut().filter(|(n, _)| *n == number).for_each(|(n, _)| *n = 0);
        Some(fast)
    }
}
