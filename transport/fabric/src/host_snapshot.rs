//! What there is on this host to make a path of, at a glance.

use std::ffi::OsString;
use std::net::IpAddr;

/// The RDMA devices of this host with the state of their ports, its IP addresses, and how much this
/// process may pin.
///
/// Two that differ say that something has come, gone or changed, so that a path which could not be
/// had may be had now; a device that was pulled out and put back differs too. Looking costs some
/// system calls, and opens no device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSnapshot {
    devices: Vec<Seen>,
    addresses: Vec<IpAddr>,
    /// RLIMIT_MEMLOCK, in bytes.
    memlock: Option<u64>,
}

/// A device in sysfs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    name: OsString,
    /// Another one for each device that the kernel makes.
    inode: u64,
    ports: Vec<Vec<u8>>,
}

impl HostSnapshot {
    /// Looks. What cannot be read is left out.
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
            Some(Seen { name: path.file_name()?.to_owned(), inode, ports })
        };
        let devices = list("/sys/class/infiniband".as_ref()).into_iter().filter_map(seen).collect();
        let mut addresses = crate::verbs::local_ips().unwrap_or_default();
        addresses.sort_unstable();
        // The hard limit, up to which pools raise the other one themselves.
        let memlock = tonic_rdma_memory::Memlock::read().ok().and_then(|limits| limits.hard);
        HostSnapshot { devices, addresses, memlock }
    }

    /// Nothing: there is no RDMA here.
    #[cfg(not(all(target_os = "linux", feature = "verbs")))]
    pub fn now() -> HostSnapshot {
        HostSnapshot::default()
    }
}

#[cfg(all(test, target_os = "linux", feature = "verbs"))]
mod tests {
    use super::*;

    #[test]
    fn two_looks_are_the_same_where_nothing_has_changed() {
        assert_eq!(HostSnapshot::now(), HostSnapshot::now());
    }

    #[test]
    fn a_device_that_was_put_back_is_another_one() {
        let with = |inode| HostSnapshot {
            devices: vec![Seen {
                name: "rxe0".into(),
                inode,
                ports: vec![b"4: ACTIVE\n".to_vec()],
            }],
            ..HostSnapshot::default()
        };
        assert_ne!(with(1), with(2));
    }
}
