//! Reads the limits on pinned memory and on descriptors, and the settings for huge pages.

use tonic_rdma_memory::{MIN_MEMLOCK, Memlock, Pinning, PoolConfig};

use crate::diagnose::host::{SystemFiles, number};
use crate::diagnose::report::{DescriptorsReport, HugePagesReport, MemlockReport, PoolSizeBy};
use crate::server::{DESCRIPTORS, MAX_CONNECTIONS};

/// How much memory may be pinned, and the resulting pool size. `set_by` tells who has set the
/// pool's size, if anyone. `pinning` says how much memory a connection's queues pin, and whether
/// CAP_IPC_LOCK lifts the limit.
pub(in crate::diagnose) fn memlock(
    limits: &Memlock,
    pool: &PoolConfig,
    set_by: Option<PoolSizeBy>,
    pinning: Pinning,
) -> MemlockReport {
    // A pool raises the soft limit to the hard limit.
    let raised = Memlock { soft: limits.hard, ..*limits };
    MemlockReport {
        soft: limits.soft,
        hard: limits.hard,
        pinned: limits.pinned,
        cap_ipc_lock: limits.cap_ipc_lock,
        needed: MIN_MEMLOCK.saturating_add(limits.pinned),
        wanted: pool.memlock_for(pinning).saturating_add(limits.pinned),
        pool_size_by: match set_by {
            Some(set_by) => set_by,
            None if raised.available(pinning.ignores_ipc_lock).is_some() => PoolSizeBy::Limit,
            None => PoolSizeBy::Memory,
        },
        pool_configured: pool.fit(None, pinning).map_or(0, |sizes| sizes.total as u64),
        pool_gets: pool.fit(Some(&raised), pinning).ok().map(|sizes| sizes.total as u64),
    }
}

pub(in crate::diagnose) fn huge_pages(files: &SystemFiles) -> HugePagesReport {
    // The file has the form `always [madvise] never`.
    let transparent = files.read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
    let meminfo = files.read("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        number(rest.trim_start_matches(':').trim().trim_end_matches("kB").trim())
    };
    HugePagesReport {
        transparent: transparent.and_then(chosen),
        size: field("Hugepagesize").map(|kib| kib.saturating_mul(1024)),
        reserved: field("HugePages_Total").unwrap_or(0),
        free: field("HugePages_Free").unwrap_or(0),
    }
}

/// This process's limit on descriptors, and the number that it uses. `None` if `/proc` does not
/// contain the limit.
pub(in crate::diagnose) fn descriptors(files: &SystemFiles) -> Option<DescriptorsReport> {
    // The line has the form `Max open files 1024 524288 files`, with more spaces.
    let limits = files.read("/proc/self/limits")?;
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let limit = |word: &str| match word {
        "unlimited" => Some(None),
        word => number(word).map(Some),
    };
    let mut words = rest.split_whitespace();
    let (soft, hard) = (limit(words.next()?)?, limit(words.next()?)?);
    let in_use = files.list("/proc/self/fd").len() as u64;
    let wanted = (MAX_CONNECTIONS * DESCRIPTORS) as u64 + in_use;
    Some(DescriptorsReport { soft, hard, in_use, wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(limits: &str) -> Option<DescriptorsReport> {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("proc/self");
        std::fs::create_dir_all(own.join("fd")).unwrap();
        std::fs::write(own.join("limits"), limits).unwrap();
        for fd in 0..4 {
            std::fs::write(own.join(format!("fd/{fd}")), "").unwrap();
        }
        descriptors(&SystemFiles::at(dir.path()))
    }

    #[test]
    fn limits_are_read_and_what_is_malformed_is_nothing() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max open files            1024                 unlimited            files\n";
        let found = of(text).unwrap();
        assert_eq!((found.soft, found.hard, found.in_use), (Some(1024), None, 4));
        assert_eq!(found.wanted, 4096 * 3 + 4);
        for bad in ["", "Max open files", "Max open files 12", "Max open files many 12 files"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert!(descriptors(&SystemFiles::real()).is_some_and(|own| own.in_use > 2));
    }
}
