//! Memory regions.
//!
//! All queue pairs of a device share a protection domain, so the device lets each peer write
//! wherever it has an rkey and an address for. What peers may write to is registered at an address
//! that they cannot guess:
//!
//! | device | the address that a WRITE names |
//! |---|---|
//! | InfiniBand, RoCE, iWARP adapters, Soft-RoCE | the iova of `ibv_reg_mr_iova`: 64 bits from the kernel's generator |
//! | Soft-iWARP, whose driver does not use the iova (`rnic_va` of `siw_reg_user_mr`) | the virtual address: the pool maps at a random place (`Registrar::ignores_iova`) |
//! | any, with an rdma-core before 25, which has no `ibv_reg_mr_iova` | likewise |
//!
//! A device that ignored the iova and is not known here would refuse the first WRITE with a remote
//! access error: it would not be used, rather than used with guessable addresses. Both keys name
//! the same addresses: what has landed is sent on from there by its iova as well.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_access_flags;
use tonic_rdma_memory::{Access, Memory, RegisterError, Registrar, Registration, random_iova};

use crate::verbs::context::DeviceContext;

/// Registers memory in a device's protection domain.
#[derive(Clone)]
pub(super) struct VerbsRegistrar(pub(super) Arc<DeviceContext>);

struct Region {
    mr: NonNull<rdma_sys::ibv_mr>,
    lkey: u32,
    rkey: u32,
    iova: u64,
    /// Keeps the protection domain.
    device: Arc<DeviceContext>,
}

// SAFETY: libibverbs is thread-safe; the region is only deregistered, once.
unsafe impl Send for Region {}
// SAFETY: &Region gives three numbers.
unsafe impl Sync for Region {}

impl Registration for Region {
    fn lkey(&self) -> u32 {
        self.lkey
    }
    fn rkey(&self) -> u32 {
        self.rkey
    }
    fn iova(&self) -> u64 {
        self.iova
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

    fn ignores_iova(&self) -> bool {
        self.0.ignores_iova
    }

    fn is_slow(&self) -> bool {
        true
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let local = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let flags = match access {
            Access::LocalRead => ibv_access_flags(0),
            // Devices lend nothing.
            Access::Local | Access::Lend => local,
            Access::RemoteWrite => local | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE,
        };
        let refused = |source| RegisterError::new(len, source);
        let (pd, at, rights) = (self.0.pd(), addr.as_ptr().cast(), flags.0 as i32);
        let (mr, iova) = match access {
            Access::RemoteWrite if !self.0.ignores_iova => {
                let iova = random_iova(addr, len).map_err(refused)?;
                // SAFETY: the domain is alive; the caller promises that the range stays mapped
                // until the region is dropped.
                (unsafe { rdma_sys::ibv_reg_mr_iova(pd, at, len, iova, rights) }, iova)
            }
            // SAFETY: as above.
            _ => (unsafe { rdma_sys::ibv_reg_mr(pd, at, len, rights) }, addr.addr().get() as u64),
        };
        let mr = NonNull::new(mr).ok_or_else(|| refused(io::Error::last_os_error()))?;
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Box::new(Region { mr, lkey, rkey, iova, device: self.0.clone() }))
    }
}
