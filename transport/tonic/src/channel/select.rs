//! Selects the path of each call, below the limits on time, concurrency and rate.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use tonic::body::Body;
use tonic_rdma_proto::Side;
use tower::buffer::Buffer;
use tower::limit::rate::Rate;
use tower::limit::{ConcurrencyLimit, ConcurrencyLimitLayer, RateLimit};
use tower::util::Either;
use tower::{Service, ServiceBuilder, ServiceExt};

use crate::channel::rails::Rails;
use crate::channel::shared::{ChannelState, Fast, Route};
use crate::connection::{Call, CallError};
use crate::endpoint::EndpointSettings;
use crate::error::{BoxError, Cause, Error};
use crate::grpc_timeout::GrpcTimeout;
use crate::land_in::{Target, WhyCopied};
use crate::path::Path;
use crate::path::reason::Reason;
use crate::tcp::{TcpClient, named, retry};
use crate::telemetry::metrics::CallTimer;
use crate::telemetry::spans::{self, Spanned};

pub(crate) type CallFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

/// Default capacity, in calls, of the queue in front of a rate limit. The same as in tonic.
const BUFFER_SIZE: usize = 1024;

type Rated = Either<Buffer<Request<Body>, CallFuture>, Select>;
pub(crate) type Stack = GrpcTimeout<Either<ConcurrencyLimit<Rated>, Rated>>;

/// Wraps the selection in the limits. The limits act on every call exactly once, in tonic's order.
pub(crate) fn build(select: Select, settings: &EndpointSettings) -> Stack {
    let rated = match settings.rate_limit {
        // RateLimit cannot be cloned, so calls pass through a queue.
        Some((calls, per)) => {
            let limited = RateLimit::new(select, Rate::new(calls, per));
            let size = settings.buffer_size.unwrap_or(BUFFER_SIZE);
            let (buffer, worker) = Buffer::pair(limited, size);
            settings.executor.spawn(worker);
            Either::Left(buffer)
        }
        None => Either::Right(select),
    };
    ServiceBuilder::new()
        .layer_fn(|s| GrpcTimeout::new(s, settings.timeout))
        .option_layer(settings.concurrency_limit.map(ConcurrencyLimitLayer::new))
        .service(rated)
}

/// Sends each call over the fast path if the fast path is up, and otherwise over TCP.
///
/// While the fast path is not up, and unless it is required, `poll_ready` reserves a place in the
/// TCP connection's queue, and `call` uses the place. Otherwise `call` selects the path. A call
/// that was meant for the fast path but could not be sent there moves to another rail or to TCP.
#[derive(Debug)]
pub(crate) struct Select {
    shared: Arc<ChannelState>,
    rails: Arc<Rails>,
    /// This clone's handle to the queue of the TCP connection.
    tcp: tonic::transport::Channel,
    /// Whether `tcp` holds a place in the queue of the TCP connection.
    placed: bool,
}

impl Select {
    pub(crate) fn new(shared: Arc<ChannelState>, rails: Arc<Rails>) -> Self {
        Self { tcp: shared.tcp.channel.clone(), shared, rails, placed: false }
    }
}

impl Clone for Select {
    fn clone(&self) -> Self {
        Self::new(self.shared.clone(), self.rails.clone())
    }
}

impl Service<Request<Body>> for Select {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = CallFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if self.shared.bad_env.is_some() || self.placed {
            return Poll::Ready(Ok(()));
        }
        if self.shared.needs_tcp() {
            ready!(self.tcp.poll_ready(cx))?;
            self.placed = true;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> CallFuture {
        let span = spans::call(Side::Client, req.uri(), &self.shared.origin.uri);
        if span.is_disabled() {
            return self.dispatch(req);
        }
        let call = span.in_scope(|| self.dispatch(req));
        Box::pin(Spanned::new(call, span, Side::Client))
    }
}

impl Select {
    fn dispatch(&mut self, req: Request<Body>) -> CallFuture {
        if let Some(env) = &self.shared.bad_env {
            let error = Error::from(env.clone());
            return Box::pin(async { Err(error.into()) });
        }
        self.shared.called();
        let timer = self.shared.durations.start();
        if std::mem::take(&mut self.placed) {
            return over_tcp(&mut self.tcp, self.shared.tcp.clone(), req, timer);
        }
        let shared = self.shared.clone();
        let picked = self.rails.pick(&shared, req.uri());
        let route = picked.map_or_else(|| shared.route(), Route::Fast);
        match route {
            Route::Fast(fast) => over_fast(shared, self.rails.clone(), fast, req, timer),
            Route::Tcp => Box::pin(queued(shared.tcp.clone(), req, timer)),
            Route::Wait => {
                let rails = self.rails.clone();
                Box::pin(async move {
                    match shared.usable().await {
                        Ok(fast) => over_fast(shared, rails, fast, req, timer).await,
                        Err(reason) => Err(Cause::required(reason).into()),
                    }
                })
            }
        }
    }
}

/// Makes the call over TCP, with the place in the queue that `tcp` has reserved.
fn over_tcp(
    tcp: &mut tonic::transport::Channel,
    client: Arc<TcpClient>,
    req: Request<Body>,
    mut timer: CallTimer,
) -> CallFuture {
    client.counters.calls_tcp.add(1);
    timer.took_tcp();
    spans::took(Path::Tcp, None);
    let Some(claimed) = Target::claim(req.extensions(), WhyCopied::Tcp) else {
        return Box::pin(retry::call(tcp, req, client, timer));
    };
    let uri = req.uri().clone();
    let call = retry::call(tcp, req, client.clone(), timer);
    Box::pin(async move { Ok(named::response(call.await?, &uri, claimed, &client)) })
}

/// Waits for a place in the queue, then makes the call over TCP.
async fn queued(
    client: Arc<TcpClient>,
    req: Request<Body>,
    mut timer: CallTimer,
) -> Result<Response<Body>, BoxError> {
    let mut tcp = client.channel.clone();
    timer.took_tcp();
    if let Err(error) = tcp.ready().await {
        timer.fail(&error);
        return Err(error.into());
    }
    over_tcp(&mut tcp, client, req, timer).await
}

/// Maximum number of times that a call moves to another fast path.
const MAX_MOVES: usize = 8;

fn over_fast(
    shared: Arc<ChannelState>,
    rails: Arc<Rails>,
    fast: Fast,
    req: Request<Body>,
    mut timer: CallTimer,
) -> CallFuture {
    shared.counters.calls_fast.add(1);
    timer.took_fast(fast.client.peer());
    spans::took(Path::of(fast.client.peer()), Some(fast.client.peer()));
    Box::pin(OverFast { call: fast.client.call(req).timed(timer), shared, rails, elsewhere: None })
}

/// A call over the fast path. `elsewhere` is allocated only if the call could not be sent over its
/// connection.
struct OverFast {
    call: Call,
    shared: Arc<ChannelState>,
    rails: Arc<Rails>,
    elsewhere: Option<CallFuture>,
}

impl Future for OverFast {
    type Output = Result<Response<Body>, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if this.elsewhere.is_none() {
            match ready!(Pin::new(&mut this.call).poll(cx)) {
                Ok(response) => return Poll::Ready(Ok(response)),
                Err(CallError::Status(status)) => return Poll::Ready(Err(status.into())),
                Err(CallError::NotSent(unsent, reason)) => {
                    let (shared, rails) = (this.shared.clone(), this.rails.clone());
                    let timer = this.call.take_timer();
                    let elsewhere = elsewhere(shared, rails, *unsent, reason, timer);
                    this.elsewhere = Some(Box::pin(elsewhere));
                }
            }
        }
        match &mut this.elsewhere {
            Some(elsewhere) => elsewhere.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

/// Moves a call that was counted as fast, but not sent, to another path: to another rail if one is
/// up, or else to TCP. If the fast path is required, the call waits for the next fast path instead
/// of moving to TCP.
async fn elsewhere(
    shared: Arc<ChannelState>,
    rails: Arc<Rails>,
    mut req: Request<Body>,
    mut reason: Reason,
    mut timer: CallTimer,
) -> Result<Response<Body>, BoxError> {
    let mut moves = 0;
    loop {
        let rail = if moves < MAX_MOVES { rails.pick(&shared, req.uri()) } else { None };
        if rail.is_none() && !shared.required {
            tracing::debug!(%reason, "a call moves to TCP before it was sent");
            shared.counters.calls_fast.take_back(1);
            shared.counters.calls_moved.add(1);
            return queued(shared.tcp.clone(), req, timer).await;
        }
        if moves == MAX_MOVES {
            return Err(Cause::required(reason).into());
        }
        moves += 1;
        tracing::debug!(%reason, "a call moves to the next fast path before it was sent");
        let fast = match rail.map_or_else(|| shared.route(), Route::Fast) {
            Route::Fast(fast) => fast,
            // Wait for the next connection. The manager already knows that this one is closed.
            Route::Tcp | Route::Wait => shared.usable().await.map_err(Cause::required)?,
        };
        shared.counters.calls_moved.add(1);
        timer.took_fast(fast.client.peer());
        let mut call = fast.client.call(req).timed(timer);
        (req, reason) = match (&mut call).await {
            Ok(response) => return Ok(response),
            Err(CallError::Status(status)) => return Err(status.into()),
            Err(CallError::NotSent(unsent, reason)) => (*unsent, reason),
        };
        timer = call.take_timer();
    }
}
