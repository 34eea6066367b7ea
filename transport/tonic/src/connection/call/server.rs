//! Calls in.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;

use http::{Extensions, Request, Response};
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::{AnyLink, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{CloseCode, ResetCode, SendError, Settings, Side};
use tower::Service;
use tracing::Instrument;

use crate::boxed_body;
use crate::codec::{BodyEncoder, Call, Deframer, HEADER, Methods, is_plain_grpc};
use crate::connection::ConnectionConfig;
use crate::connection::call::header_cache::{Head, HeaderCache};
use crate::connection::call::headers;
use crate::connection::call::recv_body::RecvBody;
use crate::connection::call::send_body::{SendBody, give_up};
use crate::connection::call::stream::{Opened, StreamRef, wait_for};
use crate::connection::call::task_pool::TaskPool;
use crate::connection::driver::drive;
use crate::connection::state::{Life, Shared};
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::spans;
use crate::telemetry::stats::Counters;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A link that has been accepted.
pub(crate) struct Accepted {
    pub(crate) link: AnyLink,
    pub(crate) pool: Pool,
    /// What the hello said.
    pub(crate) peer: Settings,
    pub(crate) options: ConnectionConfig,
    pub(crate) counters: Arc<Counters>,
    pub(crate) methods: Arc<Methods>,
    /// Given to every request.
    pub(crate) extensions: Extensions,
    /// When it resolves, the client is told to take its new calls elsewhere, calls in flight go on,
    /// and the link closes behind the last.
    pub(crate) drain: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Serves a link until it ends, and says why it did. Every call has a task to itself, and a
/// clone of `service`: see [`task_pool`](crate::connection::call::task_pool).
pub(crate) async fn serve_connection<S>(accepted: Accepted, service: S) -> Reason
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    let Accepted { link, pool, peer, options, counters, methods, extensions, drain } = accepted;
    let span = spans::connection(Side::Server, link.peer());
    let shared = Shared::new(Side::Server, link, pool, peer, &options, counters, methods);
    let mut header_cache = HeaderCache::new(shared.methods.clone(), extensions);
    let task_pool = TaskPool::new(service);
    let serve = move |Opened { stream, reader, empty, block }| {
        let Head { parts, call, plain } = match header_cache.read(block) {
            Ok(head) => head,
            Err(breach) => {
                let mut inner = stream.shared.lock();
                inner.conn.close(CloseCode::Breach, &breach.to_string());
                let detail = format!("protocol breach: {breach} ({})", stream.shared.peer);
                inner.end(Life::Closing(Reason::from_peer(ReasonCode::LinkLost, detail)));
                inner.flush_soon();
                return;
            }
        };
        stream.shared.calls.calls_fast.add(1);
        let deframer = Deframer::new(call.method().clone(), plain);
        let body = boxed_body::boxed(RecvBody::new(reader, deframer, call.method().used(), empty));
        let request = Request::from_parts(parts, body);
        task_pool.run(stream, call, request);
    };
    drive(shared.clone(), serve, drain).instrument(span).await
}

/// Begins a response. What is ready of it goes out in one message with the head. If that was all,
/// the stream is let go of; otherwise the rest is returned.
pub(in crate::connection) fn begin(
    stream: &mut StreamRef,
    response: Response<Body>,
    method: Call,
    cx: &mut Context<'_>,
) -> Option<SendBody> {
    let (parts, body) = response.into_parts();
    let block = match headers::encode_response(&parts) {
        Ok(block) => block,
        Err(status) => {
            refuse(stream, status);
            return None;
        }
    };
    let apart = is_plain_grpc(&parts.headers);
    let mut out =
        SendBody::new(body, BodyEncoder::new(method, stream.shared.eager_limit - HEADER, apart));
    out.gather(cx);
    let shared = stream.shared.clone();
    let mut inner = shared.lock();
    let end = out.is_empty();
    match inner.conn.send_headers(stream.id, block, end) {
        Ok(()) => {}
        // The client has given it up meanwhile: nobody waits for the response.
        Err(SendError::Closed) => return None,
        Err(error) => {
            drop(inner);
            refuse(stream, Status::resource_exhausted(error.to_string()));
            return None;
        }
    }
    let queued = if end { out.all_said() } else { out.queue(&mut inner, stream.id) };
    if let Err(status) = &queued {
        give_up(&mut inner, stream.id, status);
    }
    let more = queued.is_ok() && !out.is_queued();
    let dropped = if more { None } else { stream.let_go(&mut inner) };
    inner.flush_soon();
    drop(inner);
    drop(dropped);
    more.then_some(out)
}

/// The client has reset the stream, or the connection has ended.
pub(in crate::connection) fn is_over(stream: &StreamRef, cx: &Context<'_>) -> bool {
    let mut inner = stream.shared.lock();
    if inner.end_reason().is_some() {
        return true;
    }
    match inner.streams.get_mut(&stream.id) {
        Some(io) if io.fault.is_none() => {
            wait_for(&mut io.send_waker, cx);
            false
        }
        _ => true,
    }
}

/// The response cannot be sent as it is.
fn refuse(stream: &StreamRef, status: Status) {
    tracing::warn!(%status, "a response cannot be sent");
    let mut inner = stream.shared.lock();
    let response: Response<Body> = status.into_http();
    let sent = headers::encode_response(&response.into_parts().0)
        .is_ok_and(|block| inner.conn.send_headers(stream.id, block, true).is_ok());
    if !sent {
        inner.conn.reset(stream.id, ResetCode::INTERNAL);
    }
    inner.flush_soon();
}
