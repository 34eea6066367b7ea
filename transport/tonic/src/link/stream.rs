//! What a call holds of a stream.

use std::sync::Arc;
use std::task::{Context, Waker};

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_rdma_proto::{Flow, ResetCode, StreamId};

use super::shared::Shared;
use crate::codec::Used;
use crate::fifo::Fifo;

/// A piece of a received body.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) bytes: Bytes,
    pub(super) flow: Flow,
    /// It came by WRITE.
    pub(super) landed: bool,
}

/// The application's side of one stream, behind the connection's lock.
#[derive(Debug, Default)]
pub(super) struct StreamIo {
    /// The response's header block, and whether it was all (client).
    pub(super) head: Option<(Bytes, bool)>,
    pub(super) head_taken: bool,
    pub(super) pieces: Fifo<Piece>,
    pub(super) trailers: Option<Bytes>,
    /// The peer's half has ended.
    pub(super) ended: bool,
    pub(super) fault: Option<Fault>,
    /// Nobody reads: what comes is dropped.
    pub(super) discard: bool,
    /// The codec of this side's stub or service.
    pub(super) used: Used,
    pub(super) recv_waker: Option<Waker>,
    pub(super) send_waker: Option<Waker>,
    /// Live [`StreamRef`]s.
    refs: u8,
}

/// Leaves the task's waker, if it is not there already.
pub(super) fn wait_for(waker: &mut Option<Waker>, cx: &Context<'_>) {
    match waker {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *waker = Some(cx.waker().clone()),
    }
}

/// Why a stream ended other than well.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// The peer reset it.
    Reset(ResetCode),
    /// Never transmitted: free to go another way.
    Refused,
    /// This side gave it up.
    Local(Status),
}

impl Fault {
    pub(super) fn status(&self) -> Status {
        match self {
            Fault::Reset(code) => reset_status(*code),
            Fault::Refused => Status::unavailable("the peer takes no new calls on this connection"),
            Fault::Local(status) => status.clone(),
        }
    }
}

/// gRPC's mapping of HTTP/2 reset codes, as tonic has it.
fn reset_status(code: ResetCode) -> Status {
    let grpc = match code {
        ResetCode::REFUSED => Code::Unavailable,
        ResetCode::CANCEL => Code::Cancelled,
        ResetCode::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    Status::new(grpc, format!("the peer reset the stream: {code}"))
}

/// Keeps a stream's [`StreamIo`]. With the last one the stream is forgotten, and reset unless all of it has been said:
/// a response that is queued to its end still goes out.
#[derive(Debug)]
pub(super) struct StreamRef {
    pub(super) shared: Arc<Shared>,
    pub(super) id: StreamId,
}

impl StreamIo {
    /// A stream that the peer opened, and perhaps ended.
    pub(super) fn opened(ended: bool) -> Self {
        StreamIo { ended, ..StreamIo::default() }
    }

    pub(super) fn add_ref(&mut self) {
        self.refs += 1;
    }

    fn drop_ref(&mut self) -> bool {
        self.refs -= 1;
        self.refs == 0
    }
}

impl Clone for StreamRef {
    fn clone(&self) -> Self {
        if let Some(io) = self.shared.lock().streams.get_mut(&self.id) {
            io.add_ref();
        }
        StreamRef { shared: self.shared.clone(), id: self.id }
    }
}

impl Drop for StreamRef {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        let Some(io) = inner.streams.get_mut(&self.id) else { return };
        if io.drop_ref() {
            let dropped = inner.streams.remove(&self.id);
            inner.conn.release(self.id, ResetCode::CANCEL);
            inner.flush_soon();
            // Payload is freed outside the lock: it may be the last of an arena.
            drop(inner);
            drop(dropped);
        }
    }
}
