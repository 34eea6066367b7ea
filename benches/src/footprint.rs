//! Resources that a process holds.

use std::fs;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// The resources of a process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Resident memory in KiB, including shared memory (VmRSS).
    pub memory: u64,
    /// Memory in KiB that is pinned for devices (VmPin).
    pub pinned: u64,
    /// Number of open descriptors.
    pub descriptors: u64,
    /// Number of threads.
    pub threads: u64,
}

impl Footprint {
    /// Reads the resources of a process.
    ///
    /// # Errors
    /// The process does not exist.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))
            .with_context(|| format!("process {pid} is gone"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        Ok(Self {
            memory: field("VmRSS"),
            pinned: field("VmPin"),
            descriptors: fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64,
            threads: field("Threads"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_and_memory_are_seen() {
        let me = std::process::id();
        let before = Footprint::of(me).unwrap();
        let files: Vec<_> = (0..100).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let memory = vec![1u8; 64 << 20];
        let after = Footprint::of(me).unwrap();
        assert!(after.descriptors >= before.descriptors + 90, "{before:?} {after:?}");
        assert!(after.memory >= before.memory + (60 << 10), "{before:?} {after:?}");
        assert!(after.threads > 0);
        drop((files, memory));
    }
}
