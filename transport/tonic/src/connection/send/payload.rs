//! Bodies as the protocol takes them.

use tonic_rdma_fabric::Link;
use tonic_rdma_memory::PinnedBytes;
use tonic_rdma_proto::Payload;

use crate::codec::Chunk;
use crate::connection::send::lend::MIN_LENT;
use crate::connection::state::ConnectionState;

/// Bytes of a run between the segments of a message up to which it does not count as payload.
const FRAMING: usize = 256;

impl ConnectionState {
    /// Turns a chunk into a payload, and counts the copies that it needs.
    pub(crate) fn payload(&mut self, chunk: Chunk) -> Payload {
        let eager = chunk.len <= self.conn.eager_limit();
        let mut payload = Payload::new();
        let may_lend = !eager && self.link.as_ref().is_some_and(Link::may_lend);
        for (at, bytes) in chunk.segments.into_iter().enumerate() {
            // A WRITE can have it as it lies: the device knows the memory, or the link copies from
            // any.
            let framing = chunk.apart && bytes.len() <= FRAMING;
            let registered = if eager || framing { None } else { self.pool.resolve(&bytes) };
            let in_pool = registered.is_some();
            let lendable = may_lend
                && bytes.len() >= MIN_LENT
                && registered.as_ref().is_some_and(|bytes| bytes.lend_key().is_some());
            // It is resolved again when it is posted, which may be after the application has
            // dropped its registration.
            let bytes = registered.map_or(bytes, PinnedBytes::into_registered);
            let pinned = !eager && (in_pool || self.send.any_memory);
            if !(eager || framing || in_pool) {
                let len = bytes.len() as u64;
                if !chunk.apart {
                    self.usage.copied.plain_codec += len;
                }
                if !pinned {
                    self.usage.copied.staging += len;
                }
            }
            match chunk.longest == Some(at) {
                true => payload.push_aligned(bytes, pinned),
                false => payload.push(bytes, pinned),
            }
            if lendable {
                payload.last_is_lendable();
            }
        }
        payload
    }
}
