//! The connected queue pair: the work that a driver posts, the completions that it gets, and their
//! limits.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma_memory::{LendableBytes, PinnedBuf, PinnedBytes, Pool};

pub use crate::addr::PeerInfo;
use crate::error::LinkError;
use crate::timer::Timer;

/// Maximum bytes of private data in a connect request, an accept or a reject.
///
/// InfiniBand has 92 bytes, and rdma_cm's IP addressing header takes 36 of these bytes. iWARP
/// allows more.
pub const MAX_PRIVATE_DATA: usize = 56;

/// The capabilities of a link, which never change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caps {
    /// Payloads up to this many bytes travel inside the work request: 512 at most on Soft-RoCE, 80
    /// on Soft-iWARP. The value is for information only, because the link itself decides which
    /// payloads are inline.
    pub max_inline: usize,
    /// Work requests that may be in flight at once.
    pub send_queue: usize,
    /// RECVs that are posted from the start.
    pub recv_queue: usize,
    /// Longest single message, in bytes, that the device carries. SENDs are limited further by the
    /// peer's slot size.
    pub max_msg: usize,
    /// Maximum bytes of this end's landing memory that the peer accepts at a time.
    pub max_landing: usize,
    /// Whether the source of a WRITE may be any memory ([`WriteSource::Any`]). Such memory need not
    /// be registered or staged, because the link copies while the work is queued.
    pub any_memory: bool,
    /// Whether [`Link::poll`] always reports that the peer's process has ended, even if nothing is
    /// sent. Such a link needs no [probes](Link::probe).
    pub tells_end: bool,
    /// The maximum time for which a [probe](Link::probe) may stay unanswered. A device that detects
    /// missing acknowledgements ends the link earlier, so for such a device this limit matters only
    /// if the device itself has failed.
    pub probe_limit: Duration,
}

/// The maximum time for which a probe may stay unanswered if nothing else detects the loss.
#[cfg(any(
    feature = "test-util",
    all(target_os = "linux", any(feature = "shm", feature = "verbs"))
))]
pub(crate) const PROBE_LIMIT: Duration = Duration::from_millis(3750);

/// The source of a WRITE. The link keeps the source alive until the work is done or the queue pair
/// is destroyed, even if the caller is dropped (R10).
#[derive(Debug)]
pub enum WriteSource {
    /// Frozen pool memory.
    Bytes(PinnedBytes),
    /// The filled part of a pool buffer.
    Buf(PinnedBuf),
    /// Any memory. Allowed only with [`Caps::any_memory`].
    Any(Bytes),
    /// `len` bytes at `offset` of [`Link::block_mut`].
    Staged {
        /// The offset in bytes from the start of the block.
        offset: usize,
        /// The number of bytes.
        len: usize,
    },
}

impl WriteSource {
    /// Number of bytes to be written.
    pub fn len(&self) -> usize {
        match self {
            WriteSource::Bytes(b) => b.len(),
            WriteSource::Buf(b) => b.len(),
            WriteSource::Any(b) => b.len(),
            WriteSource::Staged { len, .. } => *len,
        }
    }

    /// Whether there are no bytes to write.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One work request.
#[derive(Debug)]
pub enum Work {
    /// SEND of `len` bytes at `offset` of [`Link::block_mut`]. The message takes one of the peer's
    /// RECVs, so the caller must hold a credit (R2).
    Send {
        /// The offset in bytes from the start of the block.
        offset: usize,
        /// Number of bytes, at most the peer's slot size.
        len: usize,
    },
    /// RDMA WRITE into memory that the peer granted. The peer does not notice the WRITE until a
    /// later SEND tells the peer about it (R3, R4).
    Write {
        /// The bytes to write, at most [`Caps::max_msg`] bytes.
        src: WriteSource,
        /// The address of the memory that the peer granted.
        remote_addr: u64,
        /// The peer's key for that memory.
        rkey: u32,
    },
}

/// Identifies lent bytes and their lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lent {
    /// The number of the lease, unique among the lending end's leases.
    pub lease: u32,
    /// The key of the memory.
    pub key: u32,
    /// The address of the first byte, valid with that key.
    pub addr: u64,
}

/// The state of a work request when [`Link::queue`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Posted {
    /// The memory of the request may be used again at once, and no [`Completion::Sent`] reports the
    /// request.
    Done,
    /// The request keeps its memory until a [`Completion::Sent`] covers the request.
    InFlight,
}

/// Whether a peer can WRITE to an application buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// The peer can WRITE to the buffer once the peer is told the key.
    Yes,
    /// The peer was asked to map the buffer. A later poll receives the answer.
    Asked,
    /// The peer cannot WRITE to the buffer.
    No,
}

/// A report of [`Link::poll`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// The work with this id is done, and also all work that was queued earlier. The memory of that
    /// work may be used again.
    Sent {
        /// The id given to [`Link::queue`].
        id: u64,
    },
    /// A message of `len` bytes lies in RECV slot `slot`, until [`Link::repost`].
    Received {
        /// The number of the slot, less than
        /// [`LinkConfig::max_recvs`](crate::LinkConfig::max_recvs).
        slot: u32,
        /// Number of bytes, at most the size of the slot.
        len: u32,
    },
    /// This end cannot map landing memory that the peer has given, for example because this process
    /// has no descriptor left. So this end cannot write to that memory. The report comes before the
    /// message that first names the key.
    NotMapped {
        /// The peer's key.
        rkey: u32,
    },
    /// The peer has taken back memory that was [not mapped](Completion::NotMapped).
    Forgotten {
        /// The peer's key.
        rkey: u32,
    },
    /// The peer's device has answered a [probe](Link::probe).
    Answered,
}

/// A connected, reliable queue pair.
///
/// Dropping the link destroys the queue pair first, and only then frees the memory of work in
/// flight (R9, R10). The drop neither blocks on the network nor panics. A link has one owner, and
/// one task polls it at a time.
pub trait Link: Send + 'static {
    /// The limits that the device granted.
    fn caps(&self) -> &Caps;

    /// Both ends, for log lines and error messages.
    fn peer(&self) -> &PeerInfo;

    /// Number of free places in the send queue. 0 is back-pressure, not an error: completions free
    /// further places (R5). Work that waits for [`ring_doorbell`](Link::ring_doorbell) counts as in
    /// flight.
    fn send_room(&self) -> usize;

    /// The part of the control block that holds SEND slots and staging memory. Until
    /// [`grow_sends`](Link::grow_sends) replaces the SEND slots, the length of this part is
    /// [`LinkConfig::block_bytes`](crate::LinkConfig::block_bytes). The [crate
    /// docs](crate#the-control-block) say who may write where, and when.
    fn block_mut(&mut self) -> &mut [u8];

    /// Queues one work request. The device and the peer see nothing of the request before
    /// [`ring_doorbell`](Link::ring_doorbell), except that a WRITE may land earlier.
    ///
    /// [`Completion::Sent`] reports `id`. Ids need not be unique or ordered, because the link keeps
    /// the order itself.
    ///
    /// With `signal`, the completion of this request is reported. Otherwise the link chooses which
    /// completions it reports, so that
    /// - one of every n consecutive requests is reported, where n is `min(send_queue / 4,
    ///   send_slots / 2, 16)` rounded down to a power of two,
    /// - the last request of a batch is reported if the batch, or unreported work before it, holds
    ///   memory outside the SEND slots (pool memory or staging). So an idle connection keeps no
    ///   payload.
    ///
    /// So only the completions of a few SEND slots can stay unreported for long, and at most those
    /// of half of the slots.
    ///
    /// A link that copies the bytes while work is queued returns [`Posted::Done`] instead, and
    /// reports no completion.
    ///
    /// A reported completion need not wake the link. Completions wake nobody, and are reported with
    /// the next message, as long as no payload, no [probe](Link::probe) and no work queued with
    /// `signal` is in flight, and at most half of the SEND slots and of the send queue are in use.
    /// So a small call costs no wake-up for its own SEND. Pass `signal` for work whose completion
    /// the caller waits for.
    ///
    /// # Errors
    /// [`LinkError::Misuse`] if there is no [room](Link::send_room), a range lies outside the
    /// block, or the link does not take [`WriteSource::Any`]. These errors are bugs in the caller.
    /// Nothing was queued, and the link is still usable. After any other error the link is dead.
    fn queue(&mut self, id: u64, work: Work, signal: bool) -> Result<Posted, LinkError>;

    /// Gives only this link's peer access to the landing memory behind a remote key (R12). Call
    /// this function before the SEND that first tells the peer the key: once the peer has received
    /// that SEND, it can WRITE to the memory. The call costs next to nothing if the peer already
    /// has access, and does nothing if the device checks keys itself. Returns [`Shared::No`] if the
    /// peer has reported that it cannot map that memory.
    ///
    /// # Errors
    /// [`LinkError::Misuse`] for a key that this device does not have. After any other error the
    /// link is dead.
    fn share(&mut self, rkey: u32) -> Result<Shared, LinkError>;

    /// Gives this link's peer access to the application buffer behind a remote key. Call this
    /// function before the SEND that first tells the peer the key, and again after later polls as
    /// long as the result is [`Shared::Asked`]. The peers of other links may also have access.
    ///
    /// # Errors
    /// The errors of [`share`](Link::share).
    fn share_named(&mut self, rkey: u32) -> Result<Shared, LinkError> {
        let _ = rkey;
        Ok(Shared::Yes)
    }

    /// Whether [`lend`](Link::lend) can ever return a lease.
    fn may_lend(&self) -> bool {
        false
    }

    /// Lends bytes to the peer. Once a SEND has told the peer about the lease, the peer reads the
    /// bytes in place. The bytes do not change until [`end_lease`](Link::end_lease) or, if the link
    /// is dropped before that, until the peer no longer reads memory that this link has lent.
    /// Returns `None` if these bytes cannot be lent, or if they cannot be lent yet because the peer
    /// [is mapping](Link::is_mapping) their memory.
    ///
    /// # Errors
    /// The link is dead.
    fn lend(&mut self, bytes: LendableBytes) -> Result<Option<Lent>, LinkError> {
        drop(bytes);
        Ok(None)
    }

    /// Whether the peer has been asked to map the memory with this key and has not answered.
    /// [`lend`](Link::lend) does not lend this memory yet, but may do so after a later poll.
    fn is_mapping(&self, key: u32) -> bool {
        let _ = key;
        false
    }

    /// Ends a lease that the peer has returned, or that the peer was never told about.
    fn end_lease(&mut self, lease: u32) {
        let _ = lease;
    }

    /// Returns bytes that the peer has lent, according to a received message. **The peer may write
    /// to these bytes**, so treat them like landed bytes. The lease can be returned once the last
    /// part of the bytes has been dropped: see [`take_returned`](Link::take_returned).
    ///
    /// # Errors
    /// [`LinkError::Breach`] if the peer has lent no such memory. The link is still usable.
    fn borrow(&mut self, lent: Lent, len: u32) -> Result<Bytes, LinkError> {
        let (what, peer) = (format!("{len} bytes are lent: {lent:?}"), self.peer().clone());
        Err(LinkError::Breach { what, peer: Box::new(peer) })
    }

    /// Moves the peer's leases whose bytes are no longer read to `out`. `waker` is woken when the
    /// bytes of a further lease are no longer read.
    fn take_returned(&mut self, waker: &Waker, out: &mut Vec<u32>) {
        let _ = (waker, out);
    }

    /// Hands all queued work to the device in one batch. Does nothing if no work is queued.
    ///
    /// # Errors
    /// The device refused work; the link is dead.
    fn ring_doorbell(&mut self) -> Result<(), LinkError>;

    /// Asks the peer's device, not its process, whether the peer's end of the link still exists.
    /// [`Completion::Answered`] reports the answer (R24). A probe is work of length zero that needs
    /// no memory and no credit: a WRITE, which completes when it is acknowledged, or a READ over
    /// iWARP, where a WRITE completes without an acknowledgement. Does nothing while an earlier
    /// probe is in flight or the send queue is full, or if [`Caps::tells_end`] is true. Over iWARP,
    /// the first probe of a silence also does nothing. Returns whether the device was asked.
    ///
    /// # Errors
    /// The device refused work; the link is dead.
    fn probe(&mut self) -> Result<bool, LinkError> {
        Ok(false)
    }

    /// Whether an answer may come so soon that polling for it is cheaper than waiting for a
    /// wake-up. If so, [`poll`](Link::poll) the link now, whether or not its waker fired.
    fn is_eager(&self) -> bool {
        false
    }

    /// Continues the wait that the last message ended. Call this function if everything that
    /// [`poll`](Link::poll) has just reported concerns only the transport, so that no task answers
    /// it.
    fn wait_goes_on(&mut self) {}

    /// Whether dropping the link may block for milliseconds, because an adapter destroys a queue
    /// pair.
    fn blocks_on_drop(&self) -> bool {
        false
    }

    /// Whether the peer is known to run on this thread's processor. The peer then handles messages
    /// only when this thread goes idle.
    fn shares_processor(&self) -> bool {
        false
    }

    /// Whether a message has arrived that [`poll`](Link::poll) has not reported yet. The result is
    /// always false if the check would be expensive. Callers interrupt long copies when a message
    /// has arrived.
    fn has_pending_recv(&self) -> bool {
        false
    }

    /// Creates a timer on this link's clock, which is tokio's for the simulated fabric, and
    /// otherwise the kernel's.
    fn timer(&self) -> Timer {
        Timer::new()
    }

    /// Drains connection events and completions into `out` (R6).
    ///
    /// `Ready(Ok(()))` means that completions were pushed into `out`, at most 256 per call: handle
    /// them and call again. `Pending` means that nothing was pushed, events and completions are
    /// drained, the queue is armed and the waker registered. [`queue`](Link::queue) says which
    /// completions wake the task. `Ready(Err(_))` means that the link is dead. Completions that
    /// came before the error are in `out`, and every later call returns the same error.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut Vec<Completion>,
    ) -> Poll<Result<(), LinkError>>;

    /// The received bytes of a slot, between its [`Completion::Received`] and
    /// [`repost`](Link::repost). The slice is empty for a posted slot, and no longer than the
    /// received message.
    fn recv_slot(&self, slot: u32, len: u32) -> &[u8];

    /// Gives a slot back to the device. Call this function before the peer gets the credit for the
    /// slot (R1). Returns false if the slot is not posted again. The peer then gets no credit. This
    /// happens to an extra slot that [`shrink`](Link::shrink) removes, and to a short slot that is
    /// left out while extra slots are posted.
    ///
    /// # Errors
    /// [`LinkError::Misuse`] for a slot that is posted already. After any other error the link is
    /// dead.
    fn repost(&mut self, slot: u32) -> Result<bool, LinkError>;

    /// Posts the [extra RECVs](crate::LinkConfig::recv_extra) for which the pool can
    /// [spare](Pool::spare) memory, and returns the number of newly posted RECVs. The peer may get
    /// that many more credits. Returns 0 if all extra RECVs are posted, if there is no memory, or
    /// if the link posts all its RECVs at the start, as over shared memory.
    ///
    /// # Errors
    /// The device refused work; the link is dead.
    fn grow(&mut self, pool: &Pool) -> Result<u32, LinkError>;

    /// Returns the memory that only a busy connection needs. An extra RECV is removed when the next
    /// message in it has been read and [`repost`](Link::repost) is called, because a posted RECV
    /// cannot be taken back. The memory of the extra RECVs returns to the pool once the last of
    /// them is removed. Short RECVs that were left out are posted again. Returns the number of
    /// these short RECVs. The peer may get that many more credits. Over shared memory, the link
    /// releases the pages of the ring that it sends through, if the ring holds no message.
    ///
    /// # Errors
    /// The device refused work; the link is dead.
    fn shrink(&mut self) -> Result<u32, LinkError>;

    /// Leases the [SEND slots of a busy connection](crate::LinkConfig::busy_send_slots), if the
    /// pool can [spare](Pool::spare) the memory, and uses them instead of the slots in the block.
    /// Returns the number of SEND slots if it has changed. The block is then in other memory,
    /// without its old contents. Work in flight keeps the memory with which it was queued. Does
    /// nothing if the pool has no memory to spare.
    fn grow_sends(&mut self, _pool: &Pool) -> Option<u32> {
        None
    }

    /// Returns the memory of [`grow_sends`](Link::grow_sends) to the pool. Returns the number of
    /// SEND slots if it has changed. Does nothing while work is in flight.
    fn shrink_sends(&mut self) -> Option<u32> {
        None
    }

    /// Starts an orderly end: the peer sees a disconnect, work in flight is flushed, and
    /// [`poll`](Link::poll) ends with [`LinkError::Closed`]. If the last SEND must arrive, wait for
    /// its [`Completion::Sent`] first. A second call does nothing.
    fn disconnect(&mut self);
}
