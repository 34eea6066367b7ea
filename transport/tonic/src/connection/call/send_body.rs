//! The body of a request or response that is sent.

use std::any::Any;
use std::collections::VecDeque;
use std::error::Error as _;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::turn;
use tonic_rdma_proto::{ResetCode, SendError, Side, StreamId, Unsent};

use crate::codec::{BodyChunk, BodyEncoder, Fifo, Used};
use crate::connection::call::stream_io::wait_for;
use crate::connection::call::{StreamRef, headers};
use crate::connection::state::ConnectionState;
use crate::telemetry::metrics::CallTimer;

/// Number of bytes that are taken from a body and queued together, if the body has that many bytes
/// ready.
const MIN_GATHER: usize = 64 * 1024;

#[derive(Debug)]
enum BodyState {
    Reading,
    Ended,
    Failed(Status),
    /// The connection has the whole body.
    Queued,
}

/// A body, and the part of it that was read but not queued.
#[derive(Debug)]
pub(crate) struct SendBody {
    body: Body,
    encoder: BodyEncoder,
    chunks: Fifo<BodyChunk>,
    /// The trailers as a header block.
    trailers: Option<Bytes>,
    state: BodyState,
    /// Whether the stream was full. Nothing is taken from the body until the stream has room.
    waits_for_room: bool,
    /// The panic of the body. A body that has panicked is not polled again.
    panic: Option<Panic>,
    /// Measures the call, if this is the body of its response.
    timer: CallTimer,
}

/// The payload of a body's panic.
struct Panic(Box<dyn Any + Send>);

impl fmt::Debug for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Panic")
    }
}

impl SendBody {
    pub(crate) fn new(body: Body, encoder: BodyEncoder) -> Self {
        let state = if body.is_end_stream() { BodyState::Ended } else { BodyState::Reading };
        SendBody {
            body,
            encoder,
            chunks: Fifo::default(),
            trailers: None,
            state,
            waits_for_room: false,
            panic: None,
            timer: CallTimer::default(),
        }
    }

    /// Returns this body with `timer`, which measures the call until the body ends.
    pub(crate) fn timed(mut self, mut timer: CallTimer) -> Self {
        if matches!(self.state, BodyState::Ended) {
            timer.body_ended();
        }
        self.timer = timer;
        self
    }

    /// Whether the body is empty, so that the head is the whole request or response.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.state, BodyState::Ended) && self.chunks.is_empty() && self.trailers.is_none()
    }

    /// Records that the head was queued with the connection as the whole request or response.
    pub(crate) fn ended_with_head(&mut self) -> Result<(), Status> {
        self.state = BodyState::Queued;
        Ok(())
    }

    /// Takes the data that the body has ready. Returns true if more may be ready now.
    ///
    /// Polls the body once more after it has given enough bytes, because a unary body then reports
    /// its end. The end is then sent with the message instead of in a separate message.
    ///
    /// If the body panics, its earlier data is queued as after an error, and
    /// [`resume_panic`](Self::resume_panic) continues the panic. So the head of a response is sent
    /// before the panic, as with HTTP/2.
    pub(crate) fn gather(&mut self, cx: &mut Context<'_>) -> bool {
        let (mut gathered, mut enough) = (0, false);
        while matches!(self.state, BodyState::Reading) {
            if enough {
                return true;
            }
            enough = gathered >= MIN_GATHER;
            let (encoder, body) = (&mut self.encoder, &mut self.body);
            let chunks = &mut self.chunks;
            let polled = catch_unwind(AssertUnwindSafe(|| encoder.poll(body, cx, chunks)));
            let polled = match polled {
                Ok(polled) => polled,
                Err(panic) => {
                    self.panic = Some(Panic(panic));
                    self.state = BodyState::Failed(Status::cancelled("the body panicked"));
                    return false;
                }
            };
            match polled {
                Poll::Pending => return false,
                Poll::Ready(None) => {
                    self.timer.body_ended();
                    self.state = BodyState::Ended;
                }
                Poll::Ready(Some(Err(status))) => {
                    self.timer.end(status.code());
                    self.state = BodyState::Failed(status);
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        if data.is_empty() {
                            gathered = self.chunks.iter().map(|chunk| chunk.len).sum();
                        } else {
                            gathered += data.len();
                            self.chunks.push_back(BodyChunk::whole(data));
                        }
                        if self.body.is_end_stream() {
                            self.timer.body_ended();
                            self.state = BodyState::Ended;
                        }
                    }
                    Err(frame) => {
                        let Ok(trailers) = frame.into_trailers() else { continue };
                        self.timer.end_with(&trailers);
                        match headers::encode_trailers(&trailers) {
                            Ok(block) => {
                                self.trailers = Some(block);
                                self.state = BodyState::Ended;
                            }
                            Err(status) => self.state = BodyState::Failed(status),
                        }
                    }
                },
            }
        }
        false
    }

    /// Resumes the body's panic, if the body has panicked. Call this method after the data from
    /// before the panic is queued.
    pub(crate) fn resume_panic(&mut self) {
        if let Some(Panic(panic)) = self.panic.take() {
            resume_unwind(panic);
        }
    }

    /// Queues the gathered data with the connection, and also the body's end if the end was
    /// reached.
    pub(crate) fn queue(
        &mut self,
        state: &mut ConnectionState,
        id: StreamId,
    ) -> Result<(), Status> {
        let (moved, filled) = self.encoder.take_copied();
        state.usage.copied.plain_codec += moved;
        state.usage.copied.learning += filled;
        if self.encoder.used() != Used::Unknown
            && let Some(io) = state.streams.io.get_mut(&id)
        {
            io.used = self.encoder.used();
        }
        while let Some(chunk) = self.chunks.pop_front() {
            let end = self.chunks.is_empty()
                && self.trailers.is_none()
                && matches!(self.state, BodyState::Ended);
            self.encoder.has_sent(chunk.len);
            let limit = state.conn.eager_limit();
            let payload = state.link.payload(chunk, limit, &mut state.usage.copied);
            state.conn.send_payload(id, payload, end).map_err(not_queued)?;
            if end {
                self.state = BodyState::Queued;
            }
        }
        match std::mem::replace(&mut self.state, BodyState::Queued) {
            BodyState::Reading => {
                self.state = BodyState::Reading;
                self.waits_for_room = !state.conn.has_room(id);
            }
            BodyState::Queued => {}
            BodyState::Failed(status) => {
                return Err(match state.conn.side() {
                    Side::Client => body_failed(&status),
                    Side::Server => status,
                });
            }
            BodyState::Ended => {
                let sent = match self.trailers.take() {
                    Some(block) => state.conn.send_headers(id, block, true),
                    None => state.conn.finish(id),
                };
                sent.map_err(not_queued)?;
            }
        }
        Ok(())
    }

    /// Moves the body into a stream as fast as the stream has room.
    ///
    /// Returns ready when the whole body is queued, when the peer needs no more data, or when the
    /// connection has ended. An error of the body, or a message that is too long, resets the
    /// stream.
    pub(crate) fn pump(
        &mut self,
        stream: &StreamRef,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Status>> {
        let id = stream.id;
        loop {
            if self.is_queued() {
                return Poll::Ready(Ok(()));
            }
            if self.waits_for_room {
                // Check again whether the stream is full, because the body may have woken the task.
                let mut state = stream.shared.lock();
                let is_full = state.lifecycle.end_reason().is_none()
                    && state.conn.is_open_for_sending(id)
                    && !state.conn.has_room(id);
                if is_full && let Some(io) = state.streams.io.get_mut(&id) {
                    wait_for(&mut io.send_waker, cx);
                    return Poll::Pending;
                }
                self.waits_for_room = false;
            }
            let more = self.gather(cx);
            let mut state = stream.shared.lock();
            state.tasks.work = 0;
            if state.lifecycle.end_reason().is_some() || !state.conn.is_open_for_sending(id) {
                return Poll::Ready(Ok(()));
            }
            if let Err(status) = self.queue(&mut state, id) {
                let code = self.reset_code(state.conn.side(), &status);
                give_up(&mut state, id, code, &status);
                drop(state);
                self.resume_panic();
                return Poll::Ready(Err(status));
            }
            state.flush_soon();
            if self.is_queued() {
                return Poll::Ready(Ok(()));
            }
            let mut work = 1 + state.tasks.work;
            // Ask again for room, because the queue may have emptied before the waker was stored,
            // so that the wake-up was missed.
            self.waits_for_room = self.waits_for_room && !state.conn.has_room(id);
            if more && !self.waits_for_room {
                drop(state);
                ready!(turn::charge(cx, &mut work));
                continue;
            }
            if let Some(io) = state.streams.io.get_mut(&id) {
                wait_for(&mut io.send_waker, cx);
            }
            return Poll::Pending;
        }
    }

    /// The code for resetting a stream whose body failed with `status`. For a failed request body,
    /// the code is CANCEL only if HTTP/2's CANCEL caused the failure: the body then passes on the
    /// cancellation of a call that it forwards, as hyper's bodies do. For any other failure, CANCEL
    /// would be wrong, because tonic treats CANCEL as the end of a request, so the handler would
    /// treat a truncated request as complete.
    pub(crate) fn reset_code(&self, side: Side, status: &Status) -> ResetCode {
        match (side, status.code()) {
            (Side::Client, _) if passes_on_cancellation(status) => ResetCode::CANCEL,
            (Side::Client, _) => ResetCode::INTERNAL,
            (Side::Server, _) if self.panic.is_some() => ResetCode::CANCEL,
            (Side::Server, tonic::Code::ResourceExhausted) => ResetCode::ENHANCE_YOUR_CALM,
            (Side::Server, _) => ResetCode::INTERNAL,
        }
    }

    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.state, BodyState::Queued)
    }

    /// Restores the body to its state before anything was taken from it. `unsent` is the data that
    /// was queued.
    pub(crate) fn restore(mut self, unsent: Vec<Unsent>) -> Body {
        let mut segments = VecDeque::new();
        for unsent in unsent {
            match unsent {
                Unsent::Data(payload) => segments.extend(payload.into_segments()),
                Unsent::Trailers(block) => self.trailers = Some(block),
            }
        }
        let nothing = segments.is_empty() && self.chunks.is_empty() && self.trailers.is_none();
        if nothing && matches!(self.state, BodyState::Ended | BodyState::Queued) {
            return Body::empty();
        }
        Body::new(Restored { out: self, segments })
    }
}

/// Whether HTTP/2's CANCEL is the cause of the status.
fn passes_on_cancellation(status: &Status) -> bool {
    let cause = std::iter::successors(status.source(), |&error| error.source());
    cause
        .filter_map(|error| error.downcast_ref::<h2::Error>())
        .any(|error| error.reason() == Some(h2::Reason::CANCEL))
}

/// Resets a stream whose body cannot be sent. Queued data of a response is sent first, if the peer
/// can take the data now, so that the client gets the head before the failure of the body.
pub(crate) fn give_up(state: &mut ConnectionState, id: StreamId, code: ResetCode, status: &Status) {
    if state.conn.side() == Side::Server {
        state.flush_soon();
    }
    state.conn.reset(id, code);
    state.streams.fail(id, status.clone(), &mut state.tasks);
    state.flush_soon();
}

/// The status of a call whose request cannot be sent completely, for example because a message
/// exceeds the stub's own limit. The status has the code that HTTP/2 uses for a body that fails.
fn body_failed(status: &Status) -> Status {
    let text = format!("the request's body failed: {:?}: {}", status.code(), status.message());
    let mut failed = Status::internal(text);
    failed.set_source(Arc::new(status.clone()));
    failed
}

fn not_queued(error: SendError) -> Status {
    match error {
        SendError::HeadersTooLong { .. } => Status::resource_exhausted(error.to_string()),
        other => Status::unavailable(other.to_string()),
    }
}

/// A body whose beginning has already been read.
struct Restored {
    out: SendBody,
    segments: VecDeque<Bytes>,
}

impl http_body::Body for Restored {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Restored { out, segments } = &mut *self;
        if segments.is_empty()
            && let Some(chunk) = out.chunks.pop_front()
        {
            segments.extend(chunk.segments);
        }
        if let Some(segment) = segments.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(segment))));
        }
        match std::mem::replace(&mut out.state, BodyState::Queued) {
            BodyState::Reading => {
                out.state = BodyState::Reading;
                // Do not use `out.encoder`, because the transport that polls this body decides
                // whether messages are split.
                Pin::new(&mut out.body).poll_frame(cx)
            }
            BodyState::Failed(status) => Poll::Ready(Some(Err(status))),
            BodyState::Ended | BodyState::Queued => {
                // Decoding cannot fail, because this side encoded the trailers.
                let trailers =
                    out.trailers.take().map(headers::decode_trailers).and_then(Result::ok);
                Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
            }
        }
    }
}
