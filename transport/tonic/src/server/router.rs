//! The router, which holds services and serves them.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;

use axum::response::IntoResponse;
use bytes::Bytes;
use futures_core::Stream;
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tower::layer::util::Identity;
use tower::{Layer, Service};

use crate::bootstrap::limited::LimitedOffers;
use crate::error::{BoxError, Cause, Error};
use crate::server::builder::Server;
use crate::server::serve::{serve, serve_until};

/// Services by name, to be served over both paths.
#[derive(Clone, Debug)]
pub struct Router<L = Identity> {
    server: Server<L>,
    routes: Routes,
}

impl<L> Server<L> {
    /// Create a router with the `S` typed service as the first service.
    ///
    /// The method clones the `Server` builder and creates a router that routes between services.
    pub fn add_service<S>(&mut self, svc: S) -> Router<L>
    where
        S: Service<Request<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: IntoResponse,
        S::Future: Send + 'static,
        L: Clone,
    {
        Router::new(self.clone(), Routes::new(svc))
    }

    /// Create a router with the optional `S` typed service as the first service.
    ///
    /// The method clones the `Server` builder and creates a router that routes between services.
    ///
    /// # Note
    /// Even if the argument is `None`, the router captures *all* requests to this service name. As
    /// a result, this method cannot toggle between two identically named implementations.
    pub fn add_optional_service<S>(&mut self, svc: Option<S>) -> Router<L>
    where
        S: Service<Request<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: IntoResponse,
        S::Future: Send + 'static,
        L: Clone,
    {
        Router::new(self.clone(), svc.map(Routes::new).unwrap_or_default())
    }

    /// Create a router with given [`Routes`].
    ///
    /// The method clones the `Server` builder and creates a router that routes between the services
    /// that were already added to `routes`.
    pub fn add_routes(&mut self, routes: Routes) -> Router<L>
    where
        L: Clone,
    {
        Router::new(self.clone(), routes)
    }
}

/// Adds the Offer to `routes`.
fn with_offer(routes: Routes) -> impl FnOnce(LimitedOffers) -> Routes {
    |offer| routes.add_service(offer).prepare()
}

impl<L> Router<L> {
    fn new(server: Server<L>, routes: Routes) -> Self {
        Self { server, routes }
    }

    /// Add a new service to this router.
    ///
    /// # Panics
    ///
    /// If the router already has a service of the same name.
    #[must_use]
    pub fn add_service<S>(mut self, svc: S) -> Self
    where
        S: Service<Request<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: IntoResponse,
        S::Future: Send + 'static,
    {
        self.routes = self.routes.add_service(svc);
        self
    }

    /// Add a new optional service to this router.
    ///
    /// # Note
    /// Even if the argument is `None`, the router captures *all* requests to this service name. As
    /// a result, this method cannot toggle between two identically named implementations.
    ///
    /// # Panics
    ///
    /// If the router already has a service of the same name.
    #[must_use]
    pub fn add_optional_service<S>(self, svc: Option<S>) -> Self
    where
        S: Service<Request<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: IntoResponse,
        S::Future: Send + 'static,
    {
        match svc {
            Some(svc) => self.add_service(svc),
            None => self,
        }
    }

    /// Serve on `addr` until the process ends or the future is dropped.
    ///
    /// The fast path listens on the address of `addr` if that address belongs to an RDMA device,
    /// and otherwise on every local address of a device. The fast path uses the port of `addr`, or
    /// a free port if the port of `addr` is taken. On iWARP the port is always taken, because iWARP
    /// shares TCP's ports. Only a client that presents a ticket from the TCP side is admitted. If
    /// RDMA is not available, the server logs the reason and its cure, reports the reason to
    /// clients that ask, and tries again after a change on this host, and at least once a minute.
    ///
    /// # Errors
    ///
    /// The address cannot be bound ([`Cause::Bind`]), an environment variable has a bad value
    /// ([`Cause::Environment`]), or the fast path is required and not available
    /// ([`Cause::Required`]).
    ///
    /// # Cancel safety
    ///
    /// When the future is dropped, the server accepts no new connections. Established connections
    /// are served until their clients leave, as in tonic.
    pub async fn serve<ResBody>(self, addr: SocketAddr) -> Result<(), Error>
    where
        L: Layer<Routes> + Clone,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        let incoming = self.server.bind(addr).map_err(Cause::bind(addr))?;
        let bound = incoming.local_addr().ok();
        serve(self.server, with_offer(self.routes), incoming, bound).await
    }

    /// Serve on `addr` until `signal` completes, then shut down gracefully: the server accepts no
    /// new connections, and finishes calls in flight on both paths.
    ///
    /// # Errors
    ///
    /// The errors of [`serve`](Router::serve).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`serve`](Router::serve).
    pub async fn serve_with_shutdown<F: Future<Output = ()>, ResBody>(
        self,
        addr: SocketAddr,
        signal: F,
    ) -> Result<(), Error>
    where
        L: Layer<Routes>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        let incoming = self.server.bind(addr).map_err(Cause::bind(addr))?;
        let bound = incoming.local_addr().ok();
        serve_until(self.server, with_offer(self.routes), incoming, bound, signal).await
    }

    /// Serve the connections that `incoming` yields on the TCP side.
    ///
    /// This method discards any provided TCP configuration, as in tonic. The fast path does not
    /// depend on `incoming`. The fast path listens on a free port, on every local address of an
    /// RDMA device, and the Offer names the port and the addresses.
    ///
    /// When `incoming` ends, this method returns, as in tonic. The connections that `incoming`
    /// yielded are served until their clients leave, and have the fast path until then.
    ///
    /// # Errors
    ///
    /// An environment variable has a bad value ([`Cause::Environment`]), or the fast path is
    /// required and not available ([`Cause::Required`]).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`serve`](Router::serve).
    pub async fn serve_with_incoming<I, IO, IE, ResBody>(self, incoming: I) -> Result<(), Error>
    where
        I: Stream<Item = Result<IO, IE>>,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        IE: Into<BoxError>,
        L: Layer<Routes>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        serve(self.server, with_offer(self.routes), incoming, None).await
    }

    /// Like [`serve_with_incoming`](Router::serve_with_incoming), but shuts down gracefully when
    /// `signal` completes or `incoming` ends.
    ///
    /// # Errors
    ///
    /// The errors of [`serve_with_incoming`](Router::serve_with_incoming).
    ///
    /// # Cancel safety
    ///
    /// The cancel safety of [`serve`](Router::serve).
    pub async fn serve_with_incoming_shutdown<I, IO, IE, F, ResBody>(
        self,
        incoming: I,
        signal: F,
    ) -> Result<(), Error>
    where
        I: Stream<Item = Result<IO, IE>>,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        IE: Into<BoxError>,
        F: Future<Output = ()>,
        L: Layer<Routes>,
        L::Service: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Future: Send,
        <<L as Layer<Routes>>::Service as Service<Request<Body>>>::Error: Into<BoxError> + Send,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        serve_until(self.server, with_offer(self.routes), incoming, None, signal).await
    }
}
