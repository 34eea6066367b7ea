//! The address of a server, and the settings of a channel to it.

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
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::metadata::MetadataMap;
use tonic::service::Interceptor;

use crate::bootstrap::client::OfferHook;
use crate::connection::KeepAliveSettings;
use crate::context::Context;
use crate::error::{Error, in_tonics_type, invalid_user_agent};
use crate::executor::SharedExec;
use crate::path::policy::{FabricKind, Policy};
use crate::telemetry::stats::Counters;

/// Default time that [`Endpoint::connect`] waits for the fast path.
pub(crate) const FAST_PATH_TIMEOUT: Duration = Duration::from_secs(1);

/// Channel builder, with the names of [`tonic::transport::Endpoint`].
///
/// The address is the server's TCP port. Each builder method says whether it applies to calls on
/// both paths or only to the TCP side.
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
    /// The TCP side. User agent and origin are set here as well, but not the limits.
    pub(crate) tcp: tonic::transport::Endpoint,
    pub(crate) shared: EndpointSettings,
}

/// Settings of both paths.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndpointSettings {
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
    pub(crate) keep_alive: KeepAliveSettings,
    pub(crate) rails: Option<usize>,
    pub(crate) copy_on_delivery: bool,
    pub(crate) plaintext_rdma: bool,
    /// A copy of the address in tonic's endpoint, which has no getter for its local address.
    pub(crate) local_address: Option<IpAddr>,
    /// The path of the Unix socket, if the address is a Unix socket. tonic's endpoint has no getter
    /// for the path.
    pub(crate) unix_socket: Option<Arc<str>>,
    /// Whether the TCP side's executor is tokio's, so that tasks of calls may be reused.
    pub(crate) reuses_tasks: bool,
    /// Counters to which the channel adds. A balanced channel has one set of counters for all its
    /// endpoints.
    pub(crate) counters: Option<Arc<Counters>>,
}

impl EndpointSettings {
    /// Whether settings of this endpoint can delay calls or end them early.
    pub(crate) fn has_limits(&self) -> bool {
        self.timeout.is_some() || self.concurrency_limit.is_some() || self.rate_limit.is_some()
    }
}

impl Endpoint {
    #[doc(hidden)]
    pub fn new<D>(dst: D) -> Result<Self, Error>
    where
        D: TryInto<Self>,
        D::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let this: Self = dst.try_into().map_err(|e| in_tonics_type(e.into()))?;
        // tonic's own `new` adds TLS with the enabled roots to an https address.
        Ok(Self { tcp: tonic::transport::Endpoint::new(this.tcp)?, ..this })
    }

    /// Create an `Endpoint` from a static string.
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
        Self::reusing_tasks(tonic::transport::Endpoint::from_static(s)).at(s.as_bytes())
    }

    /// Creates an endpoint from `tcp`, which uses tonic's default executor.
    fn reusing_tasks(tcp: tonic::transport::Endpoint) -> Self {
        let shared = EndpointSettings { reuses_tasks: true, ..EndpointSettings::default() };
        Self { tcp, shared }
    }

    /// Create an `Endpoint` from shared bytes.
    ///
    /// # Errors
    ///
    /// The bytes are not a valid URI.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// Endpoint::from_shared("https://example.com".to_string()).unwrap();
    /// ```
    pub fn from_shared(s: impl Into<Bytes>) -> Result<Self, Error> {
        let address = s.into();
        let tcp = tonic::transport::Endpoint::from_shared(address.clone())?;
        Ok(Self::reusing_tasks(tcp).at(&address))
    }

    /// Stores the path of the Unix socket if `address` begins with `unix:`. The path is parsed as
    /// in tonic.
    fn at(mut self, address: &[u8]) -> Self {
        let address = std::str::from_utf8(address).ok();
        let path = address.and_then(|address| address.strip_prefix("unix:"));
        self.shared.unix_socket = path.map(|path| path.strip_prefix("//").unwrap_or(path).into());
        self
    }

    /// Set a custom user-agent header (both paths).
    ///
    /// On either path, tonic's own `tonic/x.y.z` is appended. If the server's version does not tell
    /// the client what tonic appends, `tonic-rdma/x.y.z` is appended on the fast path instead.
    ///
    /// # Errors
    ///
    /// The value is not a valid header value.
    ///
    /// ```
    /// # use tonic_rdma::Endpoint;
    /// let endpoint = Endpoint::from_static("https://example.com").user_agent("Greeter").unwrap();
    /// ```
    pub fn user_agent<T>(mut self, user_agent: T) -> Result<Self, Error>
    where
        T: TryInto<HeaderValue>,
    {
        let value: HeaderValue = user_agent.try_into().map_err(|_| invalid_user_agent())?;
        self.tcp = self.tcp.user_agent(value.clone())?;
        self.shared.user_agent = Some(value);
        Ok(self)
    }

    /// Set a custom origin: the scheme and authority that calls carry (both paths).
    pub fn origin(mut self, origin: Uri) -> Self {
        self.tcp = self.tcp.origin(origin.clone());
        self.shared.origin = Some(origin);
        self
    }

    /// Limit the time from the start of each call to its response headers (both paths).
    ///
    /// The shorter of this limit and the request's `grpc-timeout` applies. The server does not
    /// learn this limit. To send a limit to the server, use [`tonic::Request::set_timeout`]. A call
    /// that exceeds the limit fails with CANCELLED, "Timeout expired", as in tonic.
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

    /// Limit the number of concurrent calls, over both paths together. Further calls wait.
    ///
    /// As in tonic, a call counts until its response headers arrive, and all clones of a channel
    /// share the limit.
    ///
    /// A limit above `usize::MAX >> 3` is reduced to this value.
    pub fn concurrency_limit(mut self, limit: usize) -> Self {
        self.shared.concurrency_limit = Some(limit.min(Semaphore::MAX_PERMITS));
        self
    }

    /// Limit the number of calls that begin per `duration`, over both paths together. Further calls
    /// wait.
    ///
    /// With this limit, calls pass through a queue and a task, which costs each call a task switch.
    /// See [`buffer_size`](Endpoint::buffer_size).
    ///
    /// # Panics
    ///
    /// Creating a channel panics if `limit` or `duration` is zero.
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

    /// Capacity, in calls, of the queues in front of the TCP connection and of the rate limit.
    /// Default is 1024.
    ///
    /// # Panics
    ///
    /// Creating a channel panics if the capacity is 0.
    pub fn buffer_size(mut self, sz: impl Into<Option<usize>>) -> Self {
        let sz = sz.into();
        self.tcp = self.tcp.buffer_size(sz);
        self.shared.buffer_size = sz;
        self
    }

    /// Set the executor of background tasks, which run HTTP/2 and the manager of the fast path.
    /// Default is `tokio::spawn`.
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

    /// Add metadata to the Offer, the call by which the channel asks for the fast path.
    ///
    /// The Offer passes through the server's layers and interceptors like every call, but not
    /// through the client's layers and interceptors, which are above the channel. So a service with
    /// authentication needs its credentials here as well. The hook receives an empty map and runs
    /// before every Offer. The hook may be slow, for example to fetch a token. An error counts as
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

    /// Run an interceptor on the Offer, for example the interceptor of the client's stub. The
    /// interceptor replaces a hook set with [`offer_metadata`](Endpoint::offer_metadata), and a
    /// hook that is set later replaces the interceptor.
    pub fn offer_interceptor<I>(mut self, interceptor: I) -> Self
    where
        I: Interceptor + Clone + Send + Sync + 'static,
    {
        self.shared.hook = Some(OfferHook::interceptor(interceptor));
        self
    }

    /// Set the context, with the devices and pinned memory to use. Default is [`Context::global`].
    pub fn context(mut self, context: Context) -> Self {
        self.shared.context = Some(context);
        self
    }

    /// Limit the size in bytes of a response's headers, and of its trailers (both paths). The size
    /// includes names, values and a few bytes for each header. Default is 64 KiB on the fast path,
    /// and hyper's 16 KiB on TCP.
    ///
    /// On the fast path, the value is clamped to the range from 4 KiB to 1 MiB, and one name or
    /// value may have 65,535 bytes. A call whose response exceeds the limit fails with
    /// RESOURCE_EXHAUSTED.
    pub fn max_header_size(mut self, bytes: u32) -> Self {
        self.shared.max_header_size = Some(bytes);
        self.tcp = self.tcp.http2_max_header_list_size(bytes);
        self
    }

    /// Limit the number of rails on which a channel connects. A rail is a pair of a client's device
    /// and a server's device, and a channel's connections share no device at either end. Default is
    /// 8. The value is clamped to the range from 1 to 8, and 1 means one connection.
    ///
    /// If client and server have several RDMA devices, each new channel begins with the next device
    /// in turn. A channel connects over the other devices once calls overlap that transfer bulk (64
    /// KiB or more in one piece). From then on, a call that transfers bulk goes to the rail with
    /// the fewest calls in flight, and any other call to the first rail. Each connection pins 8 KiB
    /// at each end when idle. Each device has its own pool. Memory of another device's pool is
    /// registered when a message in that memory is first sent. The first message is copied once
    /// ([`Copied::staging`](crate::Copied::staging)). Further messages are also copied if the
    /// memlock limit leaves no room for the registration.
    ///
    /// A server's device is reached from devices in the same IP network, or over the system's route
    /// if this host has no device in that network. When a rail is lost, its calls fail as on any
    /// lost connection, and further calls go over the other rails.
    /// [`Channel::path`](crate::Channel::path) returns the first connection's path.
    pub fn rails(mut self, rails: usize) -> Self {
        self.shared.rails = Some(rails);
        self
    }

    /// Copy received data, before the application sees it, out of the memory that the server can
    /// write to. Off by default.
    ///
    /// A server that violates the protocol can still write to granted memory after it has reported
    /// its write as complete. The server can thus change `Bytes` fields that
    /// [`ProstCodec`](crate::codec::ProstCodec) decoded from the server's messages while the
    /// application checks or uses these fields. The server can change no other memory. For a server
    /// that is not trusted, this option gives up zero-copy on receipt: each message is copied once,
    /// from landing memory to the heap, and counted in
    /// [`Copied::delivery`](crate::Copied::delivery). The server lends nothing to a client with
    /// this option. Over TCP, the server cannot write to the client's memory.
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
    /// Takes over the settings of the TCP side. A timeout, limit or user agent that is set on `tcp`
    /// applies only on the TCP path, so set these values on the result instead. The local address
    /// is not taken over, so set the local address on the result as well. Nor is the path of a Unix
    /// socket: the result of an endpoint with a `unix:` address connects to the host `tonic`, so
    /// make such an endpoint with [`Endpoint::from_shared`].
    fn from(tcp: tonic::transport::Endpoint) -> Self {
        Self { tcp, shared: EndpointSettings::default() }
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
