//! Spans of connections and calls, at level DEBUG. A disabled span costs one check of a static.
//!
//! A call's span has the attributes of OpenTelemetry's conventions for gRPC, version 1.45, and the
//! fields that tracing-opentelemetry reads: `otel.name`, `otel.kind` and `otel.status_code`. Ports
//! are signed, because tracing-opentelemetry turns unsigned numbers into texts.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::Code;
use tonic::body::Body;
use tonic_rdma_fabric::PeerInfo;
use tonic_rdma_proto::Side;
use tower::Service;
use tracing::field::{Empty, display};
use tracing::{Level, Span, debug_span, span_enabled};

use crate::bootstrap::connection;
use crate::connect_info::RdmaConnectInfo;
use crate::error::BoxError;
use crate::path::Path;
use crate::telemetry::{role, server_address, status};

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

/// The span of a call. `server` is the URI that contains the server's host and port. At a client,
/// [`took`] adds the call's path.
pub(crate) fn call(side: Side, uri: &Uri, server: &Uri) -> Span {
    debug_span!(
        target: "tonic_rdma::call",
        "call",
        otel.name = method(uri),
        otel.kind = role(side),
        otel.status_code = Empty,
        role = role(side),
        path = Empty,
        rpc.system.name = "grpc",
        rpc.method = method(uri),
        rpc.status_code = Empty,
        error.type = Empty,
        server.address = server_address(server),
        server.port = server.port_u16().map(i64::from),
        network.peer.address = Empty,
        network.peer.port = Empty,
    )
}

/// `package.Service/Method`, as gRPC names a method in its path.
fn method(uri: &Uri) -> &str {
    uri.path().strip_prefix('/').unwrap_or(uri.path())
}

/// Records a call's path in the current span, which is the call's span. `peer` is the other end of
/// a fast path.
pub(crate) fn took(path: Path, peer: Option<&PeerInfo>) {
    if span_enabled!(target: "tonic_rdma::call", Level::DEBUG) {
        let addr = peer.and_then(|peer| peer.remote.ip());
        record_path(&Span::current(), path, addr);
    }
}

fn record_path(span: &Span, path: Path, peer: Option<SocketAddr>) {
    span.record("path", display(path));
    if let Some(peer) = peer {
        span.record("network.peer.address", display(peer.ip()));
        span.record("network.peer.port", i64::from(peer.port()));
    }
}

/// The enabled span of a call, and whether the call has ended.
struct OpenSpan {
    span: Span,
    side: Side,
    ended: bool,
}

impl OpenSpan {
    /// `None` if the span is disabled.
    fn new(span: Span, side: Side) -> Option<Self> {
        (!span.is_disabled()).then_some(OpenSpan { span, side, ended: false })
    }

    /// Records the status with which the call ends.
    fn end(&mut self, code: Code) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.span.record("rpc.status_code", status::name(code));
        if status::is_error(self.side, code) {
            self.span.record("error.type", status::name(code));
            self.span.record("otel.status_code", "ERROR");
        }
    }

    fn end_with(&mut self, headers: &HeaderMap) {
        if let Some(code) = status::of_headers(headers) {
            self.end(code);
        }
    }

    /// Ends the call when the body ends without a status. At a client, tonic reports the missing
    /// status as `UNKNOWN`. At a server, the request was not a gRPC call.
    fn body_ended(&mut self) {
        match self.side {
            Side::Client => self.end(Code::Unknown),
            Side::Server => self.ended = true,
        }
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        self.end(status::of_dropped());
    }
}

pin_project! {
    /// A call that runs in a span. The response's body keeps the span.
    pub(crate) struct Spanned<F> {
        #[pin]
        call: F,
        // `None` if the span is disabled.
        open: Option<OpenSpan>,
    }
}

impl<F> Spanned<F> {
    pub(crate) fn new(call: F, span: Span, side: Side) -> Self {
        Spanned { call, open: OpenSpan::new(span, side) }
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
        let entered = this.open.as_ref().map(|open| open.span.enter());
        let result = ready!(this.call.poll(cx));
        drop(entered);
        Poll::Ready(match (result, this.open.take()) {
            (Ok(response), None) => Ok(response.map(Body::new)),
            (Ok(response), Some(open)) => Ok(follow(response.map(Body::new), open)),
            (Err(error), open) => {
                let error = error.into();
                if let Some(mut open) = open {
                    open.end(status::of_error(&*error));
                }
                Err(error)
            }
        })
    }
}

fn follow(response: Response<Body>, mut open: OpenSpan) -> Response<Body> {
    open.end_with(response.headers());
    response.map(|body| Body::new(SpannedBody { body, open: Some(open) }))
}

/// The body of a response. The call ends with the body.
struct SpannedBody {
    body: Body,
    /// `None` once the body has ended.
    open: Option<OpenSpan>,
}

impl Drop for SpannedBody {
    fn drop(&mut self) {
        if let Some(open) = &mut self.open
            && self.body.is_end_stream()
        {
            open.body_ended();
        }
    }
}

impl HttpBody for SpannedBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        let this = &mut *self;
        let entered = this.open.as_ref().map(|open| open.span.enter());
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        drop(entered);
        if let Some(open) = &mut this.open {
            match &frame {
                Some(Ok(frame)) => {
                    if let Some(trailers) = frame.trailers_ref() {
                        open.end_with(trailers);
                    }
                }
                Some(Err(status)) => open.end(status.code()),
                None => {
                    open.body_ended();
                    this.open = None;
                }
            }
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

/// Runs a server's calls in their spans, and converts bodies and errors to common types.
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
        let span = call(Side::Server, request.uri(), request.uri());
        if !span.is_disabled() {
            let extensions = request.extensions();
            match extensions.get::<RdmaConnectInfo>() {
                Some(info) => record_path(&span, info.path, info.remote_addr),
                None => record_path(&span, Path::Tcp, connection::peer(extensions)),
            }
        }
        let call = span.in_scope(|| self.0.call(request));
        Spanned::new(call, span, Side::Server)
    }
}
