//! What stands around the layered service on the fast path; on TCP tonic's server builds the same.

use super::{Settings, TraceFn};
use crate::{grpc_timeout::GrpcTimeout, spans::Calls};
use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tonic::{body::Body, service::RecoverErrorLayer};
use tower::{
    Service, ServiceBuilder, limit::ConcurrencyLimitLayer, load_shed::LoadShedLayer, util::BoxCloneService,
};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The layered service, of one type whatever the layers.
pub(crate) type Layered = BoxCloneService<Request<Body>, Response<Body>, BoxError>;

/// Gives the layered service one type, and its calls their spans.
pub(crate) fn erase<S, ResBody>(service: S) -> Layered
where
    S: Service<Request<Body>, Response = Response<ResBody>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError> + Send,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    BoxCloneService::new(Calls(service))
}

/// The stack of one connection. Its concurrency limit is its own.
pub(super) fn of_connection(
    layered: Layered,
    settings: &Settings,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = BoxError, Future: Send>
+ Clone
+ Send
+ 'static
+ use<> {
    let inner = ServiceBuilder::new()
        .layer(RecoverErrorLayer::new())
        .option_layer(settings.load_shed.then(LoadShedLayer::new))
        .option_layer(settings.concurrency_limit.map(ConcurrencyLimitLayer::new))
        .layer_fn(|s| GrpcTimeout::new(s, settings.timeout))
        .service(layered);
    Traced { inner, trace_fn: settings.trace_fn.clone() }
}

/// Runs calls in the span that the user's function makes, and gives their bodies one type.
#[derive(Clone)]
struct Traced<S> {
    inner: S,
    trace_fn: Option<TraceFn>,
}

impl<S, ResBody> Service<Request<Body>> for Traced<S>
where
    S: Service<Request<Body>, Response = Response<ResBody>>,
    S::Error: Into<BoxError>,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
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

impl<F, E, ResBody> Future for TracedFuture<F>
where
    F: Future<Output = Result<Response<ResBody>, E>>,
    E: Into<BoxError>,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let _entered = this.span.enter();
        let response = ready!(this.inner.poll(cx)).map_err(Into::into)?;
        Poll::Ready(Ok(response.map(Body::new)))
    }
}
