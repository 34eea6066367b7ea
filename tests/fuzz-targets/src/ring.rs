//! The ring of the shared-memory fabric.

/// Both ends of a ring stay within its bounds, whatever is in it and whatever is written to it
/// between their steps.
///
/// # Panics
/// Something is wrong.
#[cfg(target_os = "linux")]
pub fn ring(data: &[u8]) {
    tonic_rdma_fabric::fuzzing::ring(data);
}

/// There is no shared memory on this platform.
#[cfg(not(target_os = "linux"))]
pub fn ring(_: &[u8]) {}
