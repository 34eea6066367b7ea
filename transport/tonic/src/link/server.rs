//! Calls in.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Extensions, Request, Response};
use pin_project_lite::pin_project;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::{AnyLink, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{CloseCode, ResetCode, SendError, Settings, Side};
use tower::{Service, ServiceExt};
use tracing::Instrument;

use super::LinkOptions;
use super::drive::drive;
use super::headers;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::shared::{Life, Shared};
use super::stream::{StreamRef, wait_for};
use crate::codec::{self, Call, HEADER, Intake, Methods, Tap};
use crate::reason::{Reason, ReasonCode};
use crate::spans;
use crate::stats::Counters;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Serves one accepted link until it ends, and says why it did.
///
/// Every call runs in a task of its own, on a clone of `service`; `extensions` are given to every request. When
/// `drain` resolves, the client is told to take its new calls elsewhere, calls in flight go on, and the link closes
/// behind the last.
#[allow(clippy::too_many_arguments, reason = "one call site; each is a different thing")]
pub(crate) async fn serve_link<S>(
    link: AnyLink,
    pool: Pool,
    peer: Settings,
    options: &LinkOptions,
    counters: Arc<Counters>,
    methods: Arc<Methods>,
    service: S,
    extensions: Extensions,
    drain: impl Future<Output = ()>,
) -> Reason
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    let span = spans::connection(Side::Server, link.peer());
    let shared = Shared::new(Side::Server, link, pool, peer, options, counters, methods);
    let serve = move |stream: StreamRef, block: Bytes| {
        let parts = match headers::decode_request(block) {
            Ok(parts) => parts,
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
        let call = stream.shared.methods.call(&parts.uri);
        let intake = Intake::new(call.method().clone(), codec::is_plain_grpc(&parts.headers));
        if let Some(io) = stream.shared.lock().streams.get_mut(&stream.id) {
            io.used = call.method().used();
        }
        let mut request = Request::from_parts(parts, Body::new(Incoming::new(stream.clone(), intake)));
        *request.extensions_mut() = extensions.clone();
        let handler = service.clone().oneshot(request);
        tokio::spawn(Answer { stream, method: Some(call), call: handler, out: None });
    };
    drive(shared.clone(), serve, drain).instrument(span).await
}

pin_project! {
    /// Runs one call. The client's reset, or the connection's end, drops the handler where it stands.
    struct Answer<F> {
        stream: StreamRef,
        // Until the response's head is there.
        method: Option<Call>,
        #[pin]
        call: F,
        // From then on.
        out: Option<Outgoing>,
    }
}

impl<F, E> Future for Answer<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
    E: Into<BoxError>,
{
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if let Some(method) = this.method.take() {
            if is_over(this.stream, cx) {
                return Poll::Ready(());
            }
            let Poll::Ready(result) = this.call.poll(cx) else {
                *this.method = Some(method);
                return Poll::Pending;
            };
            let response = result.unwrap_or_else(|error| Status::from_error(error.into()).into_http());
            *this.out = begin(this.stream, response, method, cx);
        }
        match this.out {
            Some(out) => out.pump(this.stream, cx).map(|_| ()),
            None => Poll::Ready(()),
        }
    }
}

/// Begins a response. What is ready of it goes out in one message with the head; the rest is returned.
fn begin(
    stream: &StreamRef,
    response: Response<Body>,
    method: Call,
    cx: &mut Context<'_>,
) -> Option<Outgoing> {
    let (parts, body) = response.into_parts();
    let block = match headers::encode_response(&parts) {
        Ok(block) => block,
        Err(status) => {
            refuse(stream, status);
            return None;
        }
    };
    let apart = codec::is_plain_grpc(&parts.headers);
    let mut out = Outgoing::new(body, Tap::new(method, stream.shared.eager_limit - HEADER, apart));
    out.gather(cx);
    let mut inner = stream.shared.lock();
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
    if end {
        inner.flush_soon();
        return None;
    }
    Some(out)
}

/// The client has reset the stream, or the connection has ended.
fn is_over(stream: &StreamRef, cx: &Context<'_>) -> bool {
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
