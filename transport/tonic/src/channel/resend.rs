//! Calls over TCP that the server never saw are sent again.
//!
//! A server that ends in good order, or closes a connection for its age, says by GOAWAY which calls it will answer. hyper
//! reports the others in three ways, and in each of them no handler has seen the message of the call:
//!
//! | what | when |
//! |---|---|
//! | `hyper::Error::is_canceled` | the connection closed before the call had its turn |
//! | `h2::Error`, a GOAWAY of the peer | it came before the call had a stream, or names an earlier stream as the last |
//! | `h2::Error`, a reset of the peer with REFUSED_STREAM | the server has not looked at the stream |
//!
//! Everything else, a connection that breaks above all, may have reached a handler and is the caller's to judge. So is a
//! connection that cannot be made: calls fail fast, as in tonic.

use super::{BoxError, shared::Shared};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Uri, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};
use tonic::{Status, body::Body};
use tower::ServiceExt;

/// Times that a call is sent again. Each needs another connection to end under it.
const TIMES: usize = 4;
/// Bytes of a body after which no more of it is kept until the call is answered, but for two frames; then it cannot be sent
/// again. Before the server has seen a call, hyper takes no more of its body than a window of HTTP/2 holds, whatever is left
/// of the frame that fills it, and one more frame when it finds out. Its servers have windows of a mebibyte.
const KEPT: usize = 1 << 20;

/// Splits a request in one to send, and what is needed to send it again.
pub(super) fn keep(req: Request<Body>) -> (Request<Body>, Kept) {
    let (parts, body) = req.into_parts();
    let state =
        State { body, sent: Vec::new(), next: 0, bytes: 0, last: 0, whole: true, ended: false, turn: 0 };
    let (method, uri, headers) = (parts.method.clone(), parts.uri.clone(), parts.headers.clone());
    let kept = Kept { method, uri, headers, state: Arc::new(Mutex::new(state)) };
    (Request::from_parts(parts, kept.body(0)), kept)
}

/// A request that can be sent again while nobody has answered it.
pub(super) struct Kept {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    state: Arc<Mutex<State>>,
}

struct State {
    body: Body,
    /// What has been taken of it, if `whole`: all of it.
    sent: Vec<Bytes>,
    /// The next of `sent` to be sent again.
    next: usize,
    bytes: usize,
    /// Bytes of the last frame.
    last: usize,
    whole: bool,
    ended: bool,
    /// Of the request that the body belongs to. Earlier ones get nothing more of it.
    turn: usize,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    fn body(&self, turn: usize) -> Body {
        Body::new(Replay { state: self.state.clone(), turn })
    }

    /// Without extensions: tonic's own layers want none.
    fn request(&self, turn: usize) -> Request<Body> {
        let mut request = Request::new(self.body(turn));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = self.headers.clone();
        request
    }

    /// Waits for the answer; sends the call again where it was never seen.
    pub(super) async fn finish<E: Into<BoxError>>(
        self,
        call: impl Future<Output = Result<Response<Body>, E>>,
        shared: &Shared,
    ) -> Result<Response<Body>, BoxError> {
        let mut result = call.await.map_err(Into::into);
        for turn in 1..=TIMES {
            let Err(error) = &result else { break };
            if !is_never_seen(&**error) {
                break;
            }
            {
                let mut state = lock(&self.state);
                if !state.whole {
                    tracing::debug!(%error, kept = state.bytes, "a call that the server has not seen is lost: too much of it is gone");
                    break;
                }
                (state.turn, state.next) = (turn, 0);
            }
            tracing::debug!(%error, turn, "a call over TCP that the server has not seen is sent again");
            shared.counters.calls_moved.add(1);
            result = shared.tcp.clone().oneshot(self.request(turn)).await.map_err(Into::into);
        }
        // What has been sent is not asked for any more; the rest still is to be sent.
        let mut state = lock(&self.state);
        state.whole = false;
        let next = std::mem::take(&mut state.next);
        let sent: Vec<Bytes> = state.sent.drain(..next).collect();
        drop(state);
        drop(sent);
        result
    }
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

/// A body that begins with what an earlier request has sent of it.
struct Replay {
    state: Arc<Mutex<State>>,
    turn: usize,
}

impl HttpBody for Replay {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.turn != self.turn {
            return Poll::Ready(Some(Err(Status::cancelled("the call was sent again"))));
        }
        if let Some(bytes) = state.sent.get_mut(state.next) {
            state.next += 1;
            let bytes = if state.whole { bytes.clone() } else { std::mem::take(bytes) };
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut state.body).poll_frame(cx));
        match frame.as_ref().map(|frame| frame.as_ref().map(Frame::data_ref)) {
            None => state.ended = true,
            Some(Ok(Some(data))) if state.whole && state.bytes - state.last <= KEPT => {
                state.last = data.len();
                state.bytes += state.last;
                state.sent.push(data.clone());
                state.next += 1;
            }
            Some(_) => {
                state.whole = false;
                state.next = 0;
                state.sent = Vec::new();
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let state = lock(&self.state);
        state.next >= state.sent.len() && (state.ended || state.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let state = lock(&self.state);
        match state.sent.len() {
            0 if !state.ended => state.body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    fn in_two(first: &'static str, second: &'static str) -> Body {
        let stream =
            tokio_stream::iter([first, second]).map(|part| Ok::<_, Status>(Frame::data(part.into())));
        use tokio_stream::StreamExt;
        Body::new(http_body_util::StreamBody::new(stream))
    }

    #[tokio::test]
    async fn what_was_sent_is_sent_again_and_then_the_rest() {
        let (first, kept) = keep(Request::new(in_two("one", "two")));
        let mut first = first.into_body();
        assert_eq!(first.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        let turn = |turn| {
            let mut state = lock(&kept.state);
            (state.turn, state.next) = (turn, 0);
        };
        turn(1);
        let second = kept.request(1).into_body().collect().await.unwrap().to_bytes();
        assert_eq!(second, "onetwo");
        // The first gets nothing more of it.
        assert_eq!(first.frame().await.unwrap().unwrap_err().code(), tonic::Code::Cancelled);
        turn(2);
        let third = kept.request(2).into_body();
        assert!(!third.is_end_stream());
        assert_eq!(third.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_kept() {
        let long = |frames| {
            let frame = || Ok::<_, Status>(Frame::data(Bytes::from(vec![0; KEPT])));
            let stream = tokio_stream::iter(std::iter::repeat_with(frame).take(frames));
            Body::new(http_body_util::StreamBody::new(stream))
        };
        for (frames, whole) in [(3, true), (4, false)] {
            let (req, kept) = keep(Request::new(long(frames)));
            assert_eq!(req.into_body().collect().await.unwrap().to_bytes().len(), frames * KEPT);
            assert_eq!(lock(&kept.state).whole, whole);
            assert_eq!(lock(&kept.state).sent.is_empty(), !whole);
        }
    }

    #[tokio::test]
    async fn an_answer_that_comes_early_cuts_nothing_off() {
        let (first, kept) = keep(Request::new(in_two("one", "two")));
        let mut first = first.into_body();
        first.frame().await.unwrap().unwrap();
        {
            let mut state = lock(&kept.state);
            (state.turn, state.next) = (1, 0);
        }
        let second = kept.request(1).into_body();
        let shared = crate::channel::shared::Shared::new(
            tonic::transport::Endpoint::from_static("http://unused").connect_lazy(),
            Arc::default(),
            crate::channel::shared::State::Idle,
            false,
            std::time::Duration::ZERO,
            None,
            Arc::default(),
        );
        let answer = std::future::ready(Ok::<_, Status>(Response::new(Body::empty())));
        kept.finish(answer, &shared).await.unwrap();
        assert_eq!(second.collect().await.unwrap().to_bytes(), "onetwo");
    }

    #[test]
    fn only_what_was_never_seen_counts() {
        let by_user: h2::Error = h2::Reason::REFUSED_STREAM.into();
        assert!(!is_never_seen(&by_user), "not said by the peer");
        assert!(!is_never_seen(&std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        assert!(!is_never_seen(&Status::unavailable("no")));
    }
}
