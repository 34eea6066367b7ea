//! Mapped memory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Once;

use super::memfd;
use super::page::{HUGE_PAGE, HugePages};
use super::random_address::map_at_random;
use crate::error::PoolError;

/// Memory of this process only.
const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Where a mapping goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where the kernel puts it: beside others, as a rule.
    Any,
    /// Where nobody can guess it.
    Random,
}

/// Memory of this process, or of a file that peers may map: page aligned, zeroed when it is mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// Peers may have it mapped too.
    shared: bool,
}

// SAFETY: a mapping is plain memory, owned by this value; who may touch which part is decided by
// slots and pieces (R8).
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing is reachable through &Mapping but the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn new(len: usize, huge: HugePages, place: Place) -> Result<Self, PoolError> {
        if huge == HugePages::Explicit && len.is_multiple_of(HUGE_PAGE) {
            static WARNED: Once = Once::new();
            // The size is named: the default may be another, and unmapping must be in whole pages.
            match Self::map(len, ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB, None, place) {
                Ok(mapping) => return Ok(mapping),
                Err(error) => WARNED.call_once(|| {
                    tracing::warn!(
                        %error, len,
                        "no explicit huge pages (reserve some in /proc/sys/vm/nr_hugepages); using ordinary ones"
                    );
                }),
            }
        }
        let mapping = Self::map(len, ANONYMOUS, None, place)
            .map_err(|source| PoolError::Map { len, source })?;
        if huge != HugePages::Off && len >= HUGE_PAGE {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        Ok(mapping)
    }

    /// Maps a file that peers can map too, and that can neither shrink nor grow. Its pages are
    /// there at once: a peer's first WRITE should not have to wait for them.
    pub(crate) fn shared(len: usize, huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        let file = memfd::sealed(c"tonic-rdma-landing", len)?;
        let mapping = Self::map(len, libc::MAP_SHARED, Some(&file), Place::Any)?;
        if huge != HugePages::Off && len >= HUGE_PAGE {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        // Kernels before 5.14 do not know this: there, pages come as they are touched.
        mapping.advise(libc::MADV_POPULATE_WRITE);
        Ok((mapping, file))
    }

    /// Maps such a file a second time.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn again(len: usize, file: &OwnedFd) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED, Some(file), Place::Any)
    }

    fn map(
        len: usize,
        flags: libc::c_int,
        file: Option<&OwnedFd>,
        place: Place,
    ) -> io::Result<Self> {
        let map = |at: usize, flags| {
            let (at, fd) =
                (std::ptr::without_provenance_mut(at), file.map_or(-1, AsRawFd::as_raw_fd));
            // SAFETY: a new mapping touches nothing that exists: an address without MAP_FIXED is a
            // hint, which the kernel takes where nothing is (R8).
            let ptr =
                unsafe { libc::mmap(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
            if ptr == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            Ok(NonNull::new(ptr.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?)
        };
        let unmap = |ptr: NonNull<u8>| {
            // SAFETY: `map` has just given it, and nobody else knows it (R8).
            let _ = unsafe { libc::munmap(ptr.as_ptr().cast(), len) };
        };
        let ptr = match place {
            Place::Any => map(0, flags)?,
            Place::Random => map_at_random(len, |at| map(at, flags), unmap)?,
        };
        let mapping = Mapping { ptr, len, shared: file.is_some() };
        // A child of fork() must not get copies of pages that the device writes to: with
        // copy-on-write the parent would end up with pages that the device does not know.
        mapping.advise(libc::MADV_DONTFORK);
        Ok(mapping)
    }

    fn advise(&self, advice: libc::c_int) {
        // SAFETY: the range is this mapping. None of the advices used changes its contents, but
        // MADV_REMOVE in `drop`.
        if unsafe { libc::madvise(self.ptr.as_ptr().cast(), self.len, advice) } != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), advice, "madvise was not taken");
        }
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.shared {
            // A peer that keeps its mapping must not keep the memory: the pages go back to the
            // system now.
            self.advise(libc::MADV_REMOVE);
        }
        // SAFETY: mapped in `map`, unmapped once; whoever registered it has deregistered before
        // (field order in Region).
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also under the sanitizers, which leave the program a part of the address space only.
    #[test]
    fn mappings_at_random_places_are_ordinary_memory() {
        let len = 64 << 10;
        let mappings: Vec<Mapping> =
            (0..32).map(|_| Mapping::new(len, HugePages::Off, Place::Random).unwrap()).collect();
        for (i, mapping) in mappings.iter().enumerate() {
            // SAFETY: the mapping is `len` bytes long, zeroed, and nobody else's (R8).
            let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.ptr().as_ptr(), len) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(i as u8 + 1);
        }
        for (i, mapping) in mappings.iter().enumerate() {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(mapping.ptr().as_ptr(), len) };
            assert!(bytes.iter().all(|byte| *byte == i as u8 + 1));
        }
        let mut starts: Vec<usize> = mappings.iter().map(|m| m.ptr().addr().get()).collect();
        starts.sort_unstable();
        let beside = starts.windows(2).filter(|pair| pair[1] - pair[0] < 1 << 20).count();
        assert_eq!(beside, 0, "{starts:x?}");
    }

    #[test]
    fn huge_pages_are_whole_at_random_places() {
        let mapping = Mapping::new(2 * HUGE_PAGE, HugePages::Transparent, Place::Random).unwrap();
        assert!(mapping.ptr().addr().get().is_multiple_of(HUGE_PAGE));
    }
}
