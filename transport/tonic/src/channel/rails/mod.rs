//! The rails of a channel. If both ends have several devices, the channel can have a connection on
//! each rail.
//!
//! | module | what |
//! |---|---|
//! | `order` | pairs the devices of this host with the server's places |
//!
//! Each new channel begins with the next rail in turn. A channel has one connection until calls
//! that transfer bulk overlap. Then the channel connects once on each rail that shares no device
//! with the rails in use, and each call that transfers bulk goes to the connection with the fewest
//! calls in flight. All other calls stay on the first connection. A second connection would not
//! make these calls faster, and on one connection they share messages and wake-ups. A second
//! connection over the same device would not make bulk faster either ("Several threads and
//! connections" in docs/performance-log.md).
//!
//! The first connection decides the channel's path. If the first connection is lost, a connection
//! on another rail replaces it. A rail is tried last for a while if the rail failed while another
//! rail worked, or if its connection was soon lost.

mod order;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use http::Uri;
pub(crate) use order::Rail;
use tokio::time::Instant;

use crate::bootstrap::client::OfferedPlace;
use crate::channel::backoff::STABLE;
use crate::channel::shared::{ChannelState, Fast};
use crate::context::{Context, RailHealth, RailKey};
use crate::path::reason::ReasonCode;

/// Maximum number of connections of a channel, which is also the default.
pub(super) const MAX_RAILS: usize = 8;

/// Maximum number of rails of one path that an attempt tries.
const MAX_TRIES: usize = 8;

/// Returns the rails to the places of an Offer, path by path. Within a path, rails that share no
/// device come first. `turn` selects the devices of the first rail.
pub(crate) async fn find(
    context: &Context,
    env_device: Option<&str>,
    places: &[OfferedPlace],
    turn: usize,
) -> Vec<Rail> {
    let mut rails = Vec::new();
    for places in places.chunk_by(|a, b| a.path == b.path) {
        let peers = places.iter().filter_map(|place| Some(place.addr.ip()?.ip())).collect();
        let sources = context.sources(places[0].path, env_device, peers).await;
        rails.extend(order::rails(places.to_vec(), &sources, turn));
    }
    rails
}

/// A rail that a connection uses or tries.
#[derive(Debug)]
struct Used {
    connection: usize,
    rail: Rail,
    /// When the connection was established.
    up: Option<Instant>,
}

/// Why a connection leaves its rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// An attempt failed, or one end closed the connection. The rail is not the cause.
    Closed,
    /// This host or the peer reported an obstacle that may go away by itself, such as a port that
    /// is down.
    Blocked,
    /// The connection was lost.
    Lost,
}

impl Left {
    /// Classifies the reason for which a connection ended.
    pub(super) fn by(code: ReasonCode) -> Left {
        match code {
            ReasonCode::GoAway => Left::Closed,
            ReasonCode::LinkLost => Left::Lost,
            _ => Left::Blocked,
        }
    }
}

/// The rails in use by a channel's connections.
#[derive(Debug, Default)]
struct RailsInUse {
    rails: Vec<Used>,
    /// The rail on which the first connection was lost or blocked, until the first connection is up
    /// again.
    lost: Option<RailKey>,
}

impl RailsInUse {
    /// Whether another connection uses a device of the rail.
    fn meets(&self, rail: &Rail, connection: usize) -> bool {
        self.rails.iter().any(|used| used.connection != connection && rail.meets(&used.rail))
    }

    fn set(&mut self, connection: usize, rail: Rail, up: Option<Instant>) {
        self.rails.retain(|used| used.connection != connection);
        self.rails.push(Used { connection, rail, up });
    }
}

/// State that the connections of one channel share. The first connection has number 0.
#[derive(Debug)]
pub(crate) struct Rails {
    pub(super) turn: usize,
    /// Maximum number of connections.
    most: usize,
    in_use: Mutex<RailsInUse>,
    /// Set once the first connection has found several rails.
    others: OnceLock<Vec<Arc<ChannelState>>>,
}

impl Rails {
    /// Creates the state with no rail in use. `turn` selects the first rail. `most` is the maximum
    /// number of connections.
    pub(super) fn new(turn: usize, most: usize) -> Self {
        let most = most.clamp(1, MAX_RAILS);
        Self { turn, most, in_use: Mutex::default(), others: OnceLock::new() }
    }

    fn in_use(&self) -> MutexGuard<'_, RailsInUse> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rails in the order in which a connection tries them. Within a path, the order
    /// depends first on whether a rail failed lately, then on whether another connection uses a
    /// device of the rail, and last on whether this host's device is on another NUMA node. All
    /// connections but the first try only rails whose devices no other connection uses.
    pub(super) fn order(
        &self,
        connection: usize,
        rails: Vec<Rail>,
        health: &RailHealth,
    ) -> Vec<Rail> {
        let in_use = self.in_use();
        let is_used = |rail: &Rail| in_use.meets(rail, connection);
        let has_failed = |rail: &Rail| {
            health.is_avoided(&rail.key()) || connection == 0 && in_use.lost == Some(rail.key())
        };
        let mut ordered = Vec::new();
        for rails in rails.chunk_by(|a, b| a.path == b.path) {
            let may_use = |rail: &&Rail| connection == 0 || !is_used(rail);
            let mut rails: Vec<_> = rails.iter().filter(may_use).collect();
            rails.sort_by_key(|rail| (has_failed(rail), is_used(rail), rail.far));
            ordered.extend(rails.into_iter().take(MAX_TRIES).cloned());
        }
        ordered
    }

    /// Reserves a rail for a connection that is about to try it. Returns false if another
    /// connection uses a device of the rail. The first connection may try any rail.
    pub(super) fn tries(&self, connection: usize, rail: &Rail) -> bool {
        let mut in_use = self.in_use();
        let may_try = connection == 0 || !in_use.meets(rail, connection);
        if may_try {
            in_use.set(connection, rail.clone(), None);
        }
        may_try
    }

    /// Records that a connection is up on a rail. `local` is the device that the connection uses on
    /// this host.
    pub(super) fn uses(&self, connection: usize, mut rail: Rail, local: &str) {
        rail.local = Some(local.to_owned());
        let mut in_use = self.in_use();
        in_use.set(connection, rail, Some(Instant::now()));
        if connection == 0 {
            in_use.lost = None;
        }
    }

    /// Records that a connection, or an attempt to connect, has ended. A connection that is lost
    /// before [`STABLE`] has passed counts as a failure of its rail, because the rail may lose only
    /// long packets. A connection that held longer clears the rail's failures.
    pub(super) fn left(&self, connection: usize, why: Left, health: &RailHealth) {
        let mut in_use = self.in_use();
        let Some(at) = in_use.rails.iter().position(|used| used.connection == connection) else {
            return;
        };
        let Used { rail, up, .. } = in_use.rails.swap_remove(at);
        if connection == 0 && why != Left::Closed {
            in_use.lost = Some(rail.key());
        }
        match up.map(|up| up.elapsed() >= STABLE) {
            Some(true) => health.works(&rail.key()),
            Some(false) if why == Left::Lost => health.has_failed(rail.key()),
            _ => {}
        }
    }

    /// Creates the state of the other connections with `open`, if further rails exist and the state
    /// does not exist yet.
    pub(super) fn open_others(&self, mut open: impl FnMut(usize) -> Arc<ChannelState>) {
        if self.others.get().is_some() {
            return;
        }
        let apart = self
            .in_use()
            .rails
            .iter()
            .find(|used| used.connection == 0)
            .map_or(1, |used| used.rail.apart);
        if apart.min(self.most) > 1 {
            let others = (1..apart.min(self.most)).map(&mut open).collect();
            // No other thread has set the value, because only the first connection's manager calls
            // this.
            let _ = self.others.set(others);
        }
    }

    /// Returns the connection for the next call, or `None` if the channel has a single connection
    /// or none is up.
    pub(super) fn pick(&self, first: &ChannelState, uri: &Uri) -> Option<Fast> {
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
            // While the first connection is down, start no other connection, because another
            // connection would fail in the same way.
            if best.is_some() {
                other.start.begin();
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

    /// Returns the established connections, beginning with the first connection.
    pub(super) fn established(&self, first: &ChannelState) -> Vec<Fast> {
        let others = self.others.get().into_iter().flatten().map(|other| &**other);
        std::iter::once(first).chain(others).filter_map(ChannelState::established).collect()
    }

    /// Whether another connection is up, so that it could replace the first connection.
    pub(super) fn has_another(&self) -> bool {
        self.others.get().is_some_and(|others| others.iter().any(|other| other.is_up()))
    }

    /// Picks a connection that is up as the new first connection, and returns it.
    pub(super) fn promote(&self) -> Option<Fast> {
        let mut others = self.others.get()?.iter().zip(1..);
        let (fast, number) =
            others.find_map(|(other, number)| Some((other.hand_over()?, number)))?;
        let mut in_use = self.in_use();
        let used = in_use.rails.iter_mut().find(|used| used.connection == number);
        if let Some(used) = used {
            used.connection = 0;
        }
        Some(fast)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic_rdma_fabric::{Addr, LocalAddress};

    use super::*;
    use crate::context::Sources;
    use crate::path::Path;

    /// The rails between two devices at each end, in one network. `far` names this host's devices
    /// on another NUMA node.
    fn rails(far: &[&str]) -> Vec<Rail> {
        let place = |last: u8| OfferedPlace {
            path: Path::Verbs,
            addr: Addr::Ip(([10, 0, 0, last], 50051).into()),
            device: format!("s{last}"),
            iwarp: Some(false),
        };
        let source = |last: u8| LocalAddress {
            ip: [10, 0, 0, 10 + last].into(),
            prefix: 24,
            running: true,
            interface: format!("eth{last}"),
            device: format!("c{last}"),
            iwarp: false,
        };
        let far = far.iter().map(|name| (*name).to_owned()).collect();
        let addresses = vec![source(1), source(2)];
        let sources = Sources { addresses, far, ..Sources::default() };
        order::rails(vec![place(1), place(2)], &sources, 0)
    }

    fn told(rails: &[Rail]) -> Vec<String> {
        let device = |rail: &Rail| rail.local.clone().unwrap();
        rails.iter().map(|rail| format!("{} {}", device(rail), rail.remote)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_rail_that_failed_is_last_and_one_in_use_is_before_it() {
        let (of_channel, health) = (Rails::new(0, 8), RailHealth::default());
        let [failed, used, ..] = &rails(&[])[..] else { panic!() };
        health.has_failed(failed.key());
        of_channel.uses(1, used.clone(), "c2");
        let order = of_channel.order(0, rails(&[]), &health);
        assert_eq!(told(&order), ["c2 s2", "c1 s2", "c2 s1", "c1 s1"]);
        // A further connection takes only a rail that shares no device with the rail in use, even
        // if that rail has failed.
        assert_eq!(told(&of_channel.order(2, rails(&[]), &health)), ["c1 s1"]);
        for _ in 0..2 {
            of_channel.left(1, Left::Blocked, &health);
            assert_eq!(of_channel.order(2, rails(&[]), &health).len(), 4);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_loss_the_first_connection_prefers_another_rail_until_it_is_up() {
        let (of_channel, health) = (Rails::new(0, 8), RailHealth::default());
        let [lost, other, ..] = &rails(&[])[..] else { panic!() };
        assert!(of_channel.tries(0, lost));
        of_channel.uses(0, lost.clone(), "c1");
        of_channel.left(0, Left::Blocked, &health);
        let first = |connection| told(&of_channel.order(connection, rails(&[]), &health)).remove(0);
        assert_eq!((first(0), first(1)), ("c2 s2".to_owned(), "c1 s1".to_owned()));
        of_channel.uses(0, other.clone(), "c2");
        of_channel.left(0, Left::Closed, &health);
        assert_eq!(first(0), "c1 s1");
    }

    /// Over a cable that loses long packets, a connection is established, and its first long
    /// message loses it.
    #[tokio::test(start_paused = true)]
    async fn a_rail_that_connects_and_is_lost_soon_is_tried_last() {
        let health = RailHealth::default();
        let [bad, ..] = &rails(&[])[..] else { panic!() };
        let first = |channel: &Rails| told(&channel.order(1, rails(&[]), &health)).remove(0);
        let life = async |held: Duration, why: Left| {
            let of_channel = Rails::new(0, 8);
            assert!(of_channel.tries(1, bad));
            of_channel.uses(1, bad.clone(), "c1");
            tokio::time::advance(held).await;
            of_channel.left(1, why, &health);
            first(&of_channel)
        };
        assert_eq!(life(STABLE, Left::Lost).await, "c1 s1", "it was good until then");
        assert_eq!(life(STABLE / 2, Left::Closed).await, "c1 s1", "its server has ended");
        assert_eq!(life(STABLE / 2, Left::Lost).await, "c2 s2");
        assert_eq!(life(Duration::ZERO, Left::Closed).await, "c2 s2", "it does connect");
        assert_eq!(life(STABLE, Left::Closed).await, "c1 s1", "it is good again");
    }

    #[test]
    fn a_rail_is_taken_while_it_is_tried() {
        let of_channel = Rails::new(0, 8);
        let [one, other, ..] = &rails(&[])[..] else { panic!() };
        assert!(of_channel.tries(1, one) && !of_channel.tries(2, one));
        assert!(of_channel.tries(2, other) && !of_channel.tries(1, other));
        of_channel.left(1, Left::Closed, &RailHealth::default());
        assert!(of_channel.tries(2, one));
    }

    #[tokio::test(start_paused = true)]
    async fn a_device_of_another_node_comes_behind_the_near_ones() {
        let (of_channel, health) = (Rails::new(0, 8), RailHealth::default());
        let order = of_channel.order(0, rails(&["c1"]), &health);
        assert_eq!(told(&order), ["c2 s2", "c2 s1", "c1 s1", "c1 s2"]);
    }

    #[test]
    fn an_attempt_tries_few_of_very_many_places() {
        let [rail, ..] = &rails(&[])[..] else { panic!() };
        let many = vec![rail.clone(); 1000];
        let tried = Rails::new(0, 8).order(0, many, &RailHealth::default());
        assert_eq!(tried.len(), MAX_TRIES);
    }

    #[test]
    fn the_number_of_rails_is_limited() {
        assert_eq!([0, 1, 8, 1000].map(|most| Rails::new(0, most).most), [1, 1, 8, 8]);
    }
}
