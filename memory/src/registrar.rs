//! The interface to devices: registering memory.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::RegisterError;
use crate::file::OwnedFd;

/// The access that a device, and through it a peer, has to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device may read the memory for work requests of this side. Nobody may write to the
    /// memory, so the mapping may be read-only.
    LocalRead,
    /// The device may read and write the memory for work requests of this side.
    Local,
    /// Like [`Access::Local`], and peers that have the rkey may also write to the memory.
    RemoteWrite,
    /// Like [`Access::RemoteWrite`], but for the peers of several connections, one after the other.
    /// The pool requests this access only if the registrar [wants a file](Registrar::wants_file).
    RemoteWriteInTurn,
    /// Like [`Access::LocalRead`], and peers that have the rkey may map the file and read it. The
    /// pool requests this access only if the registrar [lends](Registrar::lend_scope) it.
    Lend,
}

/// The memory that a device lends to peers, which map its file and read the memory there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LendScope {
    /// No memory.
    Nothing,
    /// Memory that was [registered for lending](crate::Pool::register_lendable).
    Registered,
    /// The same, and send memory that is [for a peer](crate::Pool::for_peer).
    All,
}

/// Memory to register.
#[derive(Debug)]
pub struct Memory {
    /// The first byte.
    pub addr: NonNull<u8>,
    /// The length in bytes.
    pub len: usize,
    /// The access to allow.
    pub access: Access,
    /// The file that the memory maps, from the first byte of the file. The file is given for
    /// [`Access::Lend`], and for the other accesses of peers if the registrar [wants a
    /// file](Registrar::wants_file).
    pub file: Option<OwnedFd>,
}

/// Registers memory with one device. Implemented by fabrics. A registrar outlives its
/// registrations.
///
/// # Safety
/// The keys of a registration must stop working when the registration is dropped, because the pool
/// then unmaps the memory or leases it to another peer.
pub unsafe trait Registrar: Send + Sync + 'static {
    /// Whether registering pins pages, so that RLIMIT_MEMLOCK applies to it.
    fn pins(&self) -> bool;

    /// True if the device applies RLIMIT_MEMLOCK even to processes with CAP_IPC_LOCK, as Soft-iWARP
    /// does.
    fn ignores_ipc_lock(&self) -> bool {
        false
    }

    /// The number of bytes that the queues of one connection pin in addition to its memory. These
    /// bytes count against RLIMIT_MEMLOCK: adapter drivers pin the buffers of queue pairs and
    /// completion queues.
    fn queue_bytes(&self) -> usize {
        0
    }

    /// The NUMA node that the device is attached to, if the host has several nodes. The pool's
    /// memory is taken from this node while the node has free memory.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Whether peers address memory by its virtual address, and not by the requested iova, as on
    /// Soft-iWARP. If so, memory that peers write to is mapped at a random address, which they
    /// cannot guess. Has no effect on memory that is a [file](Registrar::wants_file).
    fn ignores_iova(&self) -> bool {
        false
    }

    /// Whether memory that peers write to must be a file that peers can map. Such a file is a memfd
    /// that can neither shrink nor grow.
    fn wants_file(&self) -> bool {
        false
    }

    /// The memory that is lent to peers.
    fn lend_scope(&self) -> LendScope {
        LendScope::Nothing
    }

    /// Whether mapping and registering memory takes so long that a runtime's task should not wait
    /// for this work. If so, a pool thread makes and frees landing memory: see
    /// [`Landing::register_waker`](crate::Landing::register_waker). Such a registrar must not
    /// expect to be called on a particular thread.
    fn is_slow(&self) -> bool {
        false
    }

    /// Registers memory. The caller may hold a lock of the pool, so this function must not use the
    /// pool.
    ///
    /// # Errors
    /// The device or the kernel refused to register the memory.
    ///
    /// # Safety
    /// The range is mapped and readable until the registration is dropped. The range is also
    /// writable, unless the access is [`Access::LocalRead`] or [`Access::Lend`].
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError>;
}

/// A registered range. Dropping this value deregisters the range. Like registration, the drop must
/// not use the pool.
pub trait Registration: Send + Sync {
    /// The key for work requests of this side.
    fn lkey(&self) -> u32;
    /// The key for peers.
    fn rkey(&self) -> u32;
    /// The address of the first byte in work requests with either key. For local access this
    /// address is the virtual address. For [`Access::RemoteWrite`] over a network, peers cannot
    /// guess this address.
    fn iova(&self) -> u64;
}

/// A registrar without a device, for pools of ordinary memory: for TCP and for tests. Every
/// registration gets a separate key.
#[derive(Debug, Default)]
pub struct HeapRegistrar {
    next_key: AtomicU32,
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

// SAFETY: the keys belong to no device, so they never work.
unsafe impl Registrar for HeapRegistrar {
    fn pins(&self) -> bool {
        false
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let addr = memory.addr.addr().get() as u64;
        Ok(Box::new(HeapRegistration { key: self.next_key.fetch_add(1, Ordering::Relaxed), addr }))
    }
}
