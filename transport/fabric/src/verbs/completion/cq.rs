//! Completion queues of a device.

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::{fmt, io};

use rdma_sys::ibv_wc_status;

use crate::verbs::completion::channel::CompChannel;
use crate::verbs::completion::dispatch::{Armed, BATCH, Completed, Queue, RECV};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::lib_probe::is_inherited;

/// The number of events that are acknowledged together, because each call takes a lock in
/// libibverbs.
const ACK_BATCH: u32 = 64;

/// A completion queue on a channel. Its owner must keep the channel longer than the queue.
pub(super) struct Cq {
    cq: NonNull<rdma_sys::ibv_cq>,
    /// Events taken and not yet acknowledged. Destroying the queue waits until all are
    /// acknowledged.
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
    /// Creates a queue for `depth` completions, whose events carry `key`.
    pub(super) fn new(
        device: &DeviceContext,
        channel: &CompChannel,
        key: usize,
        depth: u32,
    ) -> io::Result<Cq> {
        // SAFETY: context and channel are alive, and outlive the queue. Nobody uses the key as an
        // address.
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

    /// Notes that an event of the queue was taken from the channel.
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

/// Reads a work completion. If it has an error, only four of its fields are defined
/// (ibv_poll_cq(3)), and the others are not read. The length is read only for received messages.
///
/// # Safety
/// ibv_poll_cq has written the work completion.
unsafe fn read(wc: &MaybeUninit<rdma_sys::ibv_wc>) -> Completed {
    let wc = wc.as_ptr();
    // SAFETY: these four fields are always written.
    let (qp_num, wr_id, status, vendor_err) =
        unsafe { ((*wc).qp_num, (*wc).wr_id, (*wc).status, (*wc).vendor_err) };
    let succeeded = status == ibv_wc_status::IBV_WC_SUCCESS;
    let received = wr_id & RECV != 0;
    let byte_len = match succeeded && received {
        // SAFETY: a RECV that has succeeded has its length.
        true => unsafe { (*wc).byte_len },
        false => 0,
    };
    Completed { qp_num, wr_id, status, vendor_err, byte_len, is_message: !succeeded || received }
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
            each(&unsafe { read(wc) });
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
        if is_inherited() {
            return;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_is_read_of_received_messages_alone() {
        const GARBAGE: u32 = 0xdead_beef;
        let read = |wr_id: u64, status: u32| {
            let mut wc = MaybeUninit::<rdma_sys::ibv_wc>::uninit();
            let at = wc.as_mut_ptr();
            // SAFETY: the fields lie in `wc`. Only those are written that verbs defines for an
            // error, and the length.
            unsafe {
                (&raw mut (*at).wr_id).write(wr_id);
                (&raw mut (*at).status).write(status);
                (&raw mut (*at).vendor_err).write(7);
                (&raw mut (*at).qp_num).write(9);
                (&raw mut (*at).byte_len).write(GARBAGE);
                super::read(&wc)
            }
        };
        let ok = ibv_wc_status::IBV_WC_SUCCESS;
        // IBV_WC_REM_ACCESS_ERR of verbs.h.
        let refused = 10;
        for error in [ibv_wc_status::IBV_WC_WR_FLUSH_ERR, refused] {
            for wr_id in [RECV | 3, 3] {
                let completed = read(wr_id, error);
                assert_eq!((completed.byte_len, completed.is_message), (0, true));
                assert_eq!(
                    (completed.qp_num, completed.wr_id, completed.vendor_err),
                    (9, wr_id, 7)
                );
            }
        }
        assert_eq!(read(3, ok).byte_len, 0);
        assert_eq!(read(RECV | 3, ok).byte_len, GARBAGE);
    }
}
