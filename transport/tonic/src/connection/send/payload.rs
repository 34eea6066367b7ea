//! Bodies in the form that the protocol takes, and bytes that the peer reads in place.

use tonic_rdma_fabric::{Lent, Link, LinkError};
use tonic_rdma_memory::PinnedBytes;
use tonic_rdma_proto::{Connection, LentPlace, Payload};

use crate::codec::Chunk;
use crate::connection::send::link_io::LinkIo;
use crate::telemetry::stats::Copied;

/// A run between the segments of a message counts as framing, not payload, up to this many bytes.
const FRAMING: usize = 256;
/// Shorter segments are copied, because returning a lease takes a message, and a copy does not.
/// Lending costs less at 64 KiB (docs/performance-log.md). The length between a control slot and 64
/// KiB at which it begins to pay was not measured.
const MIN_LENT: usize = 32 * 1024;

impl LinkIo {
    /// Turns a chunk into a payload, and counts the copies that it needs.
    pub(crate) fn payload(&self, chunk: Chunk, eager_limit: usize, copied: &mut Copied) -> Payload {
        let eager = chunk.len <= eager_limit;
        let mut payload = Payload::new();
        let may_lend = !eager && self.link.as_ref().is_some_and(Link::may_lend);
        for (at, bytes) in chunk.segments.into_iter().enumerate() {
            // A WRITE can send the chunk from where it lies, because the device knows the memory or
            // the link copies from any memory.
            let framing = chunk.apart && bytes.len() <= FRAMING;
            let registered = if eager || framing { None } else { self.pool.resolve(&bytes) };
            let in_pool = registered.is_some();
            let lendable = may_lend
                && bytes.len() >= MIN_LENT
                && registered.as_ref().is_some_and(|bytes| bytes.lend_key().is_some());
            // It is resolved again when it is posted. The application may have dropped its
            // registration by then.
            let bytes = registered.map_or(bytes, PinnedBytes::into_registered);
            let pinned = !eager && (in_pool || self.any_memory);
            if !(eager || framing || in_pool) {
                let len = bytes.len() as u64;
                if !chunk.apart {
                    copied.plain_codec += len;
                }
                if !pinned {
                    copied.staging += len;
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

    /// Lends what the protocol has to send, as far as the pool and the peer allow. Other bytes are
    /// sent in another way, or wait until the peer has mapped their memory.
    pub(super) fn lend(&mut self, conn: &mut Connection) -> Result<(), LinkError> {
        conn.retry_lends();
        while let Some((stream, bytes)) = conn.poll_lend() {
            let lendable = if conn.may_lend() { self.pool.lend(&bytes) } else { None };
            let lent = match (lendable, &mut self.link) {
                (Some(lendable), Some(link)) => {
                    let key = lendable.key();
                    match link.lend(lendable)? {
                        None if link.is_mapping(key) => {
                            conn.postpone_lend();
                            continue;
                        }
                        lent => lent,
                    }
                }
                _ => None,
            };
            let place = lent.map(|Lent { lease, key, addr }| LentPlace { lease, key, addr });
            conn.provide_lent(stream, place);
        }
        Ok(())
    }
}
