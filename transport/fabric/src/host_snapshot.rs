//! What this host has for a fast path: devices, ports, addresses and the memlock limit.

use std::ffi::OsString;
use std::net::IpAddr;

/// The RDMA devices of this host with the state of their ports, its IP addresses, and how much this
/// process may pin.
///
/// Two snapshots that differ mean that something was added, removed or changed, so a path that
/// failed may work now. A device that was removed and added again differs too. A snapshot costs
/// some system calls, and opens no device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSnapshot {
    devices: Vec<SysfsDevice>,
    addresses: Vec<(IpAddr, u8)>,
    /// RLIMIT_MEMLOCK, in bytes.
    memlock: Option<u64>,
}

/// A device in sysfs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SysfsDevice {
    name: OsString,
    /// The kernel gives each device that it creates another inode.
    inode: u64,
    ports: Vec<Vec<u8>>,
}

impl HostSnapshot {
    /// Takes a snapshot. What cannot be read is left out.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    pub fn now() -> HostSnapshot {
        use std::os::unix::fs::MetadataExt as _;
        let list = |path: &std::path::Path| {
            let entries = std::fs::read_dir(path).into_iter().flatten();
            let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            paths.sort();
            paths
        };
        let seen = |path: std::path::PathBuf| {
            let inode = std::fs::metadata(&path).ok()?.ino();
            let ports = list(&path.join("ports"));
            let ports =
                ports.iter().filter_map(|port| std::fs::read(port.join("state")).ok()).collect();
            Some(SysfsDevice { name: path.file_name()?.to_owned(), inode, ports })
        };
        let devices = list("/sys/class/infiniband".as_ref()).into_iter().filter_map(seen).collect();
        let networks = crate::verbs::local_networks().unwrap_or_default();
        let mut addresses: Vec<_> = networks.iter().map(|at| (at.ip, at.prefix)).collect();
        addresses.sort_unstable();
        // The hard limit, up to which pools raise the other one themselves.
        let memlock = tonic_rdma_memory::Memlock::read().ok().and_then(|limits| limits.hard);
        HostSnapshot { devices, addresses, memlock }
    }

    /// An empty snapshot: this build has no RDMA.
    #[cfg(not(all(target_os = "linux", feature = "verbs")))]
    pub fn now() -> HostSnapshot {
        HostSnapshot::default()
    }
}

#[cfg(all(test, target_os = "linux", feature = "verbs"))]
mod tests {
    use super::*;

    #[test]
    fn two_snapshots_are_equal_where_nothing_has_changed() {
        assert_eq!(HostSnapshot::now(), HostSnapshot::now());
    }

    #[test]
    fn a_device_that_was_put_back_is_another_one() {
        let with = |inode| HostSnapshot {
            devices: vec![SysfsDevice {
                name: "rxe0".into(),
                inode,
                ports: vec![b"4: ACTIVE\n".to_vec()],
            }],
            ..HostSnapshot::default()
        };
        assert_ne!(with(1), with(2));
    }
}
