//! The TCP connection that carries an Offer: its identity, limits, and signs of a gateway.

use std::net::SocketAddr;
use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderName, Version};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::TcpConnectInfo;
#[cfg(feature = "_tls-any")]
use tonic::transport::server::TlsConnectInfo;
#[cfg(all(unix, feature = "_tls-any"))]
use tonic::transport::server::UdsConnectInfo;

/// Maximum number of Offers of one TCP connection that are answered at the same time.
pub(crate) const OFFERS_AT_ONCE: usize = 16;

/// Maximum number of handshakes of one client that are in progress or waiting. A client is
/// identified by its TCP connection.
pub(crate) const HANDSHAKES_AT_ONCE: usize = 8;

/// Headers that gateways add to requests.
const FORWARDING: [&str; 13] = [
    "cdn-loop",
    "cf-connecting-ip",
    "client-ip",
    "fastly-client-ip",
    "forwarded",
    "forwarded-for",
    "proxy-connection",
    "true-client-ip",
    "via",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-proxyuser-ip",
    "x-real-ip",
];
/// Prefixes of further headers that gateways add.
const FORWARDING_PREFIXES: [&str; 4] = ["l5d-", "x-envoy-", "x-forwarded", "x-original-"];

/// Evidence that a request passed through an HTTP gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trace {
    /// The version is not HTTP/2, which all clients of this crate use.
    #[error("it arrived over {0:?}")]
    Version(Version),
    #[error("it carries the header `{0}`")]
    Header(HeaderName),
}

/// The number and limits of a connection that carries Offers.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    /// Distinguishes the connection from all others of its server.
    pub(crate) number: u64,
    places: Arc<Semaphore>,
    handshakes: Handshakes,
}

/// Counts the connections that one client is setting up. The count is stored as an extension in the
/// client's tickets.
#[derive(Debug, Clone)]
pub(crate) struct Handshakes(pub(crate) Arc<Semaphore>);

impl Asker {
    pub(crate) fn new(number: u64) -> Self {
        let handshakes = Handshakes(Arc::new(Semaphore::new(HANDSHAKES_AT_ONCE)));
        Self { number, places: Arc::new(Semaphore::new(OFFERS_AT_ONCE)), handshakes }
    }

    /// The count of connections that the client is setting up.
    pub(crate) fn handshakes(&self) -> Handshakes {
        self.handshakes.clone()
    }

    /// Counts an Offer until the permit is dropped. Returns `None` if [`OFFERS_AT_ONCE`] are
    /// already in progress.
    pub(crate) fn begin(&self) -> Option<OwnedSemaphorePermit> {
        self.places.clone().try_acquire_owned().ok()
    }
}

/// The captured facts about an Offer's connection, kept in the Offer's extensions.
#[derive(Debug, Clone, Default)]
pub(crate) struct OfferConnection {
    /// The connection's connect info.
    pub(crate) extensions: Extensions,
    /// Evidence of a gateway, if the Offer carries such evidence.
    pub(crate) trace: Option<Trace>,
    /// Counts the connection's Offers.
    pub(crate) asker: Option<Asker>,
}

impl OfferConnection {
    /// The peer's end of the TCP connection. `None` if the transport has no TCP addresses.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        peer(&self.extensions)
    }

    /// Whether TLS is known to encrypt the connection.
    pub(crate) fn is_by_tls(&self) -> bool {
        #[cfg(feature = "_tls-any")]
        {
            let tcp = self.extensions.get::<TlsConnectInfo<TcpConnectInfo>>().is_some();
            #[cfg(unix)]
            let tcp = tcp || self.extensions.get::<TlsConnectInfo<UdsConnectInfo>>().is_some();
            tcp || self.extensions.get::<TlsConnectInfo<()>>().is_some()
        }
        #[cfg(not(feature = "_tls-any"))]
        false
    }

    /// Describes the connection of an accepted socket with this connect info.
    pub(crate) fn of<I: Clone + Send + Sync + 'static>(info: I) -> Self {
        let mut extensions = Extensions::new();
        extensions.insert(info);
        Self { extensions, trace: None, asker: None }
    }
}

/// The peer's end of the TCP connection of a request with these extensions.
pub(crate) fn peer(extensions: &Extensions) -> Option<SocketAddr> {
    let info = extensions.get::<TcpConnectInfo>();
    #[cfg(feature = "_tls-any")]
    let info = info.or_else(|| {
        extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref)
    });
    info?.remote_addr()
}

pub(super) fn trace(version: Version, headers: &HeaderMap) -> Option<Trace> {
    if version != Version::HTTP_2 {
        return Some(Trace::Version(version));
    }
    let forwards = |name: &&HeaderName| {
        let name = name.as_str();
        FORWARDING.contains(&name)
            || FORWARDING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    headers.keys().find(forwards).cloned().map(Trace::Header)
}
