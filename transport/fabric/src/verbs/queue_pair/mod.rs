//! Queue pairs, made on an id with a share of a completion queue, and batches of work for them.

pub(super) mod path_mtu;
pub(super) mod post;

use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::{fmt, io};

use rdma_sys::{ibv_access_flags, ibv_qp_attr_mask, ibv_qp_state, ibv_qp_type};
use tonic_rdma_memory::Memlock;

use crate::error::{FabricError, Verb};
use crate::link_config::LinkConfig;
use crate::verbs::cm::CmId;
use crate::verbs::completion::member::{CqMember, Reservation};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::attributes::port_mtu;
use crate::verbs::discovery::is_inherited;
use crate::verbs::queue_pair::path_mtu::{MtuLimit, PathMtu};

/// The RNR timer code for 0.96 ms. Code 12 is 0.64 ms, 14 is 1.28 ms, and 0 is 655 ms.
const RNR_TIMER_1_MS: u8 = 13;

/// The number of work requests in the send queue if memory is short.
const SHORT_SEND_QUEUE: u32 = 8;

/// The sizes to request for a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QpCapacity {
    pub(crate) send: u32,
    pub(crate) recv: u32,
    pub(crate) inline: u32,
    /// Maximum number of entries of a completion queue that is made for the queue pair.
    pub(crate) max_cq_entries: u32,
}

impl QpCapacity {
    /// Maximum number of completions that the queue pair has in the completion queue at a time.
    /// When the queue pair fails, each posted request completes.
    pub(crate) fn completions(&self) -> u32 {
        self.send.saturating_add(self.recv)
    }

    /// The sizes to request if memory for `self` is short. The number of RECVs stays, because the
    /// peer may rely on these RECVs.
    fn shorter(self) -> QpCapacity {
        QpCapacity { send: self.send.min(SHORT_SEND_QUEUE), inline: 0, ..self }
    }

    fn attr(&self, cq: *mut rdma_sys::ibv_cq, inline: u32) -> rdma_sys::ibv_qp_init_attr {
        rdma_sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: ptr::null_mut(),
            cap: rdma_sys::ibv_qp_cap {
                max_send_wr: self.send,
                max_recv_wr: self.recv,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        }
    }
}

/// The greatest number below `refused` that `takes` accepts, or 0 if `takes` accepts no number. If
/// `takes` accepts a number, it must also accept all smaller numbers.
fn greatest(refused: u32, mut takes: impl FnMut(u32) -> bool) -> u32 {
    let (mut accepted, mut refused) = (0, refused);
    while refused - accepted > 1 {
        let half = accepted + (refused - accepted) / 2;
        if takes(half) { accepted = half } else { refused = half }
    }
    accepted
}

/// Creates a queue pair and destroys it again, because a listed device may still refuse to create a
/// queue pair.
pub(crate) fn check_queue_pair(device: &Arc<DeviceContext>) -> Result<(), FabricError> {
    let least = QpCapacity { send: 1, recv: 1, inline: 0, max_cq_entries: 2 };
    with_queue_pair(device, &least, || ())
}

/// Returns the number of bytes that a queue pair of an ordinary connection pins, with its share of
/// a completion queue. The function creates such a queue pair three times and returns the middle
/// result, which is least affected by memory that other threads pin at the same time.
pub(crate) fn queue_bytes(device: &Arc<DeviceContext>) -> usize {
    let (config, limits) = (LinkConfig::default(), device.limits);
    let capacity = QpCapacity {
        send: config.send_queue.min(limits.max_qp_wr),
        recv: config.max_recvs().min(limits.max_qp_wr),
        inline: config.inline.min(device.inline_limit.load(Relaxed)),
        max_cq_entries: limits.max_cqe,
    };
    let pinned = || Memlock::read().map_or(0, |memlock| memlock.pinned);
    let with = |inline| with_queue_pair(device, &QpCapacity { inline, ..capacity }, pinned);
    let mut measured = [0; 3].map(|_: u64| {
        let before = pinned();
        // Some devices do not take as many inline bytes as requested.
        let with = with(capacity.inline).or_else(|_| with(0));
        with.map_or(0, |with| with.saturating_sub(before))
    });
    measured.sort_unstable();
    usize::try_from(measured[1]).unwrap_or(usize::MAX)
}

/// Calls `f` while an unused queue pair exists.
fn with_queue_pair<T>(
    device: &Arc<DeviceContext>,
    capacity: &QpCapacity,
    f: impl FnOnce() -> T,
) -> Result<T, FabricError> {
    let refused = |call, source: io::Error| FabricError::QueuePairRefused {
        device: device.name.clone(),
        verb: Verb::Call(call),
        source: source.into(),
    };
    let entries = capacity.completions().min(capacity.max_cq_entries) as i32;
    let context = device.context().as_ptr();
    // SAFETY: the context is open; a queue without a channel.
    let cq =
        unsafe { rdma_sys::ibv_create_cq(context, entries, ptr::null_mut(), ptr::null_mut(), 0) };
    if cq.is_null() {
        return Err(refused("ibv_create_cq", io::Error::last_os_error()));
    }
    let mut attr = capacity.attr(cq, capacity.inline);
    // SAFETY: domain and queue are alive.
    let qp = unsafe { rdma_sys::ibv_create_qp(device.pd(), &mut attr) };
    let made = match qp.is_null() {
        true => Err(refused("ibv_create_qp", io::Error::last_os_error())),
        false => Ok(f()),
    };
    // SAFETY: each was made above, is destroyed once, and the queue pair first.
    unsafe {
        if !qp.is_null() {
            rdma_sys::ibv_destroy_qp(qp);
        }
        rdma_sys::ibv_destroy_cq(cq);
    }
    made
}

/// A queue pair with its id and its share of a completion queue.
pub(crate) struct Qp {
    qp: NonNull<rdma_sys::ibv_qp>,
    destroyed: bool,
    /// The member is dropped after the queue pair is destroyed. If the queue pair cannot be
    /// destroyed, it may still complete work, and the member is never dropped.
    pub(crate) cq: ManuallyDrop<CqMember>,
    pub(crate) id: CmId,
    /// The longest payload that may be inline.
    pub(crate) max_inline: u32,
    /// Maximum number of work requests in flight.
    pub(crate) send: u32,
    pub(crate) device: Arc<DeviceContext>,
    /// True if this process brings the queue pair up, and the library does not know the queue pair.
    pub(crate) is_own: bool,
}

// SAFETY: libibverbs is thread-safe; a queue pair has one owner, who posts through &mut self.
unsafe impl Send for Qp {}
// SAFETY: methods of &self only call into thread-safe libraries.
unsafe impl Sync for Qp {}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp")
            .field("device", &self.device.name)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Whether this process, rather than librdmacm, brings up the queue pairs of the device. librdmacm
/// would bring them up on the thread that reads events. Over iWARP the kernel brings a queue pair
/// up when it establishes the connection.
fn is_own(device: &DeviceContext) -> bool {
    !device.is_iwarp() && rdma_sys::has::rdma_establish() && rdma_sys::has::rdma_init_qp_attr()
}

/// Makes the queue pair of an id that is bound to the device, ready to take RECVs. Also returns the
/// longest payload that may be inline.
fn create(
    device: &DeviceContext,
    id: &CmId,
    capacity: &QpCapacity,
    cq: *mut rdma_sys::ibv_cq,
    inline: u32,
) -> io::Result<(NonNull<rdma_sys::ibv_qp>, u32)> {
    let mut attr = capacity.attr(cq, inline);
    let qp = if is_own(device) {
        // SAFETY: domain and queue are alive.
        let qp = NonNull::new(unsafe { rdma_sys::ibv_create_qp(device.pd(), &mut attr) });
        let qp = qp.ok_or_else(io::Error::last_os_error)?;
        if let Err(error) = modify(qp, id, ibv_qp_state::IBV_QPS_INIT, |_| {}) {
            // SAFETY: made above, destroyed once, and not used elsewhere.
            unsafe { rdma_sys::ibv_destroy_qp(qp.as_ptr()) };
            return Err(error);
        }
        qp
    } else {
        // SAFETY: id, domain and queue are alive; the id is bound to the domain's device.
        if unsafe { rdma_sys::rdma_create_qp(id.as_ptr(), device.pd(), &mut attr) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has set the id's queue pair.
        let qp = NonNull::new(unsafe { (*id.as_ptr()).qp });
        qp.ok_or_else(|| io::Error::other("no queue pair was made"))?
    };
    // Devices report the lengths that they granted. A grant beyond the requested length is not
    // used, because it may depend on the other sizes.
    Ok((qp, inline.min(attr.cap.max_inline_data)))
}

/// Moves a queue pair to `state`. rdma_cm gives the attributes for `id`, and `change` edits them.
fn modify(
    qp: NonNull<rdma_sys::ibv_qp>,
    id: &CmId,
    state: ibv_qp_state::Type,
    change: impl FnOnce(&mut rdma_sys::ibv_qp_attr),
) -> io::Result<()> {
    let (mut attr, mask) = id.attributes(state)?;
    let has = |what: ibv_qp_attr_mask| mask & what.0 as i32 != 0;
    if has(ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS) {
        // The kernel would also allow the peer to READ, which this transport forbids (R3).
        attr.qp_access_flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
    }
    if has(ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER) {
        attr.min_rnr_timer = RNR_TIMER_1_MS;
    }
    change(&mut attr);
    // SAFETY: the queue pair is alive.
    match unsafe { rdma_sys::ibv_modify_qp(qp.as_ptr(), &mut attr, mask) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
    }
}

/// The inline length to request after the device refused `wanted`. No attribute of a device gives
/// the maximum length of inline data: Soft-iWARP takes 80 bytes, and some other devices take 96 or
/// 101. So the length is found by trial, once for each device.
fn inline_instead(
    device: &DeviceContext,
    capacity: &QpCapacity,
    cq: *mut rdma_sys::ibv_cq,
    wanted: u32,
) -> u32 {
    greatest(wanted, |inline| {
        let mut attr = capacity.attr(cq, inline);
        // SAFETY: domain and queue are alive. The queue pair is destroyed once, and not used
        // elsewhere.
        unsafe {
            let qp = rdma_sys::ibv_create_qp(device.pd(), &mut attr);
            !qp.is_null() && rdma_sys::ibv_destroy_qp(qp) == 0
        }
    })
}

/// Whether memory was short. If so, the length of inline data was not the reason for the refusal.
fn is_short_of_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

impl Qp {
    /// Makes a queue pair on an id that is bound to the device.
    ///
    /// # Errors
    /// The device refuses. The id is returned.
    pub(crate) fn new(
        device: &Arc<DeviceContext>,
        id: CmId,
        capacity: QpCapacity,
    ) -> Result<Qp, (CmId, FabricError)> {
        let refused = |call, source: io::Error| FabricError::QueuePairRefused {
            device: device.name.clone(),
            verb: Verb::Call(call),
            source: source.into(),
        };
        let entries = capacity.completions();
        let cq = match Reservation::new(device, entries, capacity.max_cq_entries) {
            Ok(cq) => cq,
            Err(error) => return Err((id, refused("ibv_create_cq", error))),
        };
        let mut capacity = capacity;
        let wanted = capacity.inline.min(device.inline_limit.load(Relaxed));
        let made = match create(device, &id, &capacity, cq.cq(), wanted) {
            Err(error) if is_short_of_memory(&error) => {
                capacity = capacity.shorter();
                let send = capacity.send;
                tracing::debug!(device = device.name, %error, send, "a shorter send queue is tried");
                create(device, &id, &capacity, cq.cq(), capacity.inline)
            }
            Err(_) if wanted > 0 => {
                let inline = inline_instead(device, &capacity, cq.cq(), wanted);
                let made = create(device, &id, &capacity, cq.cq(), inline);
                if made.is_ok() {
                    tracing::debug!(device = device.name, inline, "longest inline payload");
                    device.inline_limit.store(inline, Relaxed);
                }
                made
            }
            made => made,
        };
        let (qp, max_inline) = match made {
            Ok(made) => made,
            Err(error) => return Err((id, refused("rdma_create_qp", error))),
        };
        // SAFETY: the queue pair was made just now.
        let cq = match cq.join(unsafe { qp.as_ref().qp_num }) {
            Ok(member) => member,
            Err((reservation, error)) => {
                id.forget_queue_pair();
                // SAFETY: made above, destroyed once, and not used elsewhere.
                unsafe { rdma_sys::ibv_destroy_qp(qp.as_ptr()) };
                drop(reservation);
                return Err((id, refused("ibv_poll_cq", error)));
            }
        };
        Ok(Qp {
            qp,
            destroyed: false,
            cq: ManuallyDrop::new(cq),
            id,
            max_inline,
            send: capacity.send,
            device: device.clone(),
            is_own: is_own(device),
        })
    }

    /// The queue pair's number for a connect request or its answer, or 0 if the library knows the
    /// queue pair.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive, and its number does not change.
        if self.is_own { unsafe { self.qp.as_ref().qp_num } } else { 0 }
    }

    /// Makes the queue pair ready to receive and send, once the peer's queue pair is known. Call
    /// this function before the answer on the accepting side, and after the answer on the
    /// connecting side. If the library knows the queue pair, the library makes the queue pair ready
    /// itself. The call blocks.
    ///
    /// Returns the path MTU that the queue pair now uses, or `None` if the library chooses the MTU.
    /// The accepting side names this path MTU in its answer.
    ///
    /// # Errors
    /// The device refuses.
    pub(crate) fn bring_up(&self, limit: MtuLimit) -> io::Result<Option<PathMtu>> {
        if !self.is_own {
            return Ok(None);
        }
        let mut used = None;
        // The partition key is known only once the route is known.
        modify(self.qp, &self.id, ibv_qp_state::IBV_QPS_INIT, |_| {})?;
        modify(self.qp, &self.id, ibv_qp_state::IBV_QPS_RTR, |attr| {
            let limit = match limit {
                // SAFETY: the device keeps its context open.
                MtuLimit::OfPort => unsafe {
                    port_mtu(self.device.context(), attr.ah_attr.port_num)
                },
                MtuLimit::Named(mtu) => mtu,
            };
            let requested = PathMtu::new(attr.path_mtu);
            used = limit.into_iter().chain(requested).min();
            attr.path_mtu = used.map_or(attr.path_mtu, PathMtu::code);
        })?;
        modify(self.qp, &self.id, ibv_qp_state::IBV_QPS_RTS, |_| {})?;
        Ok(used)
    }

    /// Sets the time after which a sender that found no RECV tries again, if the library has
    /// brought the queue pair up. The retries are a safety net below flow control (R2). iWARP has
    /// no such timer.
    pub(crate) fn set_rnr_timer(&self) {
        if self.is_own || self.device.is_iwarp() {
            return;
        }
        // SAFETY: all zeros is valid for the attributes. Only the attribute that the mask names is
        // read.
        let mut attr: rdma_sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.min_rnr_timer = RNR_TIMER_1_MS;
        let mask = ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0 as i32;
        // SAFETY: the queue pair is alive.
        let errno = unsafe { rdma_sys::ibv_modify_qp(self.qp.as_ptr(), &mut attr, mask) };
        if errno != 0 {
            tracing::debug!(device = self.device.name, errno, "the RNR timer cannot be set");
        }
    }

    /// Posts a chain of send work. After a failure, the caller does not know which requests were
    /// taken.
    ///
    /// # Safety
    /// The chain must be well formed, and the memory that it names must stay readable until the
    /// work is complete or the queue pair is destroyed.
    pub(crate) unsafe fn post_send(&mut self, first: *mut rdma_sys::ibv_send_wr) -> io::Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive; the rest is the caller's promise.
        posted(unsafe { rdma_sys::ibv_post_send(self.qp.as_ptr(), first, &mut bad) })
    }

    /// Posts one RECV.
    ///
    /// # Safety
    /// The memory must stay writable, and must not be read, until the RECV is complete or the queue
    /// pair is destroyed.
    pub(crate) unsafe fn post_recv(
        &mut self,
        wr_id: u64,
        mut sge: rdma_sys::ibv_sge,
    ) -> io::Result<()> {
        let mut wr = rdma_sys::ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is alive; the rest is the caller's promise. The call copies the
        // request itself.
        posted(unsafe { rdma_sys::ibv_post_recv(self.qp.as_ptr(), &mut wr, &mut bad) })
    }

    /// Destroys the queue pair, and takes its completions out of the queue. Returns true if the
    /// device no longer accesses posted memory.
    pub(crate) fn destroy(&mut self) -> bool {
        if self.destroyed {
            return true;
        }
        self.id.forget_queue_pair();
        // SAFETY: the queue pair is alive, and is not used again once it is destroyed. The library
        // cannot use it either, because the id has forgotten it.
        match unsafe { rdma_sys::ibv_destroy_qp(self.qp.as_ptr()) } {
            0 => {
                self.destroyed = true;
                self.cq.leave();
            }
            errno => tonic_rdma_memory::throttled!(
                error,
                device = self.device.name,
                errno,
                "ibv_destroy_qp failed"
            ),
        }
        self.destroyed
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        if self.destroy() {
            // SAFETY: dropped once, here, and not used again. The queue pair was destroyed before
            // its queue (R9).
            unsafe { ManuallyDrop::drop(&mut self.cq) }
        } else {
            self.cq.leave();
        }
    }
}

/// Turns the result of a post into a `Result`. libibverbs returns 0 or an errno. Soft-iWARP's
/// provider returns a negative errno, or -1 and sets errno.
fn posted(ret: i32) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        -1 => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(0) => {
                Err(io::Error::from_raw_os_error(libc::EPERM))
            }
            error => Err(error),
        },
        errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_asked_for_what_it_takes() {
        for limit in [0, 1, 63, 64, 96, 101, 128, 255] {
            let mut asked = 0;
            let takes = |inline| {
                asked += 1;
                inline <= limit
            };
            assert_eq!(greatest(256, takes), limit);
            assert!(asked <= 8, "{asked} times");
        }
        assert_eq!(greatest(1, |_| unreachable!("0 is left")), 0);
    }

    #[test]
    fn negative_returns_are_errors_too() {
        assert_eq!(posted(-22).unwrap_err().raw_os_error(), Some(22));
        assert_eq!(posted(12).unwrap_err().raw_os_error(), Some(12));
        assert!(posted(0).is_ok());
    }
}
