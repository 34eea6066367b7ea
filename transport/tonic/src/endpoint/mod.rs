//! Where to connect to, and how.

mod connect;
mod tcp;

use std::fmt;
use std::future::Future;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Uri};
use tonic::Status;
use tonic::metadata::MetadataMap;
use tonic::service::Interceptor;

use crate::bootstrap::client::OfferHook;
use crate::context::Context;
use crate::error::Error;
use crate::executor::SharedExec;
use crate::path::policy::{FabricKind, Policy, distinct};
use crate::telemetry::stats::Counters;

/// How long [`Endpoint::connect`] waits for the fast path by default.
pub(crate) const FAST_PATH_TIMEOUT: Duration = Duration::from_secs(1);

/// Channel builder, with the names of [`tonic::transport::Endpoint`].
///
/// The address is that of the server's TCP port. Each builder method says whether it concerns
/// calls on both paths or the TCP side alone.
///
/// ```no_run
/// use tonic_rdma::Endpoint;
/// # async fn run() -> Result<(), tonic_rdma::Error> {
/// let channel = Endpoint::from_static("http://10.0.0.1:50051").connect().await?;
/// println!("connected by {}", channel.path());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Endpoint {
    /// The TCP side. User agent and origin are set on it as well, the limits are not.
    pub(crate) tcp: tonic::transport::Endpoint,
    pub(crate) shared: Settings,
}

/// What concerns both paths.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) origin: Option<Uri>,
    pub(crate) user_agent: Option<HeaderValue>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) concurrency_limit: Option<usize>,
    pub(crate) rate_limit: Option<(u64, Duration)>,
    pub(crate) buffer_size: Option<usize>,
    pub(crate) executor: SharedExec,
    pub(crate) policy: Policy,
    pub(crate) fabrics: Option<Vec<FabricKind>>,
    pub(crate) fast_path_timeout: Option<Duration>,
    pub(crate) hook: Option<OfferHook>,
    pub(crate) context: Option<Context>,
    pub(crate) max_header_size: Option<u32>,
    pub(crate) dead_peer_timeout: Option<Duration>,
    pub(crate) connections: Option<usize>,
    pub(crate) copy_on_delivery: bool,
    /// tonic's endpoint has it too, and does not tell.
    pub(crate) local_address: Option<IpAddr>,
    /// The executor of the TCP side is tokio's: tasks of calls may be reused.
    pub(crate) reuses_tasks: bool,
    /// Where to count; a balanced channel counts over all its endpoints.
    pub(crate) counters: Option<Arc<Counters>>,
}

impl Endpoint {
    #[doc(hidden)]
    pub fn new<D>(dst: D) -> Result<Self, Error>
    where
        D: TryInto<Self>,
        D::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let this: Self = dst.try_into().map_err(|e| Error::call(e.into()))?;
        // tonic's own `new` adds TLS with the enabled roots to an https address.
        Ok(Self { tcp: tonic::transport::Endpoint::new(this.tcp)?, ..this })
    }

    /// Convert an `Endpoint` from a static string.
    ///
    /// # Panics
    ///
    /// If the argument is an invalid URI.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// Endpoint::from_static("https://example.com");
    /// ```
    pub fn from_static(s: &'static str) -> Self {
        Self::reusing_tasks(tonic::transport::Endpoint::from_static(s))
    }

    /// `tcp` has the executor that tonic gives it.
    fn reusing_tasks(tcp: tonic::transport::Endpoint) -> Self {
        let shared = Settings { reuses_tasks: true, ..Settings::default() };
        Self { tcp, shared }
    }

    /// Convert an `Endpoint` from shared bytes.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// Endpoint::from_shared("https://example.com".to_string()).unwrap();
    /// ```
    pub fn from_shared(s: impl Into<Bytes>) -> Result<Self, Error> {
        Ok(Self::reusing_tasks(tonic::transport::Endpoint::from_shared(s)?))
    }

    /// Set a custom user-agent header (both paths).
    ///
    /// On TCP tonic appends its own, `tonic/x.y.z`; on the fast path `tonic-rdma/x.y.z` is
    /// appended.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// let endpoint = Endpoint::from_static("https://example.com").user_agent("Greeter").unwrap();
    /// ```
    pub fn user_agent<T>(mut self, user_agent: T) -> Result<Self, Error>
    where
        T: TryInto<HeaderValue>,
    {
        let value: HeaderValue = user_agent.try_into().map_err(|_| Error::InvalidUserAgent)?;
        self.tcp = self.tcp.user_agent(value.clone())?;
        self.shared.user_agent = Some(value);
        Ok(self)
    }

    /// Set a custom origin: scheme and authority that calls carry (both paths).
    pub fn origin(mut self, origin: Uri) -> Self {
        self.tcp = self.tcp.origin(origin.clone());
        self.shared.origin = Some(origin);
        self
    }

    /// Limit the time of each call until its response headers come (both paths).
    ///
    /// The shorter of this and the request's `grpc-timeout` counts. The server is not told of
    /// this one; for that use [`tonic::Request::set_timeout`]. A call whose time is up ends with
    /// CANCELLED, "Timeout expired", as in tonic.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// # use std::time::Duration;
    /// Endpoint::from_static("https://example.com").timeout(Duration::from_secs(5));
    /// ```
    pub fn timeout(mut self, dur: Duration) -> Self {
        self.shared.timeout = Some(dur);
        self
    }

    /// Limit the calls that run at a time, over both paths together. Further calls wait.
    ///
    /// As in tonic a call counts until its response headers come, and all clones of a channel
    /// share the limit.
    pub fn concurrency_limit(mut self, limit: usize) -> Self {
        self.shared.concurrency_limit = Some(limit);
        self
    }

    /// Limit the rate at which calls begin, over both paths together. Further calls wait.
    ///
    /// Only with this set do calls pass through a queue and a task of their own
    /// ([`buffer_size`](Endpoint::buffer_size)), which costs each call a task switch.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// # use std::time::Duration;
    /// Endpoint::from_static("https://example.com").rate_limit(32, Duration::from_secs(1));
    /// ```
    pub fn rate_limit(mut self, limit: u64, duration: Duration) -> Self {
        self.shared.rate_limit = Some((limit, duration));
        self
    }

    /// Length of the queues in front of the TCP connection and of the rate limit, in calls.
    ///
    /// Default is 1024.
    pub fn buffer_size(mut self, sz: impl Into<Option<usize>>) -> Self {
        let sz = sz.into();
        self.tcp = self.tcp.buffer_size(sz);
        self.shared.buffer_size = sz;
        self
    }

    /// Set the executor of background tasks: HTTP/2, and the fast path's manager.
    ///
    /// Uses `tokio::spawn` by default.
    pub fn executor<E>(mut self, executor: E) -> Self
    where
        E: hyper::rt::Executor<std::pin::Pin<Box<dyn Future<Output = ()> + Send>>>
            + Send
            + Sync
            + 'static,
    {
        self.shared.executor = SharedExec::new(executor);
        self.shared.reuses_tasks = false;
        self.tcp = self.tcp.executor(self.shared.executor.clone());
        self
    }

    /// Whether to use the fast path. Default is [`Policy::Auto`].
    ///
    /// The environment variable `TONIC_RDMA`, where it is set, wins over this.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.shared.policy = policy;
        self
    }

    /// The fabrics that the fast path may take, best first. Default is [`FabricKind::DEFAULT`]:
    /// shared memory where the server runs on the same host, RDMA elsewhere. Without any the
    /// channel stays on TCP.
    ///
    /// Fabrics named in the environment variable `TONIC_RDMA` win over this.
    ///
    /// ```
    /// use tonic_rdma::{Endpoint, FabricKind};
    ///
    /// // RDMA even between two processes of one host.
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").fabrics([FabricKind::Verbs]);
    /// ```
    pub fn fabrics(mut self, fabrics: impl IntoIterator<Item = FabricKind>) -> Self {
        self.shared.fabrics = Some(distinct(fabrics));
        self
    }

    /// With `true`: fail rather than send calls over TCP; the same as
    /// [`policy`](Endpoint::policy)`(Policy::Require)`. With `false`: `Policy::Auto`. Shared memory
    /// will do, unless [`fabrics`](Endpoint::fabrics) leaves it out.
    ///
    /// [`connect`](Endpoint::connect) then waits for the fast path and fails with
    /// [`Error::RdmaRequired`] and the [`Reason`](crate::Reason). On a channel from
    /// [`connect_lazy`](Endpoint::connect_lazy) calls wait up to
    /// [`fast_path_timeout`](Endpoint::fast_path_timeout) and then fail with UNAVAILABLE and the
    /// reason. The TCP connection is made all the same: the fast path is found over it.
    pub fn require_rdma(self, require: bool) -> Self {
        self.policy(if require { Policy::Require } else { Policy::Auto })
    }

    /// How long [`connect`](Endpoint::connect) waits for the fast path once TCP is connected.
    /// When it runs out, the channel starts on TCP and moves when the fast path comes up.
    ///
    /// Default is one second.
    pub fn fast_path_timeout(mut self, timeout: Duration) -> Self {
        self.shared.fast_path_timeout = Some(timeout);
        self
    }

    /// Add metadata to the Offer, the call by which the channel asks for the fast path.
    ///
    /// The Offer passes through the server's layers and interceptors like every call, but not
    /// through the client's, which stand above the channel. A service with authentication
    /// needs its credentials here as well. The hook gets an empty map, may take its time (a token
    /// may have to be fetched), and is asked anew for every attempt. An error counts as
    /// [`HandshakeRejected`](crate::ReasonCode::HandshakeRejected): the channel stays on TCP.
    ///
    /// ```
    /// use tonic::{Status, metadata::MetadataMap};
    /// use tonic_rdma::Endpoint;
    ///
    /// async fn token() -> Result<String, Status> {
    ///     Ok("secret".into())
    /// }
    ///
    /// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").offer_metadata(
    ///     |mut metadata: MetadataMap| async move {
    ///         let bearer = format!("Bearer {}", token().await?);
    ///         let value = bearer.parse().map_err(|_| Status::internal("bad token"))?;
    ///         metadata.insert("authorization", value);
    ///         Ok(metadata)
    ///     },
    /// );
    /// ```
    pub fn offer_metadata<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(MetadataMap) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<MetadataMap, Status>> + Send + 'static,
    {
        self.shared.hook = Some(OfferHook::metadata(hook));
        self
    }

    /// Run an interceptor on the Offer: the one that the client's stub has, say. In place of
    /// [`offer_metadata`](Endpoint::offer_metadata); the later of the two counts.
    pub fn offer_interceptor<I>(mut self, interceptor: I) -> Self
    where
        I: Interceptor + Clone + Send + Sync + 'static,
    {
        self.shared.hook = Some(OfferHook::interceptor(interceptor));
        self
    }

    /// The devices and pinned memory to use. Default is [`Context::global`].
    pub fn context(mut self, context: Context) -> Self {
        self.shared.context = Some(context);
        self
    }

    /// Limit the headers of a response, and its trailers, in bytes: names and values with a few
    /// bytes for each (both paths). Default is 64 KiB on the fast path, hyper's 16 KiB on TCP.
    ///
    /// On the fast path from 4 KiB to 1 MiB; what is below or above that is taken as the nearest,
    /// and one name or value may have 65,535 bytes. A call whose response has more ends with
    /// RESOURCE_EXHAUSTED.
    pub fn max_header_size(mut self, bytes: u32) -> Self {
        self.shared.max_header_size = Some(bytes);
        self.tcp = self.tcp.http2_max_header_list_size(bytes);
        self
    }

    /// How long the server may be silent on the fast path until it is taken for dead, and calls go
    /// over TCP. Default is 5 s; from 10 ms to a day, what is below or above that is taken as the
    /// nearest.
    ///
    /// Any message proves that it lives. After a quarter of this time without one it is asked, so
    /// only one that does not answer is given up; a server that pauses for longer than three
    /// quarters may be. Most deaths are noticed at once, by what the device or the kernel says of
    /// the connection. TCP has keep-alives of its own
    /// ([`http2_keep_alive_interval`](Self::http2_keep_alive_interval)).
    pub fn dead_peer_timeout(mut self, time: Duration) -> Self {
        self.shared.dead_peer_timeout = Some(time);
        self
    }

    /// Fast connections of a channel. Default is 1; from 1 to 64, what is below or above that is
    /// taken as the nearest.
    ///
    /// A connection has one lock and one completion queue, which all threads that make calls share.
    /// Where calls are made on several threads at a time, and one connection is what holds them up,
    /// each thread can have one: for a runtime with eight workers 8. A connection beside the first
    /// is set up when a thread makes its first call; calls take the first while there is none, or
    /// no memory for one. Each pins as much as the first, 60 KiB at rest, at either end, and has a
    /// task at the server, so that its threads share the calls, too.
    ///
    /// [`Channel::path`](crate::Channel::path) is that of the first connection. Over TCP there is
    /// one connection, as in tonic.
    pub fn connections(mut self, connections: usize) -> Self {
        self.shared.connections = Some(connections);
        self
    }

    /// Copy what the server sends out of the memory that it can write to, before the application
    /// sees it. Off by default.
    ///
    /// A server that breaks the protocol can still write to memory that it was granted, after it
    /// has said that it is done: to `Bytes` fields that [`ProstCodec`](crate::codec::ProstCodec)
    /// decoded from what it has sent itself, while the application checks or uses them, and to
    /// nothing else. Where the server is not trusted that far, this takes the zero out of
    /// zero-copy: each message is copied once, from landing memory to the heap, and counted in
    /// [`Copied::delivery`](crate::Copied::delivery). Over TCP there is no such memory.
    pub fn copy_on_delivery(mut self, copy: bool) -> Self {
        self.shared.copy_on_delivery = copy;
        self
    }

    /// Get the endpoint uri.
    pub fn uri(&self) -> &Uri {
        self.tcp.uri()
    }
}

impl From<tonic::transport::Endpoint> for Endpoint {
    /// Takes over the TCP side's settings. Timeout, limits and user agent set on `tcp` apply on the
    /// TCP path only; set them on the result instead. The local address is not taken over: set it
    /// on the result, too.
    fn from(tcp: tonic::transport::Endpoint) -> Self {
        Self { tcp, shared: Settings::default() }
    }
}

impl From<Uri> for Endpoint {
    fn from(uri: Uri) -> Self {
        Self::reusing_tasks(tonic::transport::Endpoint::from(uri))
    }
}

impl TryFrom<Bytes> for Endpoint {
    type Error = Error;

    fn try_from(t: Bytes) -> Result<Self, Self::Error> {
        Self::from_shared(t)
    }
}

impl TryFrom<String> for Endpoint {
    type Error = Error;

    fn try_from(t: String) -> Result<Self, Self::Error> {
        Self::from_shared(t.into_bytes())
    }
}

impl TryFrom<&'static str> for Endpoint {
    type Error = Error;

    fn try_from(t: &'static str) -> Result<Self, Self::Error> {
        Self::from_shared(t.as_bytes())
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::try_from(s.to_string())
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("uri", self.uri())
            .field("policy", &self.shared.policy)
            .finish_non_exhaustive()
    }
}
