//! A registrar that records all registrations and checks them.

#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod pinning;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use tonic_rdma_memory::{
    Access, MIN_POOL, Memory, Pool, PoolConfig, RegisterError, Registrar, Registration, Use,
};

/// A recorded registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) start: usize,
    /// The address of `start` in work requests with the key.
    pub(crate) iova: u64,
    pub(crate) len: usize,
    pub(crate) access: Access,
}

#[derive(Debug, Default)]
struct Records {
    live: BTreeMap<u32, Entry>,
    every_key: HashSet<u32>,
    most: usize,
    /// Registering fails if more than this many bytes would be registered, as with RLIMIT_MEMLOCK.
    limit: Option<usize>,
    next: u32,
}

/// Records registrations, and counts broken invariants: registrations that overlap, and memory that
/// is not mapped at the beginning or at the end of its registration.
#[derive(Debug, Default)]
pub(crate) struct RecordingRegistrar {
    records: Mutex<Records>,
    fails: AtomicBool,
    slow: AtomicBool,
    /// The number of broken invariants. They are counted, because a panic in Drop would hide the
    /// cause.
    violations: AtomicUsize,
}

impl RecordingRegistrar {
    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes registrations fail from now on, or succeed again.
    pub(crate) fn fail(&self, fails: bool) {
        self.fails.store(fails, SeqCst);
    }

    /// Makes the registrar slow, so that the landing thread makes and frees landing memory.
    pub(crate) fn slow(&self) {
        self.slow.store(true, SeqCst);
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.slow.load(SeqCst)
    }

    pub(crate) fn limit(&self, bytes: usize) {
        self.records().limit = Some(bytes);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.records().live.values().map(|e| e.len).sum()
    }

    pub(crate) fn most(&self) -> usize {
        self.records().most
    }

    pub(crate) fn bytes_of(&self, access: Access) -> usize {
        self.records().live.values().filter(|e| e.access == access).map(|e| e.len).sum()
    }

    /// The registration of a key, if it is live.
    pub(crate) fn entry(&self, key: u32) -> Option<Entry> {
        self.records().live.get(&key).copied()
    }

    /// Whether a live registration with the key covers the range, given by its address in work
    /// requests.
    pub(crate) fn covers(&self, key: u32, iova: u64, len: usize) -> bool {
        self.entry(key).is_some_and(|e| {
            iova.checked_sub(e.iova).is_some_and(|at| at + len as u64 <= e.len as u64)
        })
    }

    /// The local address to which the device translates the address `iova` under this key.
    pub(crate) fn place(&self, key: u32, iova: u64) -> *mut u8 {
        let entry = self.entry(key).expect("the key works");
        std::ptr::with_exposed_provenance_mut(
            entry.start + usize::try_from(iova - entry.iova).unwrap(),
        )
    }

    pub(crate) fn registrations(&self) -> usize {
        self.records().every_key.len()
    }

    /// Asserts that nothing is registered any longer and no invariant was broken.
    pub(crate) fn assert_settled(&self) {
        let live = self.records().live.clone();
        assert_eq!(live, BTreeMap::new());
        self.assert_clean();
    }

    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.violations.load(SeqCst), 0, "memory was unmapped while it was registered");
    }
}

/// The registrar that the pool gets.
pub(crate) struct Keeper(pub(crate) Arc<RecordingRegistrar>);

struct Kept {
    key: u32,
    iova: u64,
    registrar: Arc<RecordingRegistrar>,
}

impl Registration for Kept {
    fn lkey(&self) -> u32 {
        self.key
    }
    // Differs from the lkey, so that a mix-up is detected.
    fn rkey(&self) -> u32 {
        self.key | RKEY
    }
    fn iova(&self) -> u64 {
        self.iova
    }
}

pub(crate) const RKEY: u32 = 1 << 31;

/// The difference between iova and virtual address, so that a mix-up is detected.
const IOVA: u64 = 1 << 60;

/// The lkey of the registration with this rkey.
pub(crate) fn of_rkey(rkey: u32) -> u32 {
    assert_eq!(rkey & RKEY, RKEY, "not an rkey");
    rkey & !RKEY
}

impl Drop for Kept {
    fn drop(&mut self) {
        let entry = self.registrar.records().live.remove(&self.key);
        if !entry.is_some_and(is_mapped) {
            self.registrar.violations.fetch_add(1, SeqCst);
        }
    }
}

/// The size of a page in bytes.
pub(crate) fn page() -> usize {
    // SAFETY: sysconf takes no pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

/// Whether all of the range is mapped. Otherwise madvise(2) fails with ENOMEM.
fn is_mapped(entry: Entry) -> bool {
    let in_page = entry.start % page();
    let (start, len) = (entry.start - in_page, entry.len + in_page);
    // SAFETY: MADV_WILLNEED changes nothing, and the kernel checks the range.
    unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_WILLNEED) == 0 }
}

// SAFETY: no device knows the keys.
unsafe impl Registrar for Keeper {
    fn pins(&self) -> bool {
        false
    }

    fn is_slow(&self) -> bool {
        self.0.is_slow()
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let refused = || RegisterError::new(len, io::Error::from_raw_os_error(libc::ENOMEM));
        if self.0.fails.load(SeqCst) {
            return Err(refused());
        }
        let mut records = self.0.records();
        let start = addr.as_ptr().expose_provenance();
        let iova = start as u64 + if access == Access::RemoteWrite { IOVA } else { 0 };
        let entry = Entry { start, iova, len, access };
        let total = records.live.values().map(|e| e.len).sum::<usize>() + len;
        if records.limit.is_some_and(|limit| total > limit) {
            return Err(refused());
        }
        let overlap = records
            .live
            .values()
            .any(|e| e.start < entry.start + len && entry.start < e.start + e.len);
        if overlap || !is_mapped(entry) {
            self.0.violations.fetch_add(1, SeqCst);
        }
        records.most = records.most.max(total);
        records.next += 1;
        let key = records.next;
        records.every_key.insert(key);
        records.live.insert(key, entry);
        Ok(Box::new(Kept { key, iova, registrar: self.0.clone() }))
    }
}

pub(crate) fn pool(config: PoolConfig) -> (Pool, Arc<RecordingRegistrar>) {
    let registrar = Arc::new(RecordingRegistrar::default());
    let pool = Pool::new(config, Arc::new(Keeper(registrar.clone()))).unwrap();
    // The limit on registered bytes is the pool's total, so all parts together must fit at every
    // moment.
    registrar.limit(pool.config().total);
    (pool, registrar)
}

/// The smallest pool: 512 KiB for sending, 1 MiB for landing, 512 KiB for control.
pub(crate) fn small() -> (Pool, Arc<RecordingRegistrar>) {
    pool(PoolConfig::default().total(MIN_POOL))
}

/// Asserts that all memory has been returned.
pub(crate) fn assert_unused(pool: &Pool) {
    let stats = pool.stats();
    assert_eq!(stats.in_use_bytes(), 0, "{stats:?}");
    assert_eq!(stats.classes.iter().map(|c| c.in_use).sum::<usize>(), 0, "{stats:?}");
}

/// Asserts that no use exceeds its budget, and that the pool's figures agree with the records.
pub(crate) fn assert_budgets(pool: &Pool, registrar: &RecordingRegistrar) {
    let (sizes, stats) = (pool.config(), pool.stats());
    assert_eq!(stats.registered, registrar.bytes());
    assert_eq!(stats.leased, registrar.bytes_of(Access::RemoteWrite));
    assert_eq!(stats.registrations, registrar.registrations() as u64);
    assert_eq!(stats.high_water, registrar.most());
    assert!(stats.leased <= sizes.landing, "{stats:?}");
    assert!(registrar.bytes_of(Access::Local) <= sizes.send + sizes.control, "{stats:?}");
    assert!(stats.send <= sizes.send && stats.control <= sizes.control, "{stats:?}");
    assert!(stats.granted + stats.filled <= stats.leased, "{stats:?}");
    assert!(registrar.most() <= sizes.total);
}

pub(crate) fn usage(error: &tonic_rdma_memory::PoolError) -> Option<Use> {
    match error {
        tonic_rdma_memory::PoolError::Exhausted { usage, .. } => Some(*usage),
        _ => None,
    }
}

/// A waker that counts its calls.
#[derive(Debug, Default)]
pub(crate) struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Woken {
    pub(crate) fn new() -> (Arc<Woken>, Waker) {
        let woken = Arc::new(Woken::default());
        (woken.clone(), Waker::from(woken))
    }
    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }
}
