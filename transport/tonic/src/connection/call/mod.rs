//! The calls on a connection, and a call's handle to its stream.
//!
//! | file | what |
//! |---|---|
//! | `client` | calls that this end makes |
//! | `server` | calls that the peer makes |
//! | `task_pool` | the tasks that a server's calls run in |
//! | `response` | sends the answer to a call |
//! | `stream_io` | the state of a stream, as the connection keeps it |
//! | `streams` | the streams of a connection, and delivery to them |
//! | `send_body` | a body that is sent |
//! | `recv_body` | a body that is received |
//! | `headers` | converts http heads to and from header blocks |
//! | `header_cache` | decoded heads of requests that repeat |

pub(super) mod client;
mod header_cache;
pub(super) mod headers;
mod recv_body;
mod response;
mod send_body;
pub(super) mod server;
pub(super) mod stream_io;
pub(super) mod streams;
mod task_pool;

use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma_proto::{ResetCode, StreamId};

use crate::connection::call::stream_io::StreamIo;
use crate::connection::shared::SharedConnection;
use crate::connection::state::ConnectionState;

/// Keeps a stream's [`StreamIo`]. Dropping the last handle removes the stream and resets it. A
/// server's response that has been queued to its end is still sent.
#[derive(Debug)]
pub(crate) struct StreamRef {
    pub(crate) shared: Arc<SharedConnection>,
    pub(crate) id: StreamId,
    /// Whether the handle was released.
    released: bool,
}

/// A stream that the peer has opened.
pub(crate) struct Opened {
    /// The handle for the response.
    pub(crate) stream: StreamRef,
    /// The handle for the request's body.
    pub(crate) reader: StreamRef,
    /// Whether the request has no body.
    pub(crate) empty: bool,
    /// The request's header block.
    pub(crate) block: Bytes,
}

impl StreamRef {
    /// Creates a handle. `state` is the locked state of `shared`, and contains the stream.
    pub(crate) fn new(
        shared: &Arc<SharedConnection>,
        state: &mut ConnectionState,
        id: StreamId,
    ) -> Self {
        state.streams.io.entry(id).or_default().refs += 1;
        StreamRef { shared: shared.clone(), id, released: false }
    }

    /// Does the work of the destructor under a lock that the caller holds. The caller must flush,
    /// and must drop the result after releasing the lock, because the drop may free an arena.
    pub(crate) fn release(&mut self, state: &mut ConnectionState) -> Option<StreamIo> {
        if std::mem::replace(&mut self.released, true) {
            return None;
        }
        let io = state.streams.io.get_mut(&self.id)?;
        io.refs -= 1;
        if io.refs > 0 {
            return None;
        }
        state.conn.release(self.id, ResetCode::CANCEL);
        state.landing.forget_naming(self.id);
        state.streams.io.remove(&self.id)
    }
}

impl Opened {
    pub(crate) fn new(
        shared: &Arc<SharedConnection>,
        state: &mut ConnectionState,
        id: StreamId,
        block: Bytes,
    ) -> Self {
        let (stream, reader) =
            (StreamRef::new(shared, state, id), StreamRef::new(shared, state, id));
        let empty = state.streams.io.get(&id).is_none_or(StreamIo::is_at_end);
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
        if self.released || !self.shared.is_own() {
            return;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        let dropped = self.release(&mut state);
        if dropped.is_some() {
            state.flush_soon();
        }
        drop(state);
        drop(dropped);
    }
}
