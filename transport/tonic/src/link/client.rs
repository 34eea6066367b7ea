//! Calls out.

use std::fmt;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use tokio::sync::Notify;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::{AnyLink, Link, PeerInfo};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{SendError, Settings, Side};
use tracing::Instrument;

use super::LinkOptions;
use super::drive::drive;
use super::headers::{self, Origin};
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::shared::Shared;
use super::stream::{Fault, StreamRef, wait_for};
use crate::codec::{self, HEADER, Intake, Method, Methods, Tap};
use crate::reason::{Reason, ReasonCode};
use crate::spans;
use crate::stats::Counters;

/// Why a call got no response.
#[derive(Debug)]
pub(crate) enum CallError {
    /// Nothing was transmitted: the request may go another way.
    NotSent(Box<Request<Body>>, Reason),
    /// The call failed.
    Status(Status),
}

/// The client's end of an open connection. When the last clone is gone, the connection takes no new calls and closes
/// when those in flight have ended.
#[derive(Clone)]
pub(crate) struct FastClient {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
    origin: Arc<Origin>,
}

/// Asks the driver to end.
struct Handle(Arc<Notify>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl fmt::Debug for FastClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FastClient").field("peer", &self.shared.peer).finish_non_exhaustive()
    }
}

impl FastClient {
    /// Starts the driver of a connection that stands, `peer` being what the accept said. Calls on it go to `origin`. Within a
    /// tokio runtime.
    #[allow(clippy::too_many_arguments, reason = "each is a different thing")]
    pub(crate) fn start(
        link: AnyLink,
        pool: Pool,
        peer: Settings,
        options: &LinkOptions,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
        origin: Arc<Origin>,
    ) -> FastClient {
        let span = spans::connection(Side::Client, link.peer());
        let shared = Shared::new(Side::Client, link, pool, peer, options, counters, methods);
        let stop = Arc::new(Notify::new());
        let drain = {
            let stop = stop.clone();
            async move { stop.notified().await }
        };
        tokio::spawn(drive(shared.clone(), |_, _| (), drain).instrument(span));
        FastClient { shared, handle: Arc::new(Handle(stop)), origin }
    }

    /// Both ends, for messages.
    pub(crate) fn peer(&self) -> &PeerInfo {
        &self.shared.peer
    }

    /// Whether new calls may be made on it.
    pub(crate) fn is_open(&self) -> bool {
        self.ending().is_none()
    }

    /// Why no new calls may be made on it; `None` while they may.
    pub(crate) fn ending(&self) -> Option<Reason> {
        let inner = self.shared.lock();
        let going =
            || Reason::from_peer(ReasonCode::GoAway, "the server takes no new calls on this connection");
        inner.end_reason().cloned().or_else(|| (!inner.conn.takes_streams()).then(going))
    }

    /// Resolves when the connection is gone, with the reason.
    pub(crate) fn closed(&self) -> impl Future<Output = Reason> + Send + 'static {
        let mut closed = self.shared.closed.subscribe();
        async move {
            let reason = closed.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
            reason.unwrap_or_else(|| Reason::new(ReasonCode::LinkLost, "the driver is gone"))
        }
    }

    /// Takes no new calls; closes when those in flight have ended.
    pub(crate) fn shutdown(&self) {
        self.handle.0.notify_one();
    }

    /// Makes a call: the response's head, then its body streams. Waits for a free stream when the peer's limit is reached.
    /// Dropping the future cancels the call.
    ///
    /// What does not wait is done here and not in the future, which so has nothing to hold twice.
    pub(crate) fn call(
        &self,
        request: Request<Body>,
    ) -> impl Future<Output = Result<Response<Body>, CallError>> + Send + use<> {
        let shared = self.shared.clone();
        let (parts, body) = request.into_parts();
        let block = headers::encode_request(&parts, &self.origin);
        let call = shared.methods.call(&parts.uri);
        let method = call.method().clone();
        let apart = codec::is_plain_grpc(&parts.headers);
        let mut out = Outgoing::restorable(body, Tap::new(call, shared.eager_limit - HEADER, apart));
        async move {
            let block = block.map_err(CallError::Status)?;
            // What is ready goes with the head: a small unary call is one SEND.
            poll_fn(|cx| {
                out.gather(cx);
                Poll::Ready(())
            })
            .await;
            let answer = match open(&shared, block, &mut out).await {
                Ok(stream) => match poll_fn(|cx| wait(&stream, &mut out, cx)).await {
                    Ok((block, end)) => {
                        return respond(stream, out, block, end, method).map_err(CallError::Status);
                    }
                    Err(unanswered) => unanswered,
                },
                Err(refused) => refused,
            };
            Err(match answer {
                Unanswered::NotSent(reason) if out.is_restorable() => {
                    CallError::NotSent(Box::new(Request::from_parts(parts, out.restore())), reason)
                }
                Unanswered::NotSent(reason) => CallError::Status(Status::unavailable(reason.to_string())),
                Unanswered::Failed(status) => CallError::Status(status),
            })
        }
    }
}

/// Why there is no answer to a call.
enum Unanswered {
    NotSent(Reason),
    Failed(Status),
}

/// Opens a stream and sends what has been gathered, as soon as the peer's limit allows.
async fn open(shared: &Arc<Shared>, block: Bytes, out: &mut Outgoing) -> Result<StreamRef, Unanswered> {
    loop {
        let room = {
            let mut inner = shared.lock();
            if let Some(reason) = inner.end_reason() {
                return Err(Unanswered::NotSent(reason.clone()));
            }
            match inner.conn.open(block.clone(), out.is_empty()) {
                Ok(id) => {
                    let stream = shared.stream_ref(&mut inner, id);
                    let queued = if out.is_empty() { Ok(()) } else { out.queue(&mut inner, id) };
                    inner.flush_soon();
                    drop(inner);
                    // On an error the stream is reset as it is dropped.
                    return queued.map(|()| stream).map_err(Unanswered::Failed);
                }
                Err(SendError::TooManyStreams(_)) => {
                    inner.room_wanted = true;
                    // Made under the lock: it hears of every stream that ends from now on.
                    shared.stream_room.notified()
                }
                Err(SendError::HeadersTooLong { len, limit }) => {
                    let text = format!("request headers of {len} bytes, the limit is {limit}");
                    return Err(Unanswered::Failed(Status::resource_exhausted(text)));
                }
                Err(other) => {
                    return Err(Unanswered::NotSent(Reason::from_peer(
                        ReasonCode::GoAway,
                        other.to_string(),
                    )));
                }
            }
        };
        room.await;
    }
}

/// Waits for the head of the response, and sends what is left of the request meanwhile.
fn wait(
    stream: &StreamRef,
    out: &mut Outgoing,
    cx: &mut Context<'_>,
) -> Poll<Result<(Bytes, bool), Unanswered>> {
    let id = stream.id;
    let mut inner = stream.shared.lock();
    let transmitted = inner.conn.is_transmitted(id);
    let ended = inner.end_reason().cloned();
    let Some(io) = inner.streams.get_mut(&id) else {
        return Poll::Ready(Err(Unanswered::Failed(Status::internal("the call's stream is gone"))));
    };
    if let Some(head) = io.head.take() {
        io.head_taken = true;
        return Poll::Ready(Ok(head));
    }
    let unanswered = match (&io.fault, ended) {
        (Some(Fault::Refused), _) => {
            Unanswered::NotSent(Reason::from_peer(ReasonCode::GoAway, "the peer takes no new calls"))
        }
        (Some(fault), _) => Unanswered::Failed(fault.status()),
        (None, Some(reason)) if !transmitted => Unanswered::NotSent(reason),
        (None, Some(reason)) => Unanswered::Failed(Status::unavailable(format!("connection lost: {reason}"))),
        (None, None) => {
            wait_for(&mut io.recv_waker, cx);
            drop(inner);
            // A body is only read on once the peer may know of the call: until then it can go another way.
            if !transmitted {
                return Poll::Pending;
            }
            out.transmitted();
            return match out.pump(stream, cx) {
                Poll::Ready(Err(status)) => Poll::Ready(Err(Unanswered::Failed(status))),
                _ => Poll::Pending,
            };
        }
    };
    Poll::Ready(Err(unanswered))
}

/// The head has come; what is left of the request's body is sent beside the response.
fn respond(
    stream: StreamRef,
    mut out: Outgoing,
    block: Bytes,
    end: bool,
    method: Arc<Method>,
) -> Result<Response<Body>, Status> {
    let parts = headers::decode_response(block)
        .map_err(|breach| Status::internal(format!("malformed response head: {breach}")))?;
    if !out.is_queued() {
        let stream = stream.clone();
        tokio::spawn(async move {
            // An error has reset the stream; the response's body tells.
            let _ = poll_fn(|cx| out.pump(&stream, cx)).await;
        });
    }
    let body = if end {
        Body::empty()
    } else {
        let intake = Intake::new(method, codec::is_plain_grpc(&parts.headers));
        Body::new(Incoming::new(stream, intake))
    };
    Ok(Response::from_parts(parts, body))
}
