//! Detects programs that use the fast path but also make calls over TCP connections that never
//! asked for the fast path, for example because a stub's `connect` has made tonic's channel.
//!
//! | a TCP connection from a host to which an Offer gave a ticket | counts |
//! |---|---|
//! | has carried an Offer | no |
//! | has carried no Offer; the user agent of its calls is not tonic's | no |
//! | has carried no Offer, had its first call [`AFTER`] ago, and has carried [`CALLS`] calls | yes: one warning for the server |
//!
//! A channel of this crate whose TCP connection was replaced asks again within ten minutes
//! (`channel::backoff`), so its connections are not counted. A channel with `Policy::Off` is
//! counted, because the server cannot distinguish it from tonic's channel.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::header::USER_AGENT;
use tokio::time::Instant;

use crate::bootstrap::gateways::Gateways;

/// A connection is counted only when at least this time has passed since its first call.
const AFTER: Duration = Duration::from_secs(15 * 60);
/// A connection is counted once it has carried this many calls.
const CALLS: u32 = 20;
/// Maximum number of hosts to remember. Connections of other hosts are not noticed.
const HOSTS: usize = 1024;

/// Watches the calls of one server's connections.
#[derive(Debug)]
pub(crate) struct StockCalls {
    /// Whether any host has got a ticket and no warning has been given yet.
    is_watching: AtomicBool,
    /// Hosts that got a ticket.
    hosts: Mutex<HashSet<IpAddr>>,
    /// The server's connections.
    gateways: Arc<Gateways>,
}

impl StockCalls {
    pub(crate) fn new(gateways: Arc<Gateways>) -> Self {
        StockCalls { is_watching: AtomicBool::new(false), hosts: Mutex::default(), gateways }
    }

    /// Records that a host got a ticket.
    pub(crate) fn has_ticket(&self, host: IpAddr) {
        let mut hosts = self.hosts();
        if hosts.is_empty() {
            self.is_watching.store(true, Relaxed);
        }
        if hosts.len() < HOSTS {
            hosts.insert(host.to_canonical());
        }
    }

    /// Whether to report calls to [`called`](Self::called). Costs one load.
    pub(crate) fn is_watching(&self) -> bool {
        self.is_watching.load(Relaxed)
    }

    /// Records a call that is not an Offer. Returns true once, when a warning is due.
    pub(crate) fn called(&self, peer: SocketAddr, headers: &HeaderMap, now: Instant) -> bool {
        let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
        if !agent.is_some_and(|agent| agent.split(' ').any(|name| name.starts_with("tonic/")))
            || !self.hosts().contains(&peer.ip().to_canonical())
        {
            return false;
        }
        let counted = self.gateways.count_call(peer, now);
        counted.is_some_and(|(since, count)| count >= CALLS && now >= since + AFTER)
            && self.is_watching.swap(false, Relaxed)
    }

    fn hosts(&self) -> MutexGuard<'_, HashSet<IpAddr>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::server::TcpConnectInfo;

    use super::*;
    use crate::bootstrap::connection::OfferConnection;
    use crate::bootstrap::gateways::Known;

    const LATER: Duration = AFTER.saturating_add(Duration::from_secs(1));

    /// A server's view of its connections.
    struct World {
        gateways: Arc<Gateways>,
        stock: StockCalls,
        live: Vec<Known>,
    }

    impl World {
        fn new() -> World {
            let gateways: Arc<Gateways> = Arc::default();
            World { stock: StockCalls::new(gateways.clone()), gateways, live: Vec::new() }
        }

        /// Accepts a connection from the host 10.0.0.`host`.
        fn connect(&mut self, host: u8) -> SocketAddr {
            let peer = ([10, 0, 0, host], 1000 + self.live.len() as u16).into();
            self.live.push(self.gateways.accepted(&connection(peer)).unwrap());
            peer
        }

        /// The connection carries an Offer and gets a ticket.
        fn offer(&self, peer: SocketAddr) {
            let judged = self.gateways.judge(Some(&connection(peer)), Some(peer), Instant::now());
            assert_eq!(judged, Ok(()));
            self.stock.has_ticket(peer.ip());
        }

        /// The number of warnings for 60 calls of a connection. Half of the calls come long after
        /// the first call.
        fn warnings(&self, peer: SocketAddr, headers: &HeaderMap) -> usize {
            let start = Instant::now();
            let early = (0..30).filter(|_| self.stock.called(peer, headers, start)).count();
            assert_eq!(early, 0, "too early to say");
            (0..30).filter(|_| self.stock.called(peer, headers, start + LATER)).count()
        }
    }

    fn connection(remote_addr: SocketAddr) -> OfferConnection {
        OfferConnection::of(TcpConnectInfo { local_addr: None, remote_addr: Some(remote_addr) })
    }

    fn agent(name: &str) -> HeaderMap {
        HeaderMap::from_iter([(USER_AGENT, name.parse().unwrap())])
    }

    #[tokio::test]
    async fn a_connection_beside_those_that_asked_is_warned_of_once() {
        let mut world = World::new();
        let [fast, stock, another] = [1, 1, 1].map(|host| world.connect(host));
        assert!(!world.stock.is_watching(), "nobody has a ticket");
        world.offer(fast);
        assert!(world.stock.is_watching());
        let tonic = agent("my-service/1.0 tonic/0.14.9");
        assert_eq!(world.warnings(stock, &tonic), 1);
        assert!(!world.stock.is_watching(), "once for the server");
        assert_eq!(world.warnings(another, &tonic), 0);
    }

    #[tokio::test]
    async fn others_are_not() {
        let mut world = World::new();
        let [fast, stock, late] = [1, 1, 1].map(|host| world.connect(host));
        let elsewhere = world.connect(2);
        world.offer(fast);
        let tonic = agent("tonic/0.14.9");
        assert_eq!(world.warnings(fast, &tonic), 0, "it has asked");
        assert_eq!(world.warnings(elsewhere, &tonic), 0, "its host has no ticket");
        assert_eq!(world.warnings(stock, &agent("grpc-go/1.60")), 0, "it is not tonic");
        assert_eq!(world.warnings(stock, &HeaderMap::new()), 0);
        // The connection carries an Offer later, like the connection of a channel that connects
        // again.
        let start = Instant::now();
        assert!((0..30).all(|_| !world.stock.called(late, &tonic, start)));
        world.offer(late);
        assert!(!world.stock.called(late, &tonic, start + LATER));
        // A connection that is closed is forgotten.
        world.live.clear();
        assert_eq!(world.warnings(stock, &tonic), 0);
        assert!(world.stock.is_watching());
    }

    #[tokio::test]
    async fn hosts_are_bounded() {
        let world = World::new();
        for n in 0..3000_u32 {
            world.stock.has_ticket(std::net::Ipv4Addr::from(n).into());
        }
        assert_eq!(world.stock.hosts().len(), HOSTS);
    }
}
