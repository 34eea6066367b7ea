//! Notices programs that use the fast path and, beside it, call over TCP connections that never
//! asked for it: by a stub's `connect` that makes tonic's channel, for example.
//!
//! | a TCP connection of a host from which an Offer was answered with a ticket | counts |
//! |---|---|
//! | has carried an Offer | no |
//! | never has; its calls name another client than tonic | no |
//! | never has, since its first call [`AFTER`] ago, and has carried [`CALLS`] calls | yes: one warning for the server |
//!
//! A channel of this crate whose TCP connection was replaced asks again within 30 seconds
//! (`channel::backoff`), so its connections are not counted. One that may not use the fast path
//! (`Policy::Off`) is: the server cannot tell the two apart.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::header::USER_AGENT;
use tokio::time::Instant;

use crate::bootstrap::gateways::Gateways;

/// Time since a connection's first call before which it is not counted.
const AFTER: Duration = Duration::from_secs(60);
/// Calls before which a connection is not counted.
const CALLS: u32 = 20;
/// Hosts that are remembered. Connections of others are not noticed.
const HOSTS: usize = 1024;

/// For one server.
#[derive(Debug)]
pub(crate) struct StockCalls {
    /// There are hosts to watch, and nothing was warned of yet.
    is_watching: AtomicBool,
    /// Hosts that were given a ticket.
    hosts: Mutex<HashSet<IpAddr>>,
    /// The server's connections.
    gateways: Arc<Gateways>,
}

impl StockCalls {
    pub(crate) fn new(gateways: Arc<Gateways>) -> Self {
        StockCalls { is_watching: AtomicBool::new(false), hosts: Mutex::default(), gateways }
    }

    /// A host was given a ticket.
    pub(crate) fn has_ticket(&self, host: IpAddr) {
        let mut hosts = self.hosts();
        if hosts.is_empty() {
            self.is_watching.store(true, Relaxed);
        }
        if hosts.len() < HOSTS {
            hosts.insert(host.to_canonical());
        }
    }

    /// Whether calls are to be shown to [`called`](Self::called). Cheap: one load.
    pub(crate) fn is_watching(&self) -> bool {
        self.is_watching.load(Relaxed)
    }

    /// A connection has carried a call that is no Offer. True once: when it is to be warned of.
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
    use crate::bootstrap::connection::Connection;
    use crate::bootstrap::gateways::Known;

    const LATER: Duration = Duration::from_secs(61);

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

        /// The connection carries an Offer, which is answered with a ticket.
        fn offer(&self, peer: SocketAddr) {
            let judged = self.gateways.judge(Some(&connection(peer)), Some(peer), Instant::now());
            assert_eq!(judged, Ok(()));
            self.stock.has_ticket(peer.ip());
        }

        /// How often 60 calls of a connection are warned of, half of them long after the first.
        fn warnings(&self, peer: SocketAddr, headers: &HeaderMap) -> usize {
            let start = Instant::now();
            let early = (0..30).filter(|_| self.stock.called(peer, headers, start)).count();
            assert_eq!(early, 0, "too early to say");
            (0..30).filter(|_| self.stock.called(peer, headers, start + LATER)).count()
        }
    }

    fn connection(remote_addr: SocketAddr) -> Connection {
        Connection::of(TcpConnectInfo { local_addr: None, remote_addr: Some(remote_addr) })
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
        // It asks in the end, as a channel that connects anew does.
        let start = Instant::now();
        assert!((0..30).all(|_| !world.stock.called(late, &tonic, start)));
        world.offer(late);
        assert!(!world.stock.called(late, &tonic, start + LATER));
        // A closed connection is forgotten.
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
