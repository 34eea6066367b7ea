//! Bodies that travel over TCP: what goes out is taken apart for hyper, both ways are counted.

use std::collections::VecDeque;
use std::future::Future;
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

use super::is_plain_grpc;
use super::methods::{Call, Methods, Used};
use super::tap::{Chunk, Polled, Tap};
use crate::fifo::Fifo;
use crate::stats::Counters;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Messages up to this long are written whole. hyper cuts longer ones into frames of this size.
const WHOLE: usize = 16 * 1024;

/// A body on its way out. hyper gets the segments of its messages as they lie.
pub(crate) fn outgoing(body: Body, call: Call, apart: bool, counters: &Arc<Counters>) -> Body {
    if body.is_end_stream() {
        return body;
    }
    let tap = Tap::new(call, WHOLE, apart);
    Body::new(Outgoing {
        body,
        tap,
        segments: VecDeque::new(),
        chunks: Fifo::default(),
        counters: counters.clone(),
    })
}

struct Outgoing {
    body: Body,
    tap: Tap,
    chunks: Fifo<Chunk>,
    segments: VecDeque<Bytes>,
    counters: Arc<Counters>,
}

impl HttpBody for Outgoing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(segment) = this.segments.pop_front() {
                this.counters.bytes_sent_tcp.add(segment.len() as u64);
                return Poll::Ready(Some(Ok(Frame::data(segment))));
            }
            if let Some(chunk) = this.chunks.pop_front() {
                if !chunk.apart {
                    let tcp = &this.counters.tcp;
                    let reason = if this.tap.used() == Used::Ours { &tcp.eager } else { &tcp.plain_codec };
                    reason.add(chunk.len as u64);
                }
                this.segments.extend(chunk.segments);
                continue;
            }
            let polled = ready!(this.tap.poll(&mut this.body, cx, &mut this.chunks));
            let (moved, filled) = this.tap.take_copied();
            if moved + filled > 0 {
                this.counters.tcp.plain_codec.add(moved);
                this.counters.tcp.learning.add(filled);
            }
            return Poll::Ready(match polled {
                Polled::Data(_) => continue,
                Polled::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
                Polled::End => None,
                Polled::Failed(status) => Some(Err(status)),
            });
        }
    }

    fn is_end_stream(&self) -> bool {
        self.segments.is_empty() && self.chunks.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // That of a body which is short of its segments says nothing.
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// The server's calls over TCP: counts them, and takes responses apart.
#[derive(Debug, Clone)]
pub(crate) struct TcpCalls<S> {
    inner: S,
    methods: Arc<Methods>,
    counters: Arc<Counters>,
}

impl<S> TcpCalls<S> {
    pub(crate) fn new(inner: S, methods: Arc<Methods>, counters: Arc<Counters>) -> Self {
        TcpCalls { inner, methods, counters }
    }
}

impl<S, B> Service<Request<Body>> for TcpCalls<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = TcpCall<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.counters.calls_tcp.add(1);
        let call = self.methods.call(request.uri());
        let request = request.map(|body| Incoming::body(body, &self.counters));
        TcpCall { inner: self.inner.call(request), call: Some(call), counters: self.counters.clone() }
    }
}

pin_project! {
    pub(crate) struct TcpCall<F> {
        #[pin]
        inner: F,
        call: Option<Call>,
        counters: Arc<Counters>,
    }
}

impl<F, E, B> Future for TcpCall<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (parts, body) = ready!(this.inner.poll(cx))?.into_parts();
        let body = Body::new(body);
        let body = match this.call.take() {
            Some(call) => outgoing(body, call, is_plain_grpc(&parts.headers), this.counters),
            None => body,
        };
        Poll::Ready(Ok(Response::from_parts(parts, body)))
    }
}

/// A received body. tonic brings its frames together.
pub(crate) struct Incoming {
    inner: Body,
    counters: Arc<Counters>,
}

impl Incoming {
    /// Counts what `body` receives.
    pub(crate) fn body(body: Body, counters: &Arc<Counters>) -> Body {
        if body.is_end_stream() {
            return body;
        }
        Body::new(Incoming { inner: body, counters: counters.clone() })
    }
}

impl HttpBody for Incoming {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            let len = data.len() as u64;
            self.counters.bytes_received_tcp.add(len);
            self.counters.tcp.joined.add(len);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
