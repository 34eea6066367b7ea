//! The server builder: settings of both paths.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tonic::transport::server::TcpIncoming;
use tower::ServiceBuilder;
use tower::layer::util::{Identity, Stack};

use crate::context::Context;
use crate::path::policy::{FabricKind, Policy, distinct};
use crate::server::settings::{Settings, TraceFn};
use crate::telemetry::stats::ServerStats;

/// Server builder, with the names of [`tonic::transport::Server`].
///
/// Serves gRPC over TCP, as tonic does, and beside it the fast path, to clients that ask for it
/// over their TCP connection. Each builder method says whether it concerns calls on both paths or
/// the TCP side alone.
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
    /// The TCP side. Everything it needs is set on it.
    pub(super) tcp: tonic::transport::Server,
    pub(super) layers: ServiceBuilder<L>,
    pub(super) shared: Settings,
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
            shared: Settings::default(),
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

    /// Set the concurrency limit of each connection, of each TCP and of each fast-path
    /// connection by itself (both paths).
    #[must_use]
    pub fn concurrency_limit_per_connection(mut self, limit: usize) -> Self {
        self.shared.concurrency_limit = Some(limit);
        self.with_tcp(|s| s.concurrency_limit_per_connection(limit))
    }

    /// Answer RESOURCE_EXHAUSTED at once where the service is not ready, instead of queueing.
    /// Off by default (both paths).
    #[must_use]
    pub fn load_shed(mut self, load_shed: bool) -> Self {
        self.shared.load_shed = load_shed;
        self.with_tcp(|s| s.load_shed(load_shed))
    }

    /// Limit the time of all request handlers until their response headers; the shorter of this
    /// and the request's `grpc-timeout` counts (both paths).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.shared.timeout = Some(timeout);
        self.with_tcp(|s| s.timeout(timeout))
    }

    /// Limit the calls that a connection carries at a time. The client holds further ones back
    /// (both paths).
    ///
    /// Default on TCP is no limit; on the fast path 1024.
    #[must_use]
    pub fn max_concurrent_streams(mut self, max: impl Into<Option<u32>>) -> Self {
        let max = max.into();
        self.shared.max_concurrent_streams = max;
        self.with_tcp(|s| s.max_concurrent_streams(max))
    }

    /// Drain a connection that is older than this; calls that run go on, new ones are sent over a
    /// new connection. Default is no limit (both paths).
    #[must_use]
    pub fn max_connection_age(mut self, age: Duration) -> Self {
        self.shared.max_connection_age = Some(age);
        self.with_tcp(|s| s.max_connection_age(age))
    }

    /// Close a connection for good this long after
    /// [`max_connection_age`](Server::max_connection_age), without which it has no effect.
    /// Default is no limit (both paths).
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
    /// With [`Policy::Require`] serving fails at its start where RDMA cannot be offered, or shared
    /// memory if that is the only [fabric](Server::fabrics) allowed. The environment variable
    /// `TONIC_RDMA`, where it is set, wins over this.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.shared.policy = policy;
        self
    }

    /// The fabrics that may be offered. Default is [`FabricKind::DEFAULT`]: shared memory to
    /// clients on the same host, RDMA to all. The order is the client's to choose.
    ///
    /// Fabrics named in the environment variable `TONIC_RDMA` win over this.
    #[must_use]
    pub fn fabrics(mut self, fabrics: impl IntoIterator<Item = FabricKind>) -> Self {
        self.shared.fabrics = Some(distinct(fabrics));
        self
    }

    /// The devices and pinned memory to use. Default is [`Context::global`].
    #[must_use]
    pub fn context(mut self, context: Context) -> Self {
        self.shared.context = Some(context);
        self
    }

    /// What servers made from this builder, and from its clones, carry.
    pub fn stats(&self) -> ServerStats {
        self.shared.stats.clone()
    }

    /// How many tickets to the fast path may be outstanding, and how long each is good for.
    /// Default is 1024 and 10 seconds.
    ///
    /// A ticket is outstanding from the Offer until the client's RDMA connection uses it, a few
    /// milliseconds as a rule. Clients that get none stay on TCP and try again.
    #[must_use]
    pub fn tickets(mut self, outstanding: usize, lifetime: Duration) -> Self {
        self.shared.tickets = Some((outstanding, lifetime));
        self
    }

    /// Limit the fast-path connections that live at a time. Default is 4,096.
    ///
    /// Clients beyond it stay on TCP with the reason
    /// [`LimitReached`](crate::ReasonCode::LimitReached), and try again. A connection takes up to
    /// 60 KiB of pinned memory as long as it lives ([`Context`]'s pool may allow fewer: then the
    /// reason is [`PoolExhausted`](crate::ReasonCode::PoolExhausted)), and up to 428 while it is
    /// busy. It takes up to three descriptors with its TCP connection, of which the process has as
    /// many as RLIMIT_NOFILE says.
    #[must_use]
    pub fn max_connections(mut self, most: usize) -> Self {
        self.shared.max_connections = Some(most);
        self
    }

    /// Limit the connect requests to the fast path that are looked at, or answered and not yet
    /// established, at a time. Default is 64.
    ///
    /// Those beyond it are refused before anything is looked up or made for them, with the reason
    /// [`LimitReached`](crate::ReasonCode::LimitReached). One takes a few milliseconds, and never
    /// more than 5 s.
    #[must_use]
    pub fn max_handshakes(mut self, most: usize) -> Self {
        self.shared.max_handshakes = Some(most);
        self
    }

    /// Limit the headers of a request, in bytes: names and values with a few bytes for each (both
    /// paths). Default is 64 KiB on the fast path, hyper's 16 KiB on TCP.
    ///
    /// On the fast path from 4 KiB to 1 MiB; what is below or above that is taken as the nearest,
    /// and one name or value may have 65,535 bytes. A call with more fails at the client with
    /// RESOURCE_EXHAUSTED.
    #[must_use]
    pub fn max_header_size(mut self, bytes: u32) -> Self {
        self.shared.max_header_size = Some(bytes);
        self.http2_max_header_list_size(bytes)
    }

    /// How long a client may be silent on the fast path until it is taken for dead, and its calls
    /// are dropped. Default is 5 s; from 10 ms to a day, what is below or above that is taken as
    /// the nearest. See [`Endpoint::dead_peer_timeout`](crate::Endpoint::dead_peer_timeout); either
    /// side has its own.
    ///
    /// The last messages of a connection that ends have as long to get away: a server that is told
    /// to end waits so long for a client that takes none.
    #[must_use]
    pub fn dead_peer_timeout(mut self, time: Duration) -> Self {
        self.shared.dead_peer_timeout = Some(time);
        self
    }

    /// Copy what clients send out of the memory that they can write to, before a handler sees it.
    /// Off by default.
    ///
    /// A client that breaks the protocol can still write to memory that it was granted, after it
    /// has said that it is done: to `Bytes` fields that [`ProstCodec`](crate::codec::ProstCodec)
    /// decoded from what it has sent itself, while a handler checks or uses them, and to nothing
    /// else. Where clients are not trusted that far, this takes the zero out of zero-copy: each
    /// message is copied once, from landing memory to the heap, and counted in
    /// [`Copied::delivery`](crate::Copied::delivery). Over TCP there is no such memory.
    #[must_use]
    pub fn copy_on_delivery(mut self, copy: bool) -> Self {
        self.shared.copy_on_delivery = copy;
        self
    }

    /// Offer the fast path also to clients whose address this server does not see: behind an HTTP
    /// gateway (L7 proxy, service mesh), a translation of source addresses, or a transport without
    /// TCP addresses. Off by default: these stay on TCP, with the reason
    /// [`ThroughGateway`](crate::ReasonCode::ThroughGateway).
    ///
    /// With `true` such a client gets a ticket if the gateway lets the Offer pass, and its calls on
    /// the fast path then go **past the gateway**: what that checks, limits, routes, adds to
    /// headers or logs does not happen to them. They carry no address and no certificate, neither
    /// the client's, which nobody knows, nor the gateway's: [`tonic::Request::remote_addr`] and
    /// `peer_certs` are `None`. So handlers and layers of this server have to decide by what a call
    /// itself carries (a token, say), and to refuse calls without it. Clients that connect directly
    /// are known by address and certificate as before, unless eight Offers from their network have
    /// stated a wrong address lately, as those of a gateway's clients do: then calls of the fast
    /// path carry neither for up to ten minutes.
    #[must_use]
    pub fn offer_through_gateways(mut self, offer: bool) -> Self {
        self.shared.offer_through_gateways = offer;
        self
    }

    /// Set the [`tower::Layer`] that all services will be wrapped in (both paths).
    ///
    /// The layered service is built once and cloned for every connection of either path, so that
    /// a layer with shared state sees every call. The Offer, by which a client asks for the fast
    /// path, passes through it too: a layer that wants credentials wants them there as well
    /// ([`Endpoint::offer_metadata`](crate::Endpoint::offer_metadata)).
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

impl<L> fmt::Debug for Server<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("policy", &self.shared.policy).finish_non_exhaustive()
    }
}
