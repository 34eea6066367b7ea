//! The limits around the layered service on the fast path. On TCP, tonic's server adds the same
//! limits.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tonic::body::Body;
use tower::limit::ConcurrencyLimitLayer;
use tower::load_shed::LoadShedLayer;
use tower::{Service, ServiceBuilder};

use crate::connection::{Accepted, serve_connection};
use crate::error::BoxError;
use crate::grpc_timeout::GrpcTimeout;
use crate::path::reason::Reason;
use crate::server::builder::{ServerSettings, TraceFn};
use crate::telemetry::spans::Calls;

/// The layered service. The service's type is erased once per connection and not per call, so the
/// calls' futures keep their concrete types and need no box.
pub(crate) struct Layered(Box<dyn Serve>);

trait Serve: Send {
    fn serve(
        &self,
        settings: &ServerSettings,
        accepted: Accepted,
    ) -> Pin<Box<dyn Future<Output = Reason> + Send>>;
    fn clone_box(&self) -> Box<dyn Serve>;
}

impl Layered {
    /// Erases the type of the layered service, and adds spans to its calls.
    pub(super) fn new<S, ResBody>(service: S) -> Self
    where
        S: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
        S::Future: Send,
        S::Error: Into<BoxError> + Send,
        ResBody: http_body::Body<Data = Bytes> + Send + 'static,
        ResBody::Error: Into<BoxError>,
    {
        Self(Box::new(Erased(Calls(service))))
    }

    /// Serves a connection until it ends, and returns the reason.
    pub(super) fn serve(
        &self,
        settings: &ServerSettings,
        accepted: Accepted,
    ) -> Pin<Box<dyn Future<Output = Reason> + Send>> {
        self.0.serve(settings, accepted)
    }
}

impl Clone for Layered {
    fn clone(&self) -> Self {
        Self(self.0.clone_box())
    }
}

struct Erased<S>(S);

impl<S> Serve for Erased<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    fn serve(
        &self,
        settings: &ServerSettings,
        accepted: Accepted,
    ) -> Pin<Box<dyn Future<Output = Reason> + Send>> {
        Box::pin(serve_connection(accepted, of_connection(self.0.clone(), settings)))
    }

    fn clone_box(&self) -> Box<dyn Serve> {
        Box::new(Erased(self.0.clone()))
    }
}

/// Builds the stack of one connection, with its own concurrency limit. The connection turns errors
/// into responses.
fn of_connection<S>(
    layered: S,
    settings: &ServerSettings,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = BoxError, Future: Send>
+ Clone
+ Send
+ 'static
+ use<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    let inner = ServiceBuilder::new()
        .option_layer(settings.load_shed.then(LoadShedLayer::new))
        .option_layer(settings.concurrency_limit.map(ConcurrencyLimitLayer::new))
        .layer_fn(|s| GrpcTimeout::new(s, settings.timeout))
        .service(layered);
    Traced { inner, trace_fn: settings.trace_fn.clone() }
}

/// Runs each call in a span that the user's function creates.
#[derive(Clone)]
struct Traced<S> {
    inner: S,
    trace_fn: Option<TraceFn>,
}

impl<S> Service<Request<Body>> for Traced<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = TracedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let (req, span) = match &self.trace_fn {
            Some(trace_fn) => {
                let (parts, body) = req.into_parts();
                let head = Request::from_parts(parts, ());
                let span = trace_fn(&head);
                (head.map(|()| body), span)
            }
            None => (req, tracing::Span::none()),
        };
        TracedFuture { inner: self.inner.call(req), span }
    }
}

pin_project! {
    struct TracedFuture<F> {
        #[pin]
        inner: F,
        span: tracing::Span,
    }
}

impl<F, E> Future for TracedFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let _entered = this.span.enter();
        this.inner.poll(cx).map_err(Into::into)
    }
}
