//! The state of one call's stream, as the connection keeps it.

use std::sync::Arc;
use std::task::{Context, Waker};

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_rdma_proto::{ResetCode, Unsent};

use crate::codec::Used;
use crate::connection::receive::delays::Reading;
use crate::connection::receive::unread::Unread;
use crate::land_in::Claimed;

/// The application's side of one stream, protected by the connection's lock.
#[derive(Debug, Default)]
pub(crate) struct StreamIo {
    /// The response's header block, and whether it is the whole response (client).
    pub(crate) head: Option<(Bytes, bool)>,
    pub(crate) head_taken: bool,
    pub(crate) unread: Unread,
    pub(crate) reading: Reading,
    pub(crate) trailers: Option<Bytes>,
    /// Whether the peer's half of the stream has ended.
    pub(crate) ended: bool,
    pub(crate) fault: Option<Fault>,
    /// Whether received data is dropped, because no reader is left.
    pub(crate) discard: bool,
    /// The buffer for received data to land in.
    pub(crate) named: Option<Arc<Claimed>>,
    /// The codec of this side's stub or service.
    pub(crate) used: Used,
    pub(crate) recv_waker: Option<Waker>,
    pub(crate) send_waker: Option<Waker>,
    /// Number of live [`StreamRef`](super::StreamRef)s.
    pub(crate) refs: u8,
}

impl StreamIo {
    /// Whether a reader waits for the peer's next data, or all further data is dropped.
    pub(crate) fn is_awaited(&self) -> bool {
        self.discard || (self.recv_waker.is_some() && self.unread.is_empty())
    }
}

/// Stores the task's waker, unless it is already stored.
pub(crate) fn wait_for(waker: &mut Option<Waker>, cx: &Context<'_>) {
    match waker {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *waker = Some(cx.waker().clone()),
    }
}

/// Why a stream failed.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The peer has reset the stream.
    Reset(ResetCode),
    /// The stream was never transmitted. The call can take another path, with the data that was
    /// queued.
    Refused(Vec<Unsent>),
    /// This side has given up the stream.
    Local(Status),
}

impl Fault {
    #[inline]
    pub(crate) fn status(&self) -> Status {
        match self {
            Fault::Reset(code) => reset_status(*code),
            Fault::Refused(_) => {
                Status::unavailable("the peer takes no new calls on this connection")
            }
            Fault::Local(status) => status.clone(),
        }
    }
}

/// Maps HTTP/2 reset codes to statuses in the same way as the gRPC specification and tonic.
fn reset_status(code: ResetCode) -> Status {
    let grpc = match code {
        ResetCode::REFUSED => Code::Unavailable,
        ResetCode::CANCEL => Code::Cancelled,
        ResetCode::ENHANCE_YOUR_CALM => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    Status::new(grpc, format!("the peer reset the stream: {code}"))
}

impl StreamIo {
    /// Creates the state of a stream that the peer has opened. `ended` says that the peer's half
    /// has already ended.
    #[inline]
    pub(crate) fn opened(ended: bool) -> Self {
        StreamIo { ended, ..StreamIo::default() }
    }

    /// Whether the stream has no more data to read and no trailers.
    #[inline]
    pub(crate) fn is_at_end(&self) -> bool {
        self.ended && self.unread.is_empty() && self.trailers.is_none()
    }
}
