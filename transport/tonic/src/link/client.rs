//! Calls out.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
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
use super::headers;
use super::incoming::Incoming;
use super::outgoing::{Outgoing, Pump};
use super::shared::Shared;
use super::stream::{Fault, StreamRef};
use crate::codec::{self, HEADER, Intake, Method, Methods, Tap};
use crate::reason::{Reason, ReasonCode};
use crate::spans;
use crate::stats::Counters;

/// A call on its way: the response's head, then its body streams.
///
/// Dropping it cancels the call.
pub(crate) type FastCall = Pin<Box<dyn Future<Output = Result<Response<Body>, CallError>> + Send>>;

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
    /// Starts the driver of a connection that stands, `peer` being what the accept said. Within a tokio runtime.
    pub(crate) fn start(
        link: AnyLink,
        pool: Pool,
        peer: Settings,
        options: &LinkOptions,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> FastClient {
        let span = spans::connection(Side::Client, link.peer());
        let shared = Shared::new(Side::Client, link, pool, peer, options, counters, methods);
        let stop = Arc::new(Notify::new());
        let drain = {
            let stop = stop.clone();
            async move { stop.notified().await }
        };
        tokio::spawn(drive(shared.clone(), |_, _| (), drain).instrument(span));
        FastClient { shared, handle: Arc::new(Handle(stop)) }
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

    /// Makes a call. Waits for a free stream when the peer's limit is reached.
    pub(crate) fn call(&self, request: Request<Body>) -> FastCall {
        Box::pin(call(self.shared.clone(), request))
    }
}

async fn call(shared: Arc<Shared>, request: Request<Body>) -> Result<Response<Body>, CallError> {
    let (parts, body) = request.into_parts();
    let block = headers::encode_request(&parts).map_err(CallError::Status)?;
    let call = shared.methods.call(&parts.uri);
    let method = call.method().clone();
    let apart = codec::is_plain_grpc(&parts.headers);
    let mut out = Outgoing::restorable(body, Tap::new(call, shared.eager_limit - HEADER, apart));
    // What is ready goes with the head: a small unary call is one SEND.
    poll_fn(|cx| {
        out.gather(cx);
        Poll::Ready(())
    })
    .await;
    let not_sent = |out: Outgoing, reason| {
        let request = Request::from_parts(parts, out.restore());
        CallError::NotSent(Box::new(request), reason)
    };
    let stream = match open(&shared, block, &mut out).await {
        Ok(stream) => stream,
        Err(Refused::Reason(reason)) => return Err(not_sent(out, reason)),
        Err(Refused::Status(status)) => return Err(CallError::Status(status)),
    };
    let mut waiting = Waiting { pump: Some(Pump { out, stream: stream.clone() }), stream };
    match poll_fn(|cx| waiting.poll(cx)).await {
        Answer::Head(block, end) => waiting.respond(block, end, method).map_err(CallError::Status),
        Answer::Failed(status) => Err(CallError::Status(status)),
        Answer::NotSent(reason) => match waiting.pump {
            Some(pump) => Err(not_sent(pump.out, reason)),
            None => Err(CallError::Status(Status::unavailable(reason.to_string()))),
        },
    }
}

enum Refused {
    Reason(Reason),
    Status(Status),
}

/// Opens a stream and sends what has been gathered, as soon as the peer's limit allows.
async fn open(shared: &Arc<Shared>, block: Bytes, out: &mut Outgoing) -> Result<StreamRef, Refused> {
    loop {
        let mut room = pin!(shared.stream_room.notified());
        room.as_mut().enable();
        {
            let mut inner = shared.lock();
            if let Some(reason) = inner.end_reason() {
                return Err(Refused::Reason(reason.clone()));
            }
            match inner.conn.open(block.clone(), out.is_empty()) {
                Ok(id) => {
                    let stream = shared.stream_ref(&mut inner, id);
                    let queued = if out.is_empty() { Ok(()) } else { out.queue(&mut inner, id) };
                    inner.flush_soon();
                    drop(inner);
                    // On an error the stream is reset as it is dropped.
                    return queued.map(|()| stream).map_err(Refused::Status);
                }
                Err(SendError::TooManyStreams(_)) => inner.room_wanted = true,
                Err(SendError::HeadersTooLong { len, limit }) => {
                    let text = format!("request headers of {len} bytes, the limit is {limit}");
                    return Err(Refused::Status(Status::resource_exhausted(text)));
                }
                Err(other) => {
                    return Err(Refused::Reason(Reason::from_peer(ReasonCode::GoAway, other.to_string())));
                }
            }
        }
        room.await;
    }
}

/// A call whose head has not come.
struct Waiting {
    stream: StreamRef,
    /// The body, until it has been queued whole.
    pump: Option<Pump>,
}

enum Answer {
    Head(Bytes, bool),
    Failed(Status),
    NotSent(Reason),
}

impl Waiting {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Answer> {
        let id = self.stream.id;
        loop {
            let mut inner = self.stream.shared.lock();
            let transmitted = inner.conn.is_transmitted(id);
            let ended = inner.end_reason().cloned();
            let Some(io) = inner.streams.get_mut(&id) else {
                return Poll::Ready(Answer::Failed(Status::internal("the call's stream is gone")));
            };
            if let Some((block, end)) = io.head.take() {
                io.head_taken = true;
                return Poll::Ready(Answer::Head(block, end));
            }
            match (&io.fault, ended) {
                (Some(Fault::Refused), _) => {
                    let reason = Reason::from_peer(ReasonCode::GoAway, "the peer takes no new calls");
                    return Poll::Ready(Answer::NotSent(reason));
                }
                (Some(fault), _) => return Poll::Ready(Answer::Failed(fault.status())),
                (None, Some(reason)) if !transmitted => return Poll::Ready(Answer::NotSent(reason)),
                (None, Some(reason)) => {
                    let status = Status::unavailable(format!("connection lost: {reason}"));
                    return Poll::Ready(Answer::Failed(status));
                }
                (None, None) => {}
            }
            io.recv_waker = Some(cx.waker().clone());
            drop(inner);
            // A body is only read on once the peer may know of the call: until then it can go another way.
            let Some(pump) = self.pump.as_mut().filter(|_| transmitted) else { return Poll::Pending };
            pump.out.transmitted();
            match pump.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => self.pump = None,
                Poll::Ready(Err(status)) => return Poll::Ready(Answer::Failed(status)),
            }
        }
    }

    /// The head has come; what is left of the request's body is sent beside the response.
    fn respond(self, block: Bytes, end: bool, method: Arc<Method>) -> Result<Response<Body>, Status> {
        let parts = match headers::decode_response(block) {
            Ok(parts) => parts,
            Err(breach) => return Err(Status::internal(format!("malformed response head: {breach}"))),
        };
        if let Some(mut pump) = self.pump
            && !pump.out.is_queued()
        {
            tokio::spawn(async move {
                // An error has reset the stream; the response's body tells.
                let _ = poll_fn(|cx| pump.poll(cx)).await;
            });
        }
        let body = if end {
            Body::empty()
        } else {
            let intake = Intake::new(method, codec::is_plain_grpc(&parts.headers));
            Body::new(Incoming::new(self.stream, intake))
        };
        Ok(Response::from_parts(parts, body))
    }
}
