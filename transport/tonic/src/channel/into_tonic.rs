//! [`Channel::into_tonic`]: a channel of tonic's type that calls through ours.
//!
//! tonic's channel has one way in: the connector of its HTTP/2 connection. So it gets a pipe within
//! the process, with an HTTP/2 server at the other end that passes each call to our channel. Both
//! ends are ours, so the limits that HTTP/2 servers set for strangers do not apply, and the windows
//! are as large as memory allows: a stream that nobody reads holds [`STREAM_WINDOW`], and takes
//! nothing from the others.

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

use crate::channel::{Channel, Kind};
use crate::connection::Piped;
use crate::executor::SharedExec;

/// Bytes of one stream that wait in the pipe's connection, each way.
const STREAM_WINDOW: u32 = 1 << 20;
/// No limit for all streams together: those that are not read must not stop the others.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes in the pipe, each way. They stay in the cache of a processor.
const PIPE: usize = 128 << 10;
/// Bytes of a frame, which is received as a whole, in a buffer of its own.
const FRAME: u32 = 64 << 10;
/// Bytes of the metadata of a call, as HTTP/2 counts them. Our channel and the server have their
/// own limits.
const METADATA: u32 = 16 << 20;

impl Channel {
    /// A channel of tonic's own type that calls through this one, for libraries that name that
    /// type: `SpanExporter::builder().with_tonic().with_channel(channel.into_tonic())`. It can be
    /// cloned, and keeps this channel alive.
    ///
    /// Code that takes any [`tower::Service`] should be given the channel itself. tonic's type can
    /// only be had with an HTTP/2 connection behind it, so each call passes one within the process:
    ///
    /// - Payload is copied into a pipe and out of it, in each direction. A reply is copied into the
    ///   pipe from where it landed, instead of from there for the codec. Stubs with
    ///   [`ProstCodec`](crate::codec::ProstCodec) work, and save nothing: on this side of the pipe
    ///   messages are encoded and decoded by copying.
    /// - A stream that nobody reads holds up to 1 MiB, each way, and its sender waits.
    /// - Deadlines, metadata, cancellation and statuses pass as over TCP. What does not is an
    ///   error's [`source`](std::error::Error::source), and extensions of requests, such as
    ///   [`LandIn`](crate::LandIn).
    /// - The limits and the timeout of the [`Endpoint`](crate::Endpoint) apply.
    /// - It calls over the path of the moment, and moves with it. While that is TCP, calls pass two
    ///   HTTP/2 connections. Where TCP was chosen for good, by [`Policy::Off`](crate::Policy::Off)
    ///   or `TONIC_RDMA=off`, and the endpoint has no limits, this returns the TCP connection's own
    ///   channel: nothing is in between then, and [`stats`](Self::stats) does not count the calls.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime, unless an [`executor`](crate::Endpoint::executor) was set.
    pub fn into_tonic(self) -> tonic::transport::Channel {
        let (origin, executor) = match &*self.0 {
            Kind::One(one) if one.is_plain => return one.shared.tcp.channel.clone(),
            Kind::One(one) => (one.shared.origin.uri.clone(), one.executor.clone()),
            Kind::Balanced(_) => {
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
    // tonic refuses `https` without TLS of its own, which a pipe does not need.
    Endpoint::from_static("http://tonic-rdma.invalid")
        .origin(origin)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_max_header_list_size(METADATA)
        .http2_max_local_error_reset_streams(None)
        .max_frame_size(FRAME)
        .executor(executor)
        .connect_with_connector_lazy(connector)
}

/// Serves a connection until its client is gone.
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
        // Calls that are dropped before they were seen.
        .max_pending_accept_reset_streams(usize::MAX)
        .serve_connection(TokioIo::new(pipe), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "the connection of a channel of tonic's has ended");
    }
}

/// The request as it came to tonic's channel: without that one's user agent, as ours adds its own.
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
    // HTTP/2 copies a body into the pipe, and does not look into it.
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
    /// The body of a response. Its error becomes its trailers: HTTP/2 would make INTERNAL of every
    /// status.
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
    // The code comes first, and stands also where a text or metadata cannot be sent.
    let _ = status.add_header(&mut trailers);
    trailers
}

/// Runs the tasks of calls.
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
