//! The client's channel, with the names of [`tonic::transport::channel`].

// | file | what |
// |---|---|
// | `select` | selects the path of each call, below limits on time, concurrency and rate |
// | `shared` | state that calls and manager share, with its transition table; an established fast path |
// | `manager` | the task that keeps the channel on its fast path |
// | `attempt` | one attempt at the fast path |
// | `rails` | the connections of one channel, each over separate devices |
// | `backoff` | pauses between attempts |
// | `balance`, `balanced` | constructors of channels over many endpoints; the queue of a balancer |
// | `health` | leaves out endpoints that cannot be connected to |
// | `observer` | shows the connections to an operator |
// | `into_tonic` | a channel of tonic's type that calls through ours |

mod attempt;
pub(crate) mod backoff;
mod balance;
mod balanced;
mod health;
mod into_tonic;
mod manager;
pub(crate) mod observer;
pub(crate) mod rails;
mod select;
pub(crate) mod shared;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use attempt::Plan;
use balanced::Balanced;
use bytes::Bytes;
use http::uri::InvalidUri;
use http::{Request, Response, Uri};
use manager::{Manager, ManagerHandle};
use pin_project_lite::pin_project;
use rails::Rails;
use select::{Select, Stack};
use shared::{ChannelState, FastPathState};
use tokio::sync::watch;
use tonic::body::Body;
#[doc(no_inline)]
pub use tonic::transport::channel::Change;
#[cfg(feature = "_tls-any")]
#[cfg_attr(docsrs, doc(cfg(any(feature = "tls-ring", feature = "tls-aws-lc"))))]
#[doc(no_inline)]
pub use tonic::transport::channel::ClientTlsConfig;
use tonic_rdma_memory::{Forked, Owned, throttled};
use tonic_rdma_proto::Side;
use tower::Service;

use crate::connection::Origin;
pub use crate::endpoint::Endpoint;
use crate::endpoint::FAST_PATH_TIMEOUT;
use crate::error::{BoxError, Cause, Error, in_tonics_type};
use crate::executor::SharedExec;
use crate::path::PathInfo;
use crate::path::policy::{EnvError, EnvSettings, Policy};
use crate::path::reason::{Reason, ReasonCode};
use crate::tcp::TcpClient;
use crate::tcp::connector::{TcpChannel, recording};
use crate::telemetry::metrics;
use crate::telemetry::stats::{Counters, TransportStats};

/// Why a channel that was made before fork(2) fails all calls in the child.
const INHERITED: Forked = Forked("the channel");

/// A connection to a server, over the fast path while that path is up, and otherwise over TCP.
///
/// A channel is a [`tower::Service`] for the stubs that tonic generates:
/// `GreeterClient::new(channel)`. The `connect` that tonic generates for a stub makes tonic's
/// channel, which is TCP only.
///
/// Cloning is cheap; clones share the connection, the limits and the statistics. When the last
/// clone is dropped, the connection closes after the calls in flight.
///
/// # In tower stacks
///
/// `Channel` works under tower's timeout, retry, balance, load-shed and buffer. As with any
/// [`tower::Service`], call the same clone that was polled ready, because a clone of a ready
/// channel is not ready. Right:
///
/// ```
/// use http::{Request, Response};
/// use tonic::body::Body;
/// use tonic::transport::Error;
/// use tonic_rdma::Channel;
/// use tower::{Service, ServiceExt};
///
/// async fn call(channel: &Channel, request: Request<Body>) -> Result<Response<Body>, Error> {
///     channel.clone().oneshot(request).await
/// }
///
/// async fn by_hand(channel: &Channel, request: Request<Body>) -> Result<Response<Body>, Error> {
///     let mut channel = channel.clone();
///     channel.ready().await?.call(request).await
/// }
/// ```
///
/// Wrong: `channel` keeps the readiness and the place in a limit's queue. The clone panics if a
/// [`concurrency_limit`](Endpoint::concurrency_limit) is set:
///
/// ```no_run
/// # use http::{Request, Response};
/// # use tonic::body::Body;
/// # use tonic::transport::Error;
/// # use tonic_rdma::Channel;
/// # use tower::{Service, ServiceExt};
/// async fn call(channel: &mut Channel, request: Request<Body>) -> Result<Response<Body>, Error> {
///     channel.ready().await?;
///     channel.clone().call(request).await
/// }
/// ```
///
/// # Errors of calls
///
/// On either path, the channel reports a failed call with [`tonic::transport::Error`], as tonic's
/// channel does. A stub returns a `Status` whose `source()` downcasts to this error. [`Reason::of`]
/// finds the reason if a required fast path is not available.
///
/// In a child of fork(2), calls of a channel that was made before the fork fail with UNAVAILABLE,
/// and the text names the fork as the cause. A channel that the child makes works.
///
/// A retry layer sees each call that failed with UNAVAILABLE because the fast path was lost, but no
/// call of which nothing was transmitted: the channel sends such a call over TCP.
#[derive(Clone)]
pub struct Channel(Owned<ChannelKind>);

#[derive(Clone)]
enum ChannelKind {
    One(One),
    Balanced(Balanced),
}

/// A channel to one endpoint.
#[derive(Clone)]
struct One {
    stack: Stack,
    shared: Arc<ChannelState>,
    rails: Arc<Rails>,
    state: watch::Receiver<FastPathState>,
    seen: Arc<PathInfo>,
    context: crate::Context,
    executor: SharedExec,
    /// Whether calls always go over TCP, and the endpoint sets no timeout, concurrency limit or
    /// rate limit.
    is_plain: bool,
    _handle: Arc<ManagerHandle>,
}

impl Channel {
    /// Create an [`Endpoint`] builder that can create [`Channel`]s.
    pub fn builder(uri: Uri) -> Endpoint {
        Endpoint::from(uri)
    }

    /// Create an [`Endpoint`] from a static string.
    ///
    /// # Panics
    ///
    /// If the argument is an invalid URI.
    pub fn from_static(s: &'static str) -> Endpoint {
        Endpoint::from_static(s)
    }

    /// Create an [`Endpoint`] from shared bytes.
    ///
    /// # Errors
    ///
    /// The bytes are not a valid URI. The error type is the same as for tonic's method of this
    /// name, whereas [`Endpoint::from_shared`] returns [`Error`].
    pub fn from_shared(s: impl Into<Bytes>) -> Result<Endpoint, InvalidUri> {
        Ok(Self::builder(Uri::from_maybe_shared(s.into())?))
    }

    /// Create a channel with a custom connector for the TCP side. The channel connects at its first
    /// call. As in tonic, the connector's bytes are used unchanged, without the endpoint's TLS.
    ///
    /// Prefer [`Endpoint::connect_with_connector_lazy`].
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, unless an [`executor`](Endpoint::executor) was set.
    pub fn new<C>(connector: C, endpoint: Endpoint) -> Self
    where
        C: Service<Uri> + Send + 'static,
        C::Error: Into<BoxError> + Send,
        C::Future: Send,
        C::Response: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let (connector, local_addr) = recording(connector);
        let channel = tonic::transport::Channel::new(connector, endpoint.tcp());
        Self::lazy(endpoint.over(channel, local_addr), &endpoint, EnvSettings::read())
    }

    /// Like [`new`](Channel::new), but connects at once.
    ///
    /// # Errors
    ///
    /// See [`Endpoint::connect`].
    ///
    /// # Cancel safety
    ///
    /// See [`Endpoint::connect`].
    pub async fn connect<C>(connector: C, endpoint: Endpoint) -> Result<Self, Error>
    where
        C: Service<Uri> + Send + 'static,
        C::Error: Into<BoxError> + Send,
        C::Future: Unpin + Send,
        C::Response: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let env = EnvSettings::read()?;
        let (connector, local_addr) = recording(connector);
        let channel = tonic::transport::Channel::connect(connector, endpoint.tcp()).await?;
        Self::establish(endpoint.over(channel, local_addr), &endpoint, env).await
    }

    /// Makes a channel over a connected TCP channel. Returns when the path is decided.
    pub(crate) async fn establish(
        tcp: TcpChannel,
        endpoint: &Endpoint,
        env: EnvSettings,
    ) -> Result<Self, Error> {
        let one = One::new(tcp, endpoint, Ok(env));
        one.shared.start.begin();
        // The manager reports at the end of the time limit. The extra second is for a host that is
        // too busy to run the manager in time.
        let limit = one.shared.fast_path_timeout + Duration::from_secs(1);
        match one.shared.decided(limit).await {
            Err(reason) if one.shared.required => Err(Cause::required(reason).into()),
            _ => Ok(Self(Owned::new(ChannelKind::One(one.seen_now())))),
        }
    }

    /// Makes a channel that connects at its first call. The channel begins its fast path once
    /// further calls are likely: see [`Start`](shared::Start).
    pub(crate) fn lazy(
        tcp: TcpChannel,
        endpoint: &Endpoint,
        env: Result<EnvSettings, EnvError>,
    ) -> Self {
        Self(Owned::new(ChannelKind::One(One::new(tcp, endpoint, env))))
    }

    /// The path that a call would take now, and the reason.
    ///
    /// For a [balanced](Channel::balance_list) channel, the result is TCP and its reason if a call
    /// to any endpoint would take TCP. Otherwise the result is the first endpoint's path.
    pub fn path(&self) -> PathInfo {
        if !self.0.is_own() {
            return PathInfo::tcp(Reason::new(ReasonCode::Forked, INHERITED.to_string()));
        }
        match &*self.0 {
            ChannelKind::One(one) => one.info(),
            ChannelKind::Balanced(balanced) => balanced.info(),
        }
    }

    /// Waits until the path differs from the path that this method last returned on this clone, and
    /// returns the new path. The first call compares with the path that the channel had at first.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a change is not lost when the future is dropped.
    pub async fn path_changed(&mut self) -> PathInfo {
        match &mut *self.0 {
            ChannelKind::One(one) => one.changed().await,
            ChannelKind::Balanced(balanced) => balanced.changed().await,
        }
    }

    /// The pool of the current fast path, whose buffers are sent without a copy. For a
    /// [balanced](Channel::balance_list) channel, the result is the pool of the first endpoint that
    /// has a fast path. While calls go over TCP, the pool consists of ordinary memory, sized by the
    /// context's [`PoolConfig`](crate::PoolConfig), so code that fills buffers needs no branch. A
    /// buffer can be sent over any path. If the buffer lies in another device's pool, the first
    /// message is copied, and later messages are copied unless the memlock limit leaves room to
    /// register the memory with both devices.
    ///
    /// Call this method for each buffer, because the path may change. The call is cheap.
    pub fn pool(&self) -> crate::Pool {
        crate::Pool(match &*self.0 {
            ChannelKind::One(one) => match &*one.state.borrow() {
                FastPathState::Up(fast) => fast.pool.clone(),
                _ => one.context.ordinary_pool(),
            },
            ChannelKind::Balanced(balanced) => balanced.pool(),
        })
    }

    /// The context whose devices and pools the channel uses, for example to
    /// [register](crate::Context::register) memory with them. For a
    /// [balanced](Channel::balance_list) channel, the result is the context of the first endpoint.
    pub fn context(&self) -> crate::Context {
        match &*self.0 {
            ChannelKind::One(one) => one.context.clone(),
            ChannelKind::Balanced(balanced) => balanced.context(),
        }
    }

    /// The counters of all clones of this channel. For a balanced channel, the counters cover all
    /// endpoints, including removed endpoints.
    pub fn stats(&self) -> TransportStats {
        match &*self.0 {
            ChannelKind::One(one) => one.shared.counters.snapshot(),
            ChannelKind::Balanced(balanced) => balanced.counters().snapshot(),
        }
    }
}

impl One {
    fn new(tcp: TcpChannel, endpoint: &Endpoint, env: Result<EnvSettings, EnvError>) -> Self {
        let settings = &endpoint.shared;
        let (env, bad_env) = match env {
            Ok(env) => (env, None),
            Err(error) => (EnvSettings::default(), Some(error)),
        };
        let policy = env.policy(settings.policy);
        let fast_path_timeout = settings.fast_path_timeout.unwrap_or(FAST_PATH_TIMEOUT);
        let counters =
            settings.counters.clone().unwrap_or_else(|| Arc::new(Counters::of(Side::Client)));
        let uri = settings.origin.clone().unwrap_or_else(|| endpoint.uri().clone());
        let origin = Arc::new(Origin::new(uri, settings.user_agent.as_ref()));
        let context = settings.context.clone().unwrap_or_default();
        let fabrics = env.fabrics(settings.fabrics.as_deref(), policy);
        let off = match (&bad_env, policy) {
            (Some(error), _) => Some(error.to_string()),
            (None, Policy::Off) => Some(match env.policy {
                Some(_) => "TONIC_RDMA=off".to_owned(),
                None => "the endpoint's policy is off".to_owned(),
            }),
            _ if context.paths(&fabrics).is_empty() => Some(match policy {
                Policy::RequireVerbs => "RDMA is not among the fabrics that are allowed".to_owned(),
                _ => "the endpoint allows no fabric".to_owned(),
            }),
            _ => None,
        };
        let state = match &off {
            Some(why) => FastPathState::Down(Reason::new(ReasonCode::Policy, why.clone())),
            None => FastPathState::Idle,
        };
        let methods = Arc::default();
        let shared = Arc::new(ChannelState::new(
            TcpClient::new(tcp.channel.clone(), counters.clone(), Arc::clone(&methods)),
            state,
            policy.is_required(),
            fast_path_timeout,
            bad_env,
            origin.clone(),
            metrics::Durations::client(endpoint.uri()),
        ));
        let rails =
            Arc::new(Rails::new(context.turn(), settings.rails.unwrap_or(rails::MAX_RAILS)));
        let plan = Plan {
            tcp,
            origin,
            hook: settings.hook.clone(),
            context: context.clone(),
            fabrics,
            env_device: env.device,
            env_type_of_service: env.type_of_service,
            counters,
            methods,
            max_header_size: settings.max_header_size,
            keep_alive: settings.keep_alive,
            copy_on_delivery: settings.copy_on_delivery,
            rails: rails.clone(),
            connection: 0,
        };
        let (manager, handle) =
            Manager::new(shared.clone(), plan, settings.executor.clone(), fast_path_timeout);
        let is_plain = off.is_some() && shared.bad_env.is_none() && !settings.has_limits();
        match off {
            None => manager.start(),
            Some(why) if shared.bad_env.is_some() => {
                throttled!(error, origin = %shared.origin.uri, why, "calls fail");
            }
            Some(why) => {
                metrics::fallback(Side::Client, &Reason::new(ReasonCode::Policy, ""));
                throttled!(info, origin = %shared.origin.uri, path = "tcp", why, "calls go over TCP");
            }
        }
        let state = shared.state.subscribe();
        let seen = Arc::new(state.borrow().info());
        Self {
            stack: select::build(Select::new(shared.clone(), rails.clone()), settings),
            shared,
            rails,
            state,
            seen,
            context,
            executor: settings.executor.clone(),
            is_plain,
            _handle: Arc::new(handle),
        }
    }

    fn info(&self) -> PathInfo {
        self.state.borrow().info()
    }

    fn seen_now(mut self) -> Self {
        self.seen = Arc::new(self.info());
        self
    }

    async fn changed(&mut self) -> PathInfo {
        loop {
            let info = self.state.borrow_and_update().info();
            if info != *self.seen {
                self.seen = Arc::new(info.clone());
                return info;
            }
            if self.state.changed().await.is_err() {
                // This cannot happen, because `shared` keeps the sender alive.
                return std::future::pending().await;
            }
        }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), tonic::transport::Error>> {
        if !self.0.is_own() {
            // `call` reports the fork with a status.
            return Poll::Ready(Ok(()));
        }
        match &mut *self.0 {
            ChannelKind::One(one) => one.stack.poll_ready(cx).map_err(in_tonics_type),
            ChannelKind::Balanced(balanced) => balanced.poll_ready(cx).map_err(in_tonics_type),
        }
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if !self.0.is_own() {
            return ResponseFuture { inner: Inner::Inherited };
        }
        let inner = match &mut *self.0 {
            ChannelKind::One(one) => Inner::One { inner: one.stack.call(request) },
            ChannelKind::Balanced(balanced) => Inner::Balanced { inner: balanced.call(request) },
        };
        ResponseFuture { inner }
    }
}

pin_project! {
    /// The response of a call. Dropping this future cancels the call.
    #[must_use = "futures do nothing unless awaited"]
    pub struct ResponseFuture {
        #[pin]
        inner: Inner,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner {
        One { #[pin] inner: <Stack as Service<Request<Body>>>::Future },
        Balanced { #[pin] inner: <Balanced as Service<Request<Body>>>::Future },
        // The channel was made in a parent process of fork(2).
        Inherited,
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response<Body>, tonic::transport::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            InnerProj::One { inner } => inner.poll(cx).map_err(in_tonics_type),
            InnerProj::Balanced { inner } => inner.poll(cx).map_err(in_tonics_type),
            InnerProj::Inherited => {
                let status = tonic::Status::unavailable(INHERITED.to_string());
                Poll::Ready(Err(in_tonics_type(status.into())))
            }
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
