//! Spans of connections and calls, at level DEBUG. A disabled span costs one check of a static.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::body::Body;
use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::Side;
use tower::Service;
use tracing::field::{Empty, display};
use tracing::{Level, Span, debug_span, span_enabled};

use crate::connect_info::RdmaConnectInfo;
use crate::error::BoxError;
use crate::path::Path;
use crate::telemetry::role;

const GRPC_STATUS: &str = "grpc-status";

/// The span of a connection on a fast path.
pub(crate) fn connection(side: Side, peer: &PeerInfo) -> Span {
    debug_span!(
        target: "tonic_rdma::connection",
        "connection",
        role = role(side),
        path = %Path::of(peer),
        device = peer.device,
        local = %peer.local,
        remote = %peer.remote,
    )
}

/// The span of a call. At a client, [`took`] adds the call's path.
pub(crate) fn call(side: Side, uri: &Uri) -> Span {
    debug_span!(
        target: "tonic_rdma::call",
        "call",
        role = role(side),
        path = Empty,
        rpc.system = "grpc",
        rpc.service = split(uri).0,
        rpc.method = split(uri).1,
        rpc.grpc.status_code = Empty,
        error = Empty,
    )
}

/// Splits `/service/method` into service and method.
fn split(uri: &Uri) -> (&str, &str) {
    let path = uri.path().strip_prefix('/').unwrap_or(uri.path());
    path.rsplit_once('/').unwrap_or((path, ""))
}

/// Records the path of the call in whose span this runs.
pub(crate) fn took(path: Path) {
    if span_enabled!(target: "tonic_rdma::call", Level::DEBUG) {
        Span::current().record("path", display(path));
    }
}

pin_project! {
    /// A call in its span. The response's body keeps the span.
    pub(crate) struct Spanned<F> {
        #[pin]
        call: F,
        span: Span,
    }
}

impl<F> Spanned<F> {
    pub(crate) fn new(call: F, span: Span) -> Self {
        Spanned { call, span }
    }
}

impl<F, B, E> Future for Spanned<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    E: Into<BoxError>,
{
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let entered = this.span.enter();
        let result = ready!(this.call.poll(cx));
        drop(entered);
        Poll::Ready(match result {
            Ok(response) if this.span.is_disabled() => Ok(response.map(Body::new)),
            Ok(response) => {
                Ok(follow(response.map(Body::new), std::mem::replace(this.span, Span::none())))
            }
            Err(error) => {
                this.span.record("error", true);
                Err(error.into())
            }
        })
    }
}

fn follow(response: Response<Body>, span: Span) -> Response<Body> {
    record_status(&span, response.headers());
    response.map(|body| Body::new(SpannedBody { body, span }))
}

fn record_status(span: &Span, headers: &HeaderMap) {
    let status =
        headers.get(GRPC_STATUS).and_then(|value| value.to_str().ok()?.parse::<i64>().ok());
    if let Some(status) = status {
        span.record("rpc.grpc.status_code", status);
    }
}

/// The body of a response, which ends the call.
struct SpannedBody {
    body: Body,
    span: Span,
}

impl HttpBody for SpannedBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        let this = &mut *self;
        let entered = this.span.enter();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        drop(entered);
        match &frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_ref() {
                    record_status(&this.span, trailers);
                }
            }
            Some(Err(status)) => {
                this.span.record("rpc.grpc.status_code", i64::from(status.code() as i32));
            }
            None => this.span = Span::none(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Runs a server's calls in their spans, and makes the types of their bodies and errors the same.
#[derive(Clone, Debug)]
pub(crate) struct Calls<S>(pub(crate) S);

impl<S, B> Service<Request<Body>> for Calls<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Spanned<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let span = call(Side::Server, request.uri());
        if !span.is_disabled() {
            let fast = request.extensions().get::<RdmaConnectInfo>();
            span.record("path", display(fast.map_or(Path::Tcp, |info| info.path)));
        }
        let call = span.in_scope(|| self.0.call(request));
        Spanned::new(call, span)
    }
}
