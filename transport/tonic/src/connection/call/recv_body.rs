//! The body of a request or response that is received.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tonic::Status;
use tonic_rdma_fabric::Link;
use tonic_rdma_fabric::turn::{self, COPY_UNIT};
use tonic_rdma_memory::Landed;
use tonic_rdma_proto::{Connection, Flow, ResetCode, Side, StreamId};

use crate::codec::{Deframer, Delivered, Part, Used};
use crate::connection::call::stream_io::wait_for;
use crate::connection::call::{StreamRef, headers};
use crate::connection::copy_scheduler::ReadPace;
use crate::connection::lifecycle::inherited;
use crate::connection::receive::delays::Reading;
use crate::telemetry::metrics::CallTimer;
use crate::telemetry::stats::Copied;

/// A part that is being copied to the heap, piece by piece. Each piece is charged to the reader's
/// turn (R20).
#[derive(Debug)]
struct Copying {
    rest: Landed,
    copy: BytesMut,
}

impl Copying {
    fn new(rest: Landed) -> Self {
        let copy = BytesMut::with_capacity(rest.len());
        Copying { rest, copy }
    }

    /// Copies the next piece. After the last piece, gives the landing memory back.
    fn step(&mut self) {
        let len = self.rest.len().min(COPY_UNIT);
        self.rest.move_to(len, &mut self.copy);
    }

    fn into_part(self) -> Part {
        Part::Landed(self.copy.freeze().into())
    }
}

/// The body of a request at the server, or of a response at the client.
///
/// Dropping a response's body before its end cancels the call, once the request has been sent or
/// given up. Dropping a request's body discards the rest of the request.
#[derive(Debug)]
pub(crate) struct RecvBody {
    stream: StreamRef,
    deframer: Deframer,
    used: Used,
    pace: ReadPace,
    /// The next part for the deframer, while it is being copied.
    copying: Option<Copying>,
    /// Whether no more data comes from the stream or the deframer. After the last data, this flag
    /// may remain unset until the next poll.
    finished: bool,
    /// Whether the deframer has received the last bytes.
    ended: bool,
    /// Measures the call, if this is the body of its response.
    timer: CallTimer,
}

impl RecvBody {
    /// Creates a body. `used` is the reader's codec, as far as it is known. The stream's state may
    /// not contain the codec yet. `finished` means that the request or response has no body.
    pub(crate) fn new(stream: StreamRef, deframer: Deframer, used: Used, finished: bool) -> Self {
        RecvBody {
            stream,
            deframer,
            used,
            pace: ReadPace::new(),
            copying: None,
            finished,
            ended: finished,
            timer: CallTimer::default(),
        }
    }

    /// Returns this body with `timer`, which measures the call until the body ends.
    pub(crate) fn timed(mut self, timer: CallTimer) -> Self {
        self.timer = timer;
        self
    }

    /// Asks the connection whether a message is pending. If a message is pending, the driver and
    /// the tasks that it wakes run before the rest of this body is read (R13).
    fn check_pending(&mut self) {
        let mut state = self.stream.shared.lock();
        let short = state.conn.stats().eager_received;
        let pending = state.copies.interleaves_reads(short)
            && state.link.get().is_some_and(Link::has_pending_recv);
        if pending {
            state.tasks.wake_driver();
        }
        drop(state);
        self.pace.checked(pending);
    }

    /// Takes the next bytes from the deframer, which may copy them. The caller does not hold the
    /// connection's lock, so no task waits for the copy.
    fn pop(&mut self) -> Option<Bytes> {
        let bytes = self.deframer.pop()?;
        if self.deframer.lets_go()
            && let Some(io) = self.stream.shared.lock().streams.io.get_mut(&self.stream.id)
        {
            io.named = None;
        }
        if self.deframer.is_empty() {
            self.finished = self.ended;
            let delivered = self.deframer.take_delivered();
            if delivered != Delivered::default() {
                let mut state = self.stream.shared.lock();
                add(&mut state.usage.copied, delivered);
                state.count();
            }
        }
        Some(bytes)
    }

    /// Gives a part to the deframer. The reader may then keep the part in landing memory for any
    /// length of time. If messages are copied before they are read (`copies`), or if readers hold
    /// as much landing memory as is allowed, begins to copy the part instead.
    fn take_out(&mut self, part: Part, copies: bool) {
        let copying = match part {
            Part::Landed(landed) if copies && landed.is_in_pool() => Copying::new(landed),
            Part::Landed(landed) if !landed.hold() => Copying::new(landed),
            part => return self.deframer.push(part, self.used),
        };
        let mut state = self.stream.shared.lock();
        let copied = &mut state.usage.copied;
        let count = if copies { &mut copied.delivery } else { &mut copied.pressure };
        *count += copying.rest.len() as u64;
        state.count();
        drop(state);
        self.copying = Some(copying);
    }

    /// Returns the first bytes of the part that was taken out, once it is copied.
    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        while let Some(copying) = &mut self.copying {
            if copying.rest.is_empty() {
                let part = self.copying.take().map(Copying::into_part);
                part.into_iter().for_each(|part| self.deframer.push(part, self.used));
            } else {
                ready!(turn::charge(cx, &mut 1));
                copying.step();
            }
        }
        // The default value is never needed, because each piece has at least one byte.
        let bytes = self.pop().unwrap_or_default();
        self.hand_on(bytes)
    }

    fn hand_on(&mut self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.pace.handed_on(bytes.len());
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
        if !this.stream.shared.is_own() {
            this.finished = true;
            return Poll::Ready(Some(Err(inherited())));
        }
        ready!(this.pace.charge(cx));
        if this.pace.is_check_due() {
            this.check_pending();
        }
        if this.pace.yields() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(bytes) = this.pop() {
            return this.hand_on(bytes);
        }
        if this.copying.is_some() {
            return this.poll_part(cx);
        }
        let id = this.stream.id;
        let mut state = this.stream.shared.lock();
        let (lost, side) = (state.lifecycle.end_status(), state.conn.side());
        let Some(io) = state.streams.io.get_mut(&id) else {
            this.finished = true;
            return Poll::Ready(None);
        };
        if let Some(piece) = io.unread.pop() {
            if io.used != Used::Unknown {
                this.used = io.used;
            } else if this.used == Used::Unknown && side == Side::Server {
                // Ask the method for the codec, because the service has made its decoder by now but
                // has encoded nothing yet.
                this.used = this.deframer.method().used();
            }
            io.reading = Reading::UpToDate;
            this.ended = io.is_at_end();
            consume(&mut state.conn, id, piece.flows());
            // Count joined pieces, because the decoder copies them even if they are long.
            state.usage.copied.eager += u64::from(piece.landed_and_joined());
            if !state.flush_soon() {
                state.count();
            }
            let copies = state.landing.copies_on_delivery();
            drop(state);
            this.take_out(piece.part, copies);
            return this.poll_part(cx);
        }
        let frame = if let Some(block) = io.trailers.take() {
            match headers::decode_trailers(block) {
                Ok(trailers) => {
                    this.timer.end_with(&trailers);
                    Some(Ok(Frame::trailers(trailers)))
                }
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
            this.pace.waits();
            state.reader_waits(id);
            return Poll::Pending;
        };
        this.finished = true;
        match &frame {
            Some(Err(status)) => this.timer.end(status.code()),
            _ => this.timer.body_ended(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.finished
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// Accounts for bytes that have been read or will never be read.
#[inline]
fn consume(conn: &mut Connection, id: StreamId, flows: [(u32, Flow); 2]) {
    for (len, flow) in flows {
        if len > 0 {
            conn.consume(id, len, flow);
        }
    }
}

/// Adds the numbers of bytes that were copied before they were handed on to the reader.
fn add(copied: &mut Copied, delivered: Delivered) {
    let Delivered { plain, learning, joined, short, named } = delivered;
    copied.plain_codec += plain;
    copied.learning += learning;
    copied.joined += joined;
    copied.eager += short;
    copied.named += named;
}

impl Drop for RecvBody {
    fn drop(&mut self) {
        if !self.stream.shared.is_own() {
            self.timer.forget();
            return;
        }
        let id = self.stream.id;
        let shared = self.stream.shared.clone();
        let mut state = shared.lock();
        let delivered = self.deframer.take_delivered();
        add(&mut state.usage.copied, delivered);
        let side = state.conn.side();
        let Some(io) = state.streams.io.get_mut(&id) else { return };
        io.discard = true;
        let rest = std::mem::take(&mut io.unread);
        let (ended, alone) = (io.ended, io.refs == 1);
        consume(&mut state.conn, id, rest.flows());
        state.reader_waits(id);
        if !rest.is_empty() || delivered != Delivered::default() {
            state.count();
        }
        // Cancel the call, unless its request is still being sent. tonic treats CANCEL as the end
        // of a request, so the server would treat a truncated request as complete. A call whose
        // request is still being sent ends once the request has ended.
        if side == Side::Client && !ended && alone {
            state.conn.reset(id, ResetCode::CANCEL);
            if let Some(io) = state.streams.io.get_mut(&id) {
                let waker = io.send_waker.take();
                state.tasks.wake(waker);
            }
        }
        let dropped = self.stream.release(&mut state);
        state.flush_soon();
        drop(state);
        drop((rest, dropped));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_copied_in_pieces() {
        let bytes: Bytes = (0..=16 * COPY_UNIT).map(|i| (i * 31) as u8).collect::<Vec<_>>().into();
        let mut copying = Copying::new(bytes.clone().into());
        let mut steps = 0;
        while !copying.rest.is_empty() {
            let before = copying.copy.len();
            copying.step();
            assert!((1..=COPY_UNIT).contains(&(copying.copy.len() - before)));
            steps += 1;
        }
        assert_eq!(steps, 17);
        let Part::Landed(copy) = copying.into_part() else { panic!("not landed") };
        assert_eq!(copy.to_private(), bytes);
    }
}
