//! Work requests, their completions, and access flags of memory.

#![allow(missing_docs, reason = "the fields are those of the manual pages")]

use std::ffi::{c_int, c_uint, c_void};

use crate::macros::{enums, flags, opaque};

enums! {
    /// The operation of a work request.
    ibv_wr_opcode: std::ffi::c_uint {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
    }

    /// The outcome of a work request.
    ibv_wc_status: std::ffi::c_uint {
        IBV_WC_SUCCESS = 0,
        IBV_WC_WR_FLUSH_ERR = 5,
    }
}

flags! {
    /// Properties of a work request.
    ibv_send_flags {
        IBV_SEND_FENCE = 1 << 0,
        IBV_SEND_SIGNALED = 1 << 1,
        IBV_SEND_SOLICITED = 1 << 2,
        IBV_SEND_INLINE = 1 << 3,
    }

    /// The access that registered memory allows.
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 1 << 0,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
    }
}

opaque! {
    /// A memory window.
    ibv_mw,
    /// An address handle.
    ibv_ah,
}

/// A range of registered memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The peer's memory that a WRITE or a READ accesses.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// The peer's memory that an atomic operation accesses.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// The peer's queue pair that receives a datagram.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// The peer's side of a work request, which depends on its operation.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_send_wr_wr {
    pub rdma: ibv_send_wr_rdma,
    pub atomic: ibv_send_wr_atomic,
    pub ud: ibv_send_wr_ud,
}

/// The memory to which a memory window is bound.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_mw_bind_info {
    /// An `ibv_mr`.
    pub mr: *mut c_void,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// The memory window that a work request binds.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_bind_mw {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}

/// The header of a large packet that the device splits.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_tso {
    pub hdr: *mut c_void,
    pub hdr_sz: u16,
    pub mss: u16,
}

/// The last part of a work request, which depends on its operation. In C, the union has no name.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_send_wr_rest {
    pub bind_mw: ibv_send_wr_bind_mw,
    pub tso: ibv_send_wr_tso,
}

/// A request to a send queue, such as a SEND or a WRITE.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: ibv_wr_opcode::Type,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub wr: ibv_send_wr_wr,
    /// In C, this field is a union of structs with a single number, the number of the shared
    /// receive queue.
    pub qp_type: u32,
    pub rest: ibv_send_wr_rest,
}

/// A request to receive.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// A completion.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: ibv_wc_status::Type,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}
