//! A call's handle of its stream.

use std::sync::Arc;

use bytes::Bytes;
use tonic_rdma_proto::{ResetCode, StreamId};

use crate::connection::call::stream_io::StreamIo;
use crate::connection::shared::SharedConnection;
use crate::connection::state::ConnectionState;

/// Keeps a stream's [`StreamIo`]. The last one removes the stream, and resets it unless all of it
/// has been queued: a response that is queued to its end still goes out.
#[derive(Debug)]
pub(crate) struct StreamRef {
    pub(crate) shared: Arc<SharedConnection>,
    pub(crate) id: StreamId,
    /// It was released.
    released: bool,
}

/// A stream that the peer has opened.
pub(crate) struct Opened {
    /// For the response.
    pub(crate) stream: StreamRef,
    /// For the request's body.
    pub(crate) reader: StreamRef,
    /// There is no body.
    pub(crate) empty: bool,
    /// The head.
    pub(crate) block: Bytes,
}

impl StreamRef {
    /// `state` is that of `shared`, which has the stream.
    pub(crate) fn new(
        shared: &Arc<SharedConnection>,
        state: &mut ConnectionState,
        id: StreamId,
    ) -> Self {
        state.streams.io.entry(id).or_default().refs += 1;
        StreamRef { shared: shared.clone(), id, released: false }
    }

    /// Does what dropping it does, under a lock that the caller has. The caller drops the result
    /// outside the lock, as it may be the last of an arena, and flushes.
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
