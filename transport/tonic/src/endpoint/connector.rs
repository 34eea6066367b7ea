//! The TCP side of a channel, and which end of its connection is this one.
//!
//! An Offer states the client's own end of the TCP connection that carries it. tonic's channel does
//! not tell; the connector that it is given does.

use std::any::Any;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Error};
use tower::Service;

use crate::endpoint::Endpoint;

/// What tonic says is the URI of an endpoint whose address is a unix socket.
const URI_OF_UNIX: &str = "http://tonic/";

/// A channel over TCP.
#[derive(Debug, Clone)]
pub(crate) struct TcpChannel {
    pub(crate) channel: Channel,
    pub(crate) local_end: LocalEnd,
}

/// This end of the newest connection of a channel; `None` before the first, and where the transport
/// has no TCP address that can be asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalEnd(Arc<Mutex<Option<SocketAddr>>>);

impl LocalEnd {
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, end: Option<SocketAddr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = end;
    }
}

/// Notes this end of each connection that `connector` makes.
#[derive(Debug, Clone)]
pub(crate) struct Noting<C> {
    connector: C,
    local_end: LocalEnd,
}

impl<C> Noting<C> {
    pub(crate) fn new(connector: C) -> (Self, LocalEnd) {
        let local_end = LocalEnd::default();
        (Self { connector, local_end: local_end.clone() }, local_end)
    }
}

impl<C> Service<Uri> for Noting<C>
where
    C: Service<Uri> + 'static,
    C::Future: Send,
{
    type Response = C::Response;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<C::Response, C::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.connector.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.connector.call(uri);
        let local_end = self.local_end.clone();
        Box::pin(async move {
            let io = connecting.await?;
            local_end.set(local_addr(&io));
            Ok(io)
        })
    }
}

/// Of the streams that connectors make usually.
fn local_addr(io: &dyn Any) -> Option<SocketAddr> {
    #[cfg(feature = "_tls-any")]
    {
        use tokio_rustls::{TlsStream, client};
        if let Some(io) = io.downcast_ref::<TokioIo<client::TlsStream<TcpStream>>>() {
            return io.inner().get_ref().0.local_addr().ok();
        }
        if let Some(io) = io.downcast_ref::<TokioIo<TlsStream<TcpStream>>>() {
            return io.inner().get_ref().0.local_addr().ok();
        }
    }
    io.downcast_ref::<TokioIo<TcpStream>>()?.inner().local_addr().ok()
}

impl Endpoint {
    /// Connects the TCP side.
    pub(crate) async fn connect_tcp(&self) -> Result<TcpChannel, Error> {
        if self.is_unix() {
            let channel = self.tcp.connect().await?;
            return Ok(TcpChannel { channel, local_end: LocalEnd::default() });
        }
        let (connector, local_end) = Noting::new(self.http_connector());
        Ok(TcpChannel { channel: self.tcp.connect_with_connector(connector).await?, local_end })
    }

    /// As [`connect_tcp`](Self::connect_tcp), at the first call.
    pub(crate) fn connect_tcp_lazy(&self) -> TcpChannel {
        if self.is_unix() {
            return TcpChannel { channel: self.tcp.connect_lazy(), local_end: LocalEnd::default() };
        }
        let (connector, local_end) = Noting::new(self.http_connector());
        TcpChannel { channel: self.tcp.connect_with_connector_lazy(connector), local_end }
    }

    fn is_unix(&self) -> bool {
        self.tcp.uri() == URI_OF_UNIX
    }

    /// As tonic makes its own of the endpoint's settings.
    fn http_connector(&self) -> HttpConnector {
        let mut http = HttpConnector::new();
        // TLS is put around it by tonic.
        http.enforce_http(false);
        http.set_nodelay(self.tcp.get_tcp_nodelay());
        http.set_keepalive(self.tcp.get_tcp_keepalive());
        http.set_keepalive_interval(self.tcp.get_tcp_keepalive_interval());
        http.set_keepalive_retries(self.tcp.get_tcp_keepalive_retries());
        http.set_connect_timeout(self.tcp.get_connect_timeout());
        http.set_local_address(self.shared.local_address);
        http
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn unix_sockets_are_told_from_hosts() {
        assert!(Endpoint::from_static("unix:///run/server.sock").is_unix());
        for uri in
            ["http://tonic:50051", "https://tonic", "http://10.0.0.1:50051", "http://tonic.example"]
        {
            assert!(!Endpoint::from_static(uri).is_unix(), "{uri}");
        }
    }

    #[tokio::test]
    async fn the_end_is_that_of_the_newest_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        let local = Some([127, 0, 0, 9].into());
        let (mut connector, end) = Noting::new(endpoint.local_address(local).http_connector());
        assert_eq!(end.get(), None);
        for _ in 0..2 {
            let uri = format!("http://{addr}").parse().unwrap();
            let _io = connector.call(uri).await.unwrap();
            let (_, peer) = listener.accept().await.unwrap();
            assert_eq!((end.get(), end.get().map(|end| end.ip())), (Some(peer), local));
        }
        let pipe = tower::service_fn(|_: Uri| async {
            Ok::<_, std::io::Error>(TokioIo::new(tokio::io::duplex(1).0))
        });
        let mut pipes = Noting { connector: pipe, local_end: end.clone() };
        pipes.call(Uri::from_static("http://pipe")).await.unwrap();
        assert_eq!(end.get(), None);
    }
}
