//! Memory of a pool on systems other than Linux: ordinary memory of this process. No peer maps it,
//! and no device uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

use super::page::{HugePages, page};
use crate::error::PoolError;
use crate::file::OwnedFd;

/// Where a mapping is placed. Here the allocator chooses in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Anywhere.
    Any,
    /// At an address that peers cannot guess.
    Random,
}

/// Memory of this process. It is page aligned, and zeroed when it is made.
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
    pub(crate) fn new(len: usize, _huge: HugePages, _place: Place) -> Result<Self, PoolError> {
        let none = |kind: io::ErrorKind| PoolError::Map { len, source: kind.into() };
        let layout = Layout::from_size_align(len, page()).ok().filter(|layout| layout.size() > 0);
        let layout = layout.ok_or_else(|| none(io::ErrorKind::InvalidInput))?;
        // SAFETY: the layout has bytes (R8).
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) });
        let ptr = ptr.ok_or_else(|| none(io::ErrorKind::OutOfMemory))?;
        Ok(Mapping { ptr, layout })
    }

    /// Fails: this system has no memory that peers can write to.
    pub(crate) fn shared(_len: usize, _huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        Err(unsupported())
    }

    /// Fails: this system has no memory that peers can read.
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

    /// Does nothing: memory comes from any node.
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

/// The error of what Linux alone has.
pub(super) fn unsupported() -> io::Error {
    let what = "memory is shared between processes on Linux only";
    io::Error::new(io::ErrorKind::Unsupported, what)
}
