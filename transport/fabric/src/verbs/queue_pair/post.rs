//! Collects send work in batches, and hands each batch to the device as one chain.

use std::{fmt, io, ptr};

use rdma_sys::{ibv_send_flags, ibv_wr_opcode};

use crate::verbs::completion::dispatch::{PROBE, PROOF};
use crate::verbs::queue_pair::Qp;

/// The operation of a work request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    Send,
    Write {
        remote_addr: u64,
        rkey: u32,
    },
    /// A WRITE of no bytes. The peer checks no key for such a WRITE, and it completes when it is
    /// acknowledged.
    ProbeByWrite,
    /// A READ of no bytes (R24, the exception to R3).
    ProbeByRead,
}

/// One work request, which names its payload by address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendWorkRequest {
    pub(crate) wr_id: u64,
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
    pub(crate) operation: Operation,
}

/// Queued work. The arrays are reused, so that a batch costs no allocation.
#[derive(Default)]
pub(crate) struct Batch {
    sges: Vec<rdma_sys::ibv_sge>,
    wrs: Vec<rdma_sys::ibv_send_wr>,
}

// SAFETY: the pointers inside are set and used within `post` only.
unsafe impl Send for Batch {}
// SAFETY: as above; &Batch gives nothing but a length.
unsafe impl Sync for Batch {}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("len", &self.wrs.len()).finish()
    }
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.wrs.is_empty()
    }

    pub(crate) fn push(&mut self, request: SendWorkRequest, max_inline: u32) {
        let SendWorkRequest { wr_id, addr, len, lkey, operation } = request;
        // SAFETY: all zeros is valid for a request: null pointers, numbers, and unions of both.
        let mut wr: rdma_sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = wr_id;
        wr.num_sge = i32::from(len > 0);
        wr.opcode = match operation {
            Operation::Send => {
                // The flag also wakes a peer that waits only for messages.
                wr.send_flags |= ibv_send_flags::IBV_SEND_SOLICITED.0;
                ibv_wr_opcode::IBV_WR_SEND
            }
            Operation::Write { remote_addr, rkey } => {
                wr.wr.rdma = rdma_sys::ibv_send_wr_rdma { remote_addr, rkey };
                ibv_wr_opcode::IBV_WR_RDMA_WRITE
            }
            Operation::ProbeByWrite => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            Operation::ProbeByRead => {
                // An iWARP READ needs one scatter/gather element, even to read no bytes.
                wr.num_sge = 1;
                ibv_wr_opcode::IBV_WR_RDMA_READ
            }
        };
        let is_reported = matches!(wr_id, PROBE | PROOF);
        if is_reported {
            wr.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        } else if len <= max_inline {
            wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
        }
        self.wrs.push(wr);
        self.sges.push(rdma_sys::ibv_sge { addr, length: len, lkey });
    }

    /// Posts the batch with one doorbell, and clears it. `signalled` says which requests report
    /// their completion.
    ///
    /// # Safety
    /// The memory that the requests name must stay readable until they are complete or the queue
    /// pair is destroyed.
    pub(crate) unsafe fn post(
        &mut self,
        qp: &mut Qp,
        signalled: impl Fn(u64) -> bool,
    ) -> io::Result<()> {
        let count = self.wrs.len();
        let (sges, wrs) = (self.sges.as_mut_ptr(), self.wrs.as_mut_ptr());
        for i in 0..count {
            // SAFETY: both arrays have `count` entries, and do not move until the call below has
            // returned.
            unsafe {
                let wr = wrs.add(i);
                (*wr).sg_list = sges.add(i);
                (*wr).next = if i + 1 < count { wrs.add(i + 1) } else { ptr::null_mut() };
                if signalled((*wr).wr_id) {
                    (*wr).send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
                }
            }
        }
        let posted = match count {
            0 => Ok(()),
            // SAFETY: the chain was just made; the memory is the caller's promise.
            _ => unsafe { qp.post_send(wrs) },
        };
        self.wrs.clear();
        self.sges.clear();
        posted
    }
}
