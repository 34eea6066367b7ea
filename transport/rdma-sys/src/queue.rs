//! Attributes of queue pairs, and asynchronous events.

#![allow(missing_docs, reason = "the fields are those of the manual pages")]

use std::ffi::{c_int, c_uint, c_void};

use crate::macros::{enums, flags};
use crate::objects::{ibv_cq, ibv_qp, ibv_srq};
use crate::port::ibv_ah_attr;

enums! {
    /// The service type of a queue pair.
    ibv_qp_type: std::ffi::c_uint {
        IBV_QPT_RC = 2,
    }

    /// A state of a queue pair.
    ibv_qp_state: std::ffi::c_uint {
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
    }

    /// The kind of an asynchronous event.
    ibv_event_type: std::ffi::c_uint {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
    }
}

flags! {
    /// The attributes that ibv_modify_qp(3) reads.
    ibv_qp_attr_mask {
        IBV_QP_STATE = 1 << 0,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
    }
}

/// The object that an asynchronous event is about.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_async_event_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub port_num: c_int,
}

/// An asynchronous event of a device.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_async_event {
    pub element: ibv_async_event_element,
    pub event_type: ibv_event_type::Type,
}

/// The sizes of a queue pair.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// The attributes with which a queue pair is made.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: ibv_qp_type::Type,
    pub sq_sig_all: c_int,
}

/// The attributes of ibv_modify_qp(3) and rdma_init_qp_attr(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_qp_attr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}
