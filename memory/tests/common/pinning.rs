//! A registrar that pins memory, and RLIMIT_MEMLOCK of this process.

use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};
use std::{io, thread};

use tonic_rdma_memory::{
    Access, HeapRegistrar, Memlock, Memory, RegisterError, Registrar, Registration,
};

/// A registrar that pins memory and applies the limit to every process, as Soft-iWARP does. It pins
/// with direct system calls, because the sanitizers make libc's functions do nothing.
#[derive(Default)]
pub(crate) struct Pinning {
    heap: HeapRegistrar,
    slow: bool,
    /// The number of attempts to register landing memory.
    pub(crate) tried: AtomicUsize,
    /// Whether landing memory is refused, regardless of the limit.
    pub(crate) refuses: AtomicBool,
    /// If true, the next registration of landing memory is refused, and the limit is lowered to the
    /// bytes that are pinned now, as if another pool had been faster.
    pub(crate) is_late: AtomicBool,
    /// Registrations of landing memory wait while a test holds this lock.
    pub(crate) gate: Mutex<()>,
}

impl Pinning {
    pub(crate) fn new(slow: bool) -> Self {
        Pinning { slow, ..Pinning::default() }
    }
}

struct Pinned {
    /// This field is dropped after the memory has been unpinned.
    registration: Box<dyn Registration>,
    addr: usize,
    len: usize,
}

impl Registration for Pinned {
    fn lkey(&self) -> u32 {
        self.registration.lkey()
    }
    fn rkey(&self) -> u32 {
        self.registration.rkey()
    }
    fn iova(&self) -> u64 {
        self.registration.iova()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the range is mapped until the registration is dropped; munlock accesses no
        // contents.
        assert_eq!(unsafe { libc::syscall(libc::SYS_munlock, self.addr, self.len) }, 0);
    }
}

// SAFETY: as HeapRegistrar.
unsafe impl Registrar for Pinning {
    fn pins(&self) -> bool {
        true
    }
    fn ignores_ipc_lock(&self) -> bool {
        true
    }
    fn is_slow(&self) -> bool {
        self.slow
    }
    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let (addr, len) = (memory.addr.as_ptr() as usize, memory.len);
        let refused = || RegisterError::new(len, io::Error::from_raw_os_error(libc::ENOMEM));
        if memory.access == Access::RemoteWrite {
            drop(self.gate.lock().unwrap());
            self.tried.fetch_add(1, SeqCst);
            if self.is_late.swap(false, SeqCst) {
                leave(0);
                return Err(refused());
            }
            if self.refuses.load(SeqCst) {
                return Err(refused());
            }
        }
        if Memlock::read().unwrap().available(true).unwrap() < len as u64 {
            return Err(refused());
        }
        // SAFETY: the caller guarantees that the range is mapped; mlock accesses no contents.
        assert_eq!(unsafe { libc::syscall(libc::SYS_mlock, addr, len) }, 0);
        // SAFETY: the caller's guarantee.
        let registration = unsafe { self.heap.register(memory) }?;
        Ok(Box::new(Pinned { registration, addr, len }))
    }
}

pub(crate) fn limit(soft: u64, hard: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: limit is a valid rlimit.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) };
    assert_eq!(result, 0, "needs a hard limit of 8 MiB or more");
}

/// Sets the soft limit so that `bytes` more bytes can be pinned.
pub(crate) fn leave(bytes: usize) {
    let limits = Memlock::read().unwrap();
    limit(limits.pinned + bytes as u64, limits.hard.unwrap());
}

/// Waits until `holds` returns true, for example after a job of the landing thread.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        thread::yield_now();
    }
}
