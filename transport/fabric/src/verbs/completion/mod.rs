//! Completion queues, which the queue pairs of a device share (R6).
//!
//! | module | what |
//! |---|---|
//! | `dispatch` | the state of one queue under its lock: inboxes, sleepers, armed completions |
//! | `channel` | the descriptor that announces completions |
//! | `async_events` | the descriptor that announces failures of queues and of the device, and changes of its ports |
//! | `shard` | the queues of a device in one runtime, their channel, and the reactor |
//! | `member` | the share of one queue pair in a queue |
//!
//! # Who polls
//!
//! The holder of a queue's lock polls the queue for all queue pairs on it. The holder keeps its own
//! completions and puts the completions of other queue pairs into their inboxes. There are two
//! kinds of pollers: links, whose drivers poll when they run, and the reactor, a task that waits
//! for the channel. So a driver that polls gets its messages directly. A message for a driver that
//! sleeps first wakes the reactor, which then wakes the driver's task, usually on the same thread.
//!
//! **A sleeping member misses no completion as long as the queue is armed for the completions that
//! wake the member, or the reactor is looking.** No step relies on the polls of another member,
//! because that member may be slow or never run again. All steps happen under the lock, and wakers
//! run after the lock is released:
//!
//! | step | who | queue before | queue afterwards |
//! |---|---|---|---|
//! | a member polls: its inbox, or else the queue until it is empty | its driver | any | the same; members with completions are awake |
//! | a member is to sleep | its driver | armed for its completions, or looking | the same; the member sleeps |
//! | a member is to sleep | its driver | armed for fewer completions, or not armed | armed, then drained; the member sleeps if no completion came for it |
//! | a sleeping member posts work that it waits for | any | armed for messages | armed for all completions |
//! | an event comes | reactor | armed | not armed, drained, and then as the next three lines |
//! | nobody sleeps any more | reactor | not armed | not armed: the next member that goes to sleep arms the queue |
//! | somebody sleeps | reactor | not armed | armed, then drained |
//! | somebody sleeps, and a member polls without sleeping | reactor | not armed | looking: that member takes the completions, so the reactor needs no event for them |
//! | the reactor looks again | reactor | looking | drained; armed when nobody has polled since, and somebody sleeps |
//! | a queue pair is made | its maker | any | drained first: completions with its number belong to an earlier queue pair |
//! | a queue pair is destroyed | its owner | any | drained: its own completions are dropped |
//! | a completion whose number is unknown | any poller | any | dropped |
//! | the runtime ends | reactor | any | orphaned: members wake, and poll without sleeping |
//! | the queue fails, or the device reports its failure | any poller, reactor | any | failed: members wake, and end with the error |
//!
//! A shared queue with one member costs the same as a private queue: an event and one poll, and the
//! queue is armed when the member goes to sleep.
//!
//! # A queue is never overrun
//!
//! A queue pair reserves an entry for each request that it may have posted, because all its
//! requests complete when it fails. If no queue has room for these entries, another queue is
//! created with at least twice the size of the largest queue, up to the limits of the device and of
//! [`LinkConfig::max_cq_entries`](crate::LinkConfig::max_cq_entries). A destroyed queue pair gives
//! its entries back once its completions have left the queue. If a queue nevertheless overruns, the
//! device reports the overrun (IBV_EVENT_CQ_ERR), and the connections on the queue end with that
//! error.

mod async_events;
mod channel;
pub(super) mod dispatch;
pub(super) mod member;
mod shard;
#[cfg(test)]
mod tests;

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::{fmt, io};

use rdma_sys::ibv_wc_status;

use crate::verbs::completion::channel::CompChannel;
use crate::verbs::completion::dispatch::{Armed, BATCH, Completed, Queue, RECV};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;

/// The number of events that are acknowledged together, because each call takes a lock in
/// libibverbs.
const ACK_BATCH: u32 = 64;

/// A completion queue on a channel. Its owner must keep the channel longer than the queue.
struct Cq {
    cq: NonNull<rdma_sys::ibv_cq>,
    /// Events taken and not yet acknowledged. Destroying the queue waits until all events are
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
    fn new(
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

    fn as_ptr(&self) -> *mut rdma_sys::ibv_cq {
        self.cq.as_ptr()
    }

    /// Notes that an event of the queue was taken from the channel.
    fn took_event(&mut self) {
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
