//! Calls over TCP, with transparent retry (gRFC A6) of calls that the server has not processed.
//!
//! A server that shuts down gracefully, or closes a connection because of its age, sends a GOAWAY
//! that says which calls the server will answer. hyper reports the other calls in three ways. In
//! each case no handler has seen the call:
//!
//! | error | meaning |
//! |---|---|
//! | `hyper::Error::is_canceled` | the connection closed before the call was sent |
//! | `h2::Error`, the peer's GOAWAY | the call had no stream, or a stream after the last stream that the server answers |
//! | `h2::Error`, the peer's reset with REFUSED_STREAM | the stream was not processed |
//!
//! After any other error, such as a broken connection, a handler may have seen the call, so the
//! caller gets the error. A connection that cannot be made is not retried either: calls fail fast,
//! as in tonic.
//!
//! A body is read when hyper's connection task sends it, as in tonic, so the caller's task does not
//! encode. The data is recorded, and returns to the call when hyper drops the body. While one of
//! the first frames is sent, the next frame is read ahead, so that the last frame of most calls
//! carries END_STREAM. tonic sends an additional frame for END_STREAM.

use std::error::Error;
use std::future::{Future, poll_fn};
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use smallvec::SmallVec;
use tokio::task::coop;
use tonic::Status;
use tonic::body::Body;
use tower::{Service, ServiceExt};

use crate::codec::is_plain_grpc;
use crate::error::BoxError;
use crate::tcp::body::{TcpRecvBody, TcpSendBody};
use crate::tcp::{TcpClient, boxed};
use crate::telemetry::metrics::CallTimer;
use crate::telemetry::stats::Counters;

/// Maximum number of retries of a call. Each retry means that one more connection has ended during
/// the call, or has refused the call's stream.
const MAX_RETRIES: usize = 4;
/// Number of bytes of a body to keep for a retry, without the last two frames. A call that has sent
/// more is not retried. Before the server processes a call, hyper reads at most an HTTP/2 window of
/// its body, the rest of the frame that fills the window, and one more frame. The windows of
/// hyper's servers are 1 MiB.
const MAX_KEPT: usize = 1 << 20;
/// Maximum number of a body's frames that are sent with the next frame read ahead. A message that
/// is sent in segments has two or three frames.
const MAX_READ_AHEAD: usize = 3;
/// Maximum number of bytes of a body that are kept as a copy. A copy lets a call that waits for its
/// response free its encoder's buffer, which has 8 KiB in tonic.
const MAX_COPIED: usize = 128;

/// Units of the budget that tokio gives a task for one turn.
const UNITS_PER_TURN: usize = 128;
/// If the number of calls in flight is in this range, the calls are sent in parts of [`PART`]
/// calls: see [`spend_budget`].
const PARTED: Range<usize> = 48..192;
const PART: usize = 16;

type Polled = Option<Result<Frame<Bytes>, Status>>;

/// Makes a call on a connection in whose queue the call has a place.
pub(crate) fn call(
    tcp: &mut tonic::transport::Channel,
    mut req: Request<Body>,
    client: Arc<TcpClient>,
    timer: CallTimer,
) -> RetryCall {
    let body = mem::take(req.body_mut());
    let source = (!body.is_end_stream()).then(|| {
        let apart = is_plain_grpc(req.headers());
        TcpSendBody::new(body, client.methods.call(req.uri()), apart)
    });
    let kept = Arc::new(Kept::new(Head::of(&req), source, client));
    *req.body_mut() = kept.body();
    RetryCall { call: Attempt::First(tcp.call(req)), kept: Some(kept), timer }
}

/// A call in flight.
pub(crate) struct RetryCall {
    call: Attempt,
    /// `None` once the call has its response.
    kept: Option<Arc<Kept>>,
    timer: CallTimer,
}

enum Attempt {
    First(tonic::transport::channel::ResponseFuture),
    Retry(Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>),
}

impl Future for RetryCall {
    type Output = Result<Response<Body>, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let result = loop {
            match &mut this.call {
                Attempt::Retry(call) => break ready!(call.as_mut().poll(cx)),
                Attempt::First(call) => match (ready!(Pin::new(call).poll(cx)), &this.kept) {
                    (Ok(response), _) => break Ok(response),
                    (Err(error), Some(kept)) if was_not_processed(&error) => {
                        let retry = retry(kept.clone(), error.into());
                        this.call = Attempt::Retry(Box::pin(retry));
                    }
                    (Err(error), _) => break Err(error.into()),
                },
            }
        };
        let response = match result {
            Ok(response) => response,
            Err(error) => {
                this.timer.fail(&*error);
                return Poll::Ready(Err(error));
            }
        };
        // The rest of the body need not be kept.
        let Some(kept) = this.kept.take() else { return Poll::Ready(Ok(response)) };
        kept.client.saw_answer();
        let mut timer = mem::take(&mut this.timer);
        timer.end_with(response.headers());
        let counters = &kept.client.counters;
        Poll::Ready(Ok(response.map(|body| TcpRecvBody::timed(body, counters, timer))))
    }
}

/// Retries a call that failed with `error` before the server processed it.
async fn retry(kept: Arc<Kept>, mut error: BoxError) -> Result<Response<Body>, BoxError> {
    let client = &kept.client;
    for turn in 1..=MAX_RETRIES {
        let Some(body) = kept.retry().await else {
            tracing::debug!(%error, "a call that the server has not seen is lost: its body is not kept");
            break;
        };
        tracing::debug!(%error, turn, "a call over TCP that the server has not seen is sent again");
        client.counters.calls_moved.add(1);
        error = match client.channel.clone().oneshot(kept.head.request(body)).await {
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

/// A request without its body and extensions. tonic's own layers do not use extensions.
struct Head {
    method: Method,
    uri: Uri,
    headers: SmallVec<[(HeaderName, HeaderValue); 3]>,
}

impl Head {
    fn of(req: &Request<Body>) -> Self {
        let mut headers = SmallVec::new();
        // A loop costs less than `collect` for two headers.
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

/// A request that has no response yet, shared by the call and the body that hyper sends.
struct Kept {
    head: Head,
    client: Arc<TcpClient>,
    body: Mutex<KeptBody>,
}

/// A body, and the data that was read from it.
struct KeptBody {
    sent: Sent,
    /// `None` once the whole body was read.
    rest: Option<Rest>,
    /// Number of frames that were read.
    count: usize,
    /// Whether `sent` still has all data that was read.
    is_whole: bool,
    /// Whether hyper has the body and reads it.
    in_flight: bool,
    /// A retry that waits until hyper has read the body to its end, or dropped it.
    retry: Option<Waker>,
}

impl Kept {
    fn new(head: Head, source: Option<TcpSendBody>, client: Arc<TcpClient>) -> Self {
        let rest = source.map(|source| Rest { source, read_ahead: None });
        let sent = Sent::default();
        let body = KeptBody { sent, rest, count: 0, is_whole: true, in_flight: false, retry: None };
        Kept { head, client, body: Mutex::new(body) }
    }

    fn lock(&self) -> MutexGuard<'_, KeptBody> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body for hyper to send.
    fn body(self: &Arc<Self>) -> Body {
        let mut body = self.lock();
        let at_end = body.is_at_end();
        body.in_flight = !at_end;
        drop(body);
        boxed(RecoverableBody { at_end, kept: self.clone() })
    }

    /// Returns the body from its beginning, if all sent data was kept.
    ///
    /// Cancel safe.
    async fn retry(self: &Arc<Self>) -> Option<Body> {
        // Wait until hyper has dropped the body, which it does after a call has failed.
        poll_fn(|cx| {
            let mut body = self.lock();
            match body.in_flight {
                true => {
                    body.retry = Some(cx.waker().clone());
                    Poll::Pending
                }
                false => Poll::Ready(()),
            }
        })
        .await;
        let mut body = self.lock();
        if !body.is_whole {
            return None;
        }
        body.sent.rewind();
        drop(body);
        Some(self.body())
    }
}

impl KeptBody {
    fn is_at_end(&self) -> bool {
        self.rest.is_none() && self.sent.next >= self.sent.frames.len()
    }

    fn poll(&mut self, client: &Arc<TcpClient>, cx: &mut Context<'_>) -> Poll<Polled> {
        if let Some(bytes) = self.sent.pop() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let counters = &*client.counters;
        let frame = ready!(rest.poll(counters, cx));
        match frame.as_ref().map(|frame| frame.as_ref().ok().and_then(Frame::data_ref)) {
            None => self.rest = None,
            Some(Some(data)) => {
                self.count += 1;
                if self.count == 1 {
                    // Each call in flight has a reference to the client.
                    spend_budget(Arc::strong_count(client), cx);
                }
                if self.is_whole && !self.sent.record(data, self.count == 1) {
                    self.forget();
                }
                if self.count <= MAX_READ_AHEAD {
                    self.read_ahead(counters, cx);
                }
            }
            // The frame is an error, or trailers.
            Some(None) => self.forget(),
        }
        Poll::Ready(frame)
    }

    /// Reads the next frame if the body has one ready.
    fn read_ahead(&mut self, counters: &Counters, cx: &mut Context<'_>) {
        let Some(rest) = &mut self.rest else { return };
        match rest.poll(counters, cx) {
            Poll::Pending => {}
            Poll::Ready(None) => self.rest = None,
            Poll::Ready(frame) => rest.read_ahead = frame.map(Box::new),
        }
    }

    /// Records that hyper does not read the body any further. Returns the retry to wake.
    fn leave(&mut self) -> Option<Waker> {
        self.in_flight = false;
        self.retry.take()
    }

    /// Keeps only the data that is still to be sent.
    fn forget(&mut self) {
        self.is_whole = false;
        self.sent.forget();
    }
}

/// The data that was read from a body.
#[derive(Default)]
struct Sent {
    /// The first frame, if it is short.
    short: SmallVec<[u8; MAX_COPIED]>,
    /// The frames after `short`. While the body can be retried, the list has all frames, and
    /// otherwise only the frames that are not sent yet.
    frames: Vec<Bytes>,
    /// Index into `frames` of the next frame to send.
    next: usize,
    bytes: usize,
    /// Length of the last frame.
    last: usize,
}

impl Sent {
    /// Records a frame that is being sent. Returns false if too many bytes are kept already.
    fn record(&mut self, frame: &Bytes, is_first: bool) -> bool {
        if self.bytes - self.last > MAX_KEPT {
            return false;
        }
        self.last = frame.len();
        self.bytes += self.last;
        if is_first && self.last <= MAX_COPIED {
            self.short.extend_from_slice(frame);
        } else {
            self.frames.push(frame.clone());
            self.next += 1;
        }
        true
    }

    /// Starts again with the first frame.
    fn rewind(&mut self) {
        if !self.short.is_empty() {
            self.frames.insert(0, Bytes::copy_from_slice(&self.short));
            self.short.clear();
        }
        self.next = 0;
    }

    fn pop(&mut self) -> Option<Bytes> {
        let frame = self.frames.get(self.next)?.clone();
        self.next += 1;
        Some(frame)
    }

    /// Keeps only the data that is still to be sent.
    fn forget(&mut self) {
        self.short.clear();
        self.frames.drain(..mem::take(&mut self.next));
    }
}

/// The part of a body that was not read yet.
struct Rest {
    source: TcpSendBody,
    /// The frame after the sent frames, read ahead.
    read_ahead: Option<Box<Result<Frame<Bytes>, Status>>>,
}

impl Rest {
    fn poll(&mut self, counters: &Counters, cx: &mut Context<'_>) -> Poll<Polled> {
        if let Some(frame) = self.read_ahead.take() {
            return Poll::Ready(Some(*frame));
        }
        // A panic in the caller's stream must not end hyper's task, which serves other calls.
        let polled = catch_unwind(AssertUnwindSafe(|| self.source.poll(counters, cx)));
        let panicked =
            |_| Poll::Ready(Some(Err(Status::internal("the request's stream panicked"))));
        polled.unwrap_or_else(panicked)
    }
}

/// A body that hyper sends.
struct RecoverableBody {
    kept: Arc<Kept>,
    /// Whether hyper has received the whole body.
    at_end: bool,
}

impl Drop for RecoverableBody {
    fn drop(&mut self) {
        // After the end of this body, a retry may own the kept body.
        if self.at_end {
            return;
        }
        let retry = self.kept.lock().leave();
        if let Some(retry) = retry {
            retry.wake();
        }
    }
}

/// Makes hyper's task yield after a part of the calls in flight, by spending more of the task's
/// budget for each call. A task has 128 units per turn, and a call costs one unit. When the task
/// yields, the connection sends its requests, and the server works on these requests while the
/// client makes the next requests. If a connection sends all calls in flight together, client and
/// server take turns waiting for each other. With few calls in flight, the additional writes cost
/// more than they gain. Many calls form parts of 128 without this function. See
/// docs/performance-log.md, "tonic-rdma over TCP".
fn spend_budget(in_flight: usize, cx: &mut Context<'_>) {
    if !PARTED.contains(&in_flight) {
        return;
    }
    for _ in 1..UNITS_PER_TURN / PART {
        if !coop::has_budget_remaining() {
            break;
        }
        if let Poll::Ready(spent) = coop::poll_proceed(cx) {
            spent.made_progress();
        }
    }
}

impl HttpBody for RecoverableBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Polled> {
        if self.at_end {
            return Poll::Ready(None);
        }
        // Without another reference, the call has its response or was dropped.
        let is_alone = Arc::strong_count(&self.kept) == 1;
        let mut body = self.kept.lock();
        if is_alone && (body.is_whole || body.sent.next > 0) {
            body.forget();
        }
        let frame = ready!(body.poll(&self.kept.client, cx));
        let at_end = body.is_at_end();
        let retry = if at_end { body.leave() } else { None };
        drop(body);
        self.at_end = at_end;
        if let Some(retry) = retry {
            retry.wake();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.at_end
    }

    fn size_hint(&self) -> SizeHint {
        // Return no exact size, because the size hint of the source does not include the segments,
        // and an exact size would become a content-length header.
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

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

    fn partial(frames: impl Stream<Item = Item> + Send + 'static) -> (Body, Arc<Kept>) {
        let methods = Arc::new(Methods::default());
        let call = methods.call(&Uri::from_static("/a.B/C"));
        let source = TcpSendBody::new(Body::new(StreamBody::new(frames)), call, false);
        let channel = tonic::transport::Endpoint::from_static("http://nobody").connect_lazy();
        let client = Arc::new(TcpClient::new(channel, Arc::default(), methods));
        let kept = Arc::new(Kept::new(Head::of(&Request::default()), Some(source), client));
        (kept.body(), kept)
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
            let (mut body, kept) = partial(tokio_stream::iter(frames.clone()).map(data));
            for frame in &frames {
                assert!(!body.is_end_stream());
                assert_eq!(body.size_hint().exact(), None, "it would become a header");
                assert_eq!(next(&mut body).await, frame);
            }
            if frames.is_empty() {
                assert!(body.frame().await.is_none());
            }
            // HTTP/2 reports the end with the last frame.
            assert!(body.is_end_stream());
            let again = kept.retry().await.unwrap();
            assert_eq!(all(again).await, frames.concat());
        }
    }

    #[tokio::test]
    async fn nothing_is_read_before_hyper_sends_it() {
        let read = Arc::new(AtomicUsize::new(0));
        let counts = read.clone();
        let frames = tokio_stream::iter(["one", "two", "three", "four", "five"])
            .map(data)
            .map(move |frame| (counts.fetch_add(1, Relaxed), frame).1);
        let (mut body, kept) = partial(frames);
        assert_eq!(read.load(Relaxed), 0);
        // One frame is read ahead to find the end, but only at the beginning of a long stream.
        for (sent, read_by_then) in [(1, 2), (2, 3), (3, 4), (4, 4), (5, 5)] {
            next(&mut body).await;
            assert_eq!(read.load(Relaxed), read_by_then, "after {sent}");
        }
        drop(body);
        assert_eq!(all(kept.retry().await.unwrap()).await, "onetwothreefourfive");
    }

    #[tokio::test]
    async fn a_retry_waits_until_hyper_has_dropped_the_body() {
        let (body, kept) = partial(tokio_stream::iter([data("one"), data("two")]));
        let waiting = kept.clone();
        let retry = tokio::spawn(async move { waiting.retry().await });
        tokio::task::yield_now().await;
        assert!(!retry.is_finished());
        drop(body);
        assert_eq!(all(retry.await.unwrap().unwrap()).await, "onetwo");
    }

    #[tokio::test]
    async fn a_stream_that_panics_is_an_error_of_its_call() {
        let frames = tokio_stream::iter([1]).map(|_| -> Item { panic!("on purpose") });
        let (mut body, _kept) = partial(frames);
        assert_eq!(body.frame().await.unwrap().unwrap_err().code(), tonic::Code::Internal);
    }

    /// The number of calls that hyper's task sends in one turn.
    async fn calls_in_a_turn(in_flight: usize) -> usize {
        tokio::task::yield_now().await;
        poll_fn(|cx| {
            for calls in 0.. {
                // hyper takes a call.
                let Poll::Ready(taken) = coop::poll_proceed(cx) else { return Poll::Ready(calls) };
                taken.made_progress();
                spend_budget(in_flight, cx);
            }
            Poll::Pending
        })
        .await
    }

    #[tokio::test]
    async fn many_calls_are_sent_in_parts() {
        for (in_flight, calls) in [(1, 128), (47, 128), (48, 16), (64, 16), (191, 16), (192, 128)] {
            let counted = tokio::spawn(calls_in_a_turn(in_flight)).await.unwrap();
            assert_eq!(counted, calls, "{in_flight} in flight");
        }
        assert_eq!(tokio::spawn(calls_in_a_turn(10_000)).await.unwrap(), 128);
    }

    #[tokio::test]
    async fn what_was_sent_is_sent_again_and_then_the_rest() {
        let (more, frames) = mpsc::channel(4);
        more.send(data("one")).await.unwrap();
        let (mut first, kept) = partial(ReceiverStream::new(frames));
        assert_eq!(next(&mut first).await, "one");
        more.send(data("two")).await.unwrap();
        assert_eq!(next(&mut first).await, "two");
        drop(first);
        let mut second = kept.retry().await.unwrap();
        assert_eq!(next(&mut second).await, "one");
        drop(second);
        let third = kept.retry().await.unwrap();
        assert!(!third.is_end_stream());
        more.send(data("three")).await.unwrap();
        drop(more);
        assert_eq!(all(third).await, "onetwothree");
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_kept() {
        let frame = || data(vec![0; MAX_KEPT]);
        for (frames, is_kept) in [(3, true), (4, false)] {
            let (body, kept) =
                partial(tokio_stream::iter(std::iter::repeat_with(frame).take(frames)));
            assert_eq!(all(body).await.len(), frames * MAX_KEPT);
            let again = kept.retry().await;
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
        let (mut first, kept) = partial(ReceiverStream::new(frames));
        more.send(data("two")).await.unwrap();
        next(&mut first).await;
        next(&mut first).await;
        drop(first);
        let mut second = kept.retry().await.unwrap();
        assert_eq!(next(&mut second).await, "one");
        // The call was answered.
        drop(kept);
        more.send(data("three")).await.unwrap();
        drop(more);
        assert_eq!(all(second).await, "twothree");
    }

    #[tokio::test]
    async fn what_fails_fails_in_its_place_and_is_not_kept() {
        let frames = [data("one"), Err(Status::aborted("no more"))];
        let (mut body, kept) = partial(tokio_stream::iter(frames));
        assert_eq!(next(&mut body).await, "one");
        assert_eq!(body.frame().await.unwrap().unwrap_err().code(), tonic::Code::Aborted);
        drop(body);
        assert!(kept.retry().await.is_none());
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
