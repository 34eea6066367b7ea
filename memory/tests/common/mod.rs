//! A registrar that keeps books.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use tonic_rdma_memory::{
    Access, MIN_POOL, Memory, Pool, PoolConfig, RegisterError, Registrar, Registration, Use,
};

/// A registration in the books.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) start: usize,
    /// The address of `start` for the holder of a key.
    pub(crate) iova: u64,
    pub(crate) len: usize,
    pub(crate) access: Access,
}

#[derive(Debug, Default)]
struct Books {
    live: BTreeMap<u32, Entry>,
    every_key: HashSet<u32>,
    most: usize,
    /// Registering fails when more than this many bytes would be registered, as RLIMIT_MEMLOCK has
    /// it.
    limit: Option<usize>,
    next: u32,
}

/// Writes down what is registered. Panics on what must never happen; checks at the end of each
/// registration that its memory is still mapped.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    books: Mutex<Books>,
    fails: AtomicBool,
    /// Panicking in Drop would hide the cause: breaches are counted.
    breaches: AtomicUsize,
}

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on registering fails, or works again.
    pub(crate) fn fail(&self, fails: bool) {
        self.fails.store(fails, SeqCst);
    }

    pub(crate) fn limit(&self, bytes: usize) {
        self.books().limit = Some(bytes);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.books().live.values().map(|e| e.len).sum()
    }

    pub(crate) fn most(&self) -> usize {
        self.books().most
    }

    pub(crate) fn bytes_of(&self, access: Access) -> usize {
        self.books().live.values().filter(|e| e.access == access).map(|e| e.len).sum()
    }

    /// What a key stands for, if it works.
    pub(crate) fn entry(&self, key: u32) -> Option<Entry> {
        self.books().live.get(&key).copied()
    }

    /// Whether a live registration with the key covers the range, which is named as work requests
    /// do.
    pub(crate) fn covers(&self, key: u32, iova: u64, len: usize) -> bool {
        self.entry(key).is_some_and(|e| {
            iova.checked_sub(e.iova).is_some_and(|at| at + len as u64 <= e.len as u64)
        })
    }

    /// Where the device puts what is written with the key to this address.
    pub(crate) fn place(&self, key: u32, iova: u64) -> *mut u8 {
        let entry = self.entry(key).expect("the key works");
        std::ptr::with_exposed_provenance_mut(
            entry.start + usize::try_from(iova - entry.iova).unwrap(),
        )
    }

    pub(crate) fn registrations(&self) -> usize {
        self.books().every_key.len()
    }

    /// Nothing is registered any more, and nothing ever went wrong.
    pub(crate) fn assert_settled(&self) {
        let live = self.books().live.clone();
        assert_eq!(live, BTreeMap::new());
        self.assert_clean();
    }

    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.breaches.load(SeqCst), 0, "memory was unmapped while it was registered");
    }
}

/// The handle that the pool gets.
pub(crate) struct Keeper(pub(crate) Arc<Ledger>);

struct Kept {
    key: u32,
    iova: u64,
    ledger: Arc<Ledger>,
}

impl Registration for Kept {
    fn lkey(&self) -> u32 {
        self.key
    }
    // Told apart from the lkey, so that a mix-up shows.
    fn rkey(&self) -> u32 {
        self.key | RKEY
    }
    fn iova(&self) -> u64 {
        self.iova
    }
}

const RKEY: u32 = 1 << 31;

/// Added to the virtual address where peers write: mixed up, the two do not work.
const IOVA: u64 = 1 << 60;

/// The lkey of the registration that an rkey belongs to.
pub(crate) fn of_rkey(rkey: u32) -> u32 {
    assert_eq!(rkey & RKEY, RKEY, "not an rkey");
    rkey & !RKEY
}

impl Drop for Kept {
    fn drop(&mut self) {
        let entry = self.ledger.books().live.remove(&self.key);
        if !entry.is_some_and(is_mapped) {
            self.ledger.breaches.fetch_add(1, SeqCst);
        }
    }
}

/// madvise(2) fails with ENOMEM on ranges that are not mapped throughout.
fn is_mapped(entry: Entry) -> bool {
    // SAFETY: MADV_WILLNEED changes nothing, and the kernel checks the range.
    unsafe { libc::madvise(entry.start as *mut libc::c_void, entry.len, libc::MADV_WILLNEED) == 0 }
}

// SAFETY: no device knows the keys.
unsafe impl Registrar for Keeper {
    fn pins(&self) -> bool {
        false
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        let Memory { addr, len, access, .. } = memory;
        let refused = || RegisterError::new(len, io::Error::from_raw_os_error(libc::ENOMEM));
        if self.0.fails.load(SeqCst) {
            return Err(refused());
        }
        let mut books = self.0.books();
        let start = addr.as_ptr().expose_provenance();
        let iova = start as u64 + if access == Access::RemoteWrite { IOVA } else { 0 };
        let entry = Entry { start, iova, len, access };
        let total = books.live.values().map(|e| e.len).sum::<usize>() + len;
        if books.limit.is_some_and(|limit| total > limit) {
            return Err(refused());
        }
        let overlap = books
            .live
            .values()
            .any(|e| e.start < entry.start + len && entry.start < e.start + e.len);
        if overlap || !is_mapped(entry) {
            self.0.breaches.fetch_add(1, SeqCst);
        }
        books.most = books.most.max(total);
        books.next += 1;
        let key = books.next;
        books.every_key.insert(key);
        books.live.insert(key, entry);
        Ok(Box::new(Kept { key, iova, ledger: self.0.clone() }))
    }
}

pub(crate) fn pool(config: PoolConfig) -> (Pool, Arc<Ledger>) {
    let ledger = Arc::new(Ledger::default());
    let pool = Pool::new(config, Arc::new(Keeper(ledger.clone()))).unwrap();
    // The limit of the system is the whole: parts must fit into it at every moment.
    ledger.limit(pool.config().total);
    (pool, ledger)
}

/// The smallest pool: 512 KiB for sending, 1 MiB for landing, 512 KiB for control.
pub(crate) fn small() -> (Pool, Arc<Ledger>) {
    pool(PoolConfig::default().total(MIN_POOL))
}

/// Everything has come back.
pub(crate) fn assert_unused(pool: &Pool) {
    let stats = pool.stats();
    assert_eq!(stats.in_use_bytes(), 0, "{stats:?}");
    assert_eq!(stats.classes.iter().map(|c| c.in_use).sum::<usize>(), 0, "{stats:?}");
}

/// No part is above its budget, and the pool's figures are those of the books.
pub(crate) fn assert_budgets(pool: &Pool, ledger: &Ledger) {
    let (sizes, stats) = (pool.config(), pool.stats());
    assert_eq!(stats.registered, ledger.bytes());
    assert_eq!(stats.leased, ledger.bytes_of(Access::RemoteWrite));
    assert_eq!(stats.registrations, ledger.registrations() as u64);
    assert_eq!(stats.high_water, ledger.most());
    assert!(stats.leased <= sizes.landing, "{stats:?}");
    assert!(ledger.bytes_of(Access::Local) <= sizes.send + sizes.control, "{stats:?}");
    assert!(stats.send <= sizes.send && stats.control <= sizes.control, "{stats:?}");
    assert!(stats.granted + stats.filled <= stats.leased, "{stats:?}");
    assert!(ledger.most() <= sizes.total);
}

pub(crate) fn usage(error: &tonic_rdma_memory::PoolError) -> Option<Use> {
    match error {
        tonic_rdma_memory::PoolError::Exhausted { usage, .. } => Some(*usage),
        _ => None,
    }
}

/// A waker that counts.
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
