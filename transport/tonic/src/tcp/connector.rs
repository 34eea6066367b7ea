//! The TCP side of a channel, and the local address of its connection.
//!
//! An Offer states the client's address on the TCP connection that carries the Offer. tonic's
//! channel does not reveal that address, so the channel's connector records it.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::Channel;
use tower::util::BoxService;
use tower::{Service, ServiceExt};

use crate::error::BoxError;
use crate::path::Path;
use crate::path::policy::Plaintext;

#[derive(Debug, Clone)]
pub(crate) struct TcpChannel {
    pub(crate) channel: Channel,
    pub(crate) local_addr: LocalAddr,
    pub(crate) plaintext: Plaintext,
}

impl TcpChannel {
    /// Whether this end is not allowed to use `path` after an Offer over this channel.
    pub(crate) fn denies(&self, path: Path) -> bool {
        self.plaintext.denies(path, self.local_addr.is_by_tls())
    }
}

/// Describes the newest connection that the channel's connector has made.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalAddr(Arc<Mutex<Made>>);

#[derive(Debug, Clone, Copy, Default)]
struct Made {
    /// `None` before the first connection, and if the transport's TCP address is unknown.
    addr: Option<SocketAddr>,
    /// Whether the connector has ever made a TLS stream itself.
    by_tls: bool,
}

impl LocalAddr {
    /// The local address of the newest connection.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        self.lock().addr
    }

    /// Whether the connector itself is known to make TLS connections. TLS that tonic adds does not
    /// count.
    pub(crate) fn is_by_tls(&self) -> bool {
        self.lock().by_tls
    }

    fn set(&self, made: Made) {
        let mut last = self.lock();
        *last = Made { by_tls: made.by_tls || last.by_tls, ..made };
    }

    fn lock(&self) -> MutexGuard<'_, Made> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream of any type.
pub(crate) trait AnyIo: hyper::rt::Read + hyper::rt::Write + Unpin + Send {}

impl<T: hyper::rt::Read + hyper::rt::Write + Unpin + Send> AnyIo for T {}

/// A connector of any type, boxed. Otherwise the compiler would compile tonic's channel again for
/// each type of connector, and that channel is most of the code that a program on tonic compiles.
pub(crate) type AnyConnector = BoxService<Uri, Box<dyn AnyIo>, BoxError>;

/// Records the local address of each connection that `connector` creates.
pub(crate) fn recording<C>(connector: C) -> (AnyConnector, LocalAddr)
where
    C: Service<Uri> + Send + 'static,
    C::Response: AnyIo + 'static,
    C::Error: Into<BoxError>,
    C::Future: Send,
{
    let local_addr = LocalAddr::default();
    (record(connector, local_addr.clone()), local_addr)
}

/// Like [`recording`], but records the addresses in `newest`.
pub(crate) fn record<C>(connector: C, newest: LocalAddr) -> AnyConnector
where
    C: Service<Uri> + Send + 'static,
    C::Response: AnyIo + 'static,
    C::Error: Into<BoxError>,
    C::Future: Send,
{
    BoxService::new(connector.map_err(Into::into).map_response(move |io| {
        newest.set(made(&io));
        Box::new(io) as Box<dyn AnyIo>
    }))
}

/// Describes a stream if its type is one that connectors usually return.
fn made(io: &dyn Any) -> Made {
    #[cfg(feature = "_tls-any")]
    {
        use tokio_rustls::{TlsStream, client};
        let by_tls = |tcp: &TcpStream| Made { addr: tcp.local_addr().ok(), by_tls: true };
        if let Some(io) = io.downcast_ref::<TokioIo<client::TlsStream<TcpStream>>>() {
            return by_tls(io.inner().get_ref().0);
        }
        if let Some(io) = io.downcast_ref::<TokioIo<TlsStream<TcpStream>>>() {
            return by_tls(io.inner().get_ref().0);
        }
    }
    let tcp = io.downcast_ref::<TokioIo<TcpStream>>();
    Made { addr: tcp.and_then(|io| io.inner().local_addr().ok()), by_tls: false }
}
