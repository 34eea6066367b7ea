//! Registered memory of simulated devices: the live registrations of a device, like those in a NIC.
//! Memory is read or written only if a registration allows it.

pub(super) mod registrar;

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tonic_rdma_memory::Access;

#[derive(Debug, Clone, Copy)]
struct SimRegion {
    addr: u64,
    /// The address of the first byte, as work requests name it.
    iova: u64,
    len: usize,
    access: Access,
}

impl SimRegion {
    /// The address of `[iova, iova + len)` in this process, if all of it lies in the region.
    fn place(&self, iova: u64, len: usize) -> Option<u64> {
        let at = iova.checked_sub(self.iova)?;
        (at.checked_add(len as u64)? <= self.len as u64).then_some(self.addr + at)
    }
}

#[derive(Default)]
struct Regions {
    next: u32,
    by_lkey: HashMap<u32, SimRegion>,
}

/// The registered memory of one device.
#[derive(Default)]
pub(crate) struct RegionTable {
    regions: Mutex<Regions>,
}

impl fmt::Debug for RegionTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionTable").field("regions", &self.live()).finish()
    }
}

/// Returns the remote key for a local key. The two keys differ, so that code that confuses them
/// fails. The factor is odd, so that no two lkeys share an rkey.
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

impl RegionTable {
    fn lock(&self) -> MutexGuard<'_, Regions> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of live registrations.
    pub(crate) fn live(&self) -> usize {
        self.lock().by_lkey.len()
    }

    /// Adds a registration of `len` bytes at `addr`, whose address for the device is `iova`.
    /// Returns its lkey.
    fn add(&self, addr: u64, iova: u64, len: usize, access: Access) -> u32 {
        let mut regions = self.lock();
        regions.next = regions.next.wrapping_add(1);
        let lkey = regions.next;
        regions.by_lkey.insert(lkey, SimRegion { addr, iova, len, access });
        lkey
    }

    fn remove(&self, lkey: u32) {
        self.lock().by_lkey.remove(&lkey);
    }

    /// The address of `[iova, iova + len)` in this process, if it may be read with `lkey`.
    pub(crate) fn readable(&self, lkey: u32, iova: u64, len: usize) -> Option<u64> {
        self.lock().by_lkey.get(&lkey)?.place(iova, len)
    }

    /// Whether `rkey` allows a remote write of `len` bytes to `iova`.
    pub(crate) fn is_writable(&self, rkey: u32, iova: u64, len: usize) -> bool {
        self.lock()
            .by_lkey
            .get(&lkey_of(rkey))
            .is_some_and(|r| r.access == Access::RemoteWrite && r.place(iova, len).is_some())
    }

    /// Writes `len` bytes from `src` to `iova` as a peer, if `rkey` allows it.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes, and nobody writes to these bytes during the call.
    pub(crate) unsafe fn write(&self, rkey: u32, iova: u64, src: NonNull<u8>, len: usize) -> bool {
        let regions = self.lock();
        let place = regions
            .by_lkey
            .get(&lkey_of(rkey))
            .filter(|r| matches!(r.access, Access::RemoteWrite))
            .and_then(|r| r.place(iova, len));
        if let Some(addr) = place {
            let dst = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
            // SAFETY: the region is live and covers the range. Both stay true while the lock is
            // held, because deregistration takes the same lock. The code that registered the region
            // promised that the memory stays mapped until then. By R8 and R9 nobody reads the
            // range: the end that has granted memory does not read it while the grant lasts. The
            // ranges may overlap, because both ends are in one process, so this copy allows
            // overlap.
            unsafe { std::ptr::copy(src.as_ptr(), dst, len) };
        }
        place.is_some()
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
