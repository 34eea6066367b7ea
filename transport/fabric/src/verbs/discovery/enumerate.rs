//! The RDMA devices of this host and their addresses.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::addr::LocalNetwork;
use crate::device::{DeviceInfo, LocalAddress, PortInfo, Transport};
use crate::error::{FabricError, Verb};
use crate::verbs::addr::local_networks;
use crate::verbs::cm::CmId;
use crate::verbs::cm::channel::Channel;
use crate::verbs::discovery;
use crate::verbs::discovery::attributes::{context_name, is_iwarp, ports};
use crate::verbs::discovery::device_list::{List, device_name, no_channel};

/// Lists all RDMA devices of this host, usable or not, in the order of their names.
///
/// # Errors
/// rdma-core is missing, or the connection manager cannot be used. On a host without devices the
/// list is empty.
pub fn devices() -> Result<Vec<DeviceInfo>, FabricError> {
    discovery::probe()?;
    let list = match List::new() {
        Ok(list) => list,
        // If the kernel has no RDMA, libibverbs reports an error instead of an empty list.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ENOENT | libc::ENODEV)) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => {
            let (verb, device) = (Verb::Call("ibv_get_device_list"), "any device".to_owned());
            return Err(FabricError::Verb { verb, device, source: error.into() });
        }
    };
    if list.is_empty() {
        return Ok(Vec::new());
    }
    let addresses = local_addresses(None)?;
    let mut found: Vec<DeviceInfo> = list
        .iter()
        .map(|device| {
            // SAFETY: the list is alive.
            let name = unsafe { device_name(device) };
            // SAFETY: as above.
            let (transport, ports, unopened) = match unsafe { query(device) } {
                Ok((transport, ports)) => (transport, ports, None),
                Err(error) => {
                    tracing::debug!(device = name, %error, "RDMA device cannot be opened");
                    (Transport::Unknown, Vec::new(), error.raw_os_error())
                }
            };
            let addresses =
                addresses.iter().filter(|at| at.device == name).map(|at| at.ip).collect();
            DeviceInfo { name, transport, ports, addresses, unopened }
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// This host's IP addresses on RDMA devices.
///
/// # Errors
/// The errors of [`devices`].
pub fn local_addresses(only: Option<&str>) -> Result<Vec<LocalAddress>, FabricError> {
    discovery::probe()?;
    let channel = match Channel::new().map_err(no_channel) {
        Ok(channel) => channel,
        Err(FabricError::NoDevice) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let networks = local_networks().map_err(|source| FabricError::Verb {
        verb: Verb::Call("getifaddrs"),
        device: "any device".to_owned(),
        source: source.into(),
    })?;
    let on = networks.into_iter().filter_map(|LocalNetwork { ip, prefix, running, interface }| {
        let (device, iwarp) = bound_device(&channel, ip)?;
        Some(LocalAddress { ip, prefix, running, interface, device, iwarp })
    });
    Ok(on.filter(|at| only.is_none_or(|only| only == at.device)).collect())
}

/// Returns the given addresses of this host with the names of their devices. Addresses whose device
/// cannot be determined are left out.
pub(crate) fn places(addresses: &BTreeSet<IpAddr>) -> Vec<(IpAddr, String)> {
    if addresses.is_empty() || discovery::probe().is_err() {
        return Vec::new();
    }
    let Ok(channel) = Channel::new() else { return Vec::new() };
    let on = |ip: &IpAddr| Some((*ip, bound_device(&channel, *ip)?.0));
    addresses.iter().filter_map(on).collect()
}

/// Opens a device, reads its attributes, and closes it again.
///
/// # Safety
/// The device is in a live list.
unsafe fn query(device: NonNull<rdma_sys::ibv_device>) -> io::Result<(Transport, Vec<PortInfo>)> {
    // SAFETY: the caller's promise.
    let context = NonNull::new(unsafe { rdma_sys::ibv_open_device(device.as_ptr()) })
        .ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the context is open, and closed once.
    let attributes = unsafe { ports(context) };
    // SAFETY: as above; nothing was made on it.
    unsafe { rdma_sys::ibv_close_device(context.as_ptr()) };
    attributes.map(|(transport, ports, _)| (transport, ports))
}

/// The name of the device of a local address, and whether that device speaks iWARP.
fn bound_device(channel: &Arc<Channel>, ip: IpAddr) -> Option<(String, bool)> {
    let id = CmId::apart(channel).ok()?;
    id.bind(SocketAddr::new(ip, 0)).ok()?;
    // SAFETY: the id keeps the context open.
    id.verbs().map(|context| unsafe { (context_name(context), is_iwarp(context)) })
}
