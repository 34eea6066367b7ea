//! Workarounds for Soft-iWARP.
//!
//! # Payload that TCP still reads
//! Soft-iWARP passes payload of a page or more to TCP without a copy if the request is not
//! signalled (`siw_prepare_fpdu` in the kernel's siw_qp_tx.c). TCP reads the payload again for a
//! retransmission, and if both ends run on one host, the receiver reads the sender's pages. Both
//! may happen after a later, signalled request has reported that the memory is free. So every
//! request of that length is signalled, and the kernel copies its payload.
//!
//! # A valid offset that libsiw treats as an error
//! The kernel returns the offset at which a queue is to be mapped, and libsiw treats the offset
//! 0x90000 as a failure (`SIW_INVAL_UOBJ_KEY` of rdma/siw-abi.h). With pages of 4 KiB, this offset
//! belongs to page 144 of all queues that the process has on the device. The kernel assigns the
//! lowest free pages first. So with about 60 connections all pages before page 144 are taken, and
//! no further queue can be created. A queue that begins one page earlier covers page 144, so that
//! no other queue begins there.

use std::ptr::{self, NonNull};

use crate::verbs::discovery::is_inherited;

/// Length in bytes from which Soft-iWARP sends unsignalled payload in place: the smallest page
/// (SENDPAGE_THRESH in the kernel's siw.h is PAGE_SIZE).
pub(super) const SENT_IN_PLACE: usize = 4096;

/// The offset in bytes that libsiw treats as an error.
const INVALID_OFFSET: usize = 0x9_0000;
/// The size of one completion in bytes. In addition, a queue needs a few bytes for its own data.
const CQE_SIZE: usize = 32;

/// The queue that covers the page with the invalid offset. The queue must be dropped before the
/// context.
pub(super) struct Cover(#[allow(dead_code, reason = "held, not read")] CompletionQueue);

impl Cover {
    /// Covers the page with the invalid offset. Returns `None` if the cover is not needed or cannot
    /// be made. If the cover is needed and cannot be made, the device works only with fewer
    /// connections.
    ///
    /// # Safety
    /// The context must be open, and stay open until the cover is dropped.
    pub(super) unsafe fn new(context: NonNull<rdma_sys::ibv_context>) -> Option<Cover> {
        // SAFETY: the caller's promise.
        let queue = |depth| unsafe { CompletionQueue::new(context, depth) };
        // SAFETY: sysconf takes no pointer.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        let mut before: Vec<CompletionQueue> = Vec::new();
        // Each queue of one entry takes one page.
        while let Some(next) = queue(1) {
            if before.len() == INVALID_OFFSET / page {
                return None;
            }
            before.push(next);
        }
        before.pop();
        // This queue takes two pages: the page that has just become free, and the next page.
        queue(i32::try_from(page / CQE_SIZE).ok()?).map(Cover)
    }
}

struct CompletionQueue(NonNull<rdma_sys::ibv_cq>);

impl CompletionQueue {
    /// # Safety
    /// The contract of [`Cover::new`].
    unsafe fn new(context: NonNull<rdma_sys::ibv_context>, depth: i32) -> Option<CompletionQueue> {
        // SAFETY: the context is open; a queue without a channel.
        let cq = unsafe {
            rdma_sys::ibv_create_cq(context.as_ptr(), depth, ptr::null_mut(), ptr::null_mut(), 0)
        };
        NonNull::new(cq).map(CompletionQueue)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        // SAFETY: made in `new`, destroyed once; nothing was made on it.
        match unsafe { rdma_sys::ibv_destroy_cq(self.0.as_ptr()) } {
            0 => {}
            errno => {
                tonic_rdma_memory::throttled!(warn, errno, "ibv_destroy_cq failed; it is leaked")
            }
        }
    }
}
