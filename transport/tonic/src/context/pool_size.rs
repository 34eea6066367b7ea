//! The default size of a pool, by what the system has.
//!
//! | pool | RLIMIT_MEMLOCK | default |
//! |---|---|---|
//! | of an RDMA device | limits this process | [`DEFAULT_POOL`], or what the limit allows |
//! | of an RDMA device | does not | a sixteenth of memory, within [`PINNED`] |
//! | for shared memory | pins nothing | an eighth of memory, within [`SHARED`] |
//!
//! No default is more than a quarter of memory: what peers may write to has to fit into it.
//!
//! Memory is the machine's, or what the control group of this process may use of it. A pool maps
//! and pins memory on demand, so its size is an upper bound. It is divided among the connections
//! that transfer bulk at the same time: 64 of them need some MiB each to keep several messages of 1
//! MiB in flight.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use tonic_rdma_fabric::Fabric;
use tonic_rdma_memory::{DEFAULT_POOL, Memlock, PoolConfig};

/// Bytes of a pool of pinned memory that no limit applies to.
const PINNED: RangeInclusive<usize> = DEFAULT_POOL..=1 << 30;
/// Bytes of the pool for shared memory, of which nothing is pinned and pages are allocated on first
/// use. Several messages of 16 MiB can land in the smallest in one piece.
const SHARED: RangeInclusive<usize> = 512 << 20..=2 << 30;

/// Bytes of the smallest default, on a machine whose memory is smaller than any that runs this.
const SMALLEST: usize = 4 << 20;

/// The default configuration of the pool of an RDMA device. `ignores_ipc_lock`: the device applies
/// RLIMIT_MEMLOCK to processes with CAP_IPC_LOCK, too.
pub(super) fn pinned(ignores_ipc_lock: bool) -> PoolConfig {
    // A pool raises the soft limit first.
    let limited = Memlock::read().map_or(true, |limits| {
        Memlock { soft: limits.hard, ..limits }.available(ignores_ipc_lock).is_some()
    });
    PoolConfig::default().total(match limited {
        true => DEFAULT_POOL,
        false => part(available_memory(Path::new("/")), 16, PINNED),
    })
}

/// The default configuration of the pool of this device.
pub(super) fn of(fabric: &Fabric) -> PoolConfig {
    match fabric.provider() {
        "shm" => shared(),
        "verbs" => pinned(fabric.registrar().ignores_ipc_lock()),
        // A simulated run does not depend on the machine.
        _ => PoolConfig::default(),
    }
}

/// The default configuration of the pool for shared memory.
fn shared() -> PoolConfig {
    PoolConfig::default().total(part(available_memory(Path::new("/")), 8, SHARED))
}

/// The `divisor`th part of `memory` in whole MiB, within `range`, but at most a quarter of memory;
/// the start of `range` if the memory is unknown.
fn part(memory: Option<u64>, divisor: u64, range: RangeInclusive<usize>) -> usize {
    let wanted = memory.map_or(0, |memory| ((memory / divisor) >> 20) << 20);
    let size = usize::try_from(wanted).unwrap_or(usize::MAX).clamp(*range.start(), *range.end());
    let most = memory.map_or(usize::MAX, |memory| {
        usize::try_from(((memory / 4) >> 20) << 20).unwrap_or(usize::MAX)
    });
    size.min(most.max(SMALLEST))
}

/// Bytes of memory that this process may use: the machine's, or the lowest limit of its control
/// groups (cgroups(7), `memory.max` of version 2, `memory.limit_in_bytes` of version 1).
fn available_memory(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let meminfo = read("proc/meminfo")?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total =
        total.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let groups = read("proc/self/cgroup").unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        // hierarchy:controllers:path
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        let (base, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        // In a container the group may be mounted as the root of the hierarchy.
        let path = Path::new(path.trim_start_matches('/'));
        let limit = |group: &Path| {
            let file = root.join(base).join(group).join(file);
            fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()
        };
        path.ancestors().filter_map(limit).collect::<Vec<_>>()
    });
    Some(limits.fold(total, u64::min))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_pool_is_a_part_of_memory_within_its_range() {
        for (memory, pinned, shared) in [
            (None, 64, 512),
            (Some(GIB / 128), 4, 4),
            (Some(GIB / 8), 32, 32),
            (Some(GIB / 2), 64, 128),
            (Some(4 * GIB), 256, 512),
            (Some(8 * GIB), 512, 1024),
            (Some(1024 * GIB), 1024, 2048),
        ] {
            assert_eq!(part(memory, 16, PINNED) >> 20, pinned, "{memory:?}");
            assert_eq!(part(memory, 8, SHARED) >> 20, shared, "{memory:?}");
        }
    }

    fn system(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        available_memory(root.path())
    }

    #[test]
    fn memory_is_what_the_control_groups_leave_of_the_machines() {
        let meminfo = ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
        assert_eq!(system(&[]), None);
        assert_eq!(system(&[("proc/meminfo", "MemTotal: much\n")]), None);
        assert_eq!(system(&[meminfo]), Some(16 * GIB));
        // Version 2: the group's own limit is absent, its parent's counts.
        let group = ("proc/self/cgroup", "0::/a.slice/b.scope\n");
        let own = ("sys/fs/cgroup/a.slice/b.scope/memory.max", "max\n");
        let parent = ("sys/fs/cgroup/a.slice/memory.max", "2147483648\n");
        assert_eq!(system(&[meminfo, group, own]), Some(16 * GIB));
        assert_eq!(system(&[meminfo, group, own, parent]), Some(2 * GIB));
        // A container sees its own group as the root.
        let root = ("sys/fs/cgroup/memory.max", "1073741824\n");
        assert_eq!(system(&[meminfo, ("proc/self/cgroup", "0::/\n"), root]), Some(GIB));
        // Version 1; its value for no limit is above the machine's memory.
        let v1 = ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n");
        let unlimited = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let limit = ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "4294967296\n");
        assert_eq!(system(&[meminfo, v1, unlimited]), Some(16 * GIB));
        assert_eq!(system(&[meminfo, v1, unlimited, limit]), Some(4 * GIB));
    }
}
