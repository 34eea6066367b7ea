//! Buffers that are registered with an io_uring ring, so that the kernel pins their pages once
//! instead of for each read or write.
//!
//! Registration counts against RLIMIT_MEMLOCK, in addition to registration with an RDMA device: the
//! kernel counts the pages twice. So a buffer is registered only if the limit leaves room for the
//! buffer and for all memory that its pool may still pin. Other buffers are used unregistered.

use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::IoUring;

use crate::memlock::Memlock;
use crate::process::Process;

/// The maximum number of buffers that a ring registers at a time.
const MAX_FIXED: u32 = 256;

/// The registered buffers of a ring.
pub(crate) struct FixedBuffers {
    ring: Arc<IoUring>,
    /// The free indexes in the ring's table of buffers. The list is empty if the kernel has no
    /// sparse tables (before Linux 5.19).
    free: Mutex<Vec<u16>>,
}

/// A registered buffer. Dropping this value deregisters the buffer. The kernel unpins the pages of
/// the buffer when no work in flight uses them. Linux 6.1 may unpin them up to a second later.
pub(crate) struct Fixed {
    buffers: Arc<FixedBuffers>,
    number: u16,
    process: Process,
}

impl FixedBuffers {
    pub(super) fn new(ring: Arc<IoUring>) -> Self {
        let free = match ring.submitter().register_buffers_sparse(MAX_FIXED) {
            Ok(()) => (0..MAX_FIXED as u16).rev().collect(),
            Err(error) => {
                tracing::debug!(%error, "io_uring registers no buffers");
                Vec::new()
            }
        };
        FixedBuffers { ring, free: Mutex::new(free) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<u16>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers `len` bytes at `addr`, if RLIMIT_MEMLOCK leaves `reserved` bytes after that.
    ///
    /// # Safety
    /// The memory is mapped, and stays mapped as long as the returned value is alive.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        addr: NonNull<u8>,
        len: usize,
        reserved: u64,
    ) -> Option<Fixed> {
        // The lock is held until the buffer is registered, so that no two callers count on the same
        // room under the limit.
        let mut free = self.free();
        let number = *free.last()?;
        let left = Memlock::read().ok()?.available(false);
        if left.is_some_and(|left| left < reserved.saturating_add(len as u64)) {
            tracing::debug!(len, reserved, ?left, "RLIMIT_MEMLOCK has no room for the buffer");
            return None;
        }
        let buffer = libc::iovec { iov_base: addr.as_ptr().cast(), iov_len: len };
        // SAFETY: the memory is mapped while the buffer is registered, by the caller's contract
        // (R9), and no other buffer has the number.
        let registered = unsafe {
            self.ring.submitter().register_buffers_update(number.into(), &[buffer], None)
        };
        match registered {
            Ok(()) => {
                free.pop();
                let process = Process::current();
                Some(Fixed { buffers: self.clone(), number, process })
            }
            Err(error) => {
                tracing::debug!(len, %error, "io_uring does not register a buffer");
                None
            }
        }
    }
}

impl Fixed {
    /// The buffer's index, if the buffer is registered with the ring of `of`.
    pub(crate) fn number(&self, of: &Arc<FixedBuffers>) -> Option<u16> {
        Arc::ptr_eq(&self.buffers, of).then_some(self.number)
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        // An inherited ring belongs to the parent.
        if !self.process.is_current() {
            return;
        }
        let none = libc::iovec { iov_base: null_mut(), iov_len: 0 };
        let submitter = self.buffers.ring.submitter();
        // SAFETY: an empty buffer replaces this one, and the kernel accesses no memory through it.
        match unsafe { submitter.register_buffers_update(self.number.into(), &[none], None) } {
            Ok(()) => self.buffers.free().push(self.number),
            // The index is not used again, and the pages stay pinned until the ring is closed.
            Err(error) => crate::throttled!(warn, %error, "io_uring did not deregister a buffer"),
        }
    }
}

impl std::fmt::Debug for Fixed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fixed").field("number", &self.number).finish_non_exhaustive()
    }
}
