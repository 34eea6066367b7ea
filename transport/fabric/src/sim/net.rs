//! The interface of a simulated network and its devices for tests.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

use crate::device::{DeviceInfo, LinkLayer, PortInfo, PortState, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link_config::LinkConfig;
use crate::sim::config::{SimConfig, SimStats};
use crate::sim::connect::{self, SimListener};
use crate::sim::directory::Directory;
use crate::sim::link::SimLink;
use crate::sim::memory::registrar::SimRegistrar;
use crate::sim::observer::Observer;
use crate::sim::state::{DeviceState, NetState};

/// An in-process network. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SimNet {
    state: Arc<NetState>,
    directory: Arc<Directory>,
}

impl SimNet {
    /// Creates a network without devices.
    pub fn new(config: SimConfig) -> SimNet {
        SimNet { state: Arc::new(NetState::new(config)), directory: Arc::default() }
    }

    /// Adds a device with one address. If another device has the address, the new device takes the
    /// address over. Peers can find the device as long as one of its clones, listeners, links or
    /// registrations lives.
    pub fn device(&self, name: impl Into<String>, addr: IpAddr) -> SimDevice {
        let state = Arc::new(DeviceState::new(self.state.clone(), name.into(), addr));
        self.directory.add_device(&state);
        SimDevice { state, directory: self.directory.clone() }
    }

    /// Sets the observer, which gets all events. A second observer is ignored.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        self.state.set_observer(observer);
    }

    /// Descriptions of the breaches so far, if [`SimConfig::audit`] is set. Each description names
    /// the broken rule.
    ///
    /// | rule | checked |
    /// |---|---|
    /// | R2 | a SEND finds a RECV posted, long enough |
    /// | R3 | the accepting side does not send first |
    /// | R5 | nothing is queued without room |
    /// | R9 | a WRITE finds registered memory; a source is registered while work reads it |
    /// | R10 | memory that work reads does not change before the work is reported as done |
    pub fn breaches(&self) -> Vec<String> {
        self.state.breaches()
    }

    /// Whether [`SimConfig::injected_bug`] has occurred.
    pub fn has_broken(&self) -> bool {
        self.state.has_broken()
    }

    /// The counts so far.
    pub fn stats(&self) -> SimStats {
        self.state.stats()
    }
}

/// A device of an in-process network. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SimDevice {
    state: Arc<DeviceState>,
    directory: Arc<Directory>,
}

impl SimDevice {
    /// The name of the device.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The state of the device, which has one active port and one address.
    ///
    /// # Errors
    /// The device was removed.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        let gid = match self.state.addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        Ok(DeviceInfo {
            name: self.state.name.clone(),
            transport: Transport::Sim,
            ports: vec![PortInfo {
                number: 1,
                state: if self.state.faults.removed() {
                    PortState::Down
                } else {
                    PortState::Active
                },
                link_layer: LinkLayer::Unspecified,
                mtu: 4096,
                max_msg: self.state.net.config.max_msg.try_into().unwrap_or(u32::MAX),
                gids: vec![gid],
            }],
            addresses: self.addresses()?,
            unopened: None,
        })
    }

    /// The address of the device.
    ///
    /// # Errors
    /// The device was removed.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        match self.state.faults.removed() {
            true => Err(FabricError::DeviceRemoved { device: self.state.name.clone() }),
            false => Ok(vec![self.state.addr]),
        }
    }

    /// Returns a registrar that registers memory with the device, and pins nothing.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(SimRegistrar { device: self.state.clone() })
    }

    /// Draws the next random number of the network's generator.
    pub fn draw(&self) -> u64 {
        self.state.net.draw()
    }

    /// Number of live registrations. 0 once all pools on the device are dropped.
    pub fn registrations(&self) -> usize {
        self.state.table.live()
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    pub fn listen(&self, addr: SocketAddr) -> Result<SimListener, FabricError> {
        SimListener::new(&self.state, &self.directory, addr)
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
        connect::connect(&self.state, &self.directory, addr, config, pool, private_data, timeout)
            .await
    }

    /// Fault: after `after` more registrations, the next `count` registrations fail with ENOMEM.
    pub fn fail_registrations(&self, after: u64, count: u64) {
        self.state.faults.fail_registrations(after, count);
    }

    /// Fault: registering landing memory blocks, for 20 s at most, until this function is called
    /// with `false`. After the first call, the device's registrar [is
    /// slow](tonic_rdma_memory::Registrar::is_slow).
    pub fn hold_registrations(&self, on: bool) {
        self.state.faults.hold_registrations(on);
    }

    /// The number of registrations that are [held](Self::hold_registrations).
    pub fn held_registrations(&self) -> u64 {
        self.state.faults.held_registrations()
    }

    /// Fault: new links on this device carry `work` work requests and fail at the next one (`retry
    /// exceeded`). `None` ends the fault.
    pub fn kill_links_after(&self, work: Option<u64>) {
        self.state.faults.set_kill_after(work);
    }

    /// Fault: no message leaves or arrives, and nobody is notified, as with a network that drops
    /// all packets. `false` ends the fault.
    pub fn freeze(&self, on: bool) {
        self.directory.freeze(&self.state, on);
    }

    /// Fault: destroying a link of this device blocks until this function is called with `false`.
    pub fn hold_destroy(&self, on: bool) {
        self.state.faults.hold_destroy(on);
    }

    /// The number of links whose destruction was held.
    pub fn destroying(&self) -> u64 {
        self.state.faults.destroying()
    }

    /// Fault: this device's process pauses. The process sees no arrivals and sends nothing, while
    /// its device receives and answers probes. `false` ends the fault.
    pub fn pause(&self, on: bool) {
        self.directory.pause(&self.state, on);
    }

    /// Fault: connect requests to this device get no answer.
    pub fn lose_connects(&self, on: bool) {
        self.state.faults.set_lose_connects(if on { u32::MAX } else { 0 });
    }

    /// Fault: the next `count` connect requests to this device get no answer.
    pub fn lose_next_connects(&self, count: u32) {
        self.state.faults.set_lose_connects(count);
    }

    /// Fault: peers do not learn that this device has accepted their connect requests.
    pub fn lose_accepts(&self, on: bool) {
        self.state.faults.set_lose_accepts(if on { u32::MAX } else { 0 });
    }

    /// Fault: the next `count` peers do not learn that this device has accepted their requests.
    pub fn lose_next_accepts(&self, count: u32) {
        self.state.faults.set_lose_accepts(count);
    }

    /// Fault: all links of this device die now, with the status `RetryExceeded`. Their peers see a
    /// disconnect when the links are dropped.
    pub fn cut(&self) {
        self.directory.cut(&self.state);
    }

    /// Fault: peers are not notified when this device's links end, as if the network had lost the
    /// last packets.
    pub fn lose_disconnects(&self, on: bool) {
        self.state.faults.set_lose_disconnects(on);
    }

    /// Fault: the device is removed. Its links end with
    /// [`DeviceRemoved`](crate::LinkError::DeviceRemoved), its listeners end, and the device does
    /// not come back.
    pub fn remove(&self) {
        self.directory.remove(&self.state);
    }
}
