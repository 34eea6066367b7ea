//! A received body.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;
use tonic_rdma_fabric::Link;
use tonic_rdma_proto::{ResetCode, Side};

use crate::codec::{Deframer, Delivered, Used};
use crate::connection::call::headers;
use crate::connection::call::stream::{StreamRef, wait_for};
use crate::telemetry::stats::Copied;

/// The body of a request at the server, or of a response at the client.
///
/// Dropping a response's body before its end cancels the call. Dropping a request's body lets the
/// rest of the request go by unread.
#[derive(Debug)]
pub(in crate::connection) struct RecvBody {
    stream: StreamRef,
    deframer: Deframer,
    used: Used,
    /// Bytes handed on since other tasks had their turn.
    handed: usize,
    /// At so many the next look whether any has to.
    look: usize,
    /// Others have so many before this one goes on.
    turns_left: u8,
    /// Nothing more comes, neither from the stream nor from the deframer: said without a look at the
    /// connection. A body of which this is not known may have ended, too.
    finished: bool,
    /// The deframer has the last of it.
    ended: bool,
}

/// The decoder copies what it is handed. After so many bytes other tasks have their turn: small
/// calls beside a long message wait for this much of it, not for all (R13).
const TURN: usize = 1 << 20;
/// After so many a message that has come has its turn, if short ones came before.
const LOOK: usize = 64 * 1024;

impl RecvBody {
    /// `used`: the reader's codec, where that is known before the stream knows it. `finished`:
    /// there is none.
    pub(in crate::connection) fn new(
        stream: StreamRef,
        deframer: Deframer,
        used: Used,
        finished: bool,
    ) -> Self {
        RecvBody {
            stream,
            deframer,
            used,
            handed: 0,
            look: LOOK,
            turns_left: 0,
            finished,
            ended: finished,
        }
    }

    /// How many turns the other tasks have now, before this one goes on.
    fn gives_way(&mut self) -> u8 {
        let mut inner = self.stream.shared.lock();
        let short = inner.conn.stats().eager_received;
        let pauses = inner.beside_received.piece(short);
        let news = pauses && inner.link.as_ref().is_some_and(Link::has_pending_recv);
        if news {
            inner.wake_driver();
        }
        drop(inner);
        let turns = match news {
            // In the first the driver, in the second those whom it wakes.
            true => 2,
            false => u8::from(self.handed >= TURN),
        };
        if turns > 0 {
            self.handed = 0;
        }
        self.look = self.handed + LOOK;
        turns
    }

    /// The next bytes of what the deframer has. What it copies, it copies here, where nobody waits
    /// for the connection's lock.
    fn pop(&mut self) -> Option<Bytes> {
        let bytes = self.deframer.pop()?;
        if self.deframer.is_empty() {
            self.finished = self.ended;
            let delivered = self.deframer.take_delivered();
            if delivered != Delivered::default() {
                let mut inner = self.stream.shared.lock();
                add(&mut inner.copied, delivered);
                inner.count();
            }
        }
        Some(bytes)
    }

    fn hand_on(&mut self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.handed += bytes.len();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

impl Body for RecvBody {
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
        if this.handed >= this.look {
            this.turns_left = this.gives_way();
        }
        if this.turns_left > 0 {
            this.turns_left -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(bytes) = this.pop() {
            return this.hand_on(bytes);
        }
        let id = this.stream.id;
        let mut inner = this.stream.shared.lock();
        let lost = inner.end_status();
        let Some(io) = inner.streams.get_mut(&id) else {
            this.finished = true;
            return Poll::Ready(None);
        };
        if let Some(piece) = io.unread.pop() {
            if io.used != Used::Unknown {
                this.used = io.used;
            }
            let used = this.used;
            this.ended = io.is_at_end();
            inner.consume(id, piece.flows());
            // Of those that were joined the decoder copies even the long ones.
            inner.copied.eager += u64::from(piece.landed_and_joined());
            if !inner.flush_soon() {
                inner.count();
            }
            drop(inner);
            this.deframer.push(piece.part, used);
            // No piece is empty.
            let bytes = this.pop().unwrap_or_default();
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
            (this.handed, this.look) = (0, LOOK);
            return Poll::Pending;
        };
        this.finished = true;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.finished
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// Counts what was handed on.
fn add(copied: &mut Copied, delivered: Delivered) {
    let Delivered { plain, learning, joined, short } = delivered;
    copied.plain_codec += plain;
    copied.learning += learning;
    copied.joined += joined;
    copied.eager += short;
}

impl Drop for RecvBody {
    fn drop(&mut self) {
        let id = self.stream.id;
        let shared = self.stream.shared.clone();
        let mut inner = shared.lock();
        add(&mut inner.copied, self.deframer.take_delivered());
        let side = inner.conn.side();
        let Some(io) = inner.streams.get_mut(&id) else { return };
        io.discard = true;
        let rest = std::mem::take(&mut io.unread);
        let ended = io.ended;
        inner.consume(id, rest.flows());
        if !rest.is_empty() {
            inner.count();
        }
        if side == Side::Client && !ended {
            inner.conn.reset(id, ResetCode::CANCEL);
            if let Some(io) = inner.streams.get_mut(&id) {
                let waker = io.send_waker.take();
                inner.wake(waker);
            }
        }
        let dropped = self.stream.let_go(&mut inner);
        inner.flush_soon();
        drop(inner);
        drop((rest, dropped));
    }
}
