//! The reason why a bare connection ended.

use tonic_rdma_memory::{PoolError, RegisterError};

use crate::error::LinkError;

/// The reason why a bare connection ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BareError {
    /// The link failed, or the peer has closed it.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// There is no memory to WRITE from.
    #[error("no memory to WRITE from: {0}")]
    Pool(#[from] PoolError),
    /// Memory to WRITE to could not be registered.
    #[error("no memory to WRITE to: {0}")]
    Register(#[from] RegisterError),
    /// Pool memory has no registration.
    #[error("no memory to WRITE from: the pool does not know its own")]
    NoSource,
    /// The peer granted no place that is long enough.
    #[error("no place for a WRITE of {len} bytes: the peer's longest has {longest}")]
    TooLong {
        /// Bytes of the WRITE.
        len: usize,
        /// Bytes of the longest place.
        longest: usize,
    },
    /// The peer wanted more bytes than this end writes on request.
    #[error("the peer wants {wanted} bytes written, at most {limit} are")]
    TooMuch {
        /// Bytes.
        wanted: u64,
        /// Bytes.
        limit: u64,
    },
    /// The peer wanted more WRITEs than this end does on one request.
    #[error("the peer wants {wanted} WRITEs, at most {limit} are done at a request")]
    TooMany {
        /// Number of WRITEs.
        wanted: u32,
        /// Number of WRITEs.
        limit: u64,
    },
    /// The peer sent an invalid message, or a message that was not expected at this point.
    #[error("a message that makes no sense: {0}")]
    Message(String),
}
