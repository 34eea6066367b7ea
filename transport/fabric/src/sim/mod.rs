//! An in-process network with a seed and faults: the verbs model without hardware, for tests.
//!
//! It checks what a NIC checks. A SEND needs a posted RECV that is long enough; a WRITE needs a live key, the bounds of
//! its region and the right to write; a source needs a live local key; the accepting side must not send first (iWARP).
//! What fails kills the connection, with the completion status that rdma-core has for it.
//!
//! It has no clock of its own. [`SimConfig::delay`] holds messages and completions back for a number of *polls* drawn
//! from the seed, so that completions are reported after the answers to what they complete, and batches arrive in parts.
//! On a single-threaded runtime the same seed gives the same run. Only connect timeouts use tokio's timer.
//!
//! ```
//! # async fn example(pool_config: tonic_rdma_memory::PoolConfig) -> Result<(), Box<dyn std::error::Error>> {
//! use tonic_rdma_fabric::{Addr, Fabric};
//! use tonic_rdma_fabric::sim::{SimConfig, SimNet};
//!
//! let net = SimNet::new(SimConfig { seed: 7, ..SimConfig::default() });
//! let server = Fabric::Sim(net.device("sim0", "10.0.0.1".parse()?));
//! let client = Fabric::Sim(net.device("sim1", "10.0.0.2".parse()?));
//! let listener = server.listen(&Addr::Ip("10.0.0.1:0".parse()?))?;
//! assert_eq!(listener.local_addr().ip().map(|a| a.ip()), Some(server.addresses()?[0]));
//! # drop(client);
//! # Ok(())
//! # }
//! ```

mod connect;
mod faults;
mod link;
mod memory;
mod net;
mod rng;
mod wire;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

pub use self::connect::{SimIncoming, SimListener};
pub use self::link::SimLink;
use self::memory::SimRegistrar;
use self::net::{DeviceInner, NetInner};
use crate::device::{DeviceInfo, LinkLayer, PortInfo, PortState, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link::LinkConfig;

/// How a network behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimConfig {
    /// Where all chance comes from. Default 1.
    pub seed: u64,
    /// Polls by which a work request, and then its completion, is held back at most. 0, the default: everything is
    /// delivered when the doorbell rings.
    pub delay: u32,
    /// Longest message in bytes. Default 1 GiB, which is what InfiniBand has, less one bit.
    pub max_msg: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig { seed: 1, delay: 0, max_msg: 1 << 30 }
    }
}

/// Counts over the whole network since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimStats {
    /// SENDs handed to a peer.
    pub sends: u64,
    /// WRITEs tried.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Completions reported, of either kind.
    pub completions: u64,
    /// SENDs that found no RECV posted. Anything but 0 is a bug in flow control (R2).
    pub receiver_not_ready: u64,
    /// WRITEs that the peer's table did not allow.
    pub remote_access_errors: u64,
    /// Link ends made.
    pub links: u64,
}

/// An in-process network. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SimNet(Arc<NetInner>);

impl SimNet {
    /// A network without devices.
    pub fn new(config: SimConfig) -> SimNet {
        SimNet(Arc::new(NetInner::new(config)))
    }

    /// Adds a device with one address. An address that is taken goes over to the new device. The device can be found
    /// for as long as a clone of it, a listener or a link on it lives.
    pub fn device(&self, name: impl Into<String>, addr: IpAddr) -> SimDevice {
        let device = Arc::new(DeviceInner::new(self.0.clone(), name.into(), addr));
        self.0.add_device(&device);
        SimDevice(device)
    }

    /// The counts so far.
    pub fn stats(&self) -> SimStats {
        self.0.stats()
    }
}

/// A device of an in-process network. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SimDevice(Arc<DeviceInner>);

impl SimDevice {
    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// One active port, one address.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        let gid = match self.0.addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        Ok(DeviceInfo {
            name: self.0.name.clone(),
            transport: Transport::Sim,
            ports: vec![PortInfo {
                number: 1,
                state: if self.0.faults.removed() { PortState::Down } else { PortState::Active },
                link_layer: LinkLayer::Unspecified,
                mtu: 4096,
                max_msg: self.0.net.config.max_msg.try_into().unwrap_or(u32::MAX),
                gids: vec![gid],
            }],
            addresses: self.addresses()?,
        })
    }

    /// Its address.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        match self.0.faults.removed() {
            true => Err(FabricError::DeviceRemoved { device: self.0.name.clone() }),
            false => Ok(vec![self.0.addr]),
        }
    }

    /// Registers memory with the device. Pins nothing.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(SimRegistrar { table: self.0.table.clone(), faults: self.0.faults.clone() })
    }

    /// Live registrations: 0 when all pools on the device are gone.
    pub fn registrations(&self) -> usize {
        self.0.table.live()
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    pub fn listen(&self, addr: SocketAddr) -> Result<SimListener, FabricError> {
        SimListener::new(self.0.clone(), addr)
    }

    /// See [`Fabric::connect`](crate::Fabric::connect).
    pub async fn connect(
        &self,
        addr: SocketAddr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(SimLink, Vec<u8>), ConnectError> {
        connect::connect(&self.0, addr, config, pool, private_data, timeout).await
    }

    /// Fault: after `after` more registrations, `count` of them fail with ENOMEM.
    pub fn fail_registrations(&self, after: u64, count: u64) {
        self.0.faults.fail_registrations(after, count);
    }

    /// Fault: links made on this device from now on carry so many work requests and fail the next (`retry exceeded`).
    /// `None` ends it.
    pub fn kill_links_after(&self, work: Option<u64>) {
        self.0.faults.set_kill_after(work);
    }

    /// Fault: nothing leaves or arrives, and nobody is told, as with a stopped peer or a network that drops everything.
    /// `false` lets it go on.
    pub fn freeze(&self, on: bool) {
        self.0.freeze(on);
    }

    /// Fault: connect requests to this device get no answer.
    pub fn lose_connects(&self, on: bool) {
        self.0.faults.set_lose_connects(on);
    }

    /// Fault: the device is pulled out. Its links end with
    /// [`DeviceRemoved`](crate::LinkError::DeviceRemoved), its listeners end, and it does not come back.
    pub fn remove(&self) {
        self.0.remove();
    }
}
