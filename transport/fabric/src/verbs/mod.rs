//! RDMA through rdma-core, loaded at run time: InfiniBand, RoCE (also Soft-RoCE) and iWARP (also
//! Soft-iWARP).
//!
//! | module | what |
//! |---|---|
//! | `host_watch` | the kernel's notices of changes to devices, interfaces and addresses |
//! | `discovery` | the libraries, devices, ports and addresses of this host |
//! | `context` | an open device: context and protection domain, shared by all objects made on it |
//! | `addr` | socket addresses in C's form |
//! | `cm` | rdma_cm: ids, and the event channel that the ids of a runtime share |
//! | `mr` | memory regions |
//! | `completion` | completion queues that queue pairs share, and the rules for polling them |
//! | `queue_pair` | queue pairs, and batches of work |
//! | `connect`, `listener` | the connecting and the accepting side |
//! | `connect_error` | the errors of an attempt, on both sides |
//! | `bring_up` | the calls that bring a link up, on threads that may block |
//! | `link` | a [`Link`](crate::Link) over a queue pair |
//! | `siw` | workarounds for Soft-iWARP: payload that TCP still reads, and a limit of about 60 connections |
//! | `self_test` | makes each object that a connection needs, for diagnosis |
//! | `wake_cost` | measures how long a wake-up takes on this machine |
//!
//! # Ownership
//!
//! Every object of libibverbs and librdmacm has one owner. The owner frees the object on drop, and
//! until then keeps alive the objects that this object needs:
//!
//! ```text
//! VerbsLink -> Qp -> CqMember -> SharedCq -> Shard (channel) -> device (context, protection domain) -> bound id
//!                 -> CmId -> its part of the hub -> Hub -> Channel
//!           -> send queue and control block, freed when the queue pair is destroyed
//! registration -> device        listener -> CmId -> Hub -> Channel
//! ```
//!
//! Both libraries wait for unacknowledged events before they destroy an object, so this provider
//! acknowledges every event.
//!
//! # Removal of a device
//!
//! The links of a removed device end with [`DeviceRemoved`](crate::LinkError::DeviceRemoved), and
//! connection attempts over it fail with [`DeviceRemoved`](crate::FabricError::DeviceRemoved). The
//! kernel waits until every object on the device is freed, so links, pools and the [`VerbsDevice`]
//! must be dropped. librdmacm then closes its own handle when it next lists the devices. The last
//! device of the host is an exception: librdmacm keeps its handle until the process ends.

mod addr;
mod bring_up;
mod cm;
mod completion;
mod connect;
mod connect_error;
mod context;
mod discovery;
mod host_watch;
mod link;
mod listener;
mod mr;
mod queue_pair;
mod self_test;
mod siw;
mod wake_cost;

pub(crate) use self::addr::local_networks;
pub(crate) use self::discovery::enumerate::places;
pub use self::discovery::enumerate::{devices, local_addresses};
pub(crate) use self::discovery::may_have_devices;
pub(crate) use self::discovery::routes::routed;
pub use self::host_watch::{HostEvents, HostWatch};
pub use self::link::VerbsLink;
pub use self::listener::{VerbsIncoming, VerbsListener};
pub use self::self_test::self_test;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use std::{fmt, io};

use tonic_rdma_memory::{Pool, Registrar};

use crate::device::{DeviceInfo, Transport};
use crate::error::{ConnectError, FabricError, Verb};
use crate::link_config::LinkConfig;
use crate::verbs::cm::CmId;
use crate::verbs::cm::channel::Channel;
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::attributes::ports;
use crate::verbs::discovery::device_list::no_channel;
use crate::verbs::discovery::{enumerate, has_interface};
use crate::verbs::mr::VerbsRegistrar;
use crate::verbs::queue_pair::check_queue_pair;

/// Devices open in this process. All users of a device share its protection domain.
static OPEN: Mutex<Vec<Weak<DeviceContext>>> = Mutex::new(Vec::new());

/// A device of rdma-core. Cheap to clone.
#[derive(Clone)]
pub struct VerbsDevice(Arc<DeviceContext>);

impl fmt::Debug for VerbsDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsDevice").field("name", &self.0.name).finish_non_exhaustive()
    }
}

/// The reason why no address leads to a device.
fn unreachable(device: &DeviceInfo, has_interface: bool) -> FabricError {
    let name = device.name.clone();
    if let Some(errno) = device.unopened {
        let source = Arc::new(io::Error::from_raw_os_error(errno));
        let verb = Verb::Call("ibv_open_device");
        return FabricError::QueuePairRefused { device: name, verb, source };
    }
    match device.transport {
        // Devices of an unknown transport have connections of another kind, or no connections.
        Transport::Unknown => FabricError::NoConnections { device: name },
        Transport::InfiniBand if !has_interface => FabricError::NoIpoib { device: name },
        _ => FabricError::NoAddress { device: name },
    }
}

impl VerbsDevice {
    /// See [`Fabric::open`](crate::Fabric::open).
    ///
    /// # Errors
    /// Each requirement that is not met has its own error.
    pub fn open(name: Option<&str>) -> Result<VerbsDevice, FabricError> {
        VerbsDevice::open_among(&enumerate::devices()?, name)
    }

    /// See [`Fabric::open_listed`](crate::Fabric::open_listed).
    ///
    /// # Errors
    /// The errors of [`open`](VerbsDevice::open).
    pub fn open_among(
        found: &[DeviceInfo],
        name: Option<&str>,
    ) -> Result<VerbsDevice, FabricError> {
        discovery::probe()?;
        let Some(name) = name else {
            let mut first = None;
            for device in found {
                match VerbsDevice::open_listed(device) {
                    Ok(device) => return Ok(device),
                    Err(error) => drop(first.get_or_insert(error)),
                }
            }
            return Err(first.unwrap_or(FabricError::NoDevice));
        };
        match found.iter().find(|d| d.name == name) {
            Some(device) => VerbsDevice::open_listed(device),
            None if found.is_empty() => Err(FabricError::NoDevice),
            None => {
                let found = found.iter().map(|d| d.name.clone()).collect();
                Err(FabricError::NoSuchDevice { name: name.to_owned(), found })
            }
        }
    }

    fn open_listed(device: &DeviceInfo) -> Result<VerbsDevice, FabricError> {
        if let (false, Some(port)) =
            (device.ports.iter().any(|p| p.state.is_active()), device.ports.first())
        {
            return Err(FabricError::NoActivePort {
                device: device.name.clone(),
                state: port.state,
            });
        }
        match device.addresses.first() {
            Some(ip) => VerbsDevice::at(*ip),
            None => Err(unreachable(device, has_interface(&device.name))),
        }
    }

    /// See [`Fabric::at`](crate::Fabric::at).
    ///
    /// # Errors
    /// [`FabricError::NotOnRdma`], and the errors of [`open`](VerbsDevice::open).
    pub fn at(local: IpAddr) -> Result<VerbsDevice, FabricError> {
        discovery::probe()?;
        let channel = Channel::new().map_err(no_channel)?;
        let id = CmId::apart(&channel)
            .map_err(|source| FabricError::NoConnectionManager { source: source.into() })?;
        if id.bind(SocketAddr::new(local, 0)).is_err() || id.verbs().is_none() {
            return Err(FabricError::NotOnRdma { addr: local });
        }
        VerbsDevice::of(id)
    }

    /// See [`Fabric::toward`](crate::Fabric::toward).
    ///
    /// # Errors
    /// [`ConnectError::NotOnRdma`], [`ConnectError::NoRoute`], [`ConnectError::OtherDevice`],
    /// [`ConnectError::Timeout`], and the errors of [`open`](VerbsDevice::open).
    pub async fn toward(
        peer: SocketAddr,
        source: Option<IpAddr>,
        only: Option<&str>,
        timeout: Duration,
    ) -> Result<VerbsDevice, ConnectError> {
        discovery::probe()?;
        let id = connect::resolve(peer, source, timeout).await?;
        let device = VerbsDevice::of(id)?;
        match only {
            Some(wanted) if wanted != device.name() => Err(ConnectError::OtherDevice {
                addr: peer.into(),
                wanted: wanted.to_owned(),
                routed: device.name().to_owned(),
            }),
            _ => Ok(device),
        }
    }

    /// The device that an id is bound to. If the device is not open yet, this function opens the
    /// device, which then keeps the id.
    fn of(id: CmId) -> Result<VerbsDevice, FabricError> {
        let context = id.verbs().ok_or(FabricError::NoDevice)?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|d| d.strong_count() > 0);
        if let Some(device) = open.iter().filter_map(Weak::upgrade).find(|d| d.context() == context)
        {
            return match device.is_removed() {
                true => Err(device.removed_error()),
                false => Ok(VerbsDevice(device)),
            };
        }
        let device = DeviceContext::open(id)?;
        check_queue_pair(&device)?;
        open.push(Arc::downgrade(&device));
        Ok(VerbsDevice(device))
    }

    /// The name that `rdma link` shows.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The wire protocol.
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// True if the device was removed. The kernel frees the device once its links, listeners, pools
    /// and the clones of this value are dropped.
    pub fn is_removed(&self) -> bool {
        self.0.is_removed()
    }

    /// Makes `watch` also report events of this device: changes of its ports, its failure, and its
    /// removal. The kernel completes a removal only after this process has dropped the device.
    ///
    /// # Errors
    /// The system refuses to watch the device.
    pub fn tell_removal(&self, watch: &HostWatch) -> io::Result<()> {
        watch.also(&self.0)
    }

    /// The current state of the device.
    ///
    /// # Errors
    /// The device does not answer, or was removed.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        // SAFETY: the device is open.
        let (transport, ports, _) = unsafe { ports(self.0.context()) }
            .map_err(|source| self.0.verb_error("ibv_query_device", source))?;
        let (name, addresses) = (self.0.name.clone(), self.addresses()?);
        Ok(DeviceInfo { name, transport, ports, addresses, unopened: None })
    }

    /// This host's addresses on the device.
    ///
    /// # Errors
    /// The addresses cannot be listed, or the connection manager is gone.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        Ok(enumerate::local_addresses(Some(&self.0.name))?.into_iter().map(|at| at.ip).collect())
    }

    /// Returns a registrar that registers memory in the device's protection domain, and keeps the
    /// device open.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(VerbsRegistrar(self.0.clone()))
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    ///
    /// # Errors
    /// The address is in use, does not lie on the device, or the device failed.
    pub fn listen(&self, addr: SocketAddr) -> Result<VerbsListener, FabricError> {
        VerbsListener::new(&self.0, addr)
    }

    /// See [`Fabric::connect_telling`](crate::Fabric::connect_telling).
    ///
    /// # Errors
    /// Each way to fail has its own error.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
        answered: &AtomicBool,
    ) -> Result<(VerbsLink, Vec<u8>), ConnectError> {
        connect::connect(&self.0, addr, config, pool, private_data, timeout, answered).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{LinkLayer, PortInfo, PortState};

    #[test]
    fn a_device_without_an_address_is_told_why() {
        let told = |transport, unopened: Option<i32>, has_interface| {
            let port = PortInfo {
                number: 1,
                state: PortState::Active,
                link_layer: LinkLayer::Unspecified,
                mtu: 4096,
                max_msg: 1 << 30,
                gids: Vec::new(),
            };
            let (name, addresses) = ("x0".to_owned(), Vec::new());
            let ports = if unopened.is_some() { Vec::new() } else { vec![port] };
            let device = DeviceInfo { name, transport, ports, addresses, unopened };
            unreachable(&device, has_interface).to_string()
        };
        for has_interface in [false, true] {
            let efa = told(Transport::Unknown, None, has_interface);
            assert!(efa.contains("x0 has no reliable connections"), "{efa}");
            let closed = told(Transport::Unknown, Some(libc::EACCES), has_interface);
            assert!(closed.contains("ibv_open_device: Permission denied"), "{closed}");
        }
        let bare = told(Transport::InfiniBand, None, false);
        assert!(bare.contains("modprobe ib_ipoib"), "{bare}");
        for (transport, has_interface) in [(Transport::InfiniBand, true), (Transport::RoCE, false)]
        {
            let plain = told(transport, None, has_interface);
            assert!(plain.contains("give its network interface an address"), "{plain}");
        }
    }
}
