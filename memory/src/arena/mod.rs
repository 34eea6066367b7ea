//! Arenas: mappings that are registered once and cut into slots.
//!
//! Each slot is either free, with its handle in a free list, or owned by exactly one [`SlotRef`].
//!
//! | a slot goes from | to | by |
//! |---|---|---|
//! | free | owned | `Arenas::take`, which pops its handle |
//! | owned | free | drop of the `SlotRef`, which pushes the handle back |
//!
//! A request above the largest size class gets a dedicated arena, which has one slot. While that
//! slot is free, the arena stays registered for the next request of about its length, until the
//! budget needs its bytes or the arena is trimmed.
//!
//! Lendable memory lies only in arenas for one peer ([`Arenas::for_peer`]), because a peer maps
//! whole arenas. All arenas share the budget and the queue of waiters.
//!
//! The free lists of the size classes are lock-free. Locks protect only the idle dedicated arenas,
//! the queue of waiters, and the making and removal of arenas.

mod peers;
#[cfg(test)]
mod tests;
mod wait_queue;

use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use slab::Slab;

pub(crate) use self::wait_queue::WaitQueue;
use crate::config::control_classes;
use crate::error::PoolError;
use crate::ledger::Ledger;
use crate::region::Region;
use crate::region::mapping::{MapPlace, Mapping};
use crate::region::page::{HUGE_PAGE, page};
use crate::registered::other_pools::FurtherRegistrations;
use crate::registrar::Access;
use crate::stats::{ClassStats, Use};

/// Slot sizes in bytes. Longer requests get dedicated arenas.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Minimum time between two trims, so that memory in regular use stays registered.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);

/// One registered mapping and its slots.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The arena's registration with an io_uring ring. The first attempt sets this field, to `None`
    /// if the attempt fails. The registration is dropped before the memory.
    #[cfg(all(feature = "io-uring", target_os = "linux"))]
    fixed: std::sync::OnceLock<Option<crate::disk::fixed::Fixed>>,
    /// Registrations with the devices of other pools. They are dropped before the memory.
    further: Arc<FurtherRegistrations>,
    region: Region,
    slot: usize,
    /// The number of slots in use. This number is only a hint. The handles decide whether the arena
    /// is in use.
    in_use: AtomicUsize,
}

/// The handle of a slot. It lies in a free list while the slot is free, and otherwise in the slot's
/// [`SlotRef`].
#[derive(Debug)]
struct ArenaSlot {
    arena: Arc<Arena>,
    index: usize,
}

#[derive(Debug)]
struct Class {
    slot: usize,
    free: SegQueue<ArenaSlot>,
    slots: AtomicUsize,
    in_use: AtomicUsize,
}

/// The one peer that a set of arenas serves, and to which these arenas may be lent.
#[derive(Debug)]
struct Peer {
    id: NonZeroU32,
    /// The pool's common arenas, which serve no particular peer and hold the queue of waiters.
    common: Arc<Arenas>,
}

/// All arenas for one use.
#[derive(Debug)]
pub(crate) struct Arenas {
    usage: Use,
    budget: usize,
    /// The size of a page in bytes. An arena consists of whole pages.
    page: usize,
    classes: Vec<Class>,
    /// The arenas of all size classes. The lock also serializes growth.
    arenas: Mutex<Slab<Arc<Arena>>>,
    /// The size of a new arena in bytes, unless its slots are longer.
    arena_bytes: usize,
    /// Free dedicated arenas. They stay registered for the next request of their size, because
    /// memory is never registered per message (R12). They are removed when the budget needs their
    /// bytes, or by a trim.
    idle: Mutex<Idle>,
    /// True after arenas have been removed, until the other pools of the process are notified.
    must_notify: AtomicBool,
    /// The waiters for a slot of these arenas or of a peer's arenas. Only send memory has waiters.
    waiters: WaitQueue<Arc<Arenas>, SlotRef>,
    /// The arenas for peers. Empty if these arenas are for a peer.
    peers: Mutex<Vec<Weak<Arenas>>>,
    next_peer: AtomicU32,
    /// The total size of the arenas for peers, in bytes.
    for_peers: AtomicUsize,
    /// The peer that these arenas serve, if any.
    peer: Option<Peer>,
    /// This field is the last, so that the registrar outlives the registrations.
    ledger: Arc<Ledger>,
}

/// Free dedicated arenas.
#[derive(Debug, Default)]
struct Idle {
    /// The arenas, each with the value of `trims` when it became idle.
    arenas: Vec<(ArenaSlot, u64)>,
    /// The number of trims so far.
    trims: u64,
    last_trim: Option<Instant>,
}

/// An owned slot.
#[derive(Debug)]
pub(crate) struct SlotRef {
    ptr: NonNull<u8>,
    len: usize,
    lkey: u32,
    /// `Some` until the slot is dropped.
    handle: Option<ArenaSlot>,
    /// `None` for a dedicated arena.
    class: Option<usize>,
    /// This field is the last, so that the arenas outlive the handle.
    arenas: Arc<Arenas>,
}

// SAFETY: a slot is plain memory, and owned by this value alone (R8).
unsafe impl Send for SlotRef {}
// SAFETY: `&SlotRef` gives no access to the memory, only its address (R8).
unsafe impl Sync for SlotRef {}

impl Arenas {
    /// See [`Ledger::is_inherited`].
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.ledger.is_inherited()
    }

    pub(crate) fn new(usage: Use, budget: usize, ledger: Arc<Ledger>) -> Self {
        Arenas::with_page(usage, budget, ledger, page())
    }

    /// Creates an empty set of arenas, which consist of whole pages of `page` bytes.
    fn with_page(usage: Use, budget: usize, ledger: Arc<Ledger>, page: usize) -> Self {
        let (slots, arena_bytes) = match usage {
            Use::Control => control_classes(page),
            // Use the size classes of which at least two slots fit into the budget.
            _ => (
                CLASSES.into_iter().filter(|slot| *slot <= budget / 2).collect(),
                (ledger.sizes.send / 8).clamp(CLASSES[0], HUGE_PAGE),
            ),
        };
        let class = |slot| Class {
            slot,
            free: SegQueue::new(),
            slots: AtomicUsize::new(0),
            in_use: AtomicUsize::new(0),
        };
        Arenas {
            usage,
            budget,
            page,
            classes: slots.into_iter().map(class).collect(),
            arenas: Mutex::new(Slab::new()),
            arena_bytes,
            idle: Mutex::default(),
            must_notify: AtomicBool::new(false),
            waiters: WaitQueue::default(),
            peers: Mutex::default(),
            next_peer: AtomicU32::new(1),
            for_peers: AtomicUsize::new(0),
            peer: None,
            ledger,
        }
    }

    pub(crate) fn usage(&self) -> Use {
        self.usage
    }

    pub(crate) fn waiters(&self) -> &WaitQueue<Arc<Arenas>, SlotRef> {
        self.peer.as_ref().map_or(&self.waiters, |peer| &peer.common.waiters)
    }

    /// Serves the waiters in order while there is memory.
    #[cold]
    pub(crate) fn serve(&self) {
        let mut seen = Vec::new();
        self.waiters().serve(|arenas, len| arenas.take_seeing(len, &mut seen));
    }

    /// Serves the waiters, if there are any, after memory has become free.
    pub(crate) fn memory_freed(&self) {
        if self.waiters().any_after_free() {
            self.serve();
        }
    }

    /// Counts a request that has to wait.
    pub(crate) fn count_wait(&self) {
        self.ledger.counters.waits.fetch_add(1, Relaxed);
    }

    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    pub(crate) fn classes(&self) -> Vec<ClassStats> {
        let stats = |c: &Class| ClassStats {
            slot: c.slot,
            slots: c.slots.load(Relaxed),
            in_use: c.in_use.load(Relaxed),
        };
        let mut all: Vec<ClassStats> = self.classes.iter().map(stats).collect();
        for other in self.others() {
            for (sum, class) in all.iter_mut().zip(&other.classes) {
                sum.slots += class.slots.load(Relaxed);
                sum.in_use += class.in_use.load(Relaxed);
            }
        }
        all
    }

    /// Takes a slot of at least `len` bytes. If none is free, makes an arena for it within the
    /// budget.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<SlotRef, PoolError> {
        match self.classes.iter().position(|c| c.slot >= len).and_then(|class| self.pop(class)) {
            Some(slot) => Ok(slot),
            None => self.take_seeing(len, &mut Vec::new()),
        }
    }

    /// Like [`take`](Self::take), but adds the other sets of arenas that it examines to `seen`. The
    /// caller drops these references while it holds no lock, because they may be the last
    /// references.
    #[cold]
    fn take_seeing(
        self: &Arc<Self>,
        len: usize,
        seen: &mut Vec<Arc<Arenas>>,
    ) -> Result<SlotRef, PoolError> {
        // An empty buffer also needs an address.
        let (usage, budget, len) = (self.usage, self.budget, len.max(1));
        if len > budget {
            return Err(PoolError::TooLarge { len, budget, usage });
        }
        let first = self.classes.iter().position(|c| c.slot >= len);
        if let Some(slot) = first.and_then(|first| self.pop(first)) {
            return Ok(slot);
        }
        let slot = match first {
            Some(first) => self.pop_or_grow(first, seen),
            None => self.take_dedicated(len, seen),
        };
        // Other pools are notified only after this pool has registered the memory that it needs.
        if self.must_notify.swap(false, Relaxed) {
            self.ledger.deregistered();
        }
        match (slot, &self.peer) {
            // A slot from the common arenas, which is not lendable, is better than an error.
            (Err(PoolError::Exhausted { .. }), Some(peer)) => peer.common.take_seeing(len, seen),
            (slot, _) => slot,
        }
    }

    fn pop_or_grow(
        self: &Arc<Self>,
        first: usize,
        seen: &mut Vec<Arc<Arenas>>,
    ) -> Result<SlotRef, PoolError> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        // A slot may have become free since the first look. For example, another thread has grown
        // the class, or a thread that removes an arena has put back the free slots that it had
        // taken out of the list.
        if let Some(slot) = self.pop(first) {
            return Ok(slot);
        }
        match self.grow(&mut arenas, first, seen) {
            Ok(slot) => Ok(slot),
            // A larger slot is better than no slot.
            Err(error) => (first + 1..self.classes.len()).find_map(|c| self.pop(c)).ok_or(error),
        }
    }

    fn pop(self: &Arc<Self>, class: usize) -> Option<SlotRef> {
        let handle = self.classes[class].free.pop()?;
        handle.arena.in_use.fetch_add(1, Relaxed);
        Some(self.slot_ref(handle, Some(class)))
    }

    fn slot_ref(self: &Arc<Self>, handle: ArenaSlot, class: Option<usize>) -> SlotRef {
        let Arena { region, slot, .. } = &*handle.arena;
        self.ledger.counters.of(self.usage).fetch_add(*slot, Relaxed);
        if let Some(class) = class {
            self.classes[class].in_use.fetch_add(1, Relaxed);
        }
        SlotRef {
            // SAFETY: index < slots, so the slot lies within the region, which the handle keeps
            // alive (R8).
            ptr: unsafe { region.ptr().add(handle.index * slot) },
            len: *slot,
            lkey: region.lkey(),
            handle: Some(handle),
            class,
            arenas: self.clone(),
        }
    }

    fn grow(
        self: &Arc<Self>,
        arenas: &mut Slab<Arc<Arena>>,
        class: usize,
        seen: &mut Vec<Arc<Arenas>>,
    ) -> Result<SlotRef, PoolError> {
        let slot = self.classes[class].slot;
        // An arena consists of whole slots and of whole pages. The sizes of a slot and of a page
        // are powers of two.
        let unit = slot.max(self.page);
        let bytes = (self.arena_bytes - self.arena_bytes % unit).max(unit);
        let arena = match self.map_arena(arenas, bytes, slot, seen) {
            Err(PoolError::Exhausted { .. }) if bytes > unit => {
                self.map_arena(arenas, unit, slot, seen)?
            }
            made => made?,
        };
        let slots = arena.region.len() / slot;
        self.classes[class].slots.fetch_add(slots, Relaxed);
        arenas.insert(arena.clone());
        // The caller gets the first slot.
        arena.in_use.fetch_add(1, Relaxed);
        for index in 1..slots {
            self.classes[class].free.push(ArenaSlot { arena: arena.clone(), index });
        }
        Ok(self.slot_ref(ArenaSlot { arena, index: 0 }, Some(class)))
    }

    fn take_dedicated(
        self: &Arc<Self>,
        len: usize,
        seen: &mut Vec<Arc<Arenas>>,
    ) -> Result<SlotRef, PoolError> {
        let (budget, usage) = (self.budget, self.usage);
        let bytes = len.checked_next_multiple_of(self.page).ok_or(PoolError::TooLarge {
            len,
            budget,
            usage,
        })?;
        // A connection keeps its control block for its whole life, so the block gets no more memory
        // than it needs.
        let fits = |idle| {
            if usage == Use::Control { idle == bytes } else { idle >= bytes && idle / 2 < bytes }
        };
        if let Some(handle) = self.take_idle(fits) {
            return Ok(self.slot_ref(handle, None));
        }
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = self.map_arena(&mut arenas, bytes, bytes, seen)?;
        Ok(self.slot_ref(ArenaSlot { arena, index: 0 }, None))
    }

    /// Takes the shortest idle arena for whose length `wanted` returns true.
    fn take_idle(&self, wanted: impl Fn(usize) -> bool) -> Option<ArenaSlot> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = idle.arenas.iter().enumerate().map(|(at, (h, _))| (at, h.arena.region.len()));
        let (at, _) = fitting.filter(|(_, len)| wanted(*len)).min_by_key(|(_, len)| *len)?;
        Some(idle.arenas.swap_remove(at).0)
    }

    /// Removes the dedicated arenas that have been idle since before the last trim, at most once in
    /// a [`TRIM_INTERVAL`]. If `now` is `None`, removes all idle dedicated arenas.
    pub(crate) fn trim(&self, now: Option<Instant>) {
        // Hold the lock, so that no other thread finds the idle arenas gone before their bytes are
        // back in the budget.
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let old = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(now), Some(last)) = (now, idle.last_trim)
                && now.saturating_duration_since(last) < TRIM_INTERVAL
            {
                return;
            }
            (idle.last_trim, idle.trims) = (now.or(idle.last_trim), idle.trims + 1);
            let trims = idle.trims;
            let is_old = |(_, since): &(ArenaSlot, u64)| now.is_none() || since + 1 < trims;
            let (old, young) = idle.arenas.drain(..).partition::<Vec<_>, _>(is_old);
            idle.arenas = young;
            old
        };
        old.into_iter().for_each(|(handle, _)| self.remove_dedicated(handle));
        drop(arenas);
        if self.must_notify.swap(false, Relaxed) {
            self.ledger.deregistered();
        }
    }

    /// Removes a dedicated arena. The arena is deregistered and unmapped before the budget gets its
    /// bytes back.
    fn remove_dedicated(&self, handle: ArenaSlot) {
        let region = &handle.arena.region;
        self.ledger.index.remove(region.start());
        let bytes = region.len();
        drop(handle);
        self.release_bytes(bytes);
        self.must_notify.store(true, Relaxed);
    }

    /// Maps and registers an arena. Removes idle arenas if the budget needs their bytes.
    fn map_arena(
        &self,
        arenas: &mut Slab<Arc<Arena>>,
        bytes: usize,
        slot: usize,
        seen: &mut Vec<Arc<Arenas>>,
    ) -> Result<Arc<Arena>, PoolError> {
        if !self.take_budget(arenas, bytes) && !self.take_budget_of_others(bytes, seen) {
            return Err(PoolError::Exhausted {
                len: bytes,
                budget: self.budget,
                usage: self.usage,
            });
        }
        match self.map_region(bytes) {
            Ok(region) => {
                let arena = Arc::new(Arena {
                    #[cfg(all(feature = "io-uring", target_os = "linux"))]
                    fixed: std::sync::OnceLock::new(),
                    further: Arc::new(FurtherRegistrations::new(region.ptr(), region.len())),
                    region,
                    slot,
                    in_use: AtomicUsize::new(0),
                });
                let further = match self.usage {
                    Use::Send => Arc::downgrade(&arena.further),
                    _ => Weak::new(),
                };
                self.ledger.region_registered(&arena.region, further);
                Ok(arena)
            }
            Err(error) => {
                self.release_bytes(bytes);
                Err(error)
            }
        }
    }

    fn map_region(&self, bytes: usize) -> Result<Region, PoolError> {
        static WARNED: AtomicBool = AtomicBool::new(false);
        let (sizes, registrar) = (&self.ledger.sizes, &*self.ledger.registrar);
        if let Some(peer) = self.peer() {
            match Mapping::lendable(bytes, sizes.huge_pages) {
                Ok((mapping, file)) => {
                    let region = Region::new(mapping, Some(file), registrar, Access::Lend)?;
                    return Ok(region.for_peer(peer));
                }
                Err(error) if !WARNED.swap(true, Relaxed) => {
                    crate::throttled!(
                        warn,
                        %error, bytes,
                        "no lendable memory, so messages are copied: it needs Linux 5.1, and a \
                         descriptor for each file of 2 MiB"
                    );
                }
                Err(_) => {}
            }
        }
        let mapping = Mapping::new(bytes, sizes.huge_pages, MapPlace::Any)?;
        Ok(Region::new(mapping, None, registrar, Access::Local)?)
    }

    /// Takes `bytes` of the budget. As needed, removes idle dedicated arenas, and then other arenas
    /// without a slot in use if that frees enough bytes.
    fn take_budget(&self, arenas: &mut Slab<Arc<Arena>>, bytes: usize) -> bool {
        while !self.take_bytes(bytes) {
            if let Some(handle) = self.take_idle(|_| true) {
                self.remove_dedicated(handle);
                continue;
            }
            let idle: Vec<usize> = arenas
                .iter()
                .filter(|(_, a)| a.in_use.load(Relaxed) == 0)
                .map(|(key, _)| key)
                .collect();
            let bound =
                idle.iter().filter_map(|key| arenas.get(*key)).map(|a| a.region.len()).sum();
            let in_use = self.ledger.budgets.used(self.usage).saturating_sub(bound);
            let enough = in_use.saturating_add(bytes) <= self.budget;
            // If another thread takes a slot of an arena first, the next arena is tried.
            if !(enough && idle.into_iter().any(|key| self.remove_arena(arenas, key))) {
                return self.take_bytes(bytes);
            }
        }
        true
    }

    /// Removes an arena if all its slots are free.
    fn remove_arena(&self, arenas: &mut Slab<Arc<Arena>>, key: usize) -> bool {
        let Some(arena) = arenas.get(key).cloned() else {
            return false;
        };
        let Some(class) = self.classes.iter().find(|c| c.slot == arena.slot) else {
            return false;
        };
        let total = arena.region.len() / arena.slot;
        let (mut mine, mut others) = (Vec::with_capacity(total), Vec::new());
        while let Some(handle) = class.free.pop() {
            if Arc::ptr_eq(&handle.arena, &arena) { mine.push(handle) } else { others.push(handle) }
        }
        others.into_iter().for_each(|handle| class.free.push(handle));
        if mine.len() < total {
            mine.into_iter().for_each(|handle| class.free.push(handle));
            return false;
        }
        class.slots.fetch_sub(total, Relaxed);
        self.ledger.index.remove(arena.region.start());
        let bytes = arena.region.len();
        // All handles are here, so these are the last references: the arena is deregistered and
        // unmapped before the budget gets its bytes back.
        drop((mine, arenas.remove(key), arena));
        self.release_bytes(bytes);
        self.must_notify.store(true, Relaxed);
        true
    }
}

impl SlotRef {
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the index of the slot's arena among the buffers registered with an io_uring ring.
    /// The first call registers the arena. Returns `None` if that registration failed, or if the
    /// arena is registered with another ring.
    #[cfg(all(feature = "io-uring", target_os = "linux"))]
    pub(crate) fn fixed(&self, buffers: &Arc<crate::disk::fixed::FixedBuffers>) -> Option<u16> {
        let arena = &self.handle.as_ref()?.arena;
        let fixed = arena.fixed.get_or_init(|| {
            let ledger = &self.arenas.ledger;
            // The number of bytes that the pool may still pin with its device.
            let reserved = match ledger.registrar.pins() {
                true => ledger.unused(),
                false => 0,
            };
            let (addr, len) = (arena.region.ptr(), arena.region.len());
            // SAFETY: the arena holds the registration, and drops it before its memory (R9).
            unsafe { buffers.register(addr, len, reserved) }
        });
        fixed.as_ref()?.number(buffers)
    }
}

impl Drop for SlotRef {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else {
            return;
        };
        let arenas = &self.arenas;
        if arenas.ledger.is_inherited() {
            return std::mem::forget(handle);
        }
        arenas.ledger.counters.of(arenas.usage).fetch_sub(self.len, Relaxed);
        match self.class.and_then(|class| arenas.classes.get(class)) {
            Some(class) => {
                class.in_use.fetch_sub(1, Relaxed);
                handle.arena.in_use.fetch_sub(1, Relaxed);
                // The handle is moved, not cloned. So whoever holds all handles of an arena owns
                // the arena.
                class.free.push(handle);
            }
            None => {
                let mut idle = arenas.idle.lock().unwrap_or_else(PoisonError::into_inner);
                let trims = idle.trims;
                idle.arenas.push((handle, trims));
            }
        }
        if arenas.usage == Use::Send {
            arenas.memory_freed();
        }
    }
}

/// All slots are free here, because each owned slot holds a reference to the arenas.
impl Drop for Arenas {
    fn drop(&mut self) {
        if self.ledger.is_inherited() {
            return;
        }
        for class in &self.classes {
            while class.free.pop().is_some() {}
        }
        let arenas = self.arenas.get_mut().unwrap_or_else(PoisonError::into_inner);
        for arena in std::mem::take(arenas).into_iter().map(|(_, arena)| arena) {
            self.ledger.index.remove(arena.region.start());
            let bytes = arena.region.len();
            drop(arena);
            self.release_bytes(bytes);
        }
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        let handles = std::mem::take(&mut idle.arenas);
        handles.into_iter().for_each(|(handle, _)| self.remove_dedicated(handle));
        self.ledger.deregistered();
        if let Some(peer) = &self.peer {
            peer.common.memory_freed();
        }
    }
}
