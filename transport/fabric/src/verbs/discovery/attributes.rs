//! Attributes that an open device reports: its name, its limits and its ports.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::ptr::NonNull;

use crate::device::{LinkLayer, PortInfo, PortState, Transport};
use crate::verbs::queue_pair::path_mtu::PathMtu;

/// Maximum number of GIDs that are read per port. Soft devices list 1024 or more GIDs, nearly all
/// of which are zero.
const MAX_GIDS: i32 = 64;

/// The name of a context's device.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn context_name(context: NonNull<rdma_sys::ibv_context>) -> String {
    // SAFETY: an open context has a device, and a device has a name for as long as it is open.
    unsafe {
        let name = rdma_sys::ibv_get_device_name(context.as_ref().device);
        if name.is_null() {
            "unnamed device".to_owned()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }
}

/// Whether a context's device speaks iWARP.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn is_iwarp(context: NonNull<rdma_sys::ibv_context>) -> bool {
    // SAFETY: as above.
    let transport = unsafe { (*context.as_ref().device).transport_type };
    transport == rdma_sys::ibv_transport_type::IBV_TRANSPORT_IWARP
}

/// Reads the attributes that an open device reports.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn ports(
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
unsafe fn port_attributes(
    context: NonNull<rdma_sys::ibv_context>,
    number: u8,
) -> Option<rdma_sys::ibv_port_attr> {
    let mut attr = MaybeUninit::<rdma_sys::ibv_port_attr>::zeroed();
    // SAFETY: the context is open; the attributes are plain numbers, for which zero is valid.
    unsafe {
        let errno = rdma_sys::ibv_query_port(context.as_ptr(), number, attr.as_mut_ptr());
        (errno == 0).then(|| attr.assume_init())
    }
}

/// The active MTU of a port. `None` if the device does not report the MTU.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn port_mtu(
    context: NonNull<rdma_sys::ibv_context>,
    number: u8,
) -> Option<PathMtu> {
    // SAFETY: the caller's promise.
    unsafe { port_attributes(context, number) }.and_then(|attr| PathMtu::new(attr.active_mtu))
}

/// # Safety
/// The context is open.
unsafe fn port(context: NonNull<rdma_sys::ibv_context>, number: u8) -> Option<PortInfo> {
    // SAFETY: the caller's promise.
    let attr = unsafe { port_attributes(context, number) }?;
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
        mtu: PathMtu::new(attr.active_mtu).map_or(0, PathMtu::bytes),
        max_msg: attr.max_msg_sz,
        gids: (0..attr.gid_tbl_len.clamp(0, MAX_GIDS))
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
