//! What a call holds of a stream.

use std::sync::Arc;
use std::task::{Context, Waker};

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_rdma_proto::{ResetCode, StreamId, Unsent};

use crate::codec::Used;
use crate::connection::receive::unread::Unread;
use crate::connection::state::{Inner, Shared};

/// The application's side of one stream, behind the connection's lock.
#[derive(Debug, Default)]
pub(in crate::connection) struct StreamIo {
    /// The response's header block, and whether it was all (client).
    pub(in crate::connection) head: Option<(Bytes, bool)>,
    pub(in crate::connection) head_taken: bool,
    pub(in crate::connection) unread: Unread,
    pub(in crate::connection) trailers: Option<Bytes>,
    /// The peer's half has ended.
    pub(in crate::connection) ended: bool,
    pub(in crate::connection) fault: Option<Fault>,
    /// Nobody reads: what comes is dropped.
    pub(in crate::connection) discard: bool,
    /// The codec of this side's stub or service.
    pub(in crate::connection) used: Used,
    pub(in crate::connection) recv_waker: Option<Waker>,
    pub(in crate::connection) send_waker: Option<Waker>,
    /// Live [`StreamRef`]s.
    refs: u8,
}

/// Leaves the task's waker, if it is not there already.
pub(in crate::connection) fn wait_for(waker: &mut Option<Waker>, cx: &Context<'_>) {
    match waker {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *waker = Some(cx.waker().clone()),
    }
}

/// Why a stream ended other than well.
#[derive(Debug, Clone)]
pub(in crate::connection) enum Fault {
    /// The peer reset it.
    Reset(ResetCode),
    /// Never transmitted: free to go another way, with what had been queued.
    Refused(Vec<Unsent>),
    /// This side gave it up.
    Local(Status),
}

impl Fault {
    pub(in crate::connection) fn status(&self) -> Status {
        match self {
            Fault::Reset(code) => reset_status(*code),
            Fault::Refused(_) => {
                Status::unavailable("the peer takes no new calls on this connection")
            }
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

/// Keeps a stream's [`StreamIo`]. With the last one the stream is forgotten, and reset unless all
/// of it has been said: a response that is queued to its end still goes out.
#[derive(Debug)]
pub(in crate::connection) struct StreamRef {
    pub(in crate::connection) shared: Arc<Shared>,
    pub(in crate::connection) id: StreamId,
    /// It has been let go of.
    gone: bool,
}

/// A stream that the peer has opened.
pub(in crate::connection) struct Opened {
    /// For the answer.
    pub(in crate::connection) stream: StreamRef,
    /// For the request's body.
    pub(in crate::connection) reader: StreamRef,
    /// There is no body.
    pub(in crate::connection) empty: bool,
    /// The head.
    pub(in crate::connection) block: Bytes,
}

impl StreamIo {
    /// A stream that the peer opened, and perhaps ended.
    pub(in crate::connection) fn opened(ended: bool) -> Self {
        StreamIo { ended, ..StreamIo::default() }
    }

    /// There is nothing more to read, and no trailers.
    pub(in crate::connection) fn is_at_end(&self) -> bool {
        self.ended && self.unread.is_empty() && self.trailers.is_none()
    }
}

impl StreamRef {
    /// `inner` is that of `shared`, which has the stream.
    pub(in crate::connection) fn new(
        shared: &Arc<Shared>,
        inner: &mut Inner,
        id: StreamId,
    ) -> Self {
        inner.streams.entry(id).or_default().refs += 1;
        StreamRef { shared: shared.clone(), id, gone: false }
    }

    /// Does what dropping it does, for whoever has the lock already. What is returned is freed
    /// outside of it: it may be the last of an arena. A flush is for the caller.
    pub(in crate::connection) fn let_go(&mut self, inner: &mut Inner) -> Option<StreamIo> {
        if std::mem::replace(&mut self.gone, true) {
            return None;
        }
        let io = inner.streams.get_mut(&self.id)?;
        io.refs -= 1;
        if io.refs > 0 {
            return None;
        }
        inner.conn.release(self.id, ResetCode::CANCEL);
        inner.streams.remove(&self.id)
    }
}

impl Opened {
    pub(in crate::connection) fn new(
        shared: &Arc<Shared>,
        inner: &mut Inner,
        id: StreamId,
        block: Bytes,
    ) -> Self {
        let (stream, reader) =
            (StreamRef::new(shared, inner, id), StreamRef::new(shared, inner, id));
        let empty = inner.streams.get(&id).is_none_or(StreamIo::is_at_end);
        Opened { stream, reader, empty, block }
    }
}

impl Clone for StreamRef {
    fn clone(&self) -> Self {
        StreamRef::new(&self.shared, &mut self.shared.lock(), self.id)
    }
}

impl Drop for StreamRef {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let shared = self.shared.clone();
        let mut inner = shared.lock();
        let dropped = self.let_go(&mut inner);
        if dropped.is_some() {
            inner.flush_soon();
        }
        drop(inner);
        drop(dropped);
    }
}
