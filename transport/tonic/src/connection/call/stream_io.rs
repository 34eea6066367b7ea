//! The state of a call's stream, as the connection keeps it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Waker};

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_rdma_proto::{ResetCode, StreamId, StreamMap, Unsent};

use crate::codec::Used;
use crate::connection::receive::stall::Reading;
use crate::connection::receive::unread::Unread;
use crate::land_in::Claimed;

/// The streams of a connection.
#[derive(Debug, Default)]
pub(in crate::connection) struct Streams {
    pub(in crate::connection) io: StreamMap<StreamIo>,
    /// Streams that the peer opened and nobody serves yet, with their header blocks.
    pub(in crate::connection) opened: VecDeque<(StreamId, Bytes)>,
    /// A call waits for a free stream.
    pub(in crate::connection) room_wanted: bool,
    /// The log says that calls wait for one.
    pub(in crate::connection) limit_told: bool,
}

/// The application's side of one stream, behind the connection's lock.
#[derive(Debug, Default)]
pub(in crate::connection) struct StreamIo {
    /// The response's header block, and whether it was all (client).
    pub(in crate::connection) head: Option<(Bytes, bool)>,
    pub(in crate::connection) head_taken: bool,
    pub(in crate::connection) unread: Unread,
    pub(in crate::connection) reading: Reading,
    pub(in crate::connection) trailers: Option<Bytes>,
    /// The peer's half has ended.
    pub(in crate::connection) ended: bool,
    pub(in crate::connection) fault: Option<Fault>,
    /// Nobody reads: received data is dropped.
    pub(in crate::connection) discard: bool,
    /// The buffer that what is received is to land in.
    pub(in crate::connection) named: Option<Arc<Claimed>>,
    /// The codec of this side's stub or service.
    pub(in crate::connection) used: Used,
    pub(in crate::connection) recv_waker: Option<Waker>,
    pub(in crate::connection) send_waker: Option<Waker>,
    /// Live [`StreamRef`](super::stream::StreamRef)s.
    pub(in crate::connection) refs: u8,
}

impl StreamIo {
    /// Whether a reader waits for what the peer sends next, or nobody reads and it is dropped.
    pub(in crate::connection) fn is_awaited(&self) -> bool {
        self.discard || (self.recv_waker.is_some() && self.unread.is_empty())
    }
}

/// Stores the task's waker, if it is not stored already.
pub(in crate::connection) fn wait_for(waker: &mut Option<Waker>, cx: &Context<'_>) {
    match waker {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *waker = Some(cx.waker().clone()),
    }
}

/// Why a stream failed.
#[derive(Debug, Clone)]
pub(in crate::connection) enum Fault {
    /// The peer reset it.
    Reset(ResetCode),
    /// Never transmitted: the call can take another path, with the data that was queued.
    Refused(Vec<Unsent>),
    /// This side gave up the stream.
    Local(Status),
}

impl Fault {
    #[inline]
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

impl StreamIo {
    /// A stream that the peer opened, and may have ended.
    #[inline]
    pub(in crate::connection) fn opened(ended: bool) -> Self {
        StreamIo { ended, ..StreamIo::default() }
    }

    /// Nothing is left to read, and there are no trailers.
    #[inline]
    pub(in crate::connection) fn is_at_end(&self) -> bool {
        self.ended && self.unread.is_empty() && self.trailers.is_none()
    }
}
