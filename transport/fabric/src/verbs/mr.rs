//! Memory regions.
//!
//! All queue pairs of a device share a protection domain, so the device lets each peer write to any
//! memory for which the peer has an rkey and an address. Memory that peers may write to is
//! therefore registered at an address that peers cannot guess:
//!
//! | device | the address that a WRITE names |
//! |---|---|
//! | InfiniBand, RoCE, iWARP adapters, Soft-RoCE | the iova of `ibv_reg_mr_iova`: 64 bits from the kernel's generator |
//! | Soft-iWARP, whose driver does not use the iova (`rnic_va` of `siw_reg_user_mr`) | the virtual address: the pool maps at a random place (`Registrar::ignores_iova`) |
//! | any, with rdma-core before version 25, which has no `ibv_reg_mr_iova` | as for Soft-iWARP |
//!
//! Memory that peers may write to is registered with relaxed ordering if the device supports it.
//! WRITEs then need not wait for each other, and on some hosts the bus carries twice as much. The
//! bytes of a WRITE then arrive in any order. All bytes have arrived when the RECV of a later
//! message completes (IBV_ACCESS_RELAXED_ORDERING, ibv_reg_mr(3)), and no code reads the bytes
//! before that (R8). The simulation also delivers bytes of WRITEs out of order.
//!
//! If a device of the first row ignored the iova after all, that device would refuse the first
//! WRITE with a remote access error. So such a device could not be used at all, and would never
//! work with addresses that peers can guess. The lkey and the rkey of a region work with the same
//! addresses, so data that has landed is also sent on by its iova.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use rdma_sys::ibv_access_flags;
use tonic_rdma_memory::{Access, Memory, RegisterError, Registrar, Registration, random_iova};

use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;
use crate::verbs::queue_pair::queue_bytes;

/// Registers memory in a device's protection domain.
#[derive(Clone)]
pub(super) struct VerbsRegistrar(pub(super) Arc<DeviceContext>);

struct VerbsRegion {
    mr: NonNull<rdma_sys::ibv_mr>,
    lkey: u32,
    rkey: u32,
    iova: u64,
    /// Keeps the protection domain alive.
    device: Arc<DeviceContext>,
}

// SAFETY: libibverbs is thread-safe; the only call on the region deregisters it, once.
unsafe impl Send for VerbsRegion {}
// SAFETY: &VerbsRegion gives three numbers.
unsafe impl Sync for VerbsRegion {}

impl Registration for VerbsRegion {
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

impl Drop for VerbsRegion {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        // SAFETY: registered once, deregistered once; its protection domain is alive.
        match unsafe { rdma_sys::ibv_dereg_mr(self.mr.as_ptr()) } {
            0 => {}
            errno => tonic_rdma_memory::throttled!(
                error,
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

    fn queue_bytes(&self) -> usize {
        *self.0.queue_bytes.get_or_init(|| queue_bytes(&self.0))
    }

    fn numa_node(&self) -> Option<u32> {
        self.0.numa_node
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
            // Devices do not lend memory.
            Access::Local | Access::Lend => local,
            Access::RemoteWrite | Access::RemoteWriteInTurn => {
                local | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            }
        };
        let refused = |source| RegisterError::new(len, source);
        let hidden = access == Access::RemoteWrite && !self.0.ignores_iova;
        let iova = match hidden {
            true => random_iova(addr, len).map_err(refused)?,
            false => addr.addr().get() as u64,
        };
        let (pd, at) = (self.0.pd(), addr.as_ptr().cast());
        let register = |optional: u32| {
            let (rights, all) = (flags.0 as i32, flags.0 | optional);
            loop {
                // SAFETY: the domain is alive; the caller promises that the range stays mapped
                // until the region is dropped.
                let mr = unsafe {
                    match (optional, hidden) {
                        (0, true) => rdma_sys::ibv_reg_mr_iova(pd, at, len, iova, rights),
                        (0, false) => rdma_sys::ibv_reg_mr(pd, at, len, rights),
                        // Only this call supports optional access flags.
                        _ => rdma_sys::ibv_reg_mr_iova2(pd, at, len, iova, all),
                    }
                };
                match NonNull::new(mr).ok_or_else(io::Error::last_os_error) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    registered => return registered,
                }
            }
        };
        let mr = match access {
            Access::RemoteWrite => relaxed_if_taken(&self.0.relaxed_ordering, register),
            _ => register(0),
        };
        let mr = mr.map_err(refused)?;
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Box::new(VerbsRegion { mr, lkey, rkey, iova, device: self.0.clone() }))
    }
}

/// Registers with relaxed ordering, unless the device has refused relaxed ordering.
/// IBV_ACCESS_RELAXED_ORDERING is an optional access flag, but some kernels and libraries do not
/// support optional flags.
fn relaxed_if_taken<T>(
    taken: &AtomicBool,
    register: impl Fn(u32) -> io::Result<T>,
) -> io::Result<T> {
    if !taken.load(Relaxed) {
        return register(0);
    }
    match register(ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {
            let registered = register(0)?;
            tracing::debug!(%error, "the device does not take relaxed ordering");
            taken.store(false, Relaxed);
            Ok(registered)
        }
        registered => registered,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn relaxed_ordering_is_asked_for_until_it_is_refused() {
        const RELAXED: u32 = ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
        let taken = AtomicBool::new(true);
        let asked = RefCell::new(Vec::new());
        let register = |refuses: fn(u32) -> Option<i32>| {
            relaxed_if_taken(&taken, |optional| {
                asked.borrow_mut().push(optional);
                refuses(optional).map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
            })
            .map_err(|error| error.raw_os_error())
        };
        assert_eq!(register(|_| None), Ok(()));
        // A lack of memory, for instance, says nothing about the access flag.
        assert_eq!(register(|_| Some(libc::ENOMEM)), Err(Some(libc::ENOMEM)));
        // EINVAL without the access flag means that another argument is invalid.
        assert_eq!(register(|_| Some(libc::EINVAL)), Err(Some(libc::EINVAL)));
        let knows_none = |optional| (optional != 0).then_some(libc::EOPNOTSUPP);
        assert_eq!([register(knows_none), register(knows_none)], [Ok(()), Ok(())]);
        assert_eq!(*asked.borrow(), [RELAXED, RELAXED, RELAXED, 0, RELAXED, 0, 0]);
    }
}
