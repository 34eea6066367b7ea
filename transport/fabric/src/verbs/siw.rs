//! A page that Soft-iWARP's library cannot tell from an error.
//!
//! The kernel names the place at which a queue is to be mapped, and libsiw takes one name for a failure: 0x90000
//! (`SIW_INVAL_UOBJ_KEY` of rdma/siw-abi.h), which is page 144 of all queues that the process has on the device. The lowest
//! free pages are given out first, so when those before it are taken, with some 60 connections, no queue can be made any more.
//! A queue that begins one page earlier and covers it keeps it from being given out.

use std::ptr::{self, NonNull};

/// Pages before the one that cannot be had.
const BEFORE: usize = 144;
/// Completions (of 32 bytes, and a few bytes for all) of queues that fill one page, and two.
const ONE_PAGE: i32 = 1;
const TWO_PAGES: i32 = 128;

/// The queue that covers the page. Must be dropped before the context.
pub(super) struct Cover(#[allow(dead_code, reason = "held, not read")] Queue);

impl Cover {
    /// Covers the page. None where that is not needed, or not possible: the device works all the same, with fewer
    /// connections.
    ///
    /// # Safety
    /// The context is open, and stays so until the cover is dropped.
    pub(super) unsafe fn new(context: NonNull<rdma_sys::ibv_context>) -> Option<Cover> {
        // SAFETY: the caller's promise.
        let queue = |depth| unsafe { Queue::new(context, depth) };
        let mut before: Vec<Queue> = Vec::new();
        while let Some(next) = queue(ONE_PAGE) {
            if before.len() == BEFORE {
                return None;
            }
            before.push(next);
        }
        before.pop();
        queue(TWO_PAGES).map(Cover)
    }
}

struct Queue(NonNull<rdma_sys::ibv_cq>);

impl Queue {
    /// # Safety
    /// As [`Cover::new`].
    unsafe fn new(context: NonNull<rdma_sys::ibv_context>, depth: i32) -> Option<Queue> {
        // SAFETY: the context is open; a queue without a channel.
        let cq =
            unsafe { rdma_sys::ibv_create_cq(context.as_ptr(), depth, ptr::null_mut(), ptr::null_mut(), 0) };
        NonNull::new(cq).map(Queue)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; nothing was made on it.
        match unsafe { rdma_sys::ibv_destroy_cq(self.0.as_ptr()) } {
            0 => {}
            errno => tracing::warn!(errno, "ibv_destroy_cq failed; it is leaked"),
        }
    }
}
