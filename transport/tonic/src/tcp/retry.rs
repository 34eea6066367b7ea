//! Calls over TCP, and how those are sent again that the server never saw.
//!
//! A server that ends in good order, or closes a connection for its age, says by GOAWAY which calls
//! it will answer. hyper reports the others in three ways, and in each of them no handler has seen
//! the message of the call:
//!
//! | what | when |
//! |---|---|
//! | `hyper::Error::is_canceled` | the connection closed before the call had its turn |
//! | `h2::Error`, a GOAWAY of the peer | it came before the call had a stream, or names an earlier stream as the last |
//! | `h2::Error`, a reset of the peer with REFUSED_STREAM | the server has not looked at the stream |
//!
//! Everything else, a connection that breaks above all, may have reached a handler and is the
//! caller's to judge. So is a connection that cannot be made: calls fail fast, as in tonic.
//!
//! What a body has ready is taken from it before the call goes to tonic. Of most calls that is all:
//! the call keeps its frames, and HTTP/2 is told with the last of them that nothing more follows,
//! where tonic needs another frame for that. The body of any other call travels, remembers what was
//! taken of it, and comes back when hyper lets go of it.

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

/// Times that a call is sent again. Each needs another connection to end under it.
const TIMES: usize = 4;
/// Bytes of a body after which no more of it is kept until the call is answered, but for two
/// frames; then it cannot be sent again. Before the server has seen a call, hyper takes no more of
/// its body than a window of HTTP/2 holds, whatever is left of the frame that fills it, and one
/// more frame when it finds out. Its servers have windows of a mebibyte.
const KEPT: usize = 1 << 20;
/// Frames that are taken of a body before the call begins: a message that is taken apart has two or
/// three.
const AHEAD: usize = 2;
/// Bytes of a body that is copied, so that a call which waits for its answer does not hold the
/// whole of its encoder's buffer: tonic's is 8 KiB.
const SHORT: usize = 256;

/// Data frames. An empty one is none: a message has a header.
type Frames = [Bytes; AHEAD];
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
    RetryCall { call: Turn::First(first), kept: Some((head, kept)), client }
}

/// A call in flight.
pub(crate) struct RetryCall {
    call: Turn,
    kept: Option<(Head, KeptBody)>,
    client: Arc<TcpClient>,
}

enum Turn {
    First(tonic::transport::channel::ResponseFuture),
    Later(Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>),
}

impl Future for RetryCall {
    type Output = Result<Response<Body>, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let response = loop {
            match &mut this.call {
                Turn::Later(call) => break ready!(call.as_mut().poll(cx))?,
                Turn::First(call) => match (ready!(Pin::new(call).poll(cx)), this.kept.take()) {
                    (Ok(response), _) => break response,
                    (Err(error), Some((head, kept))) if is_never_seen(&error) => {
                        let again = again(head, kept, error.into(), this.client.clone());
                        this.call = Turn::Later(Box::pin(again));
                    }
                    (Err(error), _) => return Poll::Ready(Err(error.into())),
                },
            }
        };
        this.client.saw_answer();
        Poll::Ready(Ok(response.map(|body| TcpRecvBody::body(body, &this.client.counters))))
    }
}

/// InFlight a call again that was lost with `error`, before the server has seen it.
async fn again(
    head: Head,
    mut kept: KeptBody,
    mut error: BoxError,
    client: Arc<TcpClient>,
) -> Result<Response<Body>, BoxError> {
    for turn in 1..=TIMES {
        let Some(body) = kept.again(&client.counters).await else {
            tracing::debug!(%error, "a call that the server has not seen is lost: too much of it is gone");
            break;
        };
        tracing::debug!(%error, turn, "a call over TCP that the server has not seen is sent again");
        client.counters.calls_moved.add(1);
        error = match client.channel.clone().oneshot(head.request(body)).await {
            Ok(response) => return Ok(response),
            Err(error) => error.into(),
        };
        if !is_never_seen(&*error) {
            break;
        }
    }
    Err(error)
}

/// Whether the error says that the server has not processed the call.
fn is_never_seen(error: &(dyn Error + 'static)) -> bool {
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

/// What a request has beside its body. Without extensions: tonic's own layers want none.
struct Head {
    method: Method,
    uri: Uri,
    headers: SmallVec<[(HeaderName, HeaderValue); 3]>,
}

impl Head {
    fn of(req: &Request<Body>) -> Self {
        let mut headers = SmallVec::new();
        // One by one: to collect two costs more.
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

/// A request's body while nobody has answered the call.
enum KeptBody {
    /// All of it.
    Whole(Frames),
    /// It is on its way, and comes back this way.
    Travels(oneshot::Receiver<Box<Begun>>),
}

impl KeptBody {
    /// The body from its beginning, if all of it is still there.
    async fn again(&mut self, counters: &Arc<Counters>) -> Option<Body> {
        let back = match self {
            KeptBody::Whole(frames) => return Some(whole(frames.clone())),
            // hyper drops the body of a call that it gives up.
            KeptBody::Travels(back) => back.await.ok()?,
        };
        let (body, kept) = RecoverableBody::send(back, counters.clone());
        *self = kept;
        Some(body)
    }
}

/// Takes of a body what it has ready: gives what is to be sent, and what is needed to send it
/// again.
fn begin(mut source: TcpSendBody, counters: &Arc<Counters>) -> (Body, KeptBody) {
    // Whoever polls it next is woken.
    let mut cx = Context::from_waker(Waker::noop());
    let (mut frames, mut taken) = (Frames::default(), 0);
    let behind = loop {
        // The task that this runs in may be one that others' calls need.
        let polled = catch_unwind(AssertUnwindSafe(|| source.poll(counters, &mut cx)));
        let panicked =
            |_| Poll::Ready(Some(Err(Status::internal("the request's stream panicked"))));
        match polled.unwrap_or_else(panicked) {
            Poll::Pending => break None,
            Poll::Ready(None) => {
                if taken == 1 && frames[0].len() <= SHORT {
                    frames[0] = Bytes::from_owner(SmallVec::<[u8; SHORT]>::from_slice(&frames[0]));
                }
                return (whole(frames.clone()), KeptBody::Whole(frames));
            }
            Poll::Ready(Some(Ok(frame))) if frame.is_data() && taken < AHEAD => {
                frames[taken] = frame.into_data().unwrap_or_default();
                taken += 1;
            }
            Poll::Ready(behind) => break behind,
        }
    };
    let sent = frames[..taken].to_vec();
    let last = sent.last().map_or(0, Bytes::len);
    let bytes = sent.iter().map(Bytes::len).sum();
    RecoverableBody::send(
        Box::new(Begun { source, sent, next: 0, bytes, last, behind, ended: false }),
        counters.clone(),
    )
}

fn whole(frames: Frames) -> Body {
    boxed(Whole(frames))
}

/// A body that is known to its end.
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
        // An exact one would become a header.
        SizeHint::default()
    }
}

/// A body of which something has been taken.
struct Begun {
    source: TcpSendBody,
    /// What has been taken of it: all, or what is still to be sent.
    sent: Vec<Bytes>,
    /// The next of `sent` to be sent.
    next: usize,
    bytes: usize,
    /// Bytes of the last frame.
    last: usize,
    /// What came behind `sent` and has not been looked at.
    behind: Option<Result<Frame<Bytes>, Status>>,
    ended: bool,
}

/// A body on its way, which comes return_tx when it is dropped.
struct RecoverableBody {
    /// Always there, until this is dropped.
    begun: Option<Box<Begun>>,
    /// None: not all of it is there any more, or the call has been answered.
    return_tx: Option<oneshot::Sender<Box<Begun>>>,
    counters: Arc<Counters>,
}

impl RecoverableBody {
    fn send(mut begun: Box<Begun>, counters: Arc<Counters>) -> (Body, KeptBody) {
        begun.next = 0;
        let (return_tx, back) = oneshot::channel();
        (
            boxed(RecoverableBody { begun: Some(begun), return_tx: Some(return_tx), counters }),
            KeptBody::Travels(back),
        )
    }
}

impl Drop for RecoverableBody {
    fn drop(&mut self) {
        if let (Some(begun), Some(return_tx)) = (self.begun.take(), self.return_tx.take()) {
            // Nobody may want it any more.
            let _ = return_tx.send(begun);
        }
    }
}

impl HttpBody for RecoverableBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Polled> {
        let RecoverableBody { begun, return_tx, counters } = &mut *self;
        let Some(begun) = begun else { return Poll::Ready(None) };
        if return_tx.as_ref().is_some_and(oneshot::Sender::is_closed) {
            *return_tx = None;
        }
        if return_tx.is_none() && begun.next > 0 {
            begun.sent.drain(..mem::take(&mut begun.next));
        }
        if let Some(bytes) = begun.sent.get(begun.next) {
            begun.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(bytes.clone()))));
        }
        if begun.ended {
            return Poll::Ready(None);
        }
        let frame = match begun.behind.take() {
            Some(frame) => Some(frame),
            None => ready!(begun.source.poll(counters, cx)),
        };
        match frame.as_ref().map(|frame| frame.as_ref().map(Frame::data_ref)) {
            None => begun.ended = true,
            Some(Ok(Some(data))) if return_tx.is_some() && begun.bytes - begun.last <= KEPT => {
                begun.last = data.len();
                begun.bytes += begun.last;
                begun.sent.push(data.clone());
                begun.next += 1;
            }
            Some(_) => {
                *return_tx = None;
                begun.next = 0;
                begun.sent = Vec::new();
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.begun.as_ref().is_none_or(|begun| {
            let all = begun.next >= begun.sent.len() && begun.behind.is_none();
            all && (begun.ended || begun.source.is_end_stream())
        })
    }

    fn size_hint(&self) -> SizeHint {
        // That of a body which is short of its segments says nothing.
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

    fn begun(frames: impl Stream<Item = Item> + Send + 'static) -> (Body, KeptBody) {
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
            let (mut body, mut kept) = begun(tokio_stream::iter(frames.clone()).map(data));
            assert!(matches!(kept, KeptBody::Whole(_)));
            for frame in &frames {
                assert!(!body.is_end_stream());
                assert_eq!(body.size_hint().exact(), None, "it would become a header");
                assert_eq!(next(&mut body).await, frame);
            }
            // HTTP/2 says so with the last frame.
            assert!(body.is_end_stream());
            let again = kept.again(&Arc::default()).await.unwrap();
            assert_eq!(all(again).await, frames.concat());
        }
    }

    #[tokio::test]
    async fn what_was_sent_is_sent_again_and_then_the_rest() {
        let (more, frames) = mpsc::channel(4);
        more.send(data("one")).await.unwrap();
        let (mut first, mut kept) = begun(ReceiverStream::new(frames));
        assert_eq!(next(&mut first).await, "one");
        more.send(data("two")).await.unwrap();
        assert_eq!(next(&mut first).await, "two");
        drop(first);
        let mut second = kept.again(&Arc::default()).await.unwrap();
        assert_eq!(next(&mut second).await, "one");
        drop(second);
        let third = kept.again(&Arc::default()).await.unwrap();
        assert!(!third.is_end_stream());
        more.send(data("three")).await.unwrap();
        drop(more);
        assert_eq!(all(third).await, "onetwothree");
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_kept() {
        let frame = || data(vec![0; KEPT]);
        for (frames, is_kept) in [(3, true), (4, false)] {
            let (body, mut kept) =
                begun(tokio_stream::iter(std::iter::repeat_with(frame).take(frames)));
            assert_eq!(all(body).await.len(), frames * KEPT);
            let again = kept.again(&Arc::default()).await;
            assert_eq!(again.is_some(), is_kept);
            if let Some(again) = again {
                assert_eq!(all(again).await.len(), frames * KEPT);
            }
        }
    }

    #[tokio::test]
    async fn an_answer_that_comes_early_cuts_nothing_off() {
        let (more, frames) = mpsc::channel(4);
        more.send(data("one")).await.unwrap();
        let (mut first, mut kept) = begun(ReceiverStream::new(frames));
        more.send(data("two")).await.unwrap();
        next(&mut first).await;
        next(&mut first).await;
        drop(first);
        let mut second = kept.again(&Arc::default()).await.unwrap();
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
        let (mut body, mut kept) = begun(tokio_stream::iter(frames));
        assert_eq!(next(&mut body).await, "one");
        assert_eq!(body.frame().await.unwrap().unwrap_err().code(), tonic::Code::Aborted);
        drop(body);
        assert!(kept.again(&Arc::default()).await.is_none());
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
        assert!(!is_never_seen(&by_user), "not said by the peer");
        assert!(!is_never_seen(&std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        assert!(!is_never_seen(&Status::unavailable("no")));
    }
}
