//! The objects that libibverbs makes. These objects are used only through pointers.

#![allow(missing_docs, reason = "the fields are those of the manual pages")]

use std::ffi::{c_int, c_void};

use crate::device::ibv_transport_type;
use crate::macros::opaque;
use crate::port::ibv_port_attr;
use crate::work::{ibv_recv_wr, ibv_send_wr, ibv_wc};

opaque! {
    /// A shared receive queue.
    ibv_srq,
}

type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
pub(crate) type QueryPort =
    unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int;

/// A device in the list of ibv_get_device_list(3), up to the last field that is used.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_device {
    _ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: ibv_transport_type::Type,
}

/// The functions of the device's driver that verbs.h calls. The other entries belong to older
/// libraries.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_context_ops {
    compat_before_poll: [*mut c_void; 11],
    pub(crate) poll_cq: Option<PollCq>,
    pub(crate) req_notify_cq: Option<ReqNotifyCq>,
    compat_before_send: [*mut c_void; 12],
    pub(crate) post_send: Option<PostSend>,
    pub(crate) post_recv: Option<PostRecv>,
    compat_after_recv: [*mut c_void; 5],
}

/// An open device.
#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub(crate) ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    /// 40 bytes, but 48 with glibc on AArch64.
    mutex: libc::pthread_mutex_t,
    pub(crate) abi_compat: *mut c_void,
}

/// The struct around an [`ibv_context`] whose `abi_compat` marks it as extended. New fields are
/// added at the beginning of this struct. This declaration is the part from `query_port` on.
#[repr(C)]
pub(crate) struct verbs_context {
    pub(crate) query_port: Option<QueryPort>,
    /// Functions that this crate does not use, and a reserved number.
    pub(crate) between: [*mut c_void; 38],
    /// The size in bytes that the whole struct has in the library.
    pub(crate) sz: usize,
    pub(crate) context: ibv_context,
}

/// A protection domain, up to the last field that is used.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// A memory region.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// A completion channel.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// A completion queue, up to the last field that is used.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

/// A queue pair, up to the last field that is used.
#[derive(Debug)]
#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
}
