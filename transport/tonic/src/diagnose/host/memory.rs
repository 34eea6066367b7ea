//! Reads the limits on pinned memory, and huge pages.

use tonic_rdma_memory::{MIN_MEMLOCK, Memlock, Pinning, PoolConfig};

use crate::diagnose::host::system_files::{SystemFiles, number};
use crate::diagnose::report::{HugePagesReport, MemlockReport, PoolSizeBy};

/// How much memory may be pinned, and the resulting pool size. `set_by` tells who has set the
/// pool's size, if anyone. `pinning` describes the devices.
pub(in crate::diagnose) fn memlock(
    limits: &Memlock,
    pool: &PoolConfig,
    set_by: Option<PoolSizeBy>,
    pinning: Pinning,
) -> MemlockReport {
    // The pool raises the soft limit.
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
    // `always [madvise] never`
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
