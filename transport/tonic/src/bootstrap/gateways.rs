//! Decides whether an Offer came directly from its client or through an HTTP gateway.
//!
//! A ticket carries the identity of its Offer's TCP connection: calls on the fast path report that
//! connection's address and certificate. If a gateway forwards an Offer, the connection is the
//! gateway's, but the ticket goes to the gateway's client. Therefore the client states the address
//! of its own end of the connection, and the server compares this address with the peer address
//! that it sees.
//!
//! States of an accepted TCP connection:
//!
//! | state | an Offer that states the peer | any other Offer | closed |
//! |---|---|---|---|
//! | direct | direct | gateway | (none) |
//! | gateway | gateway | gateway | (none) |
//!
//! So a client that guesses the gateway's port has one guess for each of the gateway's connections.
//! A wrong statement counts against the peer's network. After [`MISMATCHES`] wrong statements, no
//! Offer from that network counts as direct until [`WINDOW`] after the first wrong statement.
//! During that time the answer does not depend on the statement, and no answer contains the peer's
//! address, so a guess reveals nothing.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::bootstrap::connection::{OfferConnection, Trace};
use crate::bootstrap::tickets::Network;
use crate::connection::usage::{self, ConnectionInfo};
use crate::path::Path;
use crate::path::reason::Reason;

/// Number of Offers with a wrong address from one network after which all Offers from that network
/// count as a gateway's.
pub(crate) const MISMATCHES: u32 = 8;
/// Time after the first of these Offers at which the count starts again.
pub(crate) const WINDOW: Duration = Duration::from_secs(600);
/// Maximum number of networks for which Offers with a wrong address are counted.
const NETWORKS: usize = 1024;

/// Why an Offer does not count as direct. The client receives the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Indirect {
    #[error(
        "the server does not know the Offer's connection: one of its layers rebuilt the request"
    )]
    Rebuilt,
    #[error("the server sees no TCP address of its peer: it serves another transport")]
    NoAddress,
    #[error("the Offer passed an HTTP gateway: {0}")]
    Trace(Trace),
    #[error(
        "the client did not state its own end of the TCP connection: its version is older, or \
         its connector makes no TcpStream"
    )]
    Unstated,
    #[error(
        "the client's end of the TCP connection is {0}, but the server sees another address: an \
         HTTP gateway or a translation of source addresses is in between"
    )]
    Differs(SocketAddr),
    #[error(
        "the TCP connection that the server sees has already carried an Offer that did not come \
         directly: an HTTP gateway or a translation of source addresses is in between"
    )]
    Gateway,
    #[error(
        "too many Offers from the address that the server sees stated another one; for up \
         to {} minutes, none counts as direct",
        WINDOW.as_secs() / 60
    )]
    Suspect,
    #[error("the Offer's TCP connection is closed")]
    Closed,
}

/// The server's TCP connections, and the wrong statements about their addresses.
#[derive(Debug, Default)]
pub(crate) struct Gateways(Mutex<GatewayTable>);

#[derive(Debug, Default)]
struct GatewayTable {
    /// Open connections by the peer's address.
    live: HashMap<SocketAddr, Live>,
    accepted: u64,
    mismatches: HashMap<Network, Mismatches>,
}

#[derive(Debug)]
struct Live {
    /// Distinguishes the connection from a later connection with the same peer address.
    number: u64,
    gateway: bool,
    /// Whether the connection has carried an Offer.
    asked: bool,
    /// Why the last Offer was refused. `None` if the last Offer was granted, or none was answered.
    refused: Option<Reason>,
    /// Distinguishes the connection from all others of this process.
    id: u64,
    since: Instant,
    /// The time of the first counted call, and the number of counted calls.
    calls: Option<(Instant, u32)>,
}

#[derive(Debug)]
struct Mismatches {
    since: Instant,
    count: u32,
}

/// An accepted connection. Dropping this struct removes the connection from the table.
#[derive(Debug)]
pub(crate) struct Known {
    gateways: Arc<Gateways>,
    peer: SocketAddr,
    number: u64,
}

impl Gateways {
    /// Registers an accepted connection. Returns `None` if the peer has no TCP address.
    pub(crate) fn accepted(self: &Arc<Self>, connection: &OfferConnection) -> Option<Known> {
        let peer = connection.peer()?;
        let mut table = self.lock();
        let number = table.accepted;
        table.accepted += 1;
        let live = Live {
            number,
            gateway: false,
            asked: false,
            refused: None,
            id: usage::next_id(),
            since: Instant::now(),
            calls: None,
        };
        table.live.insert(peer, live);
        Some(Known { gateways: self.clone(), peer, number })
    }

    /// Decides whether an Offer came directly. `connection` is the captured connection, and
    /// `stated` the address that the client states as its own.
    pub(crate) fn judge(
        &self,
        connection: Option<&OfferConnection>,
        stated: Option<SocketAddr>,
        now: Instant,
    ) -> Result<(), Indirect> {
        let connection = connection.ok_or(Indirect::Rebuilt)?;
        let peer = connection.peer().ok_or(Indirect::NoAddress)?;
        let evidence = match (&connection.trace, stated) {
            (Some(trace), _) => Err(Indirect::Trace(trace.clone())),
            (None, None) => Err(Indirect::Unstated),
            (None, Some(stated)) if is_same(stated, peer) => Ok(()),
            (None, Some(stated)) => Err(Indirect::Differs(stated)),
        };
        let mut table = self.lock();
        let live = table.live.get_mut(&peer).ok_or(Indirect::Closed)?;
        live.asked = true;
        let before = live.gateway;
        live.gateway |= evidence.is_err();
        let network = Network::from(peer.ip());
        let suspect = table.is_suspect(network, now);
        // Do not count a guess about a connection that is already marked as a gateway's, because
        // the guess gains nothing.
        if matches!(evidence, Err(Indirect::Differs(_))) && !before {
            table.count(network, now);
        }
        match evidence {
            // The answer must not reveal whether the statement is correct.
            Ok(()) | Err(Indirect::Differs(_)) if suspect => Err(Indirect::Suspect),
            Ok(()) | Err(Indirect::Differs(_)) if before => Err(Indirect::Gateway),
            evidence => evidence,
        }
    }

    /// Counts a call on a connection that has carried no Offer. Returns the time of the
    /// connection's first counted call, and the number of counted calls. `None` for other
    /// connections.
    pub(crate) fn count_call(&self, peer: SocketAddr, now: Instant) -> Option<(Instant, u32)> {
        let mut table = self.lock();
        let live = table.live.get_mut(&peer).filter(|live| !live.asked)?;
        let (since, count) = live.calls.get_or_insert((now, 0));
        *count = count.saturating_add(1);
        Some((*since, *count))
    }

    /// Records the answer to an Offer. `refused` is the reason if the Offer was refused.
    pub(crate) fn answered(&self, peer: SocketAddr, refused: Option<&Reason>) {
        if let Some(live) = self.lock().live.get_mut(&peer) {
            live.asked = true;
            live.refused = refused.cloned();
        }
    }

    /// Returns at most `most` connections whose numbers are above `after`, in any order. If more
    /// connections exist, returns those with the lowest numbers.
    pub(crate) fn connections(&self, after: u64, most: usize) -> Vec<ConnectionInfo> {
        let table = self.lock();
        let mut live: Vec<_> = table.live.iter().filter(|(_, live)| live.id > after).collect();
        if live.len() > most {
            live.select_nth_unstable_by_key(most, |(_, live)| live.id);
            live.truncate(most);
        }
        let info = |(peer, live): (&SocketAddr, &Live)| ConnectionInfo {
            id: live.id,
            age: live.since.elapsed(),
            path: Path::Tcp,
            device: None,
            local_addr: None,
            remote_addr: Some(*peer),
            peer_pid: None,
            asked: live.asked,
            reason: live.refused.clone(),
            usage: None,
        };
        live.into_iter().map(info).collect()
    }

    fn lock(&self) -> MutexGuard<'_, GatewayTable> {
        // Ignore poison, because each change leaves the table consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GatewayTable {
    fn is_suspect(&self, network: Network, now: Instant) -> bool {
        let mismatches = self.mismatches.get(&network);
        mismatches.is_some_and(|m| m.count >= MISMATCHES && now < m.since + WINDOW)
    }

    fn count(&mut self, network: Network, now: Instant) {
        if !self.mismatches.contains_key(&network) && self.mismatches.len() >= NETWORKS {
            self.mismatches.retain(|_, m| now < m.since + WINDOW);
            // Evict the network with the fewest mismatches, so that a flood from many networks does
            // not evict suspect networks. Of several networks with the fewest mismatches, evict the
            // oldest.
            if self.mismatches.len() >= NETWORKS
                && let Some(least) =
                    self.mismatches.iter().min_by_key(|(_, m)| (m.count, m.since)).map(|(n, _)| *n)
            {
                self.mismatches.remove(&least);
            }
        }
        let of = self.mismatches.entry(network).or_insert(Mismatches { since: now, count: 0 });
        if now >= of.since + WINDOW {
            *of = Mismatches { since: now, count: 0 };
        }
        of.count = of.count.saturating_add(1);
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let mut table = self.gateways.lock();
        if table.live.get(&self.peer).is_some_and(|live| live.number == self.number) {
            table.live.remove(&self.peer);
        }
    }
}

/// Compares an address as the two ends see it. The ends may see different scopes of an IPv6
/// address, and one end may see an IPv4-mapped IPv6 address where the other end sees the IPv4
/// address.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    (a.ip().to_canonical(), a.port()) == (b.ip().to_canonical(), b.port())
}

#[cfg(test)]
mod tests {
    use http::HeaderName;
    use tonic::transport::server::TcpConnectInfo;

    use super::*;

    fn from(peer: &str) -> OfferConnection {
        let remote_addr = Some(peer.parse().unwrap());
        OfferConnection::of(TcpConnectInfo { local_addr: None, remote_addr })
    }

    /// Judges an Offer on a new connection.
    fn judged(
        gateways: &Arc<Gateways>,
        peer: &str,
        stated: &str,
        now: Instant,
    ) -> Result<(), Indirect> {
        let connection = from(peer);
        let _known = gateways.accepted(&connection);
        gateways.judge(Some(&connection), Some(stated.parse().unwrap()), now)
    }

    #[tokio::test]
    async fn the_same_address_in_any_form_is_direct() {
        let (gateways, now) = (Arc::default(), Instant::now());
        for (peer, stated) in [
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("[::ffff:10.0.0.1]:7", "10.0.0.1:7"),
            ("10.0.0.1:7", "[::ffff:10.0.0.1]:7"),
            ("[2001:db8::1]:7", "[2001:db8::1]:7"),
            ("[fe80::1%3]:7", "[fe80::1]:7"),
        ] {
            assert_eq!(judged(&gateways, peer, stated, now), Ok(()), "{peer} {stated}");
        }
        for (peer, stated) in [
            ("10.0.0.1:7", "10.0.0.2:7"),
            ("10.0.0.1:7", "10.0.0.1:8"),
            ("[2001:db8::1]:7", "[2001:db8::2]:7"),
        ] {
            let differs = Indirect::Differs(stated.parse().unwrap());
            assert_eq!(judged(&gateways, peer, stated, now), Err(differs));
        }
    }

    #[tokio::test]
    async fn what_is_not_known_is_not_direct() {
        let (gateways, now): (Arc<Gateways>, _) = (Arc::default(), Instant::now());
        let stated = Some("10.0.0.1:7".parse().unwrap());
        assert_eq!(gateways.judge(None, stated, now), Err(Indirect::Rebuilt));
        let unix = OfferConnection::of(());
        assert!(gateways.accepted(&unix).is_none());
        assert_eq!(gateways.judge(Some(&unix), stated, now), Err(Indirect::NoAddress));
        let mut tcp = from("10.0.0.1:7");
        assert_eq!(gateways.judge(Some(&tcp), stated, now), Err(Indirect::Closed));
        {
            let _known = gateways.accepted(&tcp);
            assert_eq!(gateways.judge(Some(&tcp), None, now), Err(Indirect::Unstated));
        }
        let _known = gateways.accepted(&tcp);
        let trace = Trace::Header(HeaderName::from_static("via"));
        tcp.trace = Some(trace.clone());
        assert_eq!(gateways.judge(Some(&tcp), stated, now), Err(Indirect::Trace(trace)));
    }

    #[tokio::test]
    async fn a_connection_that_carried_a_wrong_statement_is_a_gateways_until_it_closes() {
        let (gateways, now): (Arc<Gateways>, _) = (Arc::default(), Instant::now());
        let connection = from("10.0.0.1:7");
        let [right, wrong] = ["10.0.0.1:7", "10.0.0.1:8"].map(|addr| Some(addr.parse().unwrap()));
        let first = gateways.accepted(&connection);
        assert_eq!(gateways.judge(Some(&connection), right, now), Ok(()));
        gateways.judge(Some(&connection), wrong, now).unwrap_err();
        for stated in [right, wrong] {
            assert_eq!(gateways.judge(Some(&connection), stated, now), Err(Indirect::Gateway));
        }
        assert_eq!(gateways.judge(Some(&connection), None, now), Err(Indirect::Unstated));
        // A new connection gets the same address before the server notices the end of the first
        // connection.
        let _second = gateways.accepted(&connection);
        drop(first);
        assert_eq!(gateways.judge(Some(&connection), right, now), Ok(()));
    }

    #[tokio::test]
    async fn guesses_are_few_and_teach_nothing() {
        let (gateways, now): (Arc<Gateways>, _) = (Arc::default(), Instant::now());
        for port in 0..MISMATCHES {
            // Any address in the gateway's network counts.
            let peer = format!("[2001:db8::{port}]:7");
            let wrong = judged(&gateways, &peer, "[2001:db8::9:9]:7", now);
            assert!(matches!(wrong, Err(Indirect::Differs(_))), "{wrong:?}");
        }
        let later = now + WINDOW - Duration::from_millis(1);
        for stated in ["[2001:db8::1]:7", "[2001:db8::1]:8"] {
            assert_eq!(judged(&gateways, "[2001:db8::1]:7", stated, later), Err(Indirect::Suspect));
        }
        assert_eq!(judged(&gateways, "10.0.0.1:7", "10.0.0.1:7", later), Ok(()));
        let after = now + WINDOW;
        assert_eq!(judged(&gateways, "[2001:db8::1]:7", "[2001:db8::1]:7", after), Ok(()));
    }

    #[tokio::test]
    async fn many_clients_of_one_gateway_connection_count_once() {
        let (gateways, now): (Arc<Gateways>, _) = (Arc::default(), Instant::now());
        let connection = from("10.0.0.1:7");
        let known = gateways.accepted(&connection);
        for _ in 0..2 * MISMATCHES {
            gateways
                .judge(Some(&connection), Some("10.9.9.9:1".parse().unwrap()), now)
                .unwrap_err();
        }
        drop(known);
        assert_eq!(judged(&gateways, "10.0.0.1:7", "10.0.0.1:7", now), Ok(()));
    }

    #[tokio::test]
    async fn what_is_remembered_is_bounded_and_suspects_stay() {
        let (gateways, now): (Arc<Gateways>, _) = (Arc::default(), Instant::now());
        for _ in 0..MISMATCHES {
            judged(&gateways, "10.0.0.1:7", "10.0.0.1:8", now).unwrap_err();
        }
        for n in 0..2 * NETWORKS {
            let peer = format!("172.16.{}.{}:7", n / 256, n % 256);
            judged(&gateways, &peer, "10.0.0.1:8", now).unwrap_err();
        }
        let table = gateways.lock();
        assert_eq!((table.mismatches.len(), table.live.len()), (NETWORKS, 0));
        drop(table);
        assert_eq!(judged(&gateways, "10.0.0.1:7", "10.0.0.1:7", now), Err(Indirect::Suspect));
    }
}
