//! Functions that verbs.h defines as inline. These functions call the device's driver directly,
//! through the context of the open device. The exception is `ibv_query_port`, which calls
//! libibverbs if the library or the driver is old.

use std::ffi::c_int;
use std::mem::offset_of;

use crate::functions;
use crate::objects::{QueryPort, ibv_context, ibv_cq, ibv_qp, verbs_context};
use crate::port::ibv_port_attr;
use crate::work::{ibv_recv_wr, ibv_send_wr, ibv_wc};

/// Posts a list of requests to a send queue. Returns 0, or an errno.
///
/// # Safety
/// The queue pair is alive, and the other arguments are as ibv_post_send(3) requires.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair that is alive has an open context; the rest is the caller's promise.
    unsafe {
        match (*(*qp).context).ops.post_send {
            Some(post_send) => post_send(qp, wr, bad_wr),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// Posts a list of requests to a receive queue. Returns 0, or an errno.
///
/// # Safety
/// The queue pair is alive, and the other arguments are as ibv_post_recv(3) requires.
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        match (*(*qp).context).ops.post_recv {
            Some(post_recv) => post_recv(qp, wr, bad_wr),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// Takes completions. Returns their number, or a negative number if the call fails.
///
/// # Safety
/// The queue is alive, and `wc` has room for `num_entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a queue that is alive has an open context; the rest is the caller's promise.
    unsafe {
        match (*(*cq).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(cq, num_entries, wc),
            None => -libc::EOPNOTSUPP,
        }
    }
}

/// Asks for an event at the next completion. Returns 0, or an errno.
///
/// # Safety
/// The queue is alive.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        match (*(*cq).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(cq, solicited_only),
            None => libc::EOPNOTSUPP,
        }
    }
}

/// Writes the attributes of a port. The header calls this function `___ibv_query_port`. A library
/// or driver before rdma-core 21 does not write `flags` and `port_cap_flags2`, which are then 0.
///
/// # Safety
/// The context is open, and there is room for the attributes.
pub unsafe fn ibv_query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promise, for each call. Zeros are valid attributes.
    unsafe {
        match query_port(context) {
            Some(query_port) => {
                query_port(context, port_num, port_attr, size_of::<ibv_port_attr>())
            }
            None => {
                port_attr.write_bytes(0, 1);
                functions::ibv_query_port(context, port_num, port_attr.cast())
            }
        }
    }
}

/// The context's function that queries a port, if library and driver have it.
///
/// # Safety
/// The context is open.
unsafe fn query_port(context: *mut ibv_context) -> Option<QueryPort> {
    /// `abi_compat` of a context that lies in a `verbs_context`.
    const IS_EXTENDED: usize = usize::MAX;
    // SAFETY: the context is open. An extended context is the last field of a `verbs_context`, and
    // the field before it is the size of that struct. This function reads no more of the struct
    // than this size.
    unsafe {
        if (*context).abi_compat.addr() != IS_EXTENDED {
            return None;
        }
        let outer = context.byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
        if (&raw const (*outer).sz).read() < size_of::<verbs_context>() {
            return None;
        }
        (&raw const (*outer).query_port).read()
    }
}

#[cfg(test)]
mod tests;
