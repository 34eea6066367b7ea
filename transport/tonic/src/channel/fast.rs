//! An established fast path.

use tonic_rdma_memory::Pool;

use crate::connection::FastClient;

/// An established fast path.
#[derive(Debug, Clone)]
pub(crate) struct Fast {
    pub(crate) client: FastClient,
    pub(crate) pool: Pool,
}
