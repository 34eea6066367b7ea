//! The device of this provider, which represents this process as an end of connections.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

use crate::access::{Lending, ShmAccess};
use crate::addr::ShmAddr;
use crate::device::{DeviceInfo, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link_config::LinkConfig;
use crate::shm::connect;
use crate::shm::context::{DeviceContext, NAME};
use crate::shm::link::ShmLink;
use crate::shm::listener::ShmListener;
use crate::shm::memory::table::ShmRegistrar;

/// The boot id of the running kernel (random(4)). Two processes with the same boot id can share
/// memory.
///
/// # Errors
/// /proc is not mounted.
pub(crate) fn boot_id() -> Result<String, FabricError> {
    // The id is read once, so that a process that later runs out of descriptors still knows its
    // host.
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return Ok(id.clone());
    }
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|source| FabricError::Shm {
        what: "the boot id cannot be read",
        source: Arc::new(source),
    })?;
    Ok(ID.get_or_init(|| text.trim().to_owned()).clone())
}

/// This process as an end of shared-memory connections. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ShmDevice(Arc<DeviceContext>);

impl ShmDevice {
    /// Makes a separate device, with its own registrations. Opens nothing.
    pub fn new(access: ShmAccess, lending: Lending) -> ShmDevice {
        ShmDevice(Arc::new(DeviceContext::new(access, lending)))
    }

    /// Always `shm`.
    pub fn name(&self) -> &str {
        NAME
    }

    /// Reports no ports and no addresses. Never fails.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        Ok(DeviceInfo {
            name: NAME.to_owned(),
            transport: Transport::Shm,
            ports: Vec::new(),
            addresses: Vec::new(),
            unopened: None,
        })
    }

    /// Returns a registrar that makes landing chunks known, so that they can be given to peers. It
    /// pins nothing.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(ShmRegistrar(self.0.table.clone()))
    }

    /// Number of live registrations that peers may write to. 0 once all pools on the device are
    /// dropped.
    pub fn registrations(&self) -> usize {
        self.0.table.live()
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    pub fn listen(&self, addr: &ShmAddr) -> Result<ShmListener, FabricError> {
        ShmListener::new(self.0.clone(), addr)
    }

    /// See [`Fabric::connect`](crate::Fabric::connect).
    pub async fn connect(
        &self,
        addr: &ShmAddr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(ShmLink, Vec<u8>), ConnectError> {
        connect::connect(&self.0, addr, config, pool, private_data, timeout).await
    }
}
