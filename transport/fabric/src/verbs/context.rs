//! The state that all objects on an open device share: rdma_cm's context for the device, and a
//! protection domain on that context.
//!
//! rdma_cm keeps one context per device in a process, but may close the context when no id is bound
//! to the device and the device was removed. So an open device holds a private id, `bound_id`,
//! which is bound to one of the device's addresses. Every object made on the context holds an `Arc`
//! of [`DeviceContext`], so the id and the context live as long as any such object.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use rdma_sys::rdma_cm_event_type as kind;
use rustix::event::{EventfdFlags, eventfd};

use crate::device::{PortState, Transport};
use crate::error::{FabricError, Verb};
use crate::verbs::cm::CmId;
use crate::verbs::discovery::attributes::{context_name, ports};
use crate::verbs::discovery::is_inherited;
use crate::verbs::siw::Cover;

/// The vendor id that the siw driver reports ("bmt").
const VENDOR_SIW: u32 = 0x62_6d74;

/// Limits that the device reports.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReportedLimits {
    pub(super) max_qp_wr: u32,
    pub(super) max_cqe: u32,
    /// Maximum number of bytes in one message.
    pub(super) max_msg: u32,
}

/// The completion vectors of a device: interrupts, each handled by one processor. Completion queues
/// take the vectors in turn, and each process begins at a vector that depends on its process id, so
/// that no processor handles the interrupts of all queues.
#[derive(Debug)]
pub(super) struct Vectors {
    count: u32,
    next: AtomicU32,
}

impl Vectors {
    fn new(count: i32) -> Vectors {
        Vectors { count: u32::try_from(count).unwrap_or(0).max(1), next: std::process::id().into() }
    }

    /// The vector of the next completion queue.
    pub(super) fn next(&self) -> i32 {
        (self.next.fetch_add(1, Relaxed) % self.count) as i32
    }
}

pub(super) struct DeviceContext {
    pub(super) name: String,
    pub(super) transport: Transport,
    pub(super) limits: ReportedLimits,
    /// True for Soft-iWARP, which counts pinned pages against RLIMIT_MEMLOCK itself, whatever
    /// privileges the process has.
    pub(super) is_siw: bool,
    /// True if peers name memory by its virtual address instead of its iova.
    pub(super) ignores_iova: bool,
    /// The NUMA node that the device is attached to, if the system has several nodes.
    pub(super) numa_node: Option<u32>,
    /// Interrupt vectors for completion queues.
    pub(super) vectors: Vectors,
    /// True until the device refuses relaxed ordering. While this is true, memory that peers write
    /// to is registered with relaxed ordering.
    pub(super) relaxed_ordering: AtomicBool,
    /// The number of bytes that the queues of a connection pin.
    pub(super) queue_bytes: OnceLock<usize>,
    /// The longest inline payload in bytes that the device takes, known once the device has refused
    /// a longer payload.
    pub(super) inline_limit: AtomicU32,
    context: NonNull<rdma_sys::ibv_context>,
    pd: NonNull<rdma_sys::ibv_pd>,
    /// The workaround for Soft-iWARP (`siw`). `drop` drops the cover before `bound_id`.
    cover: Option<Cover>,
    removed: AtomicBool,
    /// The eventfd that wakes host watches when the device or a port changes. The eventfd is made
    /// when the first watch needs it.
    changes: OnceLock<OwnedFd>,
    /// The id is dropped in Drop, after the protection domain.
    bound_id: ManuallyDrop<CmId>,
}

impl fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceContext").field("name", &self.name).finish_non_exhaustive()
    }
}

// SAFETY: libibverbs is thread-safe; context, protection domain and cover are used through it only.
unsafe impl Send for DeviceContext {}
// SAFETY: as above.
unsafe impl Sync for DeviceContext {}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        // SAFETY: everything made on the domain holds an Arc of this, so nothing is left on it.
        match unsafe { rdma_sys::ibv_dealloc_pd(self.pd.as_ptr()) } {
            0 => {}
            errno => {
                tonic_rdma_memory::throttled!(
                    warn,
                    device = self.name,
                    errno,
                    "ibv_dealloc_pd failed; it is leaked"
                )
            }
        }
        self.cover = None;
        let removed = self.is_removed();
        // SAFETY: dropped once, here; nothing uses it afterwards.
        unsafe { ManuallyDrop::drop(&mut self.bound_id) };
        if removed {
            // The kernel waits until librdmacm closes the device. This call makes librdmacm compare
            // its list of devices with the kernel's. librdmacm then closes devices that are neither
            // used nor listed any more. SAFETY: gives a list or null; the list is freed at once.
            unsafe {
                let list = rdma_sys::rdma_get_devices(std::ptr::null_mut());
                if !list.is_null() {
                    rdma_sys::rdma_free_devices(list);
                }
            }
        }
    }
}

/// The NUMA node of a device. The kernel reports -1 if the system has only one node.
fn numa_node(device: &str) -> Option<u32> {
    let file = format!("/sys/class/infiniband/{device}/device/numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

impl DeviceContext {
    /// Opens the device that an id is bound to, and keeps the id.
    pub(super) fn open(id: CmId) -> Result<Arc<DeviceContext>, FabricError> {
        let context = id.verbs().ok_or(FabricError::NoDevice)?;
        // SAFETY: the id keeps the context open.
        let name = unsafe { context_name(context) };
        // SAFETY: as above.
        let (transport, ports, attr) =
            unsafe { ports(context) }.map_err(|source| FabricError::Verb {
                verb: Verb::Call("ibv_query_device"),
                device: name.clone(),
                source: source.into(),
            })?;
        let port = ports.iter().find(|p| p.number == id.port()).or(ports.first());
        if let Some(state) =
            port.map(|p| p.state).filter(|s| !s.is_active() && *s != PortState::Unknown)
        {
            return Err(FabricError::NoActivePort { device: name, state });
        }
        // SAFETY: the context is open.
        let pd =
            NonNull::new(unsafe { rdma_sys::ibv_alloc_pd(context.as_ptr()) }).ok_or_else(|| {
                FabricError::QueuePairRefused {
                    device: name.clone(),
                    verb: Verb::Call("ibv_alloc_pd"),
                    source: io::Error::last_os_error().into(),
                }
            })?;
        let is_siw = attr.vendor_id == VENDOR_SIW;
        // SAFETY: the id, which is kept, keeps the context open; the cover is dropped
        // before it.
        let cover = if is_siw { unsafe { Cover::new(context) } } else { None };
        Ok(Arc::new(DeviceContext {
            numa_node: numa_node(&name),
            name,
            transport,
            limits: ReportedLimits {
                max_qp_wr: attr.max_qp_wr.max(0) as u32,
                max_cqe: attr.max_cqe.max(0) as u32,
                max_msg: port.map_or(1 << 30, |p| p.max_msg).clamp(1, 1 << 30),
            },
            is_siw,
            ignores_iova: is_siw || !rdma_sys::has::ibv_reg_mr_iova(),
            // SAFETY: the context is open.
            vectors: Vectors::new(unsafe { context.as_ref().num_comp_vectors }),
            relaxed_ordering: AtomicBool::new(true),
            queue_bytes: OnceLock::new(),
            inline_limit: AtomicU32::new(u32::MAX),
            context,
            pd,
            cover,
            removed: AtomicBool::new(false),
            changes: OnceLock::new(),
            bound_id: ManuallyDrop::new(id),
        }))
    }

    pub(super) fn context(&self) -> NonNull<rdma_sys::ibv_context> {
        self.context
    }

    pub(super) fn pd(&self) -> *mut rdma_sys::ibv_pd {
        self.pd.as_ptr()
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.transport == Transport::IWarp
    }

    /// Notes that a link or a listener has seen the removal of the device.
    pub(super) fn mark_removed(&self) {
        self.removed.store(true, SeqCst);
    }

    /// True if a link, a listener or `bound_id` has seen the removal of the device.
    pub(super) fn is_removed(&self) -> bool {
        while let Ok(Some(event)) = self.bound_id.own_event() {
            if event == kind::RDMA_CM_EVENT_DEVICE_REMOVAL {
                self.mark_removed();
            }
        }
        self.removed.load(SeqCst)
    }

    /// The descriptor that becomes readable when the device is removed. The descriptor is valid as
    /// long as the context lives.
    pub(super) fn own_events(&self) -> RawFd {
        self.bound_id.channel_fd()
    }

    /// The descriptor that [`tell_change`](Self::tell_change) writes to. Each write wakes an
    /// edge-triggered watch, so nobody has to read the descriptor.
    pub(super) fn changes(&self) -> io::Result<BorrowedFd<'_>> {
        if let Some(fd) = self.changes.get() {
            return Ok(fd.as_fd());
        }
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(self.changes.get_or_init(|| fd).as_fd())
    }

    /// Wakes the host watches, because the device or one of its ports has changed.
    pub(super) fn tell_change(&self) {
        if let Some(fd) = self.changes.get()
            && let Err(error) = rustix::io::write(fd, &1_u64.to_ne_bytes())
        {
            tracing::debug!(%error, device = self.name, "host watches may notice a change late");
        }
    }

    pub(super) fn removed_error(&self) -> FabricError {
        FabricError::DeviceRemoved { device: self.name.clone() }
    }

    pub(super) fn verb_error(&self, call: &'static str, source: io::Error) -> FabricError {
        FabricError::Verb {
            verb: Verb::Call(call),
            device: self.name.clone(),
            source: source.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_take_turns_at_vectors() {
        let vectors = Vectors::new(3);
        vectors.next.store(u32::MAX - 4, Relaxed);
        let mut taken = [0; 3];
        for _ in 0..300 {
            taken[vectors.next() as usize] += 1;
        }
        // The counter wraps around once, at a number that is not a multiple of three.
        assert!(taken.iter().all(|queues| (99..=101).contains(queues)), "{taken:?}");
        for none in [-1, 0, 1] {
            let vectors = Vectors::new(none);
            assert_eq!([vectors.next(), vectors.next()], [0, 0]);
        }
    }
}
