//! The ring and the socket of the shared-memory fabric.

/// Both ends of a ring must stay within its bounds, whatever it contains and whatever is written to
/// it between their steps.
///
/// # Panics
/// An end leaves the bounds.
#[cfg(target_os = "linux")]
pub fn ring(data: &[u8]) {
    tonic_rdma_fabric::fuzzing::ring(data);
}

/// Does nothing, because this platform has no shared memory.
#[cfg(not(target_os = "linux"))]
pub fn ring(_: &[u8]) {}

/// Each message on the socket must have one meaning, and an end must refuse messages of a kind that
/// it has not turned on.
///
/// # Panics
/// A message has several meanings, or is not refused.
#[cfg(target_os = "linux")]
pub fn socket(data: &[u8]) {
    tonic_rdma_fabric::fuzzing::socket(data);
}

/// Does nothing, because this platform has no shared memory.
#[cfg(not(target_os = "linux"))]
pub fn socket(_: &[u8]) {}
