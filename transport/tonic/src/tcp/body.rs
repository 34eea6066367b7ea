//! Bodies over TCP. Outgoing messages are split for hyper, and both directions are counted.

use std::collections::VecDeque;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use pin_project_lite::pin_project;
use tonic::Status;
use tonic::body::Body;
use tower::Service;

use crate::codec::{
    BodyChunk, BodyEncoder, Call, Fifo, Method, Methods, Polled, Used, is_plain_grpc,
};
use crate::error::BoxError;
use crate::land_in::WhyCopied;
use crate::land_in::allocators::Allocators;
use crate::tcp::{boxed, named};
use crate::telemetry::metrics::CallTimer;
use crate::telemetry::stats::Counters;

/// Messages of up to this many bytes are written in one piece. hyper cuts longer messages into
/// frames of this size.
const WHOLE: usize = 16 * 1024;

/// An outgoing body. hyper gets the segments of the body's messages without a copy.
pub(crate) struct TcpSendBody {
    body: Body,
    encoder: BodyEncoder,
    /// Segments of messages that were split.
    segments: VecDeque<Bytes>,
}

impl TcpSendBody {
    /// `apart` allows messages to be split: see [`is_plain_grpc`].
    pub(crate) fn new(body: Body, call: Call, apart: bool) -> Self {
        let encoder = BodyEncoder::new(call, WHOLE, apart);
        TcpSendBody { body, encoder, segments: VecDeque::new() }
    }

    /// Like [`poll_frame`](HttpBody::poll_frame), but counts the result.
    pub(crate) fn poll(&mut self, counters: &Counters, cx: &mut Context<'_>) -> Poll<Polled> {
        loop {
            if let Some(segment) = self.segments.pop_front() {
                counters.bytes_sent_tcp.add(segment.len() as u64);
                return Poll::Ready(Some(Ok(Frame::data(segment))));
            }
            let mut chunks = Fifo::default();
            let polled = ready!(self.encoder.poll(&mut self.body, cx, &mut chunks));
            if let Some(Ok(frame)) = &polled
                && let Some(data) = frame.data_ref()
            {
                if data.is_empty() {
                    self.take(chunks, counters);
                    continue;
                }
                self.count_whole(data, counters);
                counters.bytes_sent_tcp.add(data.len() as u64);
            }
            return Poll::Ready(polled);
        }
    }

    /// Takes the segments of messages that were split, and the bytes between these segments.
    fn take(&mut self, mut chunks: Fifo<BodyChunk>, counters: &Counters) {
        let (moved, filled) = self.encoder.take_copied();
        if moved + filled > 0 {
            counters.tcp.plain_codec.add(moved);
            counters.tcp.learning.add(filled);
        }
        while let Some(chunk) = chunks.pop_front() {
            if !chunk.apart {
                chunk.segments.iter().for_each(|segment| self.count_whole(segment, counters));
            }
            self.segments.extend(chunk.segments);
        }
    }

    /// Counts the bytes that were copied during encoding.
    fn count_whole(&self, data: &Bytes, counters: &Counters) {
        let reason = if self.encoder.used() == Used::Ours {
            &counters.tcp.eager
        } else {
            &counters.tcp.plain_codec
        };
        reason.add(data.len() as u64);
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.segments.is_empty() && self.body.is_end_stream()
    }
}

/// Counts a server's calls over TCP, and splits the messages of their responses.
#[derive(Debug, Clone)]
pub(crate) struct TcpCalls<S> {
    inner: S,
    server: Arc<Tcp>,
}

/// State that a server's calls over TCP share.
#[derive(Debug)]
struct Tcp {
    methods: Arc<Methods>,
    counters: Arc<Counters>,
    allocators: Arc<Allocators>,
}

impl<S> TcpCalls<S> {
    pub(crate) fn new(
        inner: S,
        methods: Arc<Methods>,
        counters: Arc<Counters>,
        allocators: Arc<Allocators>,
    ) -> Self {
        TcpCalls { inner, server: Arc::new(Tcp { methods, counters, allocators }) }
    }
}

impl<S, B> Service<Request<Body>> for TcpCalls<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = TcpCall<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Tcp { methods, counters, allocators } = &*self.server;
        counters.calls_tcp.add(1);
        let mut timer = counters.durations.start();
        timer.took_tcp();
        let call = methods.call(request.uri());
        let body = mem::take(request.body_mut());
        *request.body_mut() = TcpRecvBody::body(body, counters);
        if !allocators.is_empty() && call.method().used() == Used::Ours {
            request = self.server.land_in(request, call.method());
        }
        TcpCall { inner: self.inner.call(request), call: Some((call, counters.clone())), timer }
    }
}

impl Tcp {
    /// Makes a request fill a buffer of the server, if its method has an allocator.
    fn land_in(&self, request: Request<Body>, method: &Arc<Method>) -> Request<Body> {
        let (mut parts, body) = request.into_parts();
        let claimed = self.allocators.claim(&mut parts, || None, WhyCopied::Tcp);
        let body = match claimed {
            None => body,
            Some(claimed) => {
                let messages = is_plain_grpc(&parts.headers);
                named::body(body, messages, method.clone(), claimed, self.counters.clone())
            }
        };
        Request::from_parts(parts, body)
    }
}

pin_project! {
    pub(crate) struct TcpCall<F> {
        #[pin]
        inner: F,
        call: Option<(Call, Arc<Counters>)>,
        timer: CallTimer,
    }
}

impl<F, B> Future for TcpCall<F>
where
    F: Future<Output = Result<Response<B>, BoxError>>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = match ready!(this.inner.poll(cx)) {
            Ok(response) => response,
            Err(error) => {
                this.timer.fail(&*error);
                return Poll::Ready(Err(error));
            }
        };
        this.timer.end_with(response.headers());
        let apart = is_plain_grpc(response.headers());
        let call = this.call.take();
        Poll::Ready(Ok(response.map(|body| match (Body::new(body), call) {
            (body, Some((call, counters))) if !body.is_end_stream() => {
                let timer = mem::take(this.timer);
                boxed(Reply { out: TcpSendBody::new(body, call, apart), counters, timer })
            }
            (body, _) => {
                this.timer.body_ended();
                body
            }
        })))
    }
}

/// The body of a server's response.
struct Reply {
    out: TcpSendBody,
    counters: Arc<Counters>,
    timer: CallTimer,
}

impl Drop for Reply {
    fn drop(&mut self) {
        // hyper does not poll a body that has ended, so report the end here.
        if self.timer.is_running() && self.out.is_end_stream() {
            self.timer.body_ended();
        }
    }
}

impl HttpBody for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let frame = ready!(this.out.poll(&this.counters, cx));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_ref() {
                    this.timer.end_with(trailers);
                }
            }
            Some(Err(status)) => this.timer.end(status.code()),
            None => this.timer.body_ended(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.out.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // The size hint of the inner body is not the length, because it does not include the
        // segments.
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// A received body. tonic joins its frames.
pub(crate) struct TcpRecvBody {
    inner: Body,
    /// Whether the body was polled. A body that was never polled has not ended, because the
    /// constructor has checked for the end. Each check takes a lock in h2.
    polled: bool,
    counters: Arc<Counters>,
    /// Measures the call, if this is the body of its response.
    timer: CallTimer,
}

impl TcpRecvBody {
    /// Wraps `body`, and counts the bytes that arrive.
    pub(crate) fn body(body: Body, counters: &Arc<Counters>) -> Body {
        Self::timed(body, counters, CallTimer::default())
    }

    /// Like [`body`](Self::body), for a response that ends the call that `timer` measures.
    pub(crate) fn timed(body: Body, counters: &Arc<Counters>, mut timer: CallTimer) -> Body {
        if body.size_hint().exact() == Some(0) {
            timer.body_ended();
            return body;
        }
        boxed(TcpRecvBody { inner: body, polled: false, counters: counters.clone(), timer })
    }
}

impl HttpBody for TcpRecvBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.polled = true;
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    let len = data.len() as u64;
                    self.counters.bytes_received_tcp.add(len);
                    self.counters.tcp.joined.add(len);
                } else if let Some(trailers) = frame.trailers_ref() {
                    self.timer.end_with(trailers);
                }
            }
            Some(Err(status)) => self.timer.end(status.code()),
            None => self.timer.body_ended(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.polled && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
