//! Memory regions.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_access_flags;
use tonic_rdma_memory::{Access, Memory, RegisterError, Registrar, Registration};

use super::device::DeviceInner;

/// Registers memory in a device's protection domain.
#[derive(Clone)]
pub(super) struct VerbsRegistrar(pub(super) Arc<DeviceInner>);

struct Region {
    mr: NonNull<rdma_sys::ibv_mr>,
    lkey: u32,
    rkey: u32,
    /// Keeps the protection domain.
    device: Arc<DeviceInner>,
}

// SAFETY: libibverbs is thread-safe; the region is only deregistered, once.
unsafe impl Send for Region {}
// SAFETY: &Region gives two numbers.
unsafe impl Sync for Region {}

impl Registration for Region {
    fn lkey(&self) -> u32 {
        self.lkey
    }
    fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once; its protection domain is alive.
        match unsafe { rdma_sys::ibv_dereg_mr(self.mr.as_ptr()) } {
            0 => {}
            errno => tracing::error!(
                device = self.device.name,
                errno,
                "ibv_dereg_mr failed; the region stays registered"
            ),
        }
    }
}

// SAFETY: the keys are the device's; ibv_dereg_mr in Drop ends them (R12).
unsafe impl Registrar for VerbsRegistrar {
    fn pins(&self) -> bool {
        true
    }

    fn ignores_ipc_lock(&self) -> bool {
        self.0.is_siw
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let flags = match access {
            Access::Local => local,
            Access::RemoteWrite => local | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
        };
        // SAFETY: the domain is alive; the caller promises that the range stays mapped until the region is dropped.
        let mr = unsafe { rdma_sys::ibv_reg_mr(self.0.pd(), addr.as_ptr().cast(), len, flags.0 as i32) };
        let mr = NonNull::new(mr).ok_or_else(|| RegisterError::new(len, io::Error::last_os_error()))?;
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Box::new(Region { mr, lkey, rkey, device: self.0.clone() }))
    }
}
