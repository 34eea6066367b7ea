//! Pool memory on systems other than Linux. The pool has ordinary memory of this process, which no
//! peer maps and no device uses.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

use super::page::{HugePages, page};
use crate::error::PoolError;
use crate::file::OwnedFd;

/// The place of a mapping in the address space. On these systems the allocator always chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapPlace {
    /// Anywhere.
    Any,
    /// At an address that peers cannot guess.
    Random,
}

/// Memory of this process. The memory is page aligned, and zeroed when it is made.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, owned by this value. Slots and pieces determine who may access which part
// (R8).
unsafe impl Send for Mapping {}
// SAFETY: as above; only the address is reachable through &Mapping.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Allocates `len` bytes, a multiple of the page size.
    pub(crate) fn new(len: usize, _huge: HugePages, _place: MapPlace) -> Result<Self, PoolError> {
        let none = |kind: io::ErrorKind| PoolError::Map { len, source: kind.into() };
        let layout = Layout::from_size_align(len, page()).ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(|| none(io::ErrorKind::InvalidInput))?;
        // SAFETY: the layout has bytes (R8).
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) });
        let ptr = ptr.ok_or_else(|| none(io::ErrorKind::OutOfMemory))?;
        Ok(Mapping { ptr, layout })
    }

    /// Fails, because this system has no memory that peers can write to.
    pub(crate) fn shared(_len: usize, _huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        Err(unsupported())
    }

    /// Fails, because this system has no memory that peers can read.
    pub(crate) fn lendable(_len: usize, _huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        Err(unsupported())
    }

    /// Fails: this system has no memory files.
    pub(crate) fn read_only(_len: usize, _file: &OwnedFd) -> io::Result<Self> {
        Err(unsupported())
    }

    /// Fails: this system has no memory files.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn again(_len: usize, _file: &OwnedFd) -> io::Result<Self> {
        Err(unsupported())
    }

    /// Does nothing, because memory comes from any node.
    pub(crate) fn prefer_node(&self, _node: u32) {}

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed only here (R8).
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

/// The error for functions that only Linux has.
pub(super) fn unsupported() -> io::Error {
    let what = "memory is shared between processes on Linux only";
    io::Error::new(io::ErrorKind::Unsupported, what)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_and_page_aligned() {
        let len = 3 * page();
        let mapping = Mapping::new(len, HugePages::Off, MapPlace::Random).unwrap();
        assert_eq!((mapping.len(), mapping.ptr().addr().get() % page()), (len, 0));
        // SAFETY: `len` bytes that this test alone uses, until the mapping is dropped (R8).
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.ptr().as_ptr(), len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(1);
    }

    #[test]
    fn a_size_that_no_memory_has_is_an_error() {
        for len in [0, isize::MAX as usize] {
            let error = Mapping::new(len, HugePages::Off, MapPlace::Any).unwrap_err();
            assert!(matches!(error, PoolError::Map { len: told, .. } if told == len), "{error:?}");
        }
    }

    #[test]
    fn sharing_is_refused_and_names_the_system_that_has_it() {
        let shared = Mapping::shared(page(), HugePages::Off).map(drop);
        let lendable = Mapping::lendable(page(), HugePages::Off).map(drop);
        for refused in [shared, lendable] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
            assert!(error.to_string().contains("Linux"), "{error}");
        }
    }
}
