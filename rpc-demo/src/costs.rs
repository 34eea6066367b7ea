//! Measures what transfers cost this process: processor time, and bytes copied between files and
//! memory.
//!
//! The transport counts its own copies ([`tonic_rdma::Copied`]). Computing a CRC32C reads bytes and
//! copies none.

use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

static READ: AtomicU64 = AtomicU64::new(0);
static WRITTEN: AtomicU64 = AtomicU64::new(0);
static DIRECT_READ: AtomicU64 = AtomicU64::new(0);
static DIRECT_WRITTEN: AtomicU64 = AtomicU64::new(0);
static SETTLED: AtomicU64 = AtomicU64::new(0);

/// Counts `bytes` copied from a file, a pipe or a terminal into memory.
pub(crate) fn read(bytes: usize) {
    READ.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Counts `bytes` copied into a file, from memory or by the kernel from another file.
pub(crate) fn written(bytes: u64) {
    WRITTEN.fetch_add(bytes, Ordering::Relaxed);
}

/// Counts `bytes` that a disk wrote to memory. They bypassed the page cache, and no processor
/// copied them.
pub(crate) fn direct_read(bytes: u64) {
    DIRECT_READ.fetch_add(bytes, Ordering::Relaxed);
}

/// Counts `bytes` that a disk took from memory. They bypassed the page cache.
pub(crate) fn direct_written(bytes: u64) {
    DIRECT_WRITTEN.fetch_add(bytes, Ordering::Relaxed);
}

/// Counts `bytes` that were copied out of the memory where they arrived, so that their sender can
/// no longer change them.
pub(crate) fn settled(bytes: usize) {
    SETTLED.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Totals since the process started. The difference between two values is the cost of the work
/// between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Costs {
    /// Processor time of all threads in seconds, user and kernel.
    pub(crate) cpu_seconds: f64,
    /// Bytes copied from files, pipes and terminals into memory.
    pub(crate) file_read_bytes: u64,
    /// Bytes copied into files.
    pub(crate) file_written_bytes: u64,
    /// Bytes that disks wrote to memory, without a copy by a processor.
    #[serde(default)]
    pub(crate) direct_read_bytes: u64,
    /// Bytes that disks took from memory, without a copy by a processor.
    #[serde(default)]
    pub(crate) direct_written_bytes: u64,
    /// Bytes copied out of the memory where they arrived, before they were checked.
    #[serde(default)]
    pub(crate) settled_bytes: u64,
}

impl Costs {
    /// Returns the totals since the process started.
    pub(crate) fn now() -> Costs {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Costs {
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            file_read_bytes: READ.load(Ordering::Relaxed),
            file_written_bytes: WRITTEN.load(Ordering::Relaxed),
            direct_read_bytes: DIRECT_READ.load(Ordering::Relaxed),
            direct_written_bytes: DIRECT_WRITTEN.load(Ordering::Relaxed),
            settled_bytes: SETTLED.load(Ordering::Relaxed),
        }
    }
}

impl Sub for Costs {
    type Output = Costs;

    fn sub(self, before: Costs) -> Costs {
        Costs {
            cpu_seconds: self.cpu_seconds - before.cpu_seconds,
            file_read_bytes: self.file_read_bytes.saturating_sub(before.file_read_bytes),
            file_written_bytes: self.file_written_bytes.saturating_sub(before.file_written_bytes),
            direct_read_bytes: self.direct_read_bytes.saturating_sub(before.direct_read_bytes),
            direct_written_bytes: self
                .direct_written_bytes
                .saturating_sub(before.direct_written_bytes),
            settled_bytes: self.settled_bytes.saturating_sub(before.settled_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_spent_between_two_is_their_difference() {
        let before = Costs::now();
        read(10);
        written(20);
        direct_read(30);
        direct_written(40);
        settled(50);
        let spent = Costs::now() - before;
        // Other tests of this process are also counted.
        assert!(spent.file_read_bytes >= 10 && spent.file_written_bytes >= 20);
        assert!(spent.direct_read_bytes >= 30 && spent.direct_written_bytes >= 40);
        assert!(spent.settled_bytes >= 50);
        assert!(spent.cpu_seconds >= 0.0);
        assert_eq!(before - before, Costs::default());
    }
}
