//! The connection manager: ids, events and parameters of a connection.

#![allow(missing_docs, reason = "the fields are those of the manual pages")]

use std::ffi::{c_int, c_void};

use crate::macros::{enums, opaque};
use crate::objects::{ibv_context, ibv_qp};
use crate::port::{ibv_ah_attr, ibv_gid};

enums! {
    /// The kind of an event.
    rdma_cm_event_type: std::ffi::c_uint {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12,
        RDMA_CM_EVENT_MULTICAST_ERROR = 13,
        RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
    }

    /// The port space of an id.
    rdma_port_space: std::ffi::c_uint {
        RDMA_PS_TCP = 0x0106,
    }
}

opaque! {
    /// A path record of a subnet administrator.
    ibv_sa_path_rec,
}

/// The queue of connection manager events, with the descriptor that signals them.
#[derive(Debug)]
#[repr(C)]
pub struct rdma_event_channel {
    pub fd: c_int,
}

/// The source address of an id. In C, this union has no name.
#[derive(Clone, Copy)]
#[repr(C)]
pub union rdma_addr_src {
    pub src_addr: libc::sockaddr,
    pub src_storage: libc::sockaddr_storage,
}

/// The destination address of an id. In C, this union has no name.
#[derive(Clone, Copy)]
#[repr(C)]
pub union rdma_addr_dst {
    pub dst_addr: libc::sockaddr,
    pub dst_storage: libc::sockaddr_storage,
}

/// The addresses of an id on its device.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_ib_addr {
    pub sgid: ibv_gid,
    pub dgid: ibv_gid,
    pub pkey: u16,
}

/// The addresses of an id.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_addr {
    pub src: rdma_addr_src,
    pub dst: rdma_addr_dst,
    /// In C, this field is a union with one member.
    pub addr: rdma_ib_addr,
}

/// The route of an id.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_route {
    pub addr: rdma_addr,
    pub path_rec: *mut ibv_sa_path_rec,
    pub num_paths: c_int,
}

/// An identifier, up to the last field that this workspace uses.
#[repr(C)]
pub struct rdma_cm_id {
    pub verbs: *mut ibv_context,
    pub channel: *mut rdma_event_channel,
    pub context: *mut c_void,
    pub qp: *mut ibv_qp,
    pub route: rdma_route,
    pub ps: rdma_port_space::Type,
    pub port_num: u8,
}

/// The parameters of a connection.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct rdma_conn_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// The parameters of datagrams.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_ud_param {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub ah_attr: ibv_ah_attr,
    pub qp_num: u32,
    pub qkey: u32,
}

/// The parameters of an event, which depend on the port space of its id.
#[derive(Clone, Copy)]
#[repr(C)]
pub union rdma_cm_event_param {
    pub conn: rdma_conn_param,
    pub ud: rdma_ud_param,
}

/// An event of an id.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct rdma_cm_event {
    pub id: *mut rdma_cm_id,
    pub listen_id: *mut rdma_cm_id,
    pub event: rdma_cm_event_type::Type,
    pub status: c_int,
    pub param: rdma_cm_event_param,
}
