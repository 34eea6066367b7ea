//! The sim's registrar: keeps a table of live registrations, as a NIC does, and copies only what
//! the table allows.

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic_rdma_memory::{Access, Memory, RegisterError, Registrar, Registration};

use crate::sim::net::DeviceInner;
use crate::sim::{Event, InjectedBug};

#[derive(Debug, Clone, Copy)]
struct Region {
    addr: u64,
    /// The address of `addr` in work requests.
    iova: u64,
    len: usize,
    access: Access,
}

impl Region {
    /// Where `[iova, iova + len)` lies, if all of it lies in the region.
    fn place(&self, iova: u64, len: usize) -> Option<u64> {
        let at = iova.checked_sub(self.iova)?;
        (at.checked_add(len as u64)? <= self.len as u64).then_some(self.addr + at)
    }
}

#[derive(Default)]
struct Regions {
    next: u32,
    by_lkey: HashMap<u32, Region>,
}

/// The registered memory of one device.
#[derive(Default)]
pub(super) struct Table {
    regions: Mutex<Regions>,
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("regions", &self.live()).finish()
    }
}

/// Remote keys differ from local ones, so that mixing them up is found out. Odd factor: no two
/// lkeys share an rkey.
fn rkey_of(lkey: u32) -> u32 {
    lkey.wrapping_mul(0x9e37_79b1) ^ 0x5a5a_5a5a
}

fn lkey_of(rkey: u32) -> u32 {
    (rkey ^ 0x5a5a_5a5a).wrapping_mul(INVERSE)
}

const INVERSE: u32 = inverse(0x9e37_79b1);

/// The inverse of an odd number modulo 2^32, by Newton's iteration.
const fn inverse(n: u32) -> u32 {
    let mut x = n;
    let mut i = 0;
    while i < 5 {
        x = x.wrapping_mul(2u32.wrapping_sub(n.wrapping_mul(x)));
        i += 1;
    }
    x
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Live registrations.
    pub(super) fn live(&self) -> usize {
        self.lock().by_lkey.len()
    }

    /// Where `[iova, iova + len)` lies, if it may be read with `lkey`.
    pub(super) fn readable(&self, lkey: u32, iova: u64, len: usize) -> Option<u64> {
        self.lock().by_lkey.get(&lkey)?.place(iova, len)
    }

    /// A remote write of `len` bytes from `src` to `iova`, if `rkey` allows it.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes, and nobody writes there meanwhile.
    pub(super) unsafe fn write(&self, rkey: u32, iova: u64, src: NonNull<u8>, len: usize) -> bool {
        let regions = self.lock();
        let place = regions
            .by_lkey
            .get(&lkey_of(rkey))
            .filter(|r| matches!(r.access, Access::RemoteWrite))
            .and_then(|r| r.place(iova, len));
        if let Some(addr) = place {
            let dst = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
            // SAFETY: the region is live and covers the range, and it stays so while the lock is
            // held, because deregistration takes the same lock; whoever registered it promised that
            // it stays mapped until then. That nobody reads there is R8 and R9: granted memory has
            // no reader on its own side. Ranges may overlap when both ends share a process, so this
            // is a move.
            unsafe { std::ptr::copy(src.as_ptr(), dst, len) };
        }
        place.is_some()
    }
}

/// Registers memory with a device of the sim. Pins nothing.
#[derive(Debug)]
pub(super) struct SimRegistrar {
    pub(super) device: Arc<DeviceInner>,
}

struct SimRegistration {
    device: Arc<DeviceInner>,
    lkey: u32,
    iova: u64,
    len: usize,
}

impl Registration for SimRegistration {
    fn lkey(&self) -> u32 {
        self.lkey
    }
    fn rkey(&self) -> u32 {
        rkey_of(self.lkey)
    }
    fn iova(&self) -> u64 {
        self.iova
    }
}

impl Drop for SimRegistration {
    fn drop(&mut self) {
        if self.device.net.breaks(InjectedBug::KeepRegistration) {
            return;
        }
        self.device.table.lock().by_lkey.remove(&self.lkey);
        let device = &self.device.name;
        self.device.net.tell(Event::Deregistered { device, addr: self.iova, len: self.len });
    }
}

// SAFETY: keys are looked up under the table's lock for each access and removed under it when the
// Registration drops, so they stop working then.
unsafe impl Registrar for SimRegistrar {
    fn pins(&self) -> bool {
        false
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let device = &self.device;
        if device.faults.registration_fails() {
            return Err(RegisterError::new(len, std::io::Error::from_raw_os_error(libc::ENOMEM)));
        }
        let addr = addr.as_ptr().expose_provenance() as u64;
        let remote = matches!(access, Access::RemoteWrite);
        let iova = if remote { device.net.fresh_iova() } else { addr };
        let mut regions = device.table.lock();
        regions.next = regions.next.wrapping_add(1);
        let lkey = regions.next;
        regions.by_lkey.insert(lkey, Region { addr, iova, len, access });
        drop(regions);
        device.net.tell(Event::Registered { device: &device.name, addr: iova, len, remote });
        Ok(Box::new(SimRegistration { device: device.clone(), lkey, iova, len }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_invert() {
        for lkey in [0, 1, 2, 77, 0x8000_0000, u32::MAX] {
            assert_eq!(lkey_of(rkey_of(lkey)), lkey);
            assert_ne!(lkey, rkey_of(lkey));
        }
    }
}
