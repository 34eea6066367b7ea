//! Ports of a device, and their addresses.

#![allow(missing_docs, reason = "the fields are those of the manual pages")]

use std::ffi::{c_int, c_uint};

use crate::macros::{enums, opaque};

enums! {
    /// Whether a port is down, is being configured, or can carry data.
    ibv_port_state: std::ffi::c_uint {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
}

opaque! {
    /// The attributes of a port that libibverbs' own function fills: the beginning of
    /// [`ibv_port_attr`].
    _compat_ibv_port_attr,
}

/// The attributes of ibv_query_port(3) in rdma-core 22. Newer versions have one more field, and do
/// not write that field if they get the size of this struct.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_port_attr {
    pub state: ibv_port_state::Type,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// The address of a port.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_gid {
    /// The bytes of the address, in network order.
    pub raw: [u8; 16],
    /// The two halves of the address.
    pub global: ibv_gid_global,
}

/// The halves of an [`ibv_gid`], each in network order.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_gid_global {
    pub subnet_prefix: u64,
    pub interface_id: u64,
}

/// A route between subnets.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// The address vector of a peer's port.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}
