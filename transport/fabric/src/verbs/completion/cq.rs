//! Completion queues of a device.

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::{fmt, io};

use rdma_sys::ibv_wc_status;

use crate::verbs::completion::channel::CompChannel;
use crate::verbs::completion::dispatch::{Armed, BATCH, Completed, Queue, RECV};
use crate::verbs::context::DeviceContext;

/// Events acknowledged at once: acknowledging takes a lock in libibverbs.
const ACK_BATCH: u32 = 64;

/// A completion queue on a channel. Its owner keeps the channel for longer.
pub(super) struct Cq {
    cq: NonNull<rdma_sys::ibv_cq>,
    /// Events taken and not acknowledged. Destroying the queue waits until all are.
    unacked: u32,
}

// SAFETY: libibverbs is thread-safe, and the queue is polled through &mut self only.
unsafe impl Send for Cq {}
// SAFETY: &Cq gives nothing but the pointer's value.
unsafe impl Sync for Cq {}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("unacked", &self.unacked).finish_non_exhaustive()
    }
}

impl Cq {
    /// A queue for `depth` completions, whose events carry `key`.
    pub(super) fn new(
        device: &DeviceContext,
        channel: &CompChannel,
        key: usize,
        depth: u32,
    ) -> io::Result<Cq> {
        // SAFETY: context and channel are alive, and outlive the queue. The key is not an address
        // for anybody.
        let cq = unsafe {
            rdma_sys::ibv_create_cq(
                device.context().as_ptr(),
                depth.min(i32::MAX as u32) as i32,
                ptr::without_provenance_mut(key),
                channel.as_ptr(),
                device.vectors.next(),
            )
        };
        let cq = NonNull::new(cq).ok_or_else(io::Error::last_os_error)?;
        Ok(Cq { cq, unacked: 0 })
    }

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::ibv_cq {
        self.cq.as_ptr()
    }

    /// An event of the queue was taken from the channel.
    pub(super) fn took_event(&mut self) {
        self.unacked += 1;
        if self.unacked >= ACK_BATCH {
            self.ack();
        }
    }

    fn ack(&mut self) {
        // SAFETY: `unacked` events of this queue were taken and not acknowledged.
        unsafe { rdma_sys::ibv_ack_cq_events(self.cq.as_ptr(), self.unacked) };
        self.unacked = 0;
    }
}

impl Queue for Cq {
    fn take(&mut self, mut each: impl FnMut(&Completed)) -> io::Result<usize> {
        let mut wcs = [const { MaybeUninit::<rdma_sys::ibv_wc>::uninit() }; BATCH];
        // SAFETY: the queue is alive, and there is room for BATCH completions.
        let n = unsafe {
            rdma_sys::ibv_poll_cq(self.cq.as_ptr(), BATCH as i32, wcs.as_mut_ptr().cast())
        };
        let n = usize::try_from(n).map_err(|_| io::Error::from_raw_os_error(n.saturating_abs()))?;
        for wc in wcs.iter().take(n) {
            // SAFETY: ibv_poll_cq has written the first n.
            let wc = unsafe { wc.assume_init_ref() };
            each(&Completed {
                qp_num: wc.qp_num,
                wr_id: wc.wr_id,
                status: wc.status,
                vendor_err: wc.vendor_err,
                byte_len: wc.byte_len,
                is_message: wc.status != ibv_wc_status::IBV_WC_SUCCESS || wc.wr_id & RECV != 0,
            });
        }
        Ok(n)
    }

    fn arm(&mut self, what: Armed) -> io::Result<()> {
        let solicited_only = i32::from(what == Armed::Solicited);
        // SAFETY: the queue is alive.
        match unsafe { rdma_sys::ibv_req_notify_cq(self.cq.as_ptr(), solicited_only) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if self.unacked > 0 {
            self.ack();
        }
        // SAFETY: its queue pairs are destroyed: each keeps the queue until then.
        match unsafe { rdma_sys::ibv_destroy_cq(self.cq.as_ptr()) } {
            0 => {}
            errno => {
                tonic_rdma_memory::throttled!(warn, errno, "ibv_destroy_cq failed; it is leaked")
            }
        }
    }
}
