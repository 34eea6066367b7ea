//! Passes the protocol's output to the link. All output that can be sent now is posted in one
//! batch. This file converts bodies to the form that the protocol takes, and lends bytes that the
//! peer reads in place.
//!
//! | file | what |
//! |---|---|
//! | `link_io` | the link, and its work in flight |
//! | `in_flight` | SEND slots, staging blocks and WRITEs in flight |
//! | `write_window` | how many bytes of WRITEs may be in flight |

mod in_flight;
pub(super) mod link_io;
mod write_window;

use tonic_rdma_fabric::{Lent, Link, LinkError};
use tonic_rdma_memory::PinnedBytes;
use tonic_rdma_proto::{Connection, LentPlace, Payload};

use crate::codec::BodyChunk;
use crate::connection::send::link_io::LinkIo;
use crate::telemetry::stats::Copied;

/// Maximum length in bytes of a segment that counts as framing, and not as payload, in a message
/// that the codec has split.
const FRAMING: usize = 256;
/// Minimum length in bytes of a segment that is lent. Shorter segments are copied, because
/// returning a lease takes a message, and a copy does not. Lending costs less at 64 KiB
/// (docs/performance-log.md). Lengths between a control slot and 64 KiB were not measured.
const MIN_LENT: usize = 32 * 1024;

impl LinkIo {
    /// Turns a chunk into a payload, and counts the copies that sending this payload needs.
    pub(crate) fn payload(
        &self,
        chunk: BodyChunk,
        eager_limit: usize,
        copied: &mut Copied,
    ) -> Payload {
        let eager = chunk.len <= eager_limit;
        let mut payload = Payload::new();
        let may_lend = !eager && self.link.as_ref().is_some_and(Link::may_lend);
        for (at, bytes) in chunk.segments.into_iter().enumerate() {
            // Find out whether the device knows the segment's memory, so that a WRITE can send the
            // segment in place.
            let framing = chunk.apart && bytes.len() <= FRAMING;
            let registered = if eager || framing { None } else { self.pool.resolve(&bytes) };
            let in_pool = registered.is_some();
            let lendable = may_lend
                && bytes.len() >= MIN_LENT
                && registered.as_ref().is_some_and(|bytes| bytes.lend_key().is_some());
            // Do not keep the result, because the memory is resolved again when the WRITE is
            // posted. The application may have dropped the registration by then.
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

    /// Lends the bytes that the protocol proposes to lend, if the pool and the peer allow it. Bytes
    /// whose memory the peer is still mapping wait. All other bytes are sent in another way.
    fn lend(&mut self, conn: &mut Connection) -> Result<(), LinkError> {
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
