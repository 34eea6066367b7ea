//! Pinned memory and huge pages.

use tonic_rdma_memory::{MIN_MEMLOCK, Memlock, PoolConfig};

use crate::diagnose::report::{HugePagesReport, MemlockReport};
use crate::diagnose::root::{Root, number};

/// How much may be pinned, and what a pool makes of it. `ignores_ipc_lock`: a device that counts
/// for the process applies the limit whatever the process may do.
pub(super) fn memlock(
    limits: &Memlock,
    pool: &PoolConfig,
    ignores_ipc_lock: bool,
) -> MemlockReport {
    // The pool raises the soft limit.
    let raised = Memlock { soft: limits.hard, ..*limits };
    MemlockReport {
        soft: limits.soft,
        hard: limits.hard,
        pinned: limits.pinned,
        cap_ipc_lock: limits.cap_ipc_lock,
        needed: MIN_MEMLOCK.saturating_add(limits.pinned),
        wanted: pool.memlock().saturating_add(limits.pinned),
        pool_configured: pool.fit(None, ignores_ipc_lock).map_or(0, |sizes| sizes.total as u64),
        pool_gets: pool.fit(Some(&raised), ignores_ipc_lock).ok().map(|sizes| sizes.total as u64),
    }
}

pub(super) fn huge_pages(root: &Root) -> HugePagesReport {
    // `always [madvise] never`
    let transparent = root.read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
    let meminfo = root.read("/proc/meminfo").unwrap_or_default();
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
