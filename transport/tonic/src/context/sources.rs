//! The addresses of this host from which connections can be made.

#[cfg(feature = "test-util")]
use tonic_rdma_fabric::sim::SimDevice;
use tonic_rdma_fabric::{Fabric, FabricError, LocalAddress};

use crate::context::numa;

/// This host's addresses on the devices of a path.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) addresses: Vec<LocalAddress>,
    /// Whether the addresses are those of a device that the application or the environment has
    /// named.
    pub(crate) named: bool,
    /// Devices on a NUMA node that this process does not run on.
    pub(crate) far: Vec<String>,
}

impl Sources {
    /// The addresses of RDMA devices. Blocks.
    pub(super) fn of(only: Option<&str>) -> Result<Self, FabricError> {
        let mut addresses = Fabric::local_addresses(only)?;
        // Leave out interfaces that do not run, because no packet leaves by them.
        addresses.retain(|at| at.running);
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let mut far: Vec<_> = addresses.iter().map(|at| at.device.clone()).collect();
        far.dedup();
        far.retain(|device| numa::far_node(read, device).is_some());
        Ok(Self { addresses, named: false, far })
    }

    #[cfg(feature = "test-util")]
    pub(super) fn simulated(devices: &[SimDevice]) -> Self {
        let on = |device: &SimDevice, ip| LocalAddress {
            ip,
            prefix: 24,
            running: true,
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
