//! Calls over TCP, with transparent retry (gRFC A6) of calls that the server has not processed.
//!
//! A server that shuts down gracefully, or closes a connection for its age, sends a GOAWAY that
//! tells which calls it will answer. hyper reports the other calls in three ways. In each case no
//! handler has seen the call:
//!
//! | what | when |
//! |---|---|
//! | `hyper::Error::is_canceled` | the connection closed before the call was sent |
//! | `h2::Error`, a GOAWAY of the peer | the call had no stream, or one later than its last |
//! | `h2::Error`, a reset of the peer with REFUSED_STREAM | the stream was not processed |
//!
//! After any other error, such as a broken connection, a handler may have seen the call, so the
//! error goes to the caller. A connection that cannot be made is not retried either: calls fail
//! fast, as in tonic.
//!
//! The frames that a body has ready are read before the call is passed to tonic. For most calls
//! these are the whole body: the call keeps them, and the last one carries END_STREAM, for which
//! tonic would send another frame. The body of any other call is sent as a [`RecoverableBody`],
//! which records the frames that were read from it and returns itself to the call when hyper drops
//! it.

use std::error::Error;
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tonic::Status;
use tonic::body::Body;
use tower::{Service, ServiceExt};

use crate::boxed_body::boxed;
use crate::codec::is_plain_grpc;
use crate::error::BoxError;
use crate::tcp::body::{TcpRecvBody, TcpSendBody};
use crate::tcp::client::TcpClient;
use crate::telemetry::stats::Counters;

/// Maximum number of retries of a call. Each needs another connection to end during the call.
const MAX_RETRIES: usize = 4;
/// Number of bytes of a body to keep for a retry, not counting the last two frames. A call that has
/// sent more is not retried. Before the server processes a call, hyper reads at most an HTTP/2
/// window of its body, the rest of the frame that fills the window, and one more frame. hyper's
/// servers have windows of 1 MiB.
const MAX_KEPT: usize = 1 << 20;
/// Maximum number of frames to read from a body before the call begins. A message that is sent in
/// segments has two or three.
const MAX_READ_AHEAD: usize = 2;
/// Maximum length of a body that is copied, so that a call which waits for its response does not
/// keep its encoder's buffer alive: tonic's has 8 KiB.
const MAX_COPIED: usize = 256;

/// Data frames. An empty one means no frame, since a frame has at least a message header.
type Frames = [Bytes; MAX_READ_AHEAD];
type Polled = Option<Result<Frame<Bytes>, Status>>;

/// Makes a call on a connection that has a place for it.
pub(crate) fn call(
    tcp: &mut tonic::transport::Channel,
    mut req: Request<Body>,
    client: Arc<TcpClient>,
) -> RetryCall {
    let head = Head::of(&req);
    let body = mem::take(req.body_mut());
    let kept = if body.is_end_stream() {
        KeptBody::Whole(Frames::default())
    } else {
        let apart = is_plain_grpc(req.headers());
        let source = TcpSendBody::new(body, client.methods.call(req.uri()), apart);
        let (body, kept) = begin(source, &client.counters);
        *req.body_mut() = body;
        kept
    };
    let first = tcp.call(req);
    RetryCall { call: Attempt::First(first), kept: Some((head, kept)), client }
}

/// A call in flight.
pub(crate) struct RetryCall {
    call: Attempt,
    kept: Option<(Head, KeptBody)>,
    client: Arc<TcpClient>,
}

enum Attempt {
    First(tonic::transport::channel::ResponseFuture),
    Retry(Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>),
}

impl Future for RetryCall {
    type Output = Result<Response<Body>, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let response = loop {
            match &mut this.call {
                Attempt::Retry(call) => break ready!(call.as_mut().poll(cx))?,
                Attempt::First(call) => match (ready!(Pin::new(call).poll(cx)), this.kept.take()) {
                    (Ok(response), _) => break response,
                    (Err(error), Some((head, kept))) if was_not_processed(&error) => {
                        let retry = retry(head, kept, error.into(), this.client.clone());
                        this.call = Attempt::Retry(Box::pin(retry));
                    }
                    (Err(error), _) => return Poll::Ready(Err(error.into())),
                },
            }
        };
        this.client.saw_answer();
        Poll::Ready(Ok(response.map(|body| TcpRecvBody::body(body, &this.client.counters))))
    }
}

/// Retries a call that failed with `error` before the server processed it.
async fn retry(
    head: Head,
    mut kept: KeptBody,
    mut error: BoxError,
    client: Arc<TcpClient>,
) -> Result<Response<Body>, BoxError> {
    for turn in 1..=MAX_RETRIES {
        let Some(body) = kept.retry(&client.counters).await else {
            tracing::debug!(%error, "a call that the server has not seen is lost: too much of it is gone");
            break;
        };
        tracing::debug!(%error, turn, "a call over TCP that the server has not seen is sent again");
        client.counters.calls_moved.add(1);
        error = match client.channel.clone().oneshot(head.request(body)).await {
            Ok(response) => return Ok(response),
            Err(error) => error.into(),
        };
        if !was_not_processed(&*error) {
            break;
        }
    }
    Err(error)
}

/// Whether the error says that the server has not processed the call.
fn was_not_processed(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled) {
            return true;
        }
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let refused = error.reason() == Some(h2::Reason::REFUSED_STREAM);
            return error.is_remote() && (error.is_go_away() || (error.is_reset() && refused));
        }
        next = error.source();
    }
    false
}

/// A request without its body, and without extensions, which tonic's own layers do not use.
struct Head {
    method: Method,
    uri: Uri,
    headers: SmallVec<[(HeaderName, HeaderValue); 3]>,
}

impl Head {
    fn of(req: &Request<Body>) -> Self {
        let mut headers = SmallVec::new();
        // A loop costs less than collecting two headers.
        for (name, value) in req.headers() {
            headers.push((name.clone(), value.clone()));
        }
        Head { method: req.method().clone(), uri: req.uri().clone(), headers }
    }

    fn request(&self, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = Version::HTTP_2;
        request.headers_mut().extend(self.headers.iter().cloned());
        request
    }
}

/// The body of a request that has no response yet.
enum KeptBody {
    /// The whole body.
    Whole(Frames),
    /// It is being sent, and is returned over this channel.
    InFlight(oneshot::Receiver<Box<PartialBody>>),
}

impl KeptBody {
    /// The body from its beginning, if all of it was kept.
    ///
    /// Cancel safe: a dropped future loses the body, and with it the retry.
    async fn retry(&mut self, counters: &Arc<Counters>) -> Option<Body> {
        let back = match self {
            KeptBody::Whole(frames) => return Some(whole(frames.clone())),
            // hyper drops the body of a failed call.
            KeptBody::InFlight(back) => back.await.ok()?,
        };
        let (body, kept) = RecoverableBody::send(back, counters.clone());
        *self = kept;
        Some(body)
    }
}

/// Reads the frames that a body has ready. Returns the body to send, and what a retry needs.
fn begin(mut source: TcpSendBody, counters: &Arc<Counters>) -> (Body, KeptBody) {
    // The next poll registers the waker of the task that polls.
    let mut cx = Context::from_waker(Waker::noop());
    let (mut frames, mut taken) = (Frames::default(), 0);
    let read_ahead = loop {
        // A panic of the caller's stream must not end the task, which may serve other calls.
        let polled = catch_unwind(AssertUnwindSafe(|| source.poll(counters, &mut cx)));
        let panicked =
            |_| Poll::Ready(Some(Err(Status::internal("the request's stream panicked"))));
        match polled.unwrap_or_else(panicked) {
            Poll::Pending => break None,
            Poll::Ready(None) => {
                if taken == 1 && frames[0].len() <= MAX_COPIED {
                    frames[0] =
                        Bytes::from_owner(SmallVec::<[u8; MAX_COPIED]>::from_slice(&frames[0]));
                }
                return (whole(frames.clone()), KeptBody::Whole(frames));
            }
            Poll::Ready(Some(Ok(frame))) if frame.is_data() && taken < MAX_READ_AHEAD => {
                frames[taken] = frame.into_data().unwrap_or_default();
                taken += 1;
            }
            Poll::Ready(frame) => break frame,
        }
    };
    let sent = frames[..taken].to_vec();
    let last = sent.last().map_or(0, Bytes::len);
    let bytes = sent.iter().map(Bytes::len).sum();
    RecoverableBody::send(
        Box::new(PartialBody { source, sent, next: 0, bytes, last, read_ahead, ended: false }),
        counters.clone(),
    )
}

fn whole(frames: Frames) -> Body {
    boxed(Whole(frames))
}

/// A body of which all frames are known.
struct Whole(Frames);

impl HttpBody for Whole {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Polled> {
        let next = self.0.iter_mut().find(|frame| !frame.is_empty());
        Poll::Ready(next.map(|frame| Ok(Frame::data(mem::take(frame)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.iter().all(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        // An exact size would become a content-length header.
        SizeHint::default()
    }
}

/// A body of which some frames have been read.
struct PartialBody {
    source: TcpSendBody,
    /// The frames read from it: all while it can be retried, else those still to be sent.
    sent: Vec<Bytes>,
    /// Index into `sent` of the next frame to send.
    next: usize,
    bytes: usize,
    /// Length of the last frame.
    last: usize,
    /// The frame after `sent`, read ahead.
    read_ahead: Option<Result<Frame<Bytes>, Status>>,
    ended: bool,
}

/// A body that is being sent. It is returned over `return_tx` when hyper drops it.
struct RecoverableBody {
    /// `Some` until this is dropped.
    body: Option<Box<PartialBody>>,
    /// `None` when some of it was not kept, or the call has a response.
    return_tx: Option<oneshot::Sender<Box<PartialBody>>>,
    counters: Arc<Counters>,
}

impl RecoverableBody {
    fn send(mut partial: Box<PartialBody>, counters: Arc<Counters>) -> (Body, KeptBody) {
        partial.next = 0;
        let (return_tx, back) = oneshot::channel();
        (
            boxed(RecoverableBody { body: Some(partial), return_tx: Some(return_tx), counters }),
            KeptBody::InFlight(back),
        )
    }
}

impl Drop for RecoverableBody {
    fn drop(&mut self) {
        if let (Some(partial), Some(return_tx)) = (self.body.take(), self.return_tx.take()) {
            // The call may be gone.
            let _ = return_tx.send(partial);
        }
    }
}

impl HttpBody for RecoverableBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Polled> {
        let RecoverableBody { body: partial, return_tx, counters } = &mut *self;
        let Some(partial) = partial else { return Poll::Ready(None) };
        if return_tx.as_ref().is_some_and(oneshot::Sender::is_closed) {
            *return_tx = None;
        }
        if return_tx.is_none() && partial.next > 0 {
            partial.sent.drain(..mem::take(&mut partial.next));
        }
        if let Some(bytes) = partial.sent.get(partial.next) {
            partial.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(bytes.clone()))));
        }
        if partial.ended {
            return Poll::Ready(None);
        }
        let frame = match partial.read_ahead.take() {
            Some(frame) => Some(frame),
            None => ready!(partial.source.poll(counters, cx)),
        };
        match frame.as_ref().map(|frame| frame.as_ref().map(Frame::data_ref)) {
            None => partial.ended = true,
            Some(Ok(Some(data)))
                if return_tx.is_some() && partial.bytes - partial.last <= MAX_KEPT =>
            {
                partial.last = data.len();
                partial.bytes += partial.last;
                partial.sent.push(data.clone());
                partial.next += 1;
            }
            Some(_) => {
                *return_tx = None;
                partial.next = 0;
                partial.sent = Vec::new();
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(|partial| {
            let all = partial.next >= partial.sent.len() && partial.read_ahead.is_none();
            all && (partial.ended || partial.source.is_end_stream())
        })
    }

    fn size_hint(&self) -> SizeHint {
        // The size hint of a body without its segments is not its length.
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;
    use tokio_stream::{Stream, StreamExt};

    use super::*;
    use crate::codec::Methods;

    type Item = Result<Frame<Bytes>, Status>;

    fn data(bytes: impl Into<Bytes>) -> Item {
        Ok(Frame::data(bytes.into()))
    }

    fn partial(frames: impl Stream<Item = Item> + Send + 'static) -> (Body, KeptBody) {
        let methods = Arc::new(Methods::default());
        let call = methods.call(&Uri::from_static("/a.B/C"));
        begin(TcpSendBody::new(Body::new(StreamBody::new(frames)), call, false), &Arc::default())
    }

    async fn next(body: &mut Body) -> Bytes {
        body.frame().await.unwrap().unwrap().into_data().unwrap()
    }

    async fn all(body: Body) -> Bytes {
        body.collect().await.unwrap().to_bytes()
    }

    #[tokio::test]
    async fn what_is_ready_at_once_is_kept_whole() {
        for frames in [vec![], vec!["one"], vec!["one", "two"]] {
            let (mut body, mut kept) = partial(tokio_stream::iter(frames.clone()).map(data));
            assert!(matches!(kept, KeptBody::Whole(_)));
            for frame in &frames {
                assert!(!body.is_end_stream());
                assert_eq!(body.size_hint().exact(), None, "it would become a header");
                assert_eq!(next(&mut body).await, frame);
            }
            // HTTP/2 says so with the last frame.
            assert!(body.is_end_stream());
            let again = kept.retry(&Arc::default()).await.unwrap();
            assert_eq!(all(again).await, frames.concat());
        }
    }

    #[tokio::test]
    async fn what_was_sent_is_sent_again_and_then_the_rest() {
        let (more, frames) = mpsc::channel(4);
        more.send(data("one")).await.unwrap();
        let (mut first, mut kept) = partial(ReceiverStream::new(frames));
        assert_eq!(next(&mut first).await, "one");
        more.send(data("two")).await.unwrap();
        assert_eq!(next(&mut first).await, "two");
        drop(first);
        let mut second = kept.retry(&Arc::default()).await.unwrap();
        assert_eq!(next(&mut second).await, "one");
        drop(second);
        let third = kept.retry(&Arc::default()).await.unwrap();
        assert!(!third.is_end_stream());
        more.send(data("three")).await.unwrap();
        drop(more);
        assert_eq!(all(third).await, "onetwothree");
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_kept() {
        let frame = || data(vec![0; MAX_KEPT]);
        for (frames, is_kept) in [(3, true), (4, false)] {
            let (body, mut kept) =
                partial(tokio_stream::iter(std::iter::repeat_with(frame).take(frames)));
            assert_eq!(all(body).await.len(), frames * MAX_KEPT);
            let again = kept.retry(&Arc::default()).await;
            assert_eq!(again.is_some(), is_kept);
            if let Some(again) = again {
                assert_eq!(all(again).await.len(), frames * MAX_KEPT);
            }
        }
    }

    #[tokio::test]
    async fn an_answer_that_comes_early_cuts_nothing_off() {
        let (more, frames) = mpsc::channel(4);
        more.send(data("one")).await.unwrap();
        let (mut first, mut kept) = partial(ReceiverStream::new(frames));
        more.send(data("two")).await.unwrap();
        next(&mut first).await;
        next(&mut first).await;
        drop(first);
        let mut second = kept.retry(&Arc::default()).await.unwrap();
        assert_eq!(next(&mut second).await, "one");
        // Answered.
        drop(kept);
        more.send(data("three")).await.unwrap();
        drop(more);
        assert_eq!(all(second).await, "twothree");
    }

    #[tokio::test]
    async fn what_fails_fails_in_its_place_and_is_not_kept() {
        let frames = [data("one"), Err(Status::aborted("no more"))];
        let (mut body, mut kept) = partial(tokio_stream::iter(frames));
        assert_eq!(next(&mut body).await, "one");
        assert_eq!(body.frame().await.unwrap().unwrap_err().code(), tonic::Code::Aborted);
        drop(body);
        assert!(kept.retry(&Arc::default()).await.is_none());
    }

    #[test]
    fn a_head_is_made_again_with_every_header() {
        let mut req = Request::post("/a.B/C").body(Body::empty()).unwrap();
        for (name, value) in
            [("te", "trailers"), ("x-twice", "1"), ("x-twice", "2"), ("x-once", "3")]
        {
            req.headers_mut().append(name, HeaderValue::from_static(value));
        }
        let again = Head::of(&req).request(Body::empty());
        assert_eq!(
            (again.method(), again.uri(), again.headers()),
            (req.method(), req.uri(), req.headers())
        );
    }

    #[test]
    fn only_what_was_never_seen_counts() {
        let by_user: h2::Error = h2::Reason::REFUSED_STREAM.into();
        assert!(!was_not_processed(&by_user), "not said by the peer");
        assert!(!was_not_processed(&std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        assert!(!was_not_processed(&Status::unavailable("no")));
    }
}
