//! Which devices there are, and which addresses lie on them.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};
use std::ptr::NonNull;

use crate::device::{DeviceInfo, LinkLayer, PortInfo, PortState, Transport};
use crate::error::{FabricError, Verb};
use crate::verbs::addr::local_ips;
use crate::verbs::cm::Channel;
use crate::verbs::device::{bound_device, no_channel};
use crate::verbs::lib_probe;

/// GIDs that are looked at per port. Soft devices list 1024 and more, nearly all of them zero.
const GIDS: i32 = 64;

/// The device list of libibverbs, freed on drop.
pub(super) struct List {
    list: *mut *mut rdma_sys::ibv_device,
    len: usize,
}

impl List {
    pub(super) fn new() -> io::Result<List> {
        let mut len = 0;
        // SAFETY: gives a list and its length, or null.
        let list = unsafe { rdma_sys::ibv_get_device_list(&mut len) };
        match list.is_null() {
            true => Err(io::Error::last_os_error()),
            false => Ok(List { list, len: len.max(0) as usize }),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = NonNull<rdma_sys::ibv_device>> + '_ {
        // SAFETY: the list has `len` entries and lives as long as self.
        (0..self.len).filter_map(|i| NonNull::new(unsafe { *self.list.add(i) }))
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list came from ibv_get_device_list; devices that are open stay valid.
        unsafe { rdma_sys::ibv_free_device_list(self.list) };
    }
}

/// # Safety
/// The device is in a live list.
pub(super) unsafe fn device_name(device: NonNull<rdma_sys::ibv_device>) -> String {
    // SAFETY: the caller's promise; the name is a string inside the device.
    unsafe {
        let name = rdma_sys::ibv_get_device_name(device.as_ptr());
        if name.is_null() {
            String::new()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }
}

/// The names of all devices; none when they cannot be listed.
pub(super) fn names() -> Vec<String> {
    // SAFETY: the list is alive.
    List::new()
        .map(|list| list.iter().map(|d| unsafe { device_name(d) }).collect())
        .unwrap_or_default()
}

/// All RDMA devices of this host, usable or not, by name.
///
/// # Errors
/// rdma-core is missing, or the connection manager cannot be used. No device at all is an empty
/// list.
pub fn devices() -> Result<Vec<DeviceInfo>, FabricError> {
    lib_probe::probe()?;
    let list = match List::new() {
        Ok(list) => list,
        // Without any RDMA in the kernel the list is an error.
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
    if list.len == 0 {
        return Ok(Vec::new());
    }
    let addresses = local_addresses(None)?;
    let mut found: Vec<DeviceInfo> = list
        .iter()
        .map(|device| {
            // SAFETY: the list is alive.
            let name = unsafe { device_name(device) };
            // SAFETY: as above.
            let (transport, ports) = unsafe { query(device) }.unwrap_or_else(|error| {
                tracing::debug!(device = name, %error, "RDMA device cannot be opened");
                (Transport::Unknown, Vec::new())
            });
            let addresses =
                addresses.iter().filter(|(_, on)| *on == name).map(|(ip, _)| *ip).collect();
            DeviceInfo { name, transport, ports, addresses }
        })
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// This host's IP addresses that lie on RDMA devices, with the device's name.
///
/// # Errors
/// As [`devices`].
pub fn local_addresses(only: Option<&str>) -> Result<Vec<(IpAddr, String)>, FabricError> {
    lib_probe::probe()?;
    let channel = match Channel::new().map_err(no_channel) {
        Ok(channel) => channel,
        Err(FabricError::NoDevice) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let ips = local_ips().map_err(|source| FabricError::Verb {
        verb: Verb::Call("getifaddrs"),
        device: "any device".to_owned(),
        source: source.into(),
    })?;
    let on = ips.into_iter().filter_map(|ip| Some((ip, bound_device(&channel, ip)?)));
    Ok(on.filter(|(_, name)| only.is_none_or(|only| only == name)).collect())
}

/// Opens a device for a look.
///
/// # Safety
/// The device is in a live list.
unsafe fn query(device: NonNull<rdma_sys::ibv_device>) -> io::Result<(Transport, Vec<PortInfo>)> {
    // SAFETY: the caller's promise.
    let context = NonNull::new(unsafe { rdma_sys::ibv_open_device(device.as_ptr()) })
        .ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the context is open, and closed once.
    let looked = unsafe { ports(context) };
    // SAFETY: as above; nothing was made on it.
    unsafe { rdma_sys::ibv_close_device(context.as_ptr()) };
    looked.map(|(transport, ports, _)| (transport, ports))
}

/// What an open device says about itself.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn ports(
    context: NonNull<rdma_sys::ibv_context>,
) -> io::Result<(Transport, Vec<PortInfo>, rdma_sys::ibv_device_attr)> {
    let mut attr = MaybeUninit::<rdma_sys::ibv_device_attr>::zeroed();
    // SAFETY: the context is open; the attributes are plain numbers, for which zero is valid.
    let attr = unsafe {
        match rdma_sys::ibv_query_device(context.as_ptr(), attr.as_mut_ptr()) {
            0 => attr.assume_init(),
            errno => return Err(io::Error::from_raw_os_error(errno.abs())),
        }
    };
    // SAFETY: the context is open.
    let ports: Vec<PortInfo> =
        (1..=attr.phys_port_cnt).filter_map(|n| unsafe { port(context, n) }).collect();
    // SAFETY: an open context has a device.
    let transport = match unsafe { (*context.as_ref().device).transport_type } {
        rdma_sys::ibv_transport_type::IBV_TRANSPORT_IWARP => Transport::IWarp,
        rdma_sys::ibv_transport_type::IBV_TRANSPORT_IB => match ports.first().map(|p| p.link_layer)
        {
            Some(LinkLayer::Ethernet) => Transport::RoCE,
            Some(_) => Transport::InfiniBand,
            None => Transport::Unknown,
        },
        _ => Transport::Unknown,
    };
    Ok((transport, ports, attr))
}

/// # Safety
/// The context is open.
unsafe fn port(context: NonNull<rdma_sys::ibv_context>, number: u8) -> Option<PortInfo> {
    let mut attr = MaybeUninit::<rdma_sys::ibv_port_attr>::zeroed();
    // SAFETY: the context is open; the attributes are plain numbers, for which zero is valid.
    let attr = unsafe {
        if rdma_sys::ibv_query_port(context.as_ptr(), number, attr.as_mut_ptr()) != 0 {
            return None;
        }
        attr.assume_init()
    };
    use rdma_sys::ibv_port_state as state;
    Some(PortInfo {
        number,
        state: match attr.state {
            state::IBV_PORT_DOWN => PortState::Down,
            state::IBV_PORT_INIT => PortState::Init,
            state::IBV_PORT_ARMED => PortState::Armed,
            state::IBV_PORT_ACTIVE => PortState::Active,
            state::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            _ => PortState::Unknown,
        },
        // IBV_LINK_LAYER_INFINIBAND and IBV_LINK_LAYER_ETHERNET of verbs.h.
        link_layer: match attr.link_layer {
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            _ => LinkLayer::Unspecified,
        },
        // enum ibv_mtu: 1 is 256 bytes, 5 is 4096.
        mtu: match attr.active_mtu {
            code @ 1..=5 => 128 << code,
            _ => 0,
        },
        max_msg: attr.max_msg_sz,
        gids: (0..attr.gid_tbl_len.clamp(0, GIDS))
            // SAFETY: the context is open and the index lies in the table.
            .filter_map(|index| unsafe { gid(context, number, index) })
            .collect(),
    })
}

/// # Safety
/// The context is open.
unsafe fn gid(context: NonNull<rdma_sys::ibv_context>, port: u8, index: i32) -> Option<Ipv6Addr> {
    let mut gid = rdma_sys::ibv_gid { raw: [0; 16] };
    // SAFETY: the context is open; any 16 bytes are a GID.
    let raw = unsafe {
        if rdma_sys::ibv_query_gid(context.as_ptr(), port, index, &mut gid) != 0 {
            return None;
        }
        gid.raw
    };
    (raw != [0; 16]).then(|| Ipv6Addr::from(raw))
}
