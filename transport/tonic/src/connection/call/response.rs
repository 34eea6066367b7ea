//! Sends the answer to a call.

use std::task::Context;

use http::Response;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_memory::throttled;
use tonic_rdma_proto::{ResetCode, SendError, Side};

use crate::codec::{BodyEncoder, Call, HEADER, is_plain_grpc};
use crate::connection::call::send_body::{SendBody, give_up};
use crate::connection::call::stream_io::wait_for;
use crate::connection::call::{StreamRef, headers};
use crate::telemetry::metrics::CallTimer;

/// Begins a response, and queues data that is ready together with the head. Returns the body if a
/// part of it still has to be sent. Releases the stream once the whole response is queued, or if
/// the body has failed.
pub(crate) fn begin(
    stream: &mut StreamRef,
    response: Response<Body>,
    method: Call,
    mut timer: CallTimer,
    cx: &mut Context<'_>,
) -> Option<SendBody> {
    let (parts, body) = response.into_parts();
    let block = match headers::encode_response(&parts) {
        Ok(block) => block,
        Err(status) => {
            timer.end(status.code());
            refuse(stream, status);
            return None;
        }
    };
    timer.end_with(&parts.headers);
    let apart = is_plain_grpc(&parts.headers);
    let mut out =
        SendBody::new(body, BodyEncoder::new(method, stream.shared.eager_limit - HEADER, apart))
            .timed(timer);
    out.gather(cx);
    let shared = stream.shared.clone();
    let mut state = shared.lock();
    let end = out.is_empty();
    match state.conn.send_headers(stream.id, block, end) {
        Ok(()) => {}
        Err(error) => {
            drop(state);
            // Send nothing if the client has given up the call.
            if error != SendError::Closed {
                refuse(stream, Status::resource_exhausted(error.to_string()));
            }
            out.resume_panic();
            return None;
        }
    }
    let queued = if end { out.ended_with_head() } else { out.queue(&mut state, stream.id) };
    if let Err(status) = &queued {
        let code = out.reset_code(Side::Server, status);
        give_up(&mut state, stream.id, code, status);
    }
    let more = queued.is_ok() && !out.is_queued();
    let dropped = if more { None } else { stream.release(&mut state) };
    state.flush_soon();
    drop(state);
    drop(dropped);
    out.resume_panic();
    more.then_some(out)
}

/// Whether the client has reset the stream or the connection has ended.
pub(crate) fn is_over(stream: &StreamRef, cx: &Context<'_>) -> bool {
    let mut state = stream.shared.lock();
    if state.lifecycle.end_reason().is_some() {
        return true;
    }
    match state.streams.io.get_mut(&stream.id) {
        Some(io) if io.fault.is_none() => {
            wait_for(&mut io.send_waker, cx);
            false
        }
        _ => true,
    }
}

/// Answers with a status, because the response cannot be sent.
fn refuse(stream: &StreamRef, status: Status) {
    throttled!(warn, %status, "a response cannot be sent");
    let mut state = stream.shared.lock();
    let response: Response<Body> = status.into_http();
    let sent = headers::encode_response(&response.into_parts().0)
        .is_ok_and(|block| state.conn.send_headers(stream.id, block, true).is_ok());
    if !sent {
        state.conn.reset(stream.id, ResetCode::INTERNAL);
    }
    state.flush_soon();
}
