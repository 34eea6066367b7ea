//! The server builder, with the settings of both paths.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::sync::Semaphore;
use tonic::transport::server::TcpIncoming;
use tower::ServiceBuilder;
use tower::layer::util::{Identity, Stack};

use crate::connection::KeepAliveSettings;
use crate::context::Context;
use crate::land_in::IntoLandIn;
#[cfg(doc)]
#[cfg(doc)]
use crate::land_in::LandIn;
use crate::land_in::allocators::{Allocators, LandRequest};
use crate::path::policy::{FabricKind, Plaintext, Policy, distinct};
use crate::server::fast_path::admission::FixedLimits;
use crate::server::observer::{Registry, ServerObserver};
use crate::telemetry::stats::ServerStats;

/// Server builder, with the names of [`tonic::transport::Server`].
///
/// Serves gRPC over TCP, as tonic does, and over the fast path to clients that ask for it over
/// their TCP connection. Each builder method says whether it applies to calls on both paths or only
/// to the TCP side.
///
/// ```no_run
/// use tonic_rdma::Server;
/// # use tonic::service::Routes;
/// # async fn run(routes: Routes) -> Result<(), Box<dyn std::error::Error>> {
/// Server::builder()
///     .add_routes(routes)
///     .serve("[::]:50051".parse()?)
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Server<L = Identity> {
    /// The TCP side, with all its settings.
    pub(super) tcp: tonic::transport::Server,
    pub(super) layers: ServiceBuilder<L>,
    pub(super) shared: ServerSettings,
}

impl Server {
    /// Create a new server builder that can configure a [`Server`].
    pub fn builder() -> Self {
        Self::default()
    }
}

impl Default for Server {
    fn default() -> Self {
        Self {
            tcp: tonic::transport::Server::builder(),
            layers: ServiceBuilder::new(),
            shared: ServerSettings::default(),
        }
    }
}

impl<L> Server<L> {
    pub(super) fn with_tcp(
        mut self,
        f: impl FnOnce(tonic::transport::Server) -> tonic::transport::Server,
    ) -> Self {
        self.tcp = f(self.tcp);
        self
    }

    /// Limit the number of concurrent calls of each connection (both paths). TCP and fast-path
    /// connections count separately.
    ///
    /// A limit above `usize::MAX >> 3` is reduced to this value.
    #[must_use]
    pub fn concurrency_limit_per_connection(mut self, limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        self.shared.concurrency_limit = Some(limit);
        self.with_tcp(|s| s.concurrency_limit_per_connection(limit))
    }

    /// Answer RESOURCE_EXHAUSTED at once if the service is not ready, instead of queueing (both
    /// paths). Off by default.
    #[must_use]
    pub fn load_shed(mut self, load_shed: bool) -> Self {
        self.shared.load_shed = load_shed;
        self.with_tcp(|s| s.load_shed(load_shed))
    }

    /// Limit the time of each request handler until its response headers (both paths). The shorter
    /// of this time and the request's `grpc-timeout` applies.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.shared.timeout = Some(timeout);
        self.with_tcp(|s| s.timeout(timeout))
    }

    /// Limit the number of concurrent calls on one connection (both paths). Further calls wait at
    /// the client.
    ///
    /// Default is no limit on TCP and 1024 on the fast path. A server with the limit 0 serves no
    /// call. Over TCP, a call waits for ever, or fails with UNAVAILABLE if the client sends it
    /// before it knows the limit. Clients do not find the fast path, which would take 0 as 1,
    /// because they ask for it by a call over TCP.
    #[must_use]
    pub fn max_concurrent_streams(mut self, max: impl Into<Option<u32>>) -> Self {
        let max = max.into();
        self.shared.max_concurrent_streams = max;
        self.with_tcp(|s| s.max_concurrent_streams(max))
    }

    /// Drain a connection that is older than `age` (both paths): calls in flight continue, and new
    /// calls use a new connection. Default is no limit.
    #[must_use]
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.shared.max_connection_age = Some(age);
        self.with_tcp(|s| s.max_connection_age(age))
    }

    /// Close a connection and its calls when this time has passed after
    /// [`max_connection_age`](Server::max_connection_age) (both paths). The grace time has no
    /// effect unless the age is set. Default is no limit.
    #[must_use]
    pub fn max_connection_age_grace(mut self, grace: Duration) -> Self {
        self.shared.max_connection_age_grace = Some(grace);
        self.with_tcp(|s| s.max_connection_age_grace(grace))
    }

    /// Intercept inbound headers and add a [`tracing::Span`] to each response future (both
    /// paths).
    #[must_use]
    pub fn trace_fn<F>(mut self, f: F) -> Self
    where
        F: Fn(&Request<()>) -> tracing::Span + Send + Sync + 'static,
    {
        let f: TraceFn = Arc::new(f);
        self.shared.trace_fn = Some(f.clone());
        self.with_tcp(|s| s.trace_fn(move |req| f(req)))
    }

    /// Whether to offer the fast path. Default is [`Policy::Auto`].
    ///
    /// With [`Policy::Require`], serving fails at the start if none of the
    /// [fabrics](Server::fabrics) can be offered. With [`Policy::RequireVerbs`], serving fails if
    /// RDMA cannot be offered. The environment variable `TONIC_RDMA`, if set, overrides this
    /// setting.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.shared.policy = policy;
        self
    }

    /// The fabrics to offer. Default is [`FabricKind::DEFAULT`]: shared memory to clients on the
    /// same host, RDMA to all. The client chooses the order.
    ///
    /// Fabrics that the environment variable `TONIC_RDMA` names override this setting.
    #[must_use]
    pub fn fabrics(mut self, fabrics: impl IntoIterator<Item = FabricKind>) -> Self {
        self.shared.fabrics = Some(distinct(fabrics));
        self
    }

    /// Set the context, with the devices and pinned memory to use. Default is [`Context::global`].
    #[must_use]
    pub fn context(mut self, context: Context) -> Self {
        self.shared.context = Some(context);
        self
    }

    /// The counters of the servers made from this builder and its clones.
    pub fn stats(&self) -> ServerStats {
        self.shared.stats.clone()
    }

    /// Returns an observer, which shows operators the connections of the servers made from this
    /// builder and its clones.
    pub fn observer(&self) -> ServerObserver {
        ServerObserver::new(&self.shared.registry, self.stats())
    }

    /// Limit the number of concurrent fast-path connections. Default is 4,096.
    ///
    /// Further clients stay on TCP with the reason
    /// [`LimitReached`](crate::ReasonCode::LimitReached), and try again. A connection over a device
    /// pins 8 KiB at rest, and up to 400 KiB more while it is busy. A connection over shared memory
    /// pins nothing. If the [`Context`]'s pool allows fewer connections, the reason is
    /// [`PoolExhausted`](crate::ReasonCode::PoolExhausted). A connection and its TCP connection
    /// together take up to three descriptors, and RLIMIT_NOFILE limits the descriptors of the
    /// process.
    #[must_use]
    pub fn max_connections(mut self, most: usize) -> Self {
        self.shared.max_connections = Some(most);
        self
    }

    /// Limit the size in bytes of a request's headers (both paths). The size includes names, values
    /// and a few bytes for each header. Default is 64 KiB on the fast path, and hyper's 16 KiB on
    /// TCP.
    ///
    /// On the fast path, the value is clamped to the range from 4 KiB to 1 MiB, and one name or
    /// value may have 65,535 bytes. A call that exceeds the limit fails at the client with
    /// RESOURCE_EXHAUSTED.
    #[must_use]
    pub fn max_header_size(mut self, bytes: u32) -> Self {
        self.shared.max_header_size = Some(bytes);
        self.http2_max_header_list_size(bytes)
    }

    /// Copy received data, before a handler sees it, out of the memory that clients can write to.
    /// Off by default.
    ///
    /// A client that violates the protocol can still write to granted memory after it has reported
    /// its write as complete. The client can thus change `Bytes` fields that
    /// [`ProstCodec`](crate::codec::ProstCodec) decoded from the client's messages while a handler
    /// checks or uses these fields. The client can change no other memory. For clients that are not
    /// trusted, this option gives up zero-copy on receipt: each message is copied once, from
    /// landing memory to the heap, and counted in [`Copied::delivery`](crate::Copied::delivery).
    /// Clients lend nothing to a server with this option. Over TCP, clients cannot write to the
    /// server's memory.
    #[must_use]
    pub fn copy_on_delivery(mut self, copy: bool) -> Self {
        self.shared.copy_on_delivery = copy;
        self
    }

    /// For one method, make the longest `bytes` field of each request's first message land in a
    /// buffer of the server. `path` is the method's path, such as `/store.Store/Put`.
    ///
    /// `allocate` is called once for each call to the method, when the call begins. `allocate` runs
    /// on a worker of the runtime, so it must not block. If `allocate` returns `None`, this request
    /// is received in the ordinary way. A request whose field is longer than its buffer fails with
    /// OUT_OF_RANGE. So return `None` if [`field`](LandRequest::field) is longer than the buffer.
    /// If `field` is `None`, as over TCP, the client has not stated the length: return a buffer
    /// that is long enough for every request, or `None`. The handler finds the buffer in its
    /// request's extensions, as a [`LandIn`]:
    ///
    /// ```no_run
    /// # use tonic_rdma::{LandIn, Server};
    /// # use tonic::{Request, Response, Status};
    /// # use tonic_rdma_example_services::store::{Object, Receipt};
    /// let server = Server::builder().land_in("/store.Store/Put", |request| {
    ///     // The length of the field is the client's claim: limit it.
    ///     let len = request.field.filter(|len| *len <= 16 << 20)?;
    ///     Some(vec![0; len as usize])
    /// });
    ///
    /// async fn put(mut request: Request<Object>) -> Result<Response<Receipt>, Status> {
    ///     if let Some(land_in) = request.extensions_mut().remove::<LandIn<Vec<u8>>>() {
    ///         drop(request); // `data` is a view of the buffer
    ///         let finished = land_in.finish().await.map_err(|e| Status::internal(e.to_string()))?;
    ///         // Owned, filled, and out of the client's reach:
    ///         let block: &[u8] = &finished.buffer[..finished.outcome.filled()];
    ///     }
    /// #   Ok(Response::new(Receipt::default()))
    /// }
    /// ```
    ///
    /// For trusted clients, `allocate` may return a clone of a [`LandIn`] that [stays
    /// registered](LandIn::keep_registered). If the handler does not finish the [`LandIn`], the
    /// next request that gets its buffer needs no registration. If the buffer is still in use, the
    /// request is received in the ordinary way.
    ///
    /// The method's service has to use [`ProstCodec`](crate::codec::ProstCodec). The server learns
    /// the codec from the first call. So the first request, and requests that begin together with
    /// it, are received in the ordinary way, without a buffer.
    ///
    /// If a server has a method with this setting, every large message to the server needs a
    /// request for memory before it is sent. The request costs an additional round trip, even for
    /// other methods.
    #[must_use]
    pub fn land_in<T, F>(mut self, path: &str, allocate: F) -> Self
    where
        T: IntoLandIn,
        F: Fn(&LandRequest<'_>) -> Option<T> + Send + Sync + 'static,
    {
        Arc::make_mut(&mut self.shared.allocators).add(path, allocate);
        self
    }

    /// Offer the fast path even to clients whose address this server does not see. These clients
    /// are behind an HTTP gateway (L7 proxy, service mesh), a translation of source addresses, or a
    /// transport without TCP addresses. Off by default: these clients stay on TCP, with the reason
    /// [`ThroughGateway`](crate::ReasonCode::ThroughGateway).
    ///
    /// With `true`, a client behind a gateway gets a ticket if the gateway forwards the Offer. The
    /// client's calls on the fast path then **bypass the gateway**: the gateway's checks, limits,
    /// routes, headers and logs do not apply to these calls. The calls carry no address and no
    /// certificate, because the server knows only the gateway's address and certificate:
    /// [`tonic::Request::remote_addr`] and `peer_certs` are `None`. Handlers and layers of this
    /// server must therefore decide by the content of the call itself, for example a token, and
    /// refuse calls that lack this content. Clients that connect directly keep their address and
    /// certificate. The exception is a network from which eight Offers have recently stated a wrong
    /// address, as Offers through a gateway do. For up to ten minutes, calls on the fast path from
    /// this network carry no address and no certificate.
    #[must_use]
    pub fn offer_through_gateways(mut self, offer: bool) -> Self {
        self.shared.offer_through_gateways = offer;
        self
    }

    /// Serve clients that measure the fast path. A diagnosis of this server measures over
    /// connections that carry SENDs and WRITEs without calls. Off by default.
    ///
    /// The server serves one measuring connection at a time, for 60 s at most. A request on this
    /// connection makes the server WRITE at most 1 GiB in 16,384 WRITEs, so any client with a
    /// ticket can make the server spend processor time. Without this setting, a diagnosis compares
    /// only calls.
    #[cfg(feature = "measure")]
    #[must_use]
    pub fn measuring(mut self, measuring: bool) -> Self {
        self.shared.measuring = measuring;
        self
    }

    /// Set the [`tower::Layer`] that wraps all services (both paths).
    ///
    /// The layered service is built once and cloned for every connection of either path, so a layer
    /// with shared state sees every call. The Offer, by which a client asks for the fast path, also
    /// passes through the layer. So a layer that requires credentials requires them of the Offer as
    /// well ([`Endpoint::offer_metadata`](crate::Endpoint::offer_metadata)). A layer that counts,
    /// limits or sheds requests can recognise the Offer by [`is_offer`](crate::server::is_offer).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tonic::{Request, Status, service::InterceptorLayer};
    /// use tonic_rdma::Server;
    /// use tower::ServiceBuilder;
    ///
    /// fn check(request: Request<()>) -> Result<Request<()>, Status> {
    ///     match request.metadata().get("authorization") {
    ///         Some(t) if t == "Bearer secret" => Ok(request),
    ///         _ => Err(Status::unauthenticated("no valid token")),
    ///     }
    /// }
    ///
    /// let layer = ServiceBuilder::new()
    ///     .load_shed()
    ///     .timeout(Duration::from_secs(30))
    ///     .layer(InterceptorLayer::new(check))
    ///     .into_inner();
    /// Server::builder().layer(layer);
    /// ```
    pub fn layer<NewLayer>(self, new_layer: NewLayer) -> Server<Stack<NewLayer, L>> {
        Server { tcp: self.tcp, layers: self.layers.layer(new_layer), shared: self.shared }
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> std::io::Result<TcpIncoming> {
        let shared = &self.shared;
        Ok(TcpIncoming::bind(addr)?
            .with_nodelay(Some(!shared.tcp_nodelay_off))
            .with_keepalive(shared.tcp_keepalive)
            .with_keepalive_interval(shared.tcp_keepalive_interval)
            .with_keepalive_retries(shared.tcp_keepalive_retries))
    }
}

#[cfg(test)]
impl Server {
    /// Changes limits that have no public setting.
    pub(crate) fn fixed_limits(mut self, change: impl FnOnce(&mut FixedLimits)) -> Self {
        change(&mut self.shared.fixed_limits);
        self
    }
}

impl<L> fmt::Debug for Server<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("policy", &self.shared.policy).finish_non_exhaustive()
    }
}

/// Creates a request's span from its headers.
pub(super) type TraceFn = Arc<dyn Fn(&Request<()>) -> tracing::Span + Send + Sync>;

/// Settings of the fast path, and settings for binding the TCP port.
#[derive(Clone, Default)]
pub(super) struct ServerSettings {
    pub(super) trace_fn: Option<TraceFn>,
    pub(super) concurrency_limit: Option<usize>,
    pub(super) load_shed: bool,
    pub(super) timeout: Option<Duration>,
    pub(super) max_concurrent_streams: Option<u32>,
    pub(super) max_connection_age: Option<Duration>,
    pub(super) max_connection_age_grace: Option<Duration>,
    pub(super) policy: Policy,
    pub(super) fabrics: Option<Vec<FabricKind>>,
    pub(super) context: Option<Context>,
    pub(super) max_connections: Option<usize>,
    pub(super) fixed_limits: FixedLimits,
    pub(super) max_tcp_connections: Option<usize>,
    pub(super) max_header_size: Option<u32>,
    pub(super) keep_alive: KeepAliveSettings,
    pub(super) copy_on_delivery: bool,
    pub(super) plaintext: Plaintext,
    pub(super) measuring: bool,
    pub(super) allocators: Arc<Allocators>,
    pub(super) offer_through_gateways: bool,
    pub(super) tcp_nodelay_off: bool,
    pub(super) tcp_keepalive: Option<Duration>,
    pub(super) tcp_keepalive_interval: Option<Duration>,
    pub(super) tcp_keepalive_retries: Option<u32>,
    pub(super) stats: ServerStats,
    pub(super) registry: Arc<Registry>,
}
