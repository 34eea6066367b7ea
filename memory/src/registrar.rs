//! Registering memory with a device.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::RegisterError;

/// What a device, and through it a peer, may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device may read and write it for this side's own work requests.
    Local,
    /// As [`Access::Local`], and peers that have the rkey may write to it.
    RemoteWrite,
}

/// Memory to be registered.
#[derive(Debug)]
pub struct Memory {
    /// The first byte.
    pub addr: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// What may be done with it.
    pub access: Access,
    /// The file that it is a mapping of, from its first byte: for [`Access::RemoteWrite`] when the
    /// registrar [wants one](Registrar::wants_file).
    pub file: Option<OwnedFd>,
}

/// Registers memory with one device. Implemented by fabrics. It outlives its registrations.
///
/// # Safety
/// The keys of a registration must stop working when it is dropped: the pool unmaps the memory, or
/// leases it to another peer, right after.
pub unsafe trait Registrar: Send + Sync + 'static {
    /// Whether registering pins pages, so that RLIMIT_MEMLOCK applies.
    fn pins(&self) -> bool;

    /// Whether the device applies RLIMIT_MEMLOCK to processes with CAP_IPC_LOCK too (Soft-iWARP
    /// does).
    fn ignores_ipc_lock(&self) -> bool {
        false
    }

    /// Whether peers name memory by its virtual address, whatever iova is asked for (Soft-iWARP).
    /// Then what peers write to is mapped at a random place, because a peer must not guess it. Of
    /// no consequence for memory that is a [file](Registrar::wants_file).
    fn ignores_iova(&self) -> bool {
        false
    }

    /// Whether memory that peers write to must be a file that they can map: a memfd that neither
    /// shrinks nor grows.
    fn wants_file(&self) -> bool {
        false
    }

    /// Registers memory. Called with a lock of the pool held: it must not use the pool.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Safety
    /// The range is mapped, readable and writable, and stays so until the registration is dropped.
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError>;
}

/// A registered range. Dropping it deregisters; as when registering, the pool must not be used
/// meanwhile.
pub trait Registration: Send + Sync {
    /// The key for this side's own work requests.
    fn lkey(&self) -> u32;
    /// The key for peers.
    fn rkey(&self) -> u32;
    /// The address of the first byte in work requests, with either key. For [`Access::RemoteWrite`]
    /// over a network peers cannot guess it; for [`Access::Local`] it is the virtual address.
    fn iova(&self) -> u64;
}

/// Registers nothing: a pool of ordinary memory, for TCP and for tests. Every registration gets a
/// key of its own.
#[derive(Debug, Default)]
pub struct HeapRegistrar {
    next: AtomicU32,
}

struct HeapRegistration {
    key: u32,
    addr: u64,
}

impl Registration for HeapRegistration {
    fn lkey(&self) -> u32 {
        self.key
    }
    fn rkey(&self) -> u32 {
        self.key
    }
    fn iova(&self) -> u64 {
        self.addr
    }
}

// SAFETY: no device knows the keys, so they never work.
unsafe impl Registrar for HeapRegistrar {
    fn pins(&self) -> bool {
        false
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let addr = memory.addr.addr().get() as u64;
        Ok(Box::new(HeapRegistration { key: self.next.fetch_add(1, Ordering::Relaxed), addr }))
    }
}
