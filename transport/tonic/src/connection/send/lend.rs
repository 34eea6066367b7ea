//! Bytes that the peer reads where they lie.

use tonic_rdma_fabric::{Lent, Link, LinkError};
use tonic_rdma_proto::LentPlace;

use crate::connection::state::ConnectionState;

/// Segments of fewer bytes are copied: to return a lease takes a message, which a copy does not. At
/// 64 KiB lending costs less (docs/performance-log.md); where between that and a control slot it
/// begins to was not measured.
pub(super) const MIN_LENT: usize = 32 * 1024;

impl ConnectionState {
    /// Lends what the protocol has to send, as far as the pool and the peer allow. The rest is
    /// sent, or waits until the peer has mapped it.
    pub(super) fn lend(&mut self) -> Result<(), LinkError> {
        self.conn.retry_lends();
        while let Some((stream, bytes)) = self.conn.poll_lend() {
            let lendable = if self.conn.may_lend() { self.pool.lend(&bytes) } else { None };
            let lent = match (lendable, &mut self.link) {
                (Some(lendable), Some(link)) => {
                    let key = lendable.key();
                    match link.lend(lendable)? {
                        None if link.is_mapping(key) => {
                            self.conn.postpone_lend();
                            continue;
                        }
                        lent => lent,
                    }
                }
                _ => None,
            };
            let place = lent.map(|Lent { lease, key, addr }| LentPlace { lease, key, addr });
            self.conn.provide_lent(stream, place);
        }
        Ok(())
    }
}
