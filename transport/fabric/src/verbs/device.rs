//! An open device: the context that rdma_cm has for it, and a protection domain on that.
//!
//! rdma_cm keeps one context per device in a process, but may close it when no id is bound to the
//! device and the device has gone. So an open device holds an id of its own, bound to one of its
//! addresses: the anchor. It keeps the context alive for as long as anything that was made on it:
//! all of those hold an `Arc` of [`DeviceInner`].

use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use std::{fmt, io};

use rdma_sys::rdma_cm_event_type as kind;
use tonic_rdma_memory::{Pool, Registrar};

use crate::device::{DeviceInfo, PortState, Transport};
use crate::error::{ConnectError, FabricError, Verb};
use crate::link::LinkConfig;
use crate::verbs::cm::{Channel, CmId};
use crate::verbs::enumerate::{self, ports};
use crate::verbs::listener::VerbsListener;
use crate::verbs::mr::VerbsRegistrar;
use crate::verbs::siw::Cover;
use crate::verbs::{VerbsLink, connect, lib_probe, qp};

/// The vendor id that the siw driver reports ("bmt").
const VENDOR_SIW: u32 = 0x62_6d74;

/// Devices open in this process, so that all who open one share its protection domain.
static OPEN: Mutex<Vec<Weak<DeviceInner>>> = Mutex::new(Vec::new());

/// A device of rdma-core. Cheap to clone.
#[derive(Clone)]
pub struct VerbsDevice(pub(super) Arc<DeviceInner>);

impl fmt::Debug for VerbsDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsDevice").field("name", &self.0.name).finish_non_exhaustive()
    }
}

/// What a device allows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) max_qp_wr: u32,
    pub(super) max_cqe: u32,
    /// Bytes in one message.
    pub(super) max_msg: u32,
}

pub(super) struct DeviceInner {
    pub(super) name: String,
    pub(super) transport: Transport,
    pub(super) limits: Limits,
    /// Soft-iWARP counts pinned pages by itself, and against RLIMIT_MEMLOCK whatever the process
    /// may do.
    pub(super) is_siw: bool,
    /// Peers name memory by its virtual address, whatever iova it is registered at.
    pub(super) ignores_iova: bool,
    context: NonNull<rdma_sys::ibv_context>,
    pd: NonNull<rdma_sys::ibv_pd>,
    /// Dropped in Drop, before the anchor.
    cover: Option<Cover>,
    removed: AtomicBool,
    /// Dropped in Drop, after the protection domain.
    anchor: ManuallyDrop<CmId>,
}

impl fmt::Debug for DeviceInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceInner").field("name", &self.name).finish_non_exhaustive()
    }
}

// SAFETY: libibverbs is thread-safe; context, protection domain and cover are used through it only.
unsafe impl Send for DeviceInner {}
// SAFETY: as above.
unsafe impl Sync for DeviceInner {}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        // SAFETY: everything made on the domain holds an Arc of this, so nothing is left on it.
        match unsafe { rdma_sys::ibv_dealloc_pd(self.pd.as_ptr()) } {
            0 => {}
            errno => {
                tracing::warn!(device = self.name, errno, "ibv_dealloc_pd failed; it is leaked")
            }
        }
        self.cover = None;
        let removed = self.is_removed();
        // SAFETY: dropped once, here; nothing uses it afterwards.
        unsafe { ManuallyDrop::drop(&mut self.anchor) };
        if removed {
            // librdmacm closes a device that is neither used nor listed any more when it compares
            // its list with the kernel's, and it does that here. The kernel waits for it.
            // SAFETY: gives a list or null; the list is freed at once.
            unsafe {
                let list = rdma_sys::rdma_get_devices(std::ptr::null_mut());
                if !list.is_null() {
                    rdma_sys::rdma_free_devices(list);
                }
            }
        }
    }
}

/// Name of the device behind a context.
///
/// # Safety
/// The context is open.
pub(super) unsafe fn context_name(context: NonNull<rdma_sys::ibv_context>) -> String {
    // SAFETY: an open context has a device, and a device has a name for as long as it is open.
    unsafe {
        let name = rdma_sys::ibv_get_device_name(context.as_ref().device);
        if name.is_null() {
            "unnamed device".to_owned()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }
}

/// Why there is no event channel.
pub(super) fn no_channel(source: io::Error) -> FabricError {
    match source.raw_os_error() {
        // librdmacm finds no device at all.
        Some(libc::ENODEV) if enumerate::names().is_empty() => FabricError::NoDevice,
        _ => FabricError::NoConnectionManager { source: source.into() },
    }
}

impl DeviceInner {
    pub(super) fn context(&self) -> NonNull<rdma_sys::ibv_context> {
        self.context
    }

    pub(super) fn pd(&self) -> *mut rdma_sys::ibv_pd {
        self.pd.as_ptr()
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.transport == Transport::IWarp
    }

    /// The device has told a link or a listener that it is going.
    pub(super) fn mark_removed(&self) {
        self.removed.store(true, SeqCst);
    }

    /// True when the device was removed: seen by a link, a listener, or the anchor.
    pub(super) fn is_removed(&self) -> bool {
        while let Ok(Some(event)) = self.anchor.channel().next() {
            if event.kind == kind::RDMA_CM_EVENT_DEVICE_REMOVAL {
                self.mark_removed();
            }
        }
        self.removed.load(SeqCst)
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

impl VerbsDevice {
    /// See [`Fabric::open`](crate::Fabric::open).
    ///
    /// # Errors
    /// Each thing that may be missing has an error of its own.
    pub fn open(name: Option<&str>) -> Result<VerbsDevice, FabricError> {
        lib_probe::probe()?;
        let found = enumerate::devices()?;
        let Some(name) = name else {
            let mut first = None;
            for device in &found {
                match VerbsDevice::open_listed(device) {
                    Ok(device) => return Ok(device),
                    Err(error) => drop(first.get_or_insert(error)),
                }
            }
            return Err(first.unwrap_or(FabricError::NoDevice));
        };
        match found.iter().find(|d| d.name == name) {
            Some(device) => VerbsDevice::open_listed(device),
            None if found.is_empty() => Err(FabricError::NoDevice),
            None => {
                let found = found.into_iter().map(|d| d.name).collect();
                Err(FabricError::NoSuchDevice { name: name.to_owned(), found })
            }
        }
    }

    fn open_listed(device: &DeviceInfo) -> Result<VerbsDevice, FabricError> {
        if let (false, Some(port)) =
            (device.ports.iter().any(|p| p.state.is_active()), device.ports.first())
        {
            return Err(FabricError::NoActivePort {
                device: device.name.clone(),
                state: port.state,
            });
        }
        match device.addresses.first() {
            Some(ip) => VerbsDevice::at(*ip),
            None => Err(FabricError::NoAddress { device: device.name.clone() }),
        }
    }

    /// See [`Fabric::at`](crate::Fabric::at).
    ///
    /// # Errors
    /// [`FabricError::NotOnRdma`], and those of [`open`](VerbsDevice::open).
    pub fn at(local: IpAddr) -> Result<VerbsDevice, FabricError> {
        lib_probe::probe()?;
        let channel = Channel::new().map_err(no_channel)?;
        let id = CmId::new(&channel)
            .map_err(|source| FabricError::NoConnectionManager { source: source.into() })?;
        if id.bind(SocketAddr::new(local, 0)).is_err() || id.verbs().is_none() {
            return Err(FabricError::NotOnRdma { addr: local });
        }
        VerbsDevice::of(id)
    }

    /// See [`Fabric::toward`](crate::Fabric::toward).
    ///
    /// # Errors
    /// [`ConnectError::NotOnRdma`], [`ConnectError::NoRoute`], [`ConnectError::OtherDevice`], and
    /// those of [`open`](VerbsDevice::open).
    pub async fn toward(
        peer: SocketAddr,
        only: Option<&str>,
        timeout: Duration,
    ) -> Result<VerbsDevice, ConnectError> {
        lib_probe::probe()?;
        let id = connect::resolve(peer, timeout).await?;
        let device = VerbsDevice::of(id)?;
        match only {
            Some(wanted) if wanted != device.name() => Err(ConnectError::OtherDevice {
                addr: peer.into(),
                wanted: wanted.to_owned(),
                routed: device.name().to_owned(),
            }),
            _ => Ok(device),
        }
    }

    /// The device that an id is bound to: one that is open, or else the id becomes its anchor.
    fn of(id: CmId) -> Result<VerbsDevice, FabricError> {
        let context = id.verbs().ok_or(FabricError::NoDevice)?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|d| d.strong_count() > 0);
        if let Some(device) = open.iter().filter_map(Weak::upgrade).find(|d| d.context == context) {
            return match device.is_removed() {
                true => Err(device.removed_error()),
                false => Ok(VerbsDevice(device)),
            };
        }
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
        // SAFETY: the id, which becomes the anchor, keeps the context open; the cover is dropped
        // before it.
        let cover = if is_siw { unsafe { Cover::new(context) } } else { None };
        let device = Arc::new(DeviceInner {
            name,
            transport,
            limits: Limits {
                max_qp_wr: attr.max_qp_wr.max(0) as u32,
                max_cqe: attr.max_cqe.max(0) as u32,
                max_msg: port.map_or(1 << 30, |p| p.max_msg).clamp(1, 1 << 30),
            },
            is_siw,
            ignores_iova: is_siw || !lib_probe::has_reg_mr_iova(),
            context,
            pd,
            cover,
            removed: AtomicBool::new(false),
            anchor: ManuallyDrop::new(id),
        });
        qp::try_out(&device)?;
        open.push(Arc::downgrade(&device));
        Ok(VerbsDevice(device))
    }

    /// Name, as `rdma link` shows it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The wire protocol.
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// True when the device was pulled out. It goes for good when everything made on it is dropped:
    /// links, listeners, pools and clones of this.
    pub fn is_removed(&self) -> bool {
        self.0.is_removed()
    }

    /// What the device says about itself now.
    ///
    /// # Errors
    /// It does not answer any more.
    pub fn info(&self) -> Result<DeviceInfo, FabricError> {
        // SAFETY: the device is open.
        let (transport, ports, _) = unsafe { ports(self.0.context) }
            .map_err(|source| self.0.verb_error("ibv_query_device", source))?;
        Ok(DeviceInfo { name: self.0.name.clone(), transport, ports, addresses: self.addresses()? })
    }

    /// This host's addresses that lie on the device.
    ///
    /// # Errors
    /// The addresses cannot be listed, or the connection manager has gone.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, FabricError> {
        Ok(enumerate::local_addresses(Some(&self.0.name))?.into_iter().map(|(ip, _)| ip).collect())
    }

    /// Registers memory in the device's protection domain, and keeps the device open.
    pub fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(VerbsRegistrar(self.0.clone()))
    }

    /// See [`Fabric::listen`](crate::Fabric::listen).
    ///
    /// # Errors
    /// The address is in use, does not lie on the device, or the device failed.
    pub fn listen(&self, addr: SocketAddr) -> Result<VerbsListener, FabricError> {
        VerbsListener::new(&self.0, addr)
    }

    /// See [`Fabric::connect`](crate::Fabric::connect).
    ///
    /// # Errors
    /// Each way to fail has an error of its own.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        config: &LinkConfig,
        pool: &Pool,
        private_data: &[u8],
        timeout: Duration,
    ) -> Result<(VerbsLink, Vec<u8>), ConnectError> {
        connect::connect(&self.0, addr, config, pool, private_data, timeout).await
    }
}

/// Name of the device that an address of this host lies on.
pub(super) fn bound_device(channel: &Arc<Channel>, ip: IpAddr) -> Option<String> {
    let id = CmId::new(channel).ok()?;
    id.bind(SocketAddr::new(ip, 0)).ok()?;
    // SAFETY: the id keeps the context open.
    id.verbs().map(|context| unsafe { context_name(context) })
}
