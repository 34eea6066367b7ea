//! Memory that peers write to.
//!
//! A chunk is a region of its own. It is leased to one connection's account, with a registration made for that lease:
//! a key that an earlier peer had is worth nothing (R12). Pieces are cut from it in granules of 4 KiB:
//!
//! | from | to | by |
//! |---|---|---|
//! | free | granted | [`Landing::alloc`]: only the account's owner takes |
//! | granted | filled | [`LandingBuf::filled`], after DONE |
//! | granted | free | drop of the [`LandingBuf`], after ABORT or with the queue pair gone (R9) |
//! | filled | free | drop of the last `Bytes` over it, by anyone, on any thread |
//!
//! A granule's bit in the chunk's map is set from granted until free. Setting is the owner's alone, so a piece once seen
//! free stays free until it is taken; clearing is an atomic and-not, so freeing takes no lock.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use bytes::Bytes;

use crate::error::{PoolError, RegisterError};
use crate::pool::Shared;
use crate::region::{Mapping, PAGE, Region};
use crate::registrar::Access;
use crate::stats::Use;

const GRANULE: usize = PAGE;

/// A leased region and the map of its granules.
#[derive(Debug)]
struct Chunk {
    /// Always there until the chunk is dropped.
    region: Option<Region>,
    map: Box<[AtomicU64]>,
    granules: usize,
    shared: Arc<Shared>,
    account: Arc<Account>,
}

/// What of an account outlives its owner: pieces wake it when they come free.
#[derive(Debug, Default)]
struct Account {
    /// It found no memory and waits.
    wanting: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Account {
    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// All accounts of a pool, and mappings for the next lease.
#[derive(Debug, Default)]
pub(crate) struct Landings {
    accounts: Mutex<Vec<Weak<Account>>>,
    /// Accounts that wait.
    wanting: AtomicUsize,
    idle: Mutex<Vec<Mapping>>,
}

impl Landings {
    fn accounts(&self) -> MutexGuard<'_, Vec<Weak<Account>>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those that wait, because memory came free, or all, because someone waits.
    fn wake(&self, only_wanting: bool) {
        let accounts: Vec<Arc<Account>> = self.accounts().iter().filter_map(Weak::upgrade).collect();
        for account in accounts {
            if !only_wanting || account.wanting.load(Ordering::SeqCst) {
                account.wake();
            }
        }
    }

    /// Memory has come free somewhere.
    fn freed(&self) {
        if self.wanting.load(Ordering::SeqCst) > 0 {
            self.wake(true);
        }
    }
}

/// One connection's account of landing memory.
///
/// It leases chunks as it needs them and keeps them until [`trim`](Landing::trim), or until it and the last piece are
/// dropped.
#[derive(Debug)]
pub struct Landing {
    shared: Arc<Shared>,
    account: Arc<Account>,
    chunks: Vec<Arc<Chunk>>,
}

impl Landing {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let account = Arc::new(Account::default());
        shared.landings.accounts().push(Arc::downgrade(&account));
        Landing { shared, account, chunks: Vec::new() }
    }

    /// One contiguous piece of at most `want` bytes and at least `min`, both rounded up to 4 KiB. Leases another chunk
    /// while the landing budget allows; a `want` longer than a chunk gets a chunk of its own if the budget has it.
    ///
    /// None: there is no such piece now. The waker given to [`Landing::register_waker`] is woken when memory comes free
    /// in the pool, and other accounts are told through [`Landing::wanted_elsewhere`].
    ///
    /// # Errors
    /// Another chunk was needed, the budget had it, and it could not be mapped or registered. What the account has stays.
    pub fn alloc(&mut self, want: usize, min: usize) -> Result<Option<LandingBuf>, RegisterError> {
        if let Some(piece) = self.take(want, min) {
            self.set_wanting(false);
            return Ok(Some(piece));
        }
        // Told before the last look: whoever frees from now on wakes this account.
        let first = self.set_wanting(true);
        if let Some(piece) = self.take(want, min) {
            self.set_wanting(false);
            return Ok(Some(piece));
        }
        match self.lease(want, min) {
            Ok(true) => {}
            Ok(false) => {
                if first {
                    self.shared.landings.wake(false);
                }
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        let piece = self.take(want, min);
        if piece.is_some() {
            self.set_wanting(false);
        }
        Ok(piece)
    }

    /// The whole piece if any chunk has it or a chunk can be leased for it; else the longest there is.
    fn take(&mut self, want: usize, min: usize) -> Option<LandingBuf> {
        let granules = want.div_ceil(GRANULE).max(1);
        for chunk in &self.chunks {
            if let Some(start) = chunk.find(granules) {
                return Some(LandingBuf::new(chunk, start, granules));
            }
        }
        if self.can_lease(want) {
            return None;
        }
        let longest = self.chunks.iter().filter_map(|c| c.longest().map(|run| (c, run)));
        let (chunk, (start, len)) = longest.max_by_key(|(_, (_, len))| *len)?;
        (len * GRANULE >= min.max(1)).then(|| LandingBuf::new(chunk, start, len))
    }

    fn lease_len(&self, want: usize) -> usize {
        want.checked_next_multiple_of(GRANULE).unwrap_or(usize::MAX).max(self.shared.sizes.chunk)
    }

    fn budget_left(&self) -> usize {
        let used = self.shared.budgets.of(Use::Landing).load(Ordering::Relaxed);
        self.shared.sizes.landing.saturating_sub(used)
    }

    fn can_lease(&self, want: usize) -> bool {
        self.lease_len(want) <= self.budget_left()
    }

    /// Leases a chunk for `want`, or for as much of it as the budget has left.
    fn lease(&mut self, want: usize, min: usize) -> Result<bool, RegisterError> {
        let shared = &self.shared;
        let left = self.budget_left();
        let len = self.lease_len(want).min(left - left % GRANULE);
        if len < min.max(GRANULE) || !shared.budgets.take(Use::Landing, len, shared.sizes.landing) {
            return Ok(false);
        }
        match Chunk::new(shared, &self.account, len) {
            Ok(chunk) => {
                self.chunks.push(Arc::new(chunk));
                Ok(true)
            }
            Err(error) => {
                shared.budgets.give(Use::Landing, len);
                Err(error)
            }
        }
    }

    /// Returns whether it is a change.
    fn set_wanting(&self, wanting: bool) -> bool {
        let changed = self.account.wanting.swap(wanting, Ordering::SeqCst) != wanting;
        if changed {
            let count = &self.shared.landings.wanting;
            if wanting {
                count.fetch_add(1, Ordering::SeqCst)
            } else {
                count.fetch_sub(1, Ordering::SeqCst)
            };
        }
        changed
    }

    /// The task to wake: when memory comes free after [`alloc`](Landing::alloc) had none, and when another account begins
    /// to wait. Kept until it is replaced.
    pub fn register_waker(&mut self, waker: &Waker) {
        let mut kept = self.account.waker.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *kept {
            Some(kept) => kept.clone_from(waker),
            None => *kept = Some(waker.clone()),
        }
    }

    /// Gives chunks without granted or filled pieces back to the pool, deregistered. Returns their bytes.
    pub fn trim(&mut self) -> usize {
        let mut bytes = 0;
        self.chunks.retain(|chunk| {
            let idle = chunk.is_free();
            bytes += if idle { chunk.granules * GRANULE } else { 0 };
            !idle
        });
        bytes
    }

    /// Whether another account waits for memory: what is idle here should go back.
    pub fn wanted_elsewhere(&self) -> bool {
        let own = usize::from(self.account.wanting.load(Ordering::SeqCst));
        self.shared.landings.wanting.load(Ordering::SeqCst) > own
    }

    /// Whether less than a quarter of the pool's landing budget is free: what lands should be copied out, so that
    /// readers that hold on to it do not starve the rest.
    pub fn under_pressure(&self) -> bool {
        let counters = &self.shared.counters;
        let used = counters.granted.load(Ordering::Relaxed) + counters.filled.load(Ordering::Relaxed);
        used > self.shared.sizes.landing / 4 * 3
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.set_wanting(false);
        let me = Arc::as_ptr(&self.account);
        self.shared.landings.accounts().retain(|account| account.as_ptr() != me);
    }
}

impl Chunk {
    /// Maps, or takes a mapping that came back, and registers it for this lease. The budget has been taken.
    fn new(shared: &Arc<Shared>, account: &Arc<Account>, len: usize) -> Result<Self, RegisterError> {
        let kept = {
            let mut idle = shared.landings.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.iter().position(|m| m.len() == len).map(|at| idle.swap_remove(at))
        };
        let mapping = match kept {
            Some(mapping) => mapping,
            None => Mapping::new(len, shared.sizes.huge_pages).map_err(|error| match error {
                PoolError::Map { len, source } => RegisterError::new(len, source),
                other => RegisterError::new(len, std::io::Error::other(other)),
            })?,
        };
        let region =
            Region::new(mapping, &*shared.registrar, Access::RemoteWrite).map_err(|(error, _)| error)?;
        shared.counters.registrations.fetch_add(1, Ordering::Relaxed);
        shared.index.insert(&region);
        let granules = len / GRANULE;
        let map: Box<[AtomicU64]> = (0..granules.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        if !granules.is_multiple_of(64)
            && let Some(last) = map.last()
        {
            // Granules past the end are taken for ever.
            last.store(u64::MAX << (granules % 64), Ordering::Relaxed);
        }
        Ok(Chunk { region: Some(region), map, granules, shared: shared.clone(), account: account.clone() })
    }

    fn is_set(&self, granule: usize) -> bool {
        // Acquire: what the last reader did to the memory is over.
        self.map[granule / 64].load(Ordering::Acquire) >> (granule % 64) & 1 == 1
    }

    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.granules {
                // Whole words that are taken are passed over at once.
                if at % 64 == 0 && self.map[at / 64].load(Ordering::Acquire) == u64::MAX {
                    at += 64;
                } else if self.is_set(at) {
                    at += 1;
                } else {
                    let start = at;
                    while at < self.granules && !self.is_set(at) {
                        at += 1;
                    }
                    return Some((start, at - start));
                }
            }
            None
        })
    }

    fn find(&self, granules: usize) -> Option<usize> {
        self.runs().find(|(_, len)| *len >= granules).map(|(start, _)| start)
    }

    fn longest(&self) -> Option<(usize, usize)> {
        self.runs().max_by_key(|(_, len)| *len)
    }

    fn is_free(&self) -> bool {
        self.runs().next() == Some((0, self.granules))
    }

    fn mark(&self, start: usize, len: usize, taken: bool) {
        let end = start + len;
        let mut at = start;
        while at < end {
            let bit = at % 64;
            let count = (64 - bit).min(end - at);
            let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << bit };
            let word = &self.map[at / 64];
            if taken {
                let before = word.fetch_or(mask, Ordering::AcqRel);
                debug_assert_eq!(before & mask, 0, "a granule was granted twice");
            } else {
                let before = word.fetch_and(!mask, Ordering::AcqRel);
                debug_assert_eq!(before & mask, mask, "a granule was freed twice");
            }
            at += count;
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let Some(region) = self.region.take() else { return };
        let shared = &self.shared;
        shared.index.remove(&region);
        let mapping = region.deregister();
        let len = mapping.len();
        if len == shared.sizes.chunk {
            shared.landings.idle.lock().unwrap_or_else(PoisonError::into_inner).push(mapping);
        }
        shared.budgets.give(Use::Landing, len);
        shared.landings.freed();
    }
}

/// A piece of landing memory that has been granted, or is about to be: a peer may write to it, nobody may read it.
///
/// Drop it only when nothing can write to it any more: after ABORT, or when the queue pair has been destroyed (R9).
#[derive(Debug)]
pub struct LandingBuf {
    piece: Piece,
}

/// A taken run of granules.
#[derive(Debug)]
struct Piece {
    chunk: Arc<Chunk>,
    start: usize,
    granules: usize,
    filled: bool,
}

impl Piece {
    fn bytes(&self) -> usize {
        self.granules * GRANULE
    }

    fn addr(&self) -> usize {
        self.chunk.region.as_ref().map_or(0, |region| region.start() + self.start * GRANULE)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let shared = &self.chunk.shared;
        let counter = if self.filled { &shared.counters.filled } else { &shared.counters.granted };
        counter.fetch_sub(self.bytes(), Ordering::Relaxed);
        self.chunk.mark(self.start, self.granules, false);
        if self.chunk.account.wanting.load(Ordering::SeqCst) {
            self.chunk.account.wake();
        } else {
            // A chunk that has become idle may be what others wait for.
            if shared.landings.wanting.load(Ordering::SeqCst) > 0 {
                self.chunk.account.wake();
            }
        }
    }
}

impl LandingBuf {
    fn new(chunk: &Arc<Chunk>, start: usize, granules: usize) -> Self {
        chunk.mark(start, granules, true);
        let piece = Piece { chunk: chunk.clone(), start, granules, filled: false };
        chunk.shared.counters.granted.fetch_add(piece.bytes(), Ordering::Relaxed);
        LandingBuf { piece }
    }

    /// The address, as a peer's WRITE names it.
    pub fn addr(&self) -> u64 {
        self.piece.addr() as u64
    }

    /// The remote key.
    pub fn rkey(&self) -> u32 {
        self.piece.chunk.region.as_ref().map_or(0, Region::rkey)
    }

    /// Bytes.
    pub fn capacity(&self) -> usize {
        self.piece.bytes()
    }

    /// The peer has written the first `len` bytes, and said DONE: they can be read. At most the capacity counts. The
    /// memory returns when the last `Bytes` over it is dropped.
    pub fn filled(self, len: usize) -> Bytes {
        let LandingBuf { mut piece } = self;
        piece.filled = true;
        let counters = &piece.chunk.shared.counters;
        counters.granted.fetch_sub(piece.bytes(), Ordering::Relaxed);
        counters.filled.fetch_add(piece.bytes(), Ordering::Relaxed);
        let len = len.min(piece.bytes());
        if len == 0 { Bytes::new() } else { Bytes::from_owner(Filled { piece, len }) }
    }
}

/// Landed bytes.
struct Filled {
    piece: Piece,
    len: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        match &self.piece.chunk.region {
            // SAFETY: the piece lies within the region and belongs to this value since DONE (R4, R8); the mapping was
            // zeroed when it was made, so all of it is initialized.
            Some(region) => unsafe {
                std::slice::from_raw_parts(region.ptr().as_ptr().add(self.piece.start * GRANULE), self.len)
            },
            None => &[],
        }
    }
}
