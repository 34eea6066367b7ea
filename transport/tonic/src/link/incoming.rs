//! A received body.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;
use tonic_rdma_proto::{ResetCode, Side};

use super::headers;
use super::stream::{StreamRef, wait_for};
use crate::codec::{Delivered, Intake};

/// The body of a request at the server, or of a response at the client.
///
/// Dropping a response's body before its end cancels the call. Dropping a request's body lets the rest of the
/// request go by unread.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: StreamRef,
    intake: Intake,
    /// Bytes handed on since other tasks had their turn.
    handed: usize,
    finished: bool,
}

/// The decoder copies what it is handed. After so many bytes other tasks have their turn: small calls beside a long message
/// wait for this much of it, not for all (R13).
const TURN: usize = 1 << 20;

impl Incoming {
    pub(super) fn new(stream: StreamRef, intake: Intake) -> Self {
        Incoming { stream, intake, handed: 0, finished: false }
    }

    fn hand_on(&mut self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.handed += bytes.len();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.finished {
            return Poll::Ready(None);
        }
        let this = &mut *self;
        if this.handed >= TURN {
            this.handed = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(bytes) = this.intake.pop() {
            return this.hand_on(bytes);
        }
        let id = this.stream.id;
        let mut inner = this.stream.shared.lock();
        let lost = inner.end_status();
        let Some(io) = inner.streams.get_mut(&id) else {
            this.finished = true;
            return Poll::Ready(None);
        };
        if let Some(piece) = io.pieces.pop_front() {
            let used = io.used;
            inner.conn.consume(id, piece.bytes.len() as u32, piece.flow);
            this.intake.push(piece.bytes, used, piece.landed);
            let Delivered { plain, learning, joined, short } = this.intake.take_delivered();
            let copied = &mut inner.copied;
            copied.plain_codec += plain;
            copied.learning += learning;
            copied.joined += joined;
            copied.eager += short;
            inner.flush_soon();
            drop(inner);
            // No piece is empty.
            let bytes = this.intake.pop().unwrap_or_default();
            return this.hand_on(bytes);
        }
        let frame = if let Some(block) = io.trailers.take() {
            match headers::decode_trailers(block) {
                Ok(trailers) => Some(Ok(Frame::trailers(trailers))),
                Err(breach) => Some(Err(Status::internal(format!("malformed trailers: {breach}")))),
            }
        } else if io.ended {
            None
        } else if let Some(fault) = &io.fault {
            Some(Err(fault.status()))
        } else if let Some(status) = lost {
            Some(Err(status))
        } else {
            wait_for(&mut io.recv_waker, cx);
            this.handed = 0;
            return Poll::Pending;
        };
        this.finished = true;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        if self.finished {
            return true;
        }
        if !self.intake.is_empty() {
            return false;
        }
        let inner = self.stream.shared.lock();
        match inner.streams.get(&self.stream.id) {
            Some(io) => io.ended && io.pieces.is_empty() && io.trailers.is_none(),
            None => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let id = self.stream.id;
        let mut inner = self.stream.shared.lock();
        let side = inner.conn.side();
        let Some(io) = inner.streams.get_mut(&id) else { return };
        io.discard = true;
        let rest = std::mem::take(&mut io.pieces);
        let ended = io.ended;
        for piece in rest.iter() {
            inner.conn.consume(id, piece.bytes.len() as u32, piece.flow);
        }
        if side == Side::Client && !ended {
            inner.conn.reset(id, ResetCode::CANCEL);
            if let Some(io) = inner.streams.get_mut(&id) {
                let waker = io.send_waker.take();
                inner.wake(waker);
            }
        }
        inner.flush_soon();
        drop(inner);
        drop(rest);
    }
}
