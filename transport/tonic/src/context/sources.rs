//! The addresses of this host from which connections can be made, and their routes.

use std::net::IpAddr;

#[cfg(feature = "test-util")]
use tonic_rdma_fabric::sim::SimDevice;
use tonic_rdma_fabric::{Fabric, FabricError, LocalAddress};

use crate::context::numa;

/// This host's addresses on the devices of a path.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) addresses: Vec<LocalAddress>,
    /// Whether the addresses belong to a device that the application or the environment has named.
    pub(crate) named: bool,
    /// Devices on a NUMA node that this process does not run on.
    pub(crate) far: Vec<String>,
    /// The pairs of an address and a destination outside its network that the kernel routes through
    /// the address' interface.
    pub(crate) routed: Vec<(IpAddr, IpAddr)>,
}

impl Sources {
    /// Returns the addresses of RDMA devices, and their routes to the `peers` that are in the
    /// network of none of these addresses. Blocks.
    pub(super) fn of(only: Option<&str>, mut peers: Vec<IpAddr>) -> Result<Self, FabricError> {
        let mut addresses = Fabric::local_addresses(only)?;
        // Leave out interfaces that are not running, because they send no packets.
        addresses.retain(|at| at.running);
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let mut far: Vec<_> = addresses.iter().map(|at| at.device.clone()).collect();
        far.dedup();
        far.retain(|device| numa::far_node(read, device).is_some());
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
