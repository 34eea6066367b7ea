//! Memory of the application that is mapped from a file which was truncated: what was read of it
//! may be zeros, and must not be announced to the peer.

use bytes::Bytes;
use tonic_rdma_fabric::{AnyLink, LinkError};

/// Checks the source of a WRITE after it was read.
///
/// # Errors
/// It is mapped from a file that was truncated. The peer has the bytes, and no DONE for them: the
/// connection has to end.
#[inline]
pub(super) fn check(src: &Bytes, link: &AnyLink) -> Result<(), LinkError> {
    #[cfg(target_os = "linux")]
    if tonic_rdma_memory::mapped_file::is_truncated(src) {
        use tonic_rdma_fabric::{Link as _, Verb};
        return Err(LinkError::Device {
            verb: Verb::Write,
            source: std::sync::Arc::new(tonic_rdma_memory::mapped_file::truncated()),
            peer: Box::new(link.peer().clone()),
        });
    }
    let _ = (src, link);
    Ok(())
}
