//! The addresses of this host from which connections can be made, with their routes, and the NUMA
//! nodes of devices.

use std::net::IpAddr;

#[cfg(feature = "test-util")]
use tonic_rdma_fabric::sim::SimDevice;
use tonic_rdma_fabric::{Fabric, FabricError, LocalAddress};

/// This host's addresses on the devices of a path.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) addresses: Vec<LocalAddress>,
    /// Whether the addresses belong to a device that the application or the environment has named.
    pub(crate) named: bool,
    /// Devices on a NUMA node on which this process is not allowed to run.
    pub(crate) far: Vec<String>,
    /// Pairs of an address and a destination outside the address's network. The kernel routes the
    /// destination through the address's interface.
    pub(crate) routed: Vec<(IpAddr, IpAddr)>,
}

impl Sources {
    /// Returns the addresses of RDMA devices, and their routes to the `peers` outside the networks
    /// of these addresses. Blocks.
    pub(super) fn of(only: Option<&str>, mut peers: Vec<IpAddr>) -> Result<Self, FabricError> {
        let mut addresses = Fabric::local_addresses(only)?;
        // Leave out interfaces that are not running, because they send no packets.
        addresses.retain(|at| at.running);
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let mut far: Vec<_> = addresses.iter().map(|at| at.device.clone()).collect();
        far.dedup();
        far.retain(|device| far_node(read, device).is_some());
        peers.retain(|peer| !addresses.iter().any(|at| at.is_beside(*peer)));
        let routed = Fabric::routed(&addresses, &peers).unwrap_or_else(|error| {
            tracing::debug!(%error, "no answers about routes: the kernel chooses the device");
            Vec::new()
        });
        Ok(Self { addresses, named: false, far, routed })
    }

    #[cfg(feature = "test-util")]
    pub(super) fn simulated(devices: &[SimDevice]) -> Self {
        let on = |device: &SimDevice, ip| LocalAddress {
            ip,
            prefix: 24,
            running: true,
            interface: device.name().to_owned(),
            device: device.name().to_owned(),
            iwarp: false,
        };
        let addresses = devices.iter().flat_map(|device| {
            let addresses = device.addresses().unwrap_or_default();
            addresses.into_iter().map(move |ip| on(device, ip))
        });
        Self { addresses: addresses.collect(), ..Self::default() }
    }
}

/// The NUMA node of a device, if this process is not allowed to run on that node. Processors are
/// listed as in `0-3,8`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FarNode {
    pub(crate) node: u32,
    /// The processors of the device's node.
    pub(crate) there: String,
    /// The processors that this process may run on.
    pub(crate) allowed: String,
}

/// The NUMA node of a device, if this process is not allowed to run on any of the node's
/// processors. `read` returns the text of a file.
pub(crate) fn far_node(read: impl Fn(&str) -> Option<String>, device: &str) -> Option<FarNode> {
    // The value is -1 if the kernel assigns the device to no node, as on many machines with one
    // node.
    let node = read(&format!("/sys/class/infiniband/{device}/device/numa_node"))?;
    let node: u32 = node.trim().parse().ok()?;
    let there = read(&format!("/sys/devices/system/node/node{node}/cpulist"))?.trim().to_owned();
    let status = read("/proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let allowed = allowed.trim().to_owned();
    let near = ranges(&there).any(|there| ranges(&allowed).any(|own| overlap(there, own)));
    (!near).then_some(FarNode { node, there, allowed })
}

/// The first and last processor of each part of a list such as `0-3,8`.
fn ranges(list: &str) -> impl Iterator<Item = (u32, u32)> {
    list.split(',').filter_map(|part| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        Some((first.parse().ok()?, last.parse().ok()?))
    })
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0 <= b.1 && b.0 <= a.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn far(node: &str, there: &str, allowed: &str) -> Option<FarNode> {
        let read = |path: &str| match path {
            "/sys/class/infiniband/mlx5_0/device/numa_node" => Some(format!("{node}\n")),
            "/sys/devices/system/node/node1/cpulist" => Some(format!("{there}\n")),
            "/proc/self/status" => Some(format!("Name:\tx\nCpus_allowed_list:\t{allowed}\n")),
            _ => None,
        };
        far_node(read, "mlx5_0")
    }

    #[test]
    fn a_device_is_far_if_no_processor_of_its_node_is_allowed() {
        assert_eq!(far("1", "8-15", "0-7").unwrap().node, 1);
        assert_eq!(far("1", "8-15", "0-3,16").unwrap().allowed, "0-3,16");
        for (node, there, allowed) in
            [("1", "8-15", "0-15"), ("1", "8", "7-8"), ("-1", "0-7", "8"), ("2", "8", "1")]
        {
            assert_eq!(far(node, there, allowed), None, "{node} {there} {allowed}");
        }
    }
}
