//! An in-process network with a seed and faults: the verbs model without hardware, for tests.
//!
//! It checks what a NIC checks. A SEND needs a posted RECV that is long enough; a WRITE needs a
//! live key, the bounds of its region and the right to write; a source needs a live local key; the
//! accepting side must not send first (iWARP). What fails kills the connection, with the completion
//! status that rdma-core has for it.
//!
//! [`SimConfig::delay`] holds messages and completions back for a number of *polls* drawn from the
//! seed, so that completions are reported after the answers to what they complete, and batches
//! arrive in parts; [`SimConfig::latency`] does it by tokio's clock. On a single-threaded runtime
//! with a paused clock the same seed gives the same run. Without latency, only connect timeouts use
//! the clock.
//!
//! With [`SimConfig::audit`] it also checks what a NIC cannot see, and [`SimNet::breaches`] tells.
//! A [`Observer`] hears everything that happens. [`InjectedBug`] breaks the fabric's own promises, to see
//! that its checkers notice.
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

mod audit;
mod connect;
mod delay;
mod faults;
mod injected_bugs;
mod link;
mod memory;
mod net;
mod observer;
mod rng;
mod wire;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tonic_rdma_memory::{Pool, Registrar};

pub use self::connect::{SimIncoming, SimListener};
pub use self::injected_bugs::InjectedBug;
pub use self::link::SimLink;
use self::memory::SimRegistrar;
use self::net::{DeviceInner, NetInner};
pub use self::observer::{EndId, Event, Observer};
use crate::device::{DeviceInfo, LinkLayer, PortInfo, PortState, Transport};
use crate::error::{ConnectError, FabricError};
use crate::link::LinkConfig;

/// How a network behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimConfig {
    /// Where all chance comes from. Default 1.
    pub seed: u64,
    /// Polls by which a work request, and then its completion, is held back at most. 0, the
    /// default: everything is delivered when the doorbell rings.
    pub delay: u32,
    /// Longest message in bytes. Default 1 GiB, which is what InfiniBand has, less one bit.
    pub max_msg: usize,
    /// Time by which a work request, and then its completion, is held back at most, in whole
    /// milliseconds. Default 0.
    pub latency: Duration,
    /// Of so many arrivals one wakes nobody: what has arrived is found with the next one, or by a
    /// timer. 0, the default: none is lost.
    pub lost_wakeups: u32,
    /// For one of so many arrivals the sender is woken too, for nothing. 0, the default: never.
    pub idle_wakeups: u32,
    /// For one of so many links, work that has arrived when the link dies is not reported as done.
    /// 0, the default: never.
    pub flushed: u32,
    /// Places that devices give a link's send queue at most; at least 4. Default: as many as are
    /// asked for.
    pub send_queue: Option<u32>,
    /// Check the rules, see [`SimNet::breaches`]. Default false: it reads all payload three times.
    pub audit: bool,
    /// A promise to break, and after how many occasions for it. Default none.
    pub injected_bug: Option<(InjectedBug, u64)>,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            seed: 1,
            delay: 0,
            max_msg: 1 << 30,
            latency: Duration::ZERO,
            lost_wakeups: 0,
            idle_wakeups: 0,
            flushed: 0,
            send_queue: None,
            audit: false,
            injected_bug: None,
        }
    }
}

/// Counts over the whole network since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SimStats {
    /// Times that queued work was handed to a device.
    pub doorbells: u64,
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

    /// Adds a device with one address. An address that is taken goes over to the new device. The
    /// device can be found for as long as a clone of it, or a listener, a link or registered memory
    /// on it lives.
    pub fn device(&self, name: impl Into<String>, addr: IpAddr) -> SimDevice {
        let device = Arc::new(DeviceInner::new(self.0.clone(), name.into(), addr));
        self.0.add_device(&device);
        SimDevice(device)
    }

    /// Has a network tell what happens on it. Once: a second observer is ignored.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        self.0.set_tap(observer);
    }

    /// The rules that were broken so far, with [`SimConfig::audit`], in words that name the rule.
    ///
    /// | rule | checked |
    /// |---|---|
    /// | R2 | a SEND finds a RECV posted, long enough |
    /// | R3 | the accepting side does not send first |
    /// | R5 | nothing is queued without room |
    /// | R9 | a WRITE finds its memory registered for it; a source is registered while work reads it |
    /// | R10 | what work reads does not change before it is reported as done |
    pub fn breaches(&self) -> Vec<String> {
        self.0.breaches()
    }

    /// Whether [`SimConfig::injected_bug`] has struck.
    pub fn has_broken(&self) -> bool {
        self.0.has_broken()
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
        Arc::new(SimRegistrar { device: self.0.clone() })
    }

    /// A number drawn from the network's seed, another one each time.
    pub fn draw(&self) -> u64 {
        self.0.net.draw()
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

    /// Fault: links made on this device from now on carry so many work requests and fail the next
    /// (`retry exceeded`). `None` ends it.
    pub fn kill_links_after(&self, work: Option<u64>) {
        self.0.faults.set_kill_after(work);
    }

    /// Fault: nothing leaves or arrives, and nobody is told, as with a stopped peer or a network
    /// that drops everything. `false` lets it go on.
    pub fn freeze(&self, on: bool) {
        self.0.freeze(on);
    }

    /// Fault: connect requests to this device get no answer.
    pub fn lose_connects(&self, on: bool) {
        self.0.faults.set_lose_connects(on);
    }

    /// Fault: all links of this device die now, with retries exceeded. Their peers see a disconnect
    /// when the links are dropped.
    pub fn cut(&self) {
        self.0.cut();
    }

    /// Fault: peers of this device's links are not told when those end, as when the network takes
    /// the last packets with it.
    pub fn lose_disconnects(&self, on: bool) {
        self.0.faults.set_lose_disconnects(on);
    }

    /// Fault: the device is pulled out. Its links end with
    /// [`DeviceRemoved`](crate::LinkError::DeviceRemoved), its listeners end, and it does not come
    /// back.
    pub fn remove(&self) {
        self.0.remove();
    }
}
