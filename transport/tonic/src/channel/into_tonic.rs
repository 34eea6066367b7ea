//! [`Channel::into_tonic`]: a channel of tonic's type that calls through ours.
//!
//! The only way into tonic's channel is the connector of its HTTP/2 connection. So the connector
//! returns a pipe within the process, with an HTTP/2 server at the other end that passes each call
//! to our channel. Both ends are ours, so the limits that protect HTTP/2 servers from strangers do
//! not apply. A stream that nobody reads holds at most [`STREAM_WINDOW`] bytes, and does not reduce
//! the window of other streams.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::USER_AGENT;
use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use http_body::Frame;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use pin_project_lite::pin_project;
use tokio::io::DuplexStream;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::ServiceExt;

use crate::channel::{Channel, ChannelKind};
use crate::connection::Piped;
use crate::executor::SharedExec;
use crate::tcp::connector::recording;

/// Bytes of one stream that may wait in the pipe's connection, in each direction.
const STREAM_WINDOW: u32 = 1 << 20;
/// The window for all streams together, in bytes: the largest that HTTP/2 allows, so that unread
/// streams do not stop other streams.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Capacity of the pipe in bytes, in each direction. This many bytes fit in a processor's cache.
const PIPE: usize = 128 << 10;
/// Maximum length of a frame in bytes. Each frame is received whole, into its own buffer.
const FRAME: u32 = 64 << 10;
/// Maximum length of a call's metadata in bytes, as HTTP/2 counts it. Our channel and the server
/// have their own limits.
const METADATA: u32 = 16 << 20;

impl Channel {
    /// Converts this channel to tonic's type, for libraries that accept only tonic's type:
    /// `SpanExporter::builder().with_tonic().with_channel(channel.into_tonic())`. The result can be
    /// cloned, and keeps this channel alive.
    ///
    /// Code that takes any [`tower::Service`] should get the channel itself. tonic's type requires
    /// an HTTP/2 connection, so each call passes through an HTTP/2 connection within the process:
    ///
    /// - Payload is copied into the pipe and out of it, in each direction. Stubs with
    ///   [`ProstCodec`](crate::codec::ProstCodec) work but save no copies, because the client's
    ///   side of the pipe encodes and decodes by copying. A received reply is copied from landing
    ///   memory into the pipe.
    /// - A stream that nobody reads holds up to 1 MiB in each direction, and its sender waits.
    /// - Deadlines, metadata, cancellation and statuses pass as over TCP. An error's
    ///   [`source`](std::error::Error::source) is lost, and so are extensions of requests, such as
    ///   [`LandIn`](crate::LandIn).
    /// - The [`Endpoint`](crate::Endpoint)'s limits and timeout apply.
    /// - Calls take the channel's current path. While that path is TCP, calls pass through two
    ///   HTTP/2 connections. If the path is permanently TCP, by [`Policy::Off`](crate::Policy::Off)
    ///   or `TONIC_RDMA=off`, and the endpoint has no limits, the result is the TCP connection's
    ///   own channel. Calls then pass through only one HTTP/2 connection, and
    ///   [`stats`](Self::stats) does not count them.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, unless an [`executor`](crate::Endpoint::executor) was set.
    pub fn into_tonic(self) -> tonic::transport::Channel {
        let (origin, executor) = match &*self.0 {
            ChannelKind::One(one) if one.is_plain => return one.shared.tcp.channel.clone(),
            ChannelKind::One(one) => (one.shared.origin.uri.clone(), one.executor.clone()),
            ChannelKind::Balanced(_) => {
                (Uri::from_static("http://tonic-rdma.invalid"), SharedExec::default())
            }
        };
        over_pipe(self, origin, executor)
    }
}

/// A channel of tonic's type whose calls go to `channel`.
fn over_pipe(channel: Channel, origin: Uri, executor: SharedExec) -> tonic::transport::Channel {
    let spawn = executor.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let (client, server) = tokio::io::duplex(PIPE);
        spawn.spawn(serve(server, channel.clone(), spawn.clone()));
        ready(Ok::<_, Infallible>(TokioIo::new(client)))
    });
    // tonic refuses `https` unless tonic itself adds TLS, which a pipe does not need.
    Endpoint::from_static("http://tonic-rdma.invalid")
        .origin(origin)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_max_header_list_size(METADATA)
        .http2_max_local_error_reset_streams(None)
        .max_frame_size(FRAME)
        .executor(executor)
        .connect_with_connector_lazy(recording(connector).0)
}

/// Serves the pipe until the client has closed it.
async fn serve(pipe: DuplexStream, channel: Channel, executor: SharedExec) {
    let service = service_fn(move |request| {
        let call = channel.clone().oneshot(forwarded(request));
        async move { Ok::<_, Infallible>(response(call.await)) }
    });
    let served = http2::Builder::new(Tasks(executor))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_header_list_size(METADATA)
        .max_concurrent_streams(None)
        .max_local_error_reset_streams(None)
        // Set no limit, because calls may be dropped before the server has seen them.
        .max_pending_accept_reset_streams(usize::MAX)
        .serve_connection(TokioIo::new(pipe), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "the pipe to tonic's channel has ended");
    }
}

/// The request as tonic's channel sent it, but without tonic's user agent, because our channel adds
/// its own.
fn forwarded(request: Request<Incoming>) -> Request<Body> {
    let mut request = request.map(Body::new);
    if let Some(agent) = request.headers().get(USER_AGENT).map(HeaderValue::as_bytes) {
        let own = match agent.iter().rposition(|byte| *byte == b' ') {
            Some(at) => HeaderValue::from_bytes(&agent[..at]).ok(),
            None => None,
        };
        match own {
            Some(own) => request.headers_mut().insert(USER_AGENT, own),
            None => request.headers_mut().remove(USER_AGENT),
        };
    }
    // The response's body may stay where it landed, because HTTP/2 copies the body into the pipe
    // and does not parse it.
    request.extensions_mut().insert(Piped);
    request
}

fn response(result: Result<Response<Body>, tonic::transport::Error>) -> Response<EndsWithStatus> {
    match result {
        Ok(response) => response.map(|inner| EndsWithStatus { inner, ended: false }),
        Err(error) => Status::from_error(error.into()).into_http(),
    }
}

pin_project! {
    /// A response's body that reports its error as trailers, because HTTP/2 would turn every status
    /// into INTERNAL.
    #[derive(Default)]
    struct EndsWithStatus {
        #[pin]
        inner: Body,
        ended: bool,
    }
}

impl http_body::Body for EndsWithStatus {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.project();
        if *this.ended {
            return Poll::Ready(None);
        }
        this.inner.poll_frame(cx).map(|frame| match frame? {
            Ok(frame) => Some(Ok(frame)),
            Err(status) => {
                *this.ended = true;
                Some(Ok(Frame::trailers(trailers(&status))))
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.inner.size_hint()
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    // An error can only come from the text or the details. The metadata and the code have been
    // added by then and are still sent.
    let _ = status.add_header(&mut trailers);
    trailers
}

/// Spawns the calls' tasks.
#[derive(Clone)]
struct Tasks(SharedExec);

impl<F> Executor<F> for Tasks
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}
