//! The resources that a fast path needs on this host: devices, ports, addresses and the memlock
//! limit.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::IpAddr;

use crate::addr::{LocalNetwork, is_reachable};
use crate::device::PortState;
use crate::error::FabricError;

/// This host's RDMA devices with the states of their ports, its IP addresses, and how much memory
/// this process may pin.
///
/// If two snapshots differ, something was added, removed or changed, so a path that failed may work
/// now. If a device was removed and added again, the snapshots also differ. A snapshot costs some
/// system calls, and a few more for each address in use. A snapshot opens only the devices of
/// addresses in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSnapshot {
    devices: Vec<SysfsDevice>,
    addresses: Vec<LocalNetwork>,
    /// The addresses in use, with the names of their devices.
    places: Vec<(IpAddr, String)>,
    /// The hard limit of RLIMIT_MEMLOCK, in bytes.
    memlock: Option<u64>,
}

/// An RDMA device as listed in sysfs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SysfsDevice {
    name: OsString,
    /// The inode in sysfs, which is new for each device that the kernel creates.
    inode: u64,
    /// The state of each port as sysfs writes it: `4: ACTIVE`.
    ports: Vec<Vec<u8>>,
}

impl HostSnapshot {
    /// Returns the reason why a link of `device` with the local address `local` cannot reach any
    /// peer, or `None` if no reason is known. Possible reasons: no port of the device is active, no
    /// interface has the address, the interface with the address has no carrier, or the address now
    /// lies on another device. The last reason is known only for an address [in use](Self::now).
    ///
    /// In these cases an established link is not lost yet. Its device retransmits for a while, and
    /// the port may become active again.
    pub fn obstacle(&self, device: &str, local: IpAddr) -> Option<FabricError> {
        // If the device is lost, its links report the loss themselves.
        let seen = self.devices.iter().find(|seen| seen.name == device)?;
        let is_active = |state: &Vec<u8>| state.starts_with(b"4:");
        if !seen.ports.is_empty() && !seen.ports.iter().any(is_active) {
            let (device, state) = (device.to_owned(), PortState::Down);
            return Some(FabricError::NoActivePort { device, state });
        }
        match self.addresses.iter().find(|at| at.ip == local) {
            // Loopback and link-local addresses are not in the list.
            None if !is_reachable(&local) => None,
            None => Some(FabricError::NotOnRdma { addr: local }),
            Some(at) if !at.running => {
                let (device, interface) = (device.to_owned(), at.interface.clone());
                Some(FabricError::NoCarrier { device, interface })
            }
            Some(_) => {
                let (_, found) = self.places.iter().find(|(at, _)| *at == local)?;
                let (addr, device, found) = (local, device.to_owned(), found.clone());
                (device != found).then_some(FabricError::Moved { addr, device, found })
            }
        }
    }

    /// Takes a snapshot. The snapshot includes the devices of the addresses `in_use`, because an
    /// address can move to another device. Items that cannot be read are left out.
    #[cfg(all(target_os = "linux", feature = "verbs"))]
    pub fn now(in_use: &BTreeSet<IpAddr>) -> HostSnapshot {
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
        let mut addresses = crate::verbs::local_networks().unwrap_or_default();
        addresses.sort_unstable();
        // The hard limit counts, because pools raise the soft limit to the hard limit.
        let memlock = tonic_rdma_memory::Memlock::read().ok().and_then(|limits| limits.hard);
        let places = crate::verbs::places(in_use);
        HostSnapshot { devices, addresses, places, memlock }
    }

    /// Returns an empty snapshot, because this build has no RDMA.
    #[cfg(not(all(target_os = "linux", feature = "verbs")))]
    pub fn now(_: &BTreeSet<IpAddr>) -> HostSnapshot {
        HostSnapshot::default()
    }
}

#[cfg(all(test, target_os = "linux", feature = "verbs"))]
mod tests {
    use super::*;

    #[test]
    fn two_snapshots_are_equal_where_nothing_has_changed() {
        let none = BTreeSet::new();
        assert_eq!(HostSnapshot::now(&none), HostSnapshot::now(&none));
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

    #[test]
    fn a_link_is_told_what_keeps_it_from_its_peer() {
        let ip = |last| IpAddr::from([10, 0, 0, last]);
        let device = |name: &str, states: &[&str]| SysfsDevice {
            name: name.into(),
            inode: 1,
            ports: states.iter().map(|state| state.as_bytes().to_vec()).collect(),
        };
        let host = HostSnapshot {
            devices: vec![
                device("up", &["1: DOWN\n", "4: ACTIVE\n"]),
                device("down", &["1: DOWN\n"]),
                device("unknown", &[]),
            ],
            addresses: [(ip(1), true), (ip(2), false), (ip(4), true)]
                .map(|(ip, running)| LocalNetwork {
                    ip,
                    prefix: 24,
                    running,
                    interface: "eth0".to_owned(),
                })
                .into(),
            places: [(ip(1), "up"), (ip(4), "up")].map(|(ip, on)| (ip, on.to_owned())).into(),
            memlock: None,
        };
        let obstacle = |device, local| host.obstacle(device, local).map(|error| error.to_string());
        for device in ["up", "gone"] {
            assert_eq!(obstacle(device, ip(1)), None, "{device}");
        }
        let moved = obstacle("unknown", ip(4)).unwrap();
        assert!(moved.contains("moved from RDMA device unknown to up"), "{moved}");
        let port = "no port of RDMA device down is active (it is down)";
        assert!(obstacle("down", ip(1)).unwrap().starts_with(port));
        for device in ["up", "unknown"] {
            let interface =
                format!("interface eth0 of RDMA device {device} is down or has no carrier");
            assert!(obstacle(device, ip(2)).unwrap().starts_with(&interface));
        }
        assert!(matches!(host.obstacle("up", ip(3)), Some(FabricError::NotOnRdma { .. })));
        assert_eq!(obstacle("up", IpAddr::from([169, 254, 0, 1])), None);
    }
}
