//! The size of a pool: from the operator, from the program, or from the machine.
//!
//! | pool | RLIMIT_MEMLOCK | default |
//! |---|---|---|
//! | of an RDMA device | limits this process | [`DEFAULT_POOL`], or the part that the limit allows |
//! | of an RDMA device | does not limit this process | a sixteenth of memory, within [`PINNED`] |
//! | for shared memory | pins nothing | an eighth of memory, within [`SHARED`] |
//!
//! Except on machines with very little memory, no default is more than a quarter of memory, because
//! all memory that peers may write to has to fit into the machine's memory.
//!
//! "Memory" here is the machine's memory, or the part that this process's control group may use. A
//! pool maps and pins memory on demand, so its size is an upper bound. The connections that
//! transfer bulk at the same time share the pool. If there are 64 such connections, each of them
//! needs several MiB of the pool to keep several messages of 1 MiB in flight.
//!
//! `TONIC_RDMA_POOL` replaces the total that the program has set. Parts that the program has set
//! keep their proportions.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use tonic_rdma_fabric::Fabric;
use tonic_rdma_memory::{DEFAULT_POOL, Memlock, PoolConfig};

use crate::path::policy::{EnvSettings, PoolTotals};

/// Bytes of a pool of pinned memory if no limit applies.
const PINNED: RangeInclusive<usize> = DEFAULT_POOL..=1 << 30;
/// Bytes of the pool for shared memory. No page of this pool is pinned, and pages are allocated on
/// first use. Even in the smallest pool, several messages of 16 MiB can land in one piece each.
const SHARED: RangeInclusive<usize> = 512 << 20..=2 << 30;

/// The smallest default size in bytes, for machines with very little memory.
const SMALLEST: usize = 4 << 20;

/// The sizes that the operator has set. A channel or server refuses bad sizes when it starts.
pub(super) fn by_operator() -> PoolTotals {
    EnvSettings::read().map(|env| env.pool).unwrap_or_default()
}

/// The configuration of an RDMA device's pool. `ignores_ipc_lock` says that the device applies
/// RLIMIT_MEMLOCK even to processes with CAP_IPC_LOCK.
pub(super) fn pinned(config: PoolConfig, ignores_ipc_lock: bool) -> PoolConfig {
    sized(config, by_operator().verbs, || {
        // Use the hard limit, because a pool raises the soft limit before it pins.
        let limited = Memlock::read().map_or(true, |limits| {
            Memlock { soft: limits.hard, ..limits }.available(ignores_ipc_lock).is_some()
        });
        match limited {
            true => DEFAULT_POOL,
            false => part(available_memory(Path::new("/")), 16, PINNED),
        }
    })
}

/// The configuration of the pool of this device.
pub(super) fn of(fabric: &Fabric, config: PoolConfig) -> PoolConfig {
    match fabric.provider() {
        "shm" => {
            sized(config, by_operator().shm, || part(available_memory(Path::new("/")), 8, SHARED))
        }
        "verbs" => pinned(config, fabric.registrar().ignores_ipc_lock()),
        // Keep the configuration, because a simulated run does not depend on the machine.
        _ => config,
    }
}

/// Returns `config` with the operator's total, its own total, or the machine's total, in this order
/// of preference.
fn sized(
    config: PoolConfig,
    by_operator: Option<usize>,
    by_machine: impl FnOnce() -> usize,
) -> PoolConfig {
    match (by_operator, config.configured_total()) {
        (None, Some(_)) => config,
        (None, None) => config.or_total(by_machine()),
        // If the program has set parts without a total, the parts refer to the machine's total.
        (Some(bytes), None) => config.or_total(by_machine()).rescale(bytes),
        (Some(bytes), Some(_)) => config.rescale(bytes),
    }
}

/// Returns the `divisor`th part of `memory` in whole MiB, within `range`, but at most a quarter of
/// memory. If the memory is unknown, returns the start of `range`.
fn part(memory: Option<u64>, divisor: u64, range: RangeInclusive<usize>) -> usize {
    let wanted = memory.map_or(0, |memory| ((memory / divisor) >> 20) << 20);
    let size = usize::try_from(wanted).unwrap_or(usize::MAX).clamp(*range.start(), *range.end());
    let most = memory.map_or(usize::MAX, |memory| {
        usize::try_from(((memory / 4) >> 20) << 20).unwrap_or(usize::MAX)
    });
    size.min(most.max(SMALLEST))
}

/// Returns the bytes of memory that this process may use: the machine's memory, or the lowest limit
/// of the process's control groups if that limit is lower. See cgroups(7): `memory.max` in version
/// 2, `memory.limit_in_bytes` in version 1.
fn available_memory(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let meminfo = read("proc/meminfo")?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total =
        total.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let groups = read("proc/self/cgroup").unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        // Each line has the form `hierarchy:controllers:path`.
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
    use tonic_rdma_memory::{HugePages, Pinning};

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

    #[test]
    fn one_knob_does_not_discard_the_size_of_the_machine() {
        let landing = |config: &PoolConfig| {
            let sizes = config.fit(None, Pinning::default()).unwrap();
            (sizes.total >> 20, sizes.landing >> 20, sizes.huge_pages)
        };
        let machine = || 2 << 30;
        let one_knob = PoolConfig::default().huge_pages(HugePages::Off);
        let two = one_knob.clone().landing(1280 << 20);
        let set = two.clone().total(3 << 30);
        assert_eq!(landing(&sized(one_knob.clone(), None, machine)), (2048, 1024, HugePages::Off));
        assert_eq!(landing(&sized(two.clone(), None, machine)), (2048, 1280, HugePages::Off));
        assert_eq!(landing(&sized(set.clone(), None, machine)), (3072, 1280, HugePages::Off));
        // The operator's size replaces the total, and the parts keep the program's proportions.
        let operator = Some(512 << 20);
        assert_eq!(landing(&sized(one_knob, operator, machine)), (512, 256, HugePages::Off));
        assert_eq!(landing(&sized(two, operator, machine)), (512, 320, HugePages::Off));
        assert_eq!(landing(&sized(set, operator, machine)), (512, 213, HugePages::Off));
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
        // Version 2: the group itself has no limit, so its parent's limit applies.
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
