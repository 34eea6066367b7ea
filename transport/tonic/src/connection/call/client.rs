//! The client's end of a connection, and its calls.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use tokio::sync::Notify;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::{AnyLink, Link, PeerInfo};
use tonic_rdma_memory::{Pool, throttled};
use tonic_rdma_proto::{PeerSettings, SendError, Side, Unsent};
use tracing::Instrument;

use crate::codec::{BodyEncoder, Deframer, HEADER, Method, Methods, Used, is_plain_grpc};
use crate::connection::ConnectionConfig;
use crate::connection::call::StreamRef;
use crate::connection::call::headers::{self, Caller, Origin};
use crate::connection::call::recv_body::RecvBody;
use crate::connection::call::send_body::{SendBody, give_up};
use crate::connection::call::stream_io::{Fault, wait_for};
use crate::connection::driver::drive;
use crate::connection::lifecycle::{Life, ended, inherited};
use crate::connection::shared::SharedConnection;
use crate::connection::state::ConnectionState;
use crate::connection::usage::ConnectionInfo;
use crate::land_in::{Claimed, Target, WhyCopied};
use crate::path::reason::{Reason, ReasonCode};
use crate::tcp;
use crate::telemetry::metrics::CallTimer;
use crate::telemetry::spans;
use crate::telemetry::stats::Counters;

/// An extension of a request. The extension says that the reader of the response's body copies all
/// bytes before it parses them. So the reader gets the bytes in landing memory, although the server
/// may still write there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piped;

/// Why a call got no response.
#[derive(Debug)]
pub(crate) enum CallError {
    /// Nothing was transmitted, so the request may take another path.
    NotSent(Box<Request<Body>>, Reason),
    /// The call failed.
    Status(Status),
}

/// The client's end of an open connection. When the last clone is dropped, the connection takes no
/// new calls, and closes once the calls in flight have ended.
#[derive(Clone)]
pub(crate) struct FastClient {
    shared: Arc<SharedConnection>,
    handle: Arc<StopHandle>,
    caller: Arc<Caller>,
}

/// When dropped, tells the driver to end the connection.
struct StopHandle(Arc<Notify>);

impl Drop for StopHandle {
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
    /// Starts the driver of an established connection. `peer` contains the settings of the accept
    /// message. Calls go to `origin`. Must be called within a tokio runtime.
    #[allow(clippy::too_many_arguments, reason = "each is a different thing")]
    pub(crate) fn start(
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: &ConnectionConfig,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
        origin: Arc<Origin>,
    ) -> FastClient {
        let span = spans::connection(Side::Client, link.peer());
        let shared =
            SharedConnection::new(Side::Client, link, pool, peer, options, counters, methods);
        let stop = Arc::new(Notify::new());
        let drain = {
            let stop = stop.clone();
            async move { stop.notified().await }
        };
        tokio::spawn(drive(shared.clone(), drop, drain).instrument(span));
        FastClient {
            shared,
            handle: Arc::new(StopHandle(stop)),
            caller: Arc::new(Caller::new(&origin)),
        }
    }

    /// Describes the link's two ends.
    pub(crate) fn peer(&self) -> &PeerInfo {
        &self.shared.peer
    }

    /// Whether the connection takes new calls.
    pub(crate) fn is_open(&self) -> bool {
        self.ending().is_none()
    }

    /// Number of calls that have begun and not ended.
    pub(crate) fn calls_in_flight(&self) -> usize {
        self.shared.lock().streams.io.len()
    }

    /// A snapshot of the connection. `None` if the connection belongs to a parent process.
    pub(crate) fn info(&self) -> Option<ConnectionInfo> {
        self.shared.info()
    }

    /// Why the connection takes no new calls. `None` while the connection takes new calls.
    pub(crate) fn ending(&self) -> Option<Reason> {
        self.shared.lock().why_no_calls()
    }

    /// Waits until the connection ends, or until an end has run out of a resource, so that new
    /// calls must take another path. Returns the reason.
    pub(crate) fn closed(&self) -> impl Future<Output = Reason> + Send + 'static {
        let mut closed = self.shared.closed.subscribe();
        async move {
            let reason =
                closed.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
            reason.unwrap_or_else(|| Reason::new(ReasonCode::LinkLost, "the driver is gone"))
        }
    }

    /// Makes the connection take no new calls, and close once the calls in flight have ended.
    pub(crate) fn shutdown(&self) {
        self.handle.0.notify_one();
    }

    /// Makes a call, and returns the response once the response's head has arrived. If the peer
    /// allows no more streams, the call waits until other calls end, and then begins in its turn,
    /// even if its task does not run. Dropping the future cancels the call.
    pub(crate) fn call(&self, request: Request<Body>) -> Call {
        let shared = self.shared.clone();
        let (parts, body) = request.into_parts();
        let block = headers::encode_request(&parts, &self.caller);
        let call = shared.methods.call(&parts.uri);
        let method = call.method().clone();
        let apart = is_plain_grpc(&parts.headers);
        let out =
            Some(SendBody::new(body, BodyEncoder::new(call, shared.eager_limit - HEADER, apart)));
        let named = Target::claim(&parts.extensions, WhyCopied::NotApart);
        let timer = CallTimer::default();
        Call { shared, parts, block, method, out, named, stage: CallStage::New, timer }
    }
}

/// Why a call got no answer.
enum Unanswered {
    NotSent(Reason, Vec<Unsent>),
    Failed(Status),
}

/// A call in flight. The future is written by hand, because it is moved, and the future of an
/// `async` block would be twice as large.
pub(crate) struct Call {
    shared: Arc<SharedConnection>,
    parts: Parts,
    block: Result<Bytes, Status>,
    method: Arc<Method>,
    /// `None` once the call has ended.
    out: Option<SendBody>,
    /// The buffer for the response to land in.
    named: Option<Arc<Claimed>>,
    stage: CallStage,
    timer: CallTimer,
}

impl Call {
    /// Returns this call, measured by `timer`.
    pub(crate) fn timed(mut self, timer: CallTimer) -> Self {
        self.timer = timer;
        self
    }

    /// Takes the timer of a call that was not sent.
    pub(crate) fn take_timer(&mut self) -> CallTimer {
        std::mem::take(&mut self.timer)
    }
}

enum CallStage {
    New,
    Open(StreamRef),
}

impl Future for Call {
    type Output = Result<Response<Body>, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Call { shared, parts, block, method, out: place, named, stage, timer } = &mut *self;
        let Some(out) = place else {
            let ended = Status::internal("a call was polled after its end");
            return Poll::Ready(Err(CallError::Status(ended)));
        };
        if !shared.is_own() {
            *place = None;
            return Poll::Ready(Err(CallError::Status(inherited())));
        }
        let unanswered = loop {
            match stage {
                // Send ready data together with the head, so that a small unary call is one SEND.
                CallStage::New => _ = out.gather(cx),
                CallStage::Open(stream) => match ready!(wait(stream, out, cx)) {
                    Ok((block, end)) => {
                        let CallStage::Open(stream) = std::mem::replace(stage, CallStage::New)
                        else {
                            continue;
                        };
                        let (out, named) = (place.take(), named.take());
                        let piped = parts.extensions.get::<Piped>().is_some();
                        let timer = std::mem::take(timer);
                        let response =
                            respond(stream, out, (block, end), method, named, piped, timer);
                        return Poll::Ready(response.map_err(CallError::Status));
                    }
                    Err(unanswered) => break unanswered,
                },
            }
            *stage = match block {
                Ok(block) => match open(shared, block, out, named.as_ref(), cx) {
                    Ok(stream) => CallStage::Open(stream),
                    Err(unanswered) => break unanswered,
                },
                Err(status) => break Unanswered::Failed(status.clone()),
            };
            if out.is_queued() {
                return Poll::Pending;
            }
        };
        // Dropping the old stage resets the stream, if the call has opened one.
        *stage = CallStage::New;
        // Release the buffer, because the call may claim it again on another path.
        *named = None;
        let out = place.take();
        let error = match (unanswered, out) {
            (Unanswered::NotSent(reason, unsent), Some(out)) => {
                let parts = std::mem::replace(parts, Request::new(()).into_parts().0);
                CallError::NotSent(
                    Box::new(Request::from_parts(parts, out.restore(unsent))),
                    reason,
                )
            }
            (Unanswered::NotSent(reason, _), None) => {
                CallError::Status(Status::unavailable(reason.to_string()))
            }
            (Unanswered::Failed(status), _) => CallError::Status(status),
        };
        if let CallError::Status(status) = &error {
            timer.end(status.code());
        }
        Poll::Ready(Err(error))
    }
}

/// Opens a stream and queues the gathered data, which is sent once the peer allows the stream. The
/// response wakes the call's task.
fn open(
    shared: &Arc<SharedConnection>,
    block: &Bytes,
    out: &mut SendBody,
    named: Option<&Arc<Claimed>>,
    cx: &Context<'_>,
) -> Result<StreamRef, Unanswered> {
    let mut state = shared.lock();
    if let Some(reason) = state.lifecycle.end_reason() {
        return Err(Unanswered::NotSent(reason.clone(), Vec::new()));
    }
    match state.conn.open(block.clone(), out.is_empty()) {
        Ok(id) => {
            let stream = StreamRef::new(shared, &mut state, id);
            if let Some(io) = state.streams.io.get_mut(&id) {
                wait_for(&mut io.recv_waker, cx);
            }
            if let Some(named) = named {
                let ConnectionState { landing, streams, conn, .. } = &mut *state;
                landing.name_memory(id, named, streams, conn);
            }
            let queued =
                if out.is_empty() { out.ended_with_head() } else { out.queue(&mut state, id) };
            if state.conn.is_waiting(id) && !std::mem::replace(&mut state.streams.limit_told, true)
            {
                throttled!(
                    warn,
                    peer = %state.lifecycle.peer,
                    limit = state.conn.peer_max_streams(),
                    "the connection has as many calls in flight as the server allows; further \
                     calls wait until one ends: end calls that are not read, or raise \
                     Server::max_concurrent_streams"
                );
            }
            if let Err(status) = &queued {
                give_up(&mut state, id, out.reset_code(Side::Client, status), status);
            }
            state.flush_soon();
            if state.conn.is_roused() {
                // The peer's time to answer begins now. Wake the driver, because only its timer
                // measures that time.
                state.tasks.wake_driver();
            }
            drop(state);
            out.resume_panic();
            queued.map(|()| stream).map_err(Unanswered::Failed)
        }
        Err(SendError::HeadersTooLong { len, limit }) => {
            let text = format!("request headers of {len} bytes, the limit is {limit}");
            Err(Unanswered::Failed(Status::resource_exhausted(text)))
        }
        Err(_) => Err(Unanswered::NotSent(state.lifecycle.why_no_calls(), Vec::new())),
    }
}

/// Waits for the response's head, and sends the rest of the request at the same time.
fn wait(
    stream: &StreamRef,
    out: &mut SendBody,
    cx: &mut Context<'_>,
) -> Poll<Result<(Bytes, bool), Unanswered>> {
    let id = stream.id;
    let mut guard = stream.shared.lock();
    let state = &mut *guard;
    let Some(io) = state.streams.io.get_mut(&id) else {
        return Poll::Ready(Err(Unanswered::Failed(Status::internal("the call's stream is gone"))));
    };
    if let Some(head) = io.head.take() {
        io.head_taken = true;
        return Poll::Ready(Ok(head));
    }
    let transmitted = state.conn.is_transmitted(id);
    let unanswered = match (&mut io.fault, state.lifecycle.life()) {
        (Some(Fault::Refused(unsent)), _) => {
            let unsent = std::mem::take(unsent);
            Unanswered::NotSent(state.lifecycle.why_no_calls(), unsent)
        }
        (Some(fault), _) => Unanswered::Failed(fault.status()),
        (None, Life::Open) => {
            wait_for(&mut io.recv_waker, cx);
            guard.reader_waits(id);
            drop(guard);
            // Read no more of the body while nothing is transmitted, because the call can still
            // take another path.
            if !transmitted {
                return Poll::Pending;
            }
            return match out.pump(stream, cx) {
                Poll::Ready(Err(status)) => Poll::Ready(Err(Unanswered::Failed(status))),
                _ => Poll::Pending,
            };
        }
        (None, Life::Closing(reason) | Life::Dead(reason)) if !transmitted => {
            Unanswered::NotSent(reason.clone(), state.conn.withdraw(id))
        }
        (None, Life::Closing(reason) | Life::Dead(reason)) => Unanswered::Failed(ended(reason)),
    };
    Poll::Ready(Err(unanswered))
}

/// Returns the response after its head has arrived. The rest of the request's body is sent in
/// parallel with the response.
fn respond(
    stream: StreamRef,
    out: Option<SendBody>,
    (block, end): (Bytes, bool),
    method: &Arc<Method>,
    named: Option<Arc<Claimed>>,
    piped: bool,
    mut timer: CallTimer,
) -> Result<Response<Body>, Status> {
    let parts = headers::decode_response(block).map_err(|breach| {
        let status = Status::internal(format!("malformed response head: {breach}"));
        timer.end(status.code());
        status
    })?;
    timer.end_with(&parts.headers);
    if let Some(mut out) = out.filter(|out| !out.is_queued()) {
        let stream = stream.clone();
        tokio::spawn(async move {
            // Ignore an error: the error has reset the stream, so the response's body reports it.
            let _ = poll_fn(|cx| out.pump(&stream, cx)).await;
        });
    }
    let body = if end {
        timer.body_ended();
        Body::empty()
    } else {
        let messages = is_plain_grpc(&parts.headers);
        let deframer = match named {
            None if piped => Deframer::in_place(method.clone()),
            None => Deframer::new(method.clone(), messages),
            Some(named) => Deframer::gathering(method.clone(), messages, named),
        };
        tcp::boxed(RecvBody::new(stream, deframer, Used::Unknown, false).timed(timer))
    };
    Ok(Response::from_parts(parts, body))
}
