//! Bytes that the peer reads where they lie.

use tonic_rdma_fabric::{Lent, Link, LinkError};
use tonic_rdma_proto::LentPlace;

use crate::connection::state::ConnectionState;

/// Segments of fewer bytes are copied: to lend and to return one costs a message in each direction,
/// and the page of a long one is in no cache of the reader's either way.
pub(super) const MIN_LENT: usize = 32 * 1024;

impl ConnectionState {
    /// Lends what the protocol has to send, as far as the pool and the peer allow. The rest is
    /// sent.
    pub(super) fn lend(&mut self) -> Result<(), LinkError> {
        while let Some((stream, bytes)) = self.conn.poll_lend() {
            let bytes = if self.conn.may_lend() { self.pool.lend(&bytes) } else { None };
            let lent = match (bytes, &mut self.link) {
                (Some(bytes), Some(link)) => link.lend(bytes)?,
                _ => None,
            };
            let place = lent.map(|Lent { lease, key, addr }| LentPlace { lease, key, addr });
            self.conn.provide_lent(stream, place);
        }
        Ok(())
    }
}
