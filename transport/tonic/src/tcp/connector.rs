//! The TCP side of a channel, and the local address of its connection.
//!
//! An Offer states the client's address on the TCP connection that carries it. tonic's channel does
//! not expose that address, so the connector given to it records it.

use std::any::Any;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::Channel;
use tower::Service;

/// A channel over TCP.
#[derive(Debug, Clone)]
pub(crate) struct TcpChannel {
    pub(crate) channel: Channel,
    pub(crate) local_addr: LocalAddr,
}

/// The local address of the newest connection of a channel. `None` before the first connection, and
/// if the transport's TCP address is unknown.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalAddr(Arc<Mutex<Option<SocketAddr>>>);

impl LocalAddr {
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, addr: Option<SocketAddr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = addr;
    }
}

/// Records the local address of each connection that `connector` creates.
#[derive(Debug, Clone)]
pub(crate) struct RecordLocalAddr<C> {
    pub(crate) connector: C,
    pub(crate) local_addr: LocalAddr,
}

impl<C> RecordLocalAddr<C> {
    pub(crate) fn new(connector: C) -> (Self, LocalAddr) {
        let local_addr = LocalAddr::default();
        (Self { connector, local_addr: local_addr.clone() }, local_addr)
    }
}

impl<C> Service<Uri> for RecordLocalAddr<C>
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
        let local_addr = self.local_addr.clone();
        Box::pin(async move {
            let io = connecting.await?;
            local_addr.set(addr_of(&io));
            Ok(io)
        })
    }
}

/// The local address of a stream, for the types that connectors usually return.
fn addr_of(io: &dyn Any) -> Option<SocketAddr> {
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
