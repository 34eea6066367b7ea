//! What a call holds of a stream.

use std::sync::Arc;
use std::task::{Context, Waker};

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_rdma_proto::{ResetCode, StreamId, Unsent};

use super::shared::{Inner, Shared};
use super::unread::Unread;
use crate::codec::Used;

/// The application's side of one stream, behind the connection's lock.
#[derive(Debug, Default)]
pub(super) struct StreamIo {
    /// The response's header block, and whether it was all (client).
    pub(super) head: Option<(Bytes, bool)>,
    pub(super) head_taken: bool,
    pub(super) unread: Unread,
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
    /// Never transmitted: free to go another way, with what had been queued.
    Refused(Vec<Unsent>),
    /// This side gave it up.
    Local(Status),
}

impl Fault {
    pub(super) fn status(&self) -> Status {
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
pub(super) struct StreamRef {
    pub(super) shared: Arc<Shared>,
    pub(super) id: StreamId,
    /// It has been let go of.
    gone: bool,
}

/// A stream that the peer has opened.
pub(super) struct Opened {
    /// For the answer.
    pub(super) stream: StreamRef,
    /// For the request's body.
    pub(super) reader: StreamRef,
    /// There is no body.
    pub(super) empty: bool,
    /// The head.
    pub(super) block: Bytes,
}

impl StreamIo {
    /// A stream that the peer opened, and perhaps ended.
    pub(super) fn opened(ended: bool) -> Self {
        StreamIo { ended, ..StreamIo::default() }
    }

    /// There is nothing more to read, and no trailers.
    pub(super) fn is_at_end(&self) -> bool {
        self.ended && self.unread.is_empty() && self.trailers.is_none()
    }
}

impl StreamRef {
    /// `inner` is that of `shared`, which has the stream.
    pub(super) fn new(shared: &Arc<Shared>, inner: &mut Inner, id: StreamId) -> Self {
        inner.streams.entry(id).or_default().refs += 1;
        StreamRef { shared: shared.clone(), id, gone: false }
    }

    /// Does what dropping it does, for whoever has the lock already. What is returned is freed
    /// outside of it: it may be the last of an arena. A flush is for the caller.
    pub(super) fn let_go(&mut self, inner: &mut Inner) -> Option<StreamIo> {
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
    pub(super) fn new(shared: &Arc<Shared>, inner: &mut Inner, id: StreamId, block: Bytes) -> Self {
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
