//! Serves a user's service without a router.

use std::future::Future;
use std::net::SocketAddr;

use bytes::Bytes;
use futures_core::Stream;
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;
use tonic::transport::server::Connected;
use tower::{Layer, Service};

use crate::error::{BoxError, Cause, Error};
use crate::server::builder::Server;
use crate::server::offer_route::OfferRoute;
use crate::server::serve::{serve, serve_until};

impl<L> Server<L> {
    /// Serve the service `svc` on `addr` until the process ends or the future is dropped. The
    /// service receives every request, whatever its path, except the Offers with which clients ask
    /// for the fast path.
    ///
    /// In all other respects, this method is like [`Router::serve`](crate::Router::serve). The
    /// layers wrap an [`OfferRoute`], which contains the service. A layer that accepts any service
    /// also accepts an [`OfferRoute`].
    ///
    /// ```no_run
    /// # use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
    /// # async fn run(greeter: impl Greeter) -> Result<(), tonic_rdma::Error> {
    /// let addr = ([0, 0, 0, 0], 50051).into();
    /// tonic_rdma::Server::builder().serve(addr, GreeterServer::new(greeter)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`Router::serve`](crate::Router::serve).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`Router::serve`](crate::Router::serve).
    pub async fn serve<S, ResBody>(self, addr: SocketAddr, svc: S) -> Result<(), Error>
    where
        L: Layer<OfferRoute<S>>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Error:
            Into<BoxError> + Send + 'static,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        let incoming = self.bind(addr).map_err(Cause::bind(addr))?;
        let bound = incoming.local_addr().ok();
        serve(self, |offer| OfferRoute::new(svc, offer), incoming, bound).await
    }

    /// Like [`serve`](Server::serve), but shuts down gracefully when `signal` completes, like
    /// [`Router::serve_with_shutdown`](crate::Router::serve_with_shutdown).
    ///
    /// # Errors
    ///
    /// The errors of [`Router::serve`](crate::Router::serve).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`Router::serve`](crate::Router::serve).
    pub async fn serve_with_shutdown<S, F, ResBody>(
        self,
        addr: SocketAddr,
        svc: S,
        signal: F,
    ) -> Result<(), Error>
    where
        L: Layer<OfferRoute<S>>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Error:
            Into<BoxError> + Send + 'static,
        F: Future<Output = ()>,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        let incoming = self.bind(addr).map_err(Cause::bind(addr))?;
        let bound = incoming.local_addr().ok();
        serve_until(self, |offer| OfferRoute::new(svc, offer), incoming, bound, signal).await
    }

    /// Like [`serve`](Server::serve), but on the connections that `incoming` yields. See
    /// [`Router::serve_with_incoming`](crate::Router::serve_with_incoming).
    ///
    /// # Errors
    ///
    /// The errors of [`Router::serve_with_incoming`](crate::Router::serve_with_incoming).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`Router::serve`](crate::Router::serve).
    pub async fn serve_with_incoming<S, I, IO, IE, ResBody>(
        self,
        svc: S,
        incoming: I,
    ) -> Result<(), Error>
    where
        L: Layer<OfferRoute<S>>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Error:
            Into<BoxError> + Send + 'static,
        I: Stream<Item = Result<IO, IE>>,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        IE: Into<BoxError>,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        serve(self, |offer| OfferRoute::new(svc, offer), incoming, None).await
    }

    /// Like [`serve_with_incoming`](Server::serve_with_incoming), but shuts down gracefully when
    /// `signal` completes.
    ///
    /// # Errors
    ///
    /// The errors of [`Router::serve_with_incoming`](crate::Router::serve_with_incoming).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`Router::serve`](crate::Router::serve).
    pub async fn serve_with_incoming_shutdown<S, I, F, IO, IE, ResBody>(
        self,
        svc: S,
        incoming: I,
        signal: F,
    ) -> Result<(), Error>
    where
        L: Layer<OfferRoute<S>>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<OfferRoute<S>>>::Service as Service<Request<Body>>>::Error:
            Into<BoxError> + Send + 'static,
        I: Stream<Item = Result<IO, IE>>,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        IE: Into<BoxError>,
        F: Future<Output = ()>,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        serve_until(self, |offer| OfferRoute::new(svc, offer), incoming, None, signal).await
    }
}
