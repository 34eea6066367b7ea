//! Messages over TCP whose field goes to an application buffer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;

use crate::codec::{Deframer, Method, Part, Used, is_plain_grpc};
use crate::land_in::Claimed;
use crate::tcp::{TcpClient, boxed};
use crate::telemetry::stats::Counters;

/// A body whose messages are gathered, so that the decoder copies the field to the application
/// buffer.
struct NamedBody {
    inner: Body,
    deframer: Deframer,
    used: Used,
    counters: Arc<Counters>,
}

/// The response to a call to the method at `uri`, with a body that fills the buffer.
pub(crate) fn response(
    response: Response<Body>,
    uri: &Uri,
    claimed: Arc<Claimed>,
    client: &TcpClient,
) -> Response<Body> {
    let messages = is_plain_grpc(response.headers());
    // The method's codec is known, because the call has already encoded its request.
    let method = client.methods.call(uri).method().clone();
    response.map(|inner| body(inner, messages, method, claimed, client.counters.clone()))
}

/// Returns a body for a call to `method` that fills the claimed buffer.
pub(crate) fn body(
    inner: Body,
    messages: bool,
    method: Arc<Method>,
    claimed: Arc<Claimed>,
    counters: Arc<Counters>,
) -> Body {
    if inner.is_end_stream() {
        return inner;
    }
    let used = method.used();
    let deframer = Deframer::gathering(method, messages, claimed);
    boxed(NamedBody { inner, deframer, used, counters })
}

impl NamedBody {
    fn count(&mut self) {
        let delivered = self.deframer.take_delivered();
        // Received bytes are already counted as joined.
        self.counters.tcp.named.add(delivered.named);
        self.counters.tcp.learning.add(delivered.learning);
    }
}

impl HttpBody for NamedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        this.count();
        loop {
            if let Some(bytes) = this.deframer.pop() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => this.deframer.push(Part::Eager(data), this.used),
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                other => return Poll::Ready(other),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.deframer.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Drop for NamedBody {
    fn drop(&mut self) {
        self.count();
    }
}
