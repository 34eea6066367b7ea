//! Arenas: mapped once, registered once, cut into slots.
//!
//! A slot is free (its handle is in a free list), or owned by exactly one [`SlotRef`].
//!
//! | from | to | by |
//! |---|---|---|
//! | free | owned | `Arenas::take`, which pops its handle |
//! | owned | free | drop of the `SlotRef`, which pushes the handle back |
//!
//! An arena of its own, for a request above the largest class, has one slot; while that is free the
//! arena stays registered, until another request fits it or the budget needs its bytes.
//!
//! The lists are lock-free; a lock is taken only to make an arena or to take one down.

mod wait_queue;

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::queue::SegQueue;
use slab::Slab;

pub(crate) use self::wait_queue::WaitQueue;
use crate::error::PoolError;
use crate::ledger::{Ledger, deregistered};
use crate::region::Region;
use crate::region::mapping::{Mapping, Place};
use crate::region::page::{HUGE_PAGE, page};
use crate::registrar::Access;
use crate::stats::{ClassStats, Use};

/// Slot sizes in bytes. Longer requests get arenas of their own.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// What is in use time and again is not to be taken down between.
const BETWEEN_TRIMS: Duration = Duration::from_secs(1);

/// One registered mapping and its slots.
#[derive(Debug)]
pub(crate) struct Arena {
    region: Region,
    slot: usize,
    /// Slots in use: a hint. What counts is who has the handles.
    live: AtomicUsize,
}

/// A free slot.
#[derive(Debug)]
struct Handle {
    arena: Arc<Arena>,
    index: usize,
}

#[derive(Debug)]
struct Class {
    slot: usize,
    free: SegQueue<Handle>,
    slots: AtomicUsize,
    in_use: AtomicUsize,
}

/// All arenas of one use.
#[derive(Debug)]
pub(crate) struct Arenas {
    usage: Use,
    budget: usize,
    classes: Vec<Class>,
    /// Arenas that exist. The lock also serialises growing.
    arenas: Mutex<Slab<Arc<Arena>>>,
    /// Bytes of a new arena of small slots.
    arena: usize,
    /// Free arenas of their own, kept registered for the next request of their size until the
    /// budget needs them: memory is not registered per message (R12), however long.
    idle: Mutex<Idle>,
    /// Arenas have been taken down, and other pools of the process have not been told.
    freed: AtomicBool,
    /// Those that wait for a slot: of send memory only.
    waiters: WaitQueue<SlotRef>,
    /// Last, so that the registrar outlives the registrations.
    ledger: Arc<Ledger>,
}

/// Free arenas of their own.
#[derive(Debug, Default)]
struct Idle {
    /// With the number of times that idle ones had been taken down when each became idle.
    arenas: Vec<(Handle, u64)>,
    trims: u64,
    trimmed: Option<Instant>,
}

/// A slot, owned.
#[derive(Debug)]
pub(crate) struct SlotRef {
    ptr: NonNull<u8>,
    len: usize,
    lkey: u32,
    /// Always there until the slot is dropped.
    handle: Option<Handle>,
    /// None: an arena of its own.
    class: Option<usize>,
    /// Last, so that they outlive the arena.
    arenas: Arc<Arenas>,
}

// SAFETY: a slot is plain memory, and owned by this value alone (R8).
unsafe impl Send for SlotRef {}
// SAFETY: as above; nothing is reachable through &SlotRef but the address.
unsafe impl Sync for SlotRef {}

impl Arenas {
    pub(crate) fn new(usage: Use, budget: usize, ledger: Arc<Ledger>) -> Self {
        // Send memory is cut into classes that fit its budget at least twice; a connection's
        // control block always has an arena of its own.
        let largest = if usage == Use::Send { budget / 2 } else { 0 };
        let class = |slot: &usize| Class {
            slot: *slot,
            free: SegQueue::new(),
            slots: AtomicUsize::new(0),
            in_use: AtomicUsize::new(0),
        };
        Arenas {
            usage,
            budget,
            classes: CLASSES.iter().filter(|slot| **slot <= largest).map(class).collect(),
            arenas: Mutex::new(Slab::new()),
            arena: (ledger.sizes.send / 8).clamp(CLASSES[0], HUGE_PAGE),
            idle: Mutex::default(),
            freed: AtomicBool::new(false),
            waiters: WaitQueue::default(),
            ledger,
        }
    }

    pub(crate) fn usage(&self) -> Use {
        self.usage
    }

    pub(crate) fn waiters(&self) -> &WaitQueue<SlotRef> {
        &self.waiters
    }

    /// Gives those that wait what there is.
    pub(crate) fn serve(self: &Arc<Self>) {
        self.waiters.serve(|len| self.take(len));
    }

    /// Memory has come free.
    pub(crate) fn freed(self: &Arc<Self>) {
        if self.waiters.any_after_free() {
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
        self.classes.iter().map(stats).collect()
    }

    /// A slot of at least `len` bytes, if there is one or room for one.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<SlotRef, PoolError> {
        // A buffer of no bytes has an address all the same.
        let (usage, budget, len) = (self.usage, self.budget, len.max(1));
        if len > budget {
            return Err(PoolError::TooLarge { len, budget, usage });
        }
        let first = self.classes.iter().position(|c| c.slot >= len);
        if let Some(slot) = first.and_then(|first| self.pop(first)) {
            return Ok(slot);
        }
        let slot = match first {
            Some(first) => self.pop_or_grow(first),
            None => self.own_arena(len),
        };
        // Other pools look when this one has registered what it needs.
        if self.freed.swap(false, Relaxed) {
            deregistered();
        }
        slot
    }

    fn pop_or_grow(self: &Arc<Self>, first: usize) -> Result<SlotRef, PoolError> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        // Someone may have grown it meanwhile; and while an arena is taken down, under this lock,
        // lists look emptier than they are.
        if let Some(slot) = self.pop(first) {
            return Ok(slot);
        }
        match self.grow(&mut arenas, first) {
            Ok(slot) => Ok(slot),
            // Better a larger slot than none.
            Err(error) => (first + 1..self.classes.len()).find_map(|c| self.pop(c)).ok_or(error),
        }
    }

    fn pop(self: &Arc<Self>, class: usize) -> Option<SlotRef> {
        let handle = self.classes[class].free.pop()?;
        handle.arena.live.fetch_add(1, Relaxed);
        Some(self.own(handle, Some(class)))
    }

    fn own(self: &Arc<Self>, handle: Handle, class: Option<usize>) -> SlotRef {
        let Arena { region, slot, .. } = &*handle.arena;
        self.ledger.counters.of(self.usage).fetch_add(*slot, Relaxed);
        if let Some(class) = class {
            self.classes[class].in_use.fetch_add(1, Relaxed);
        }
        SlotRef {
            // SAFETY: index < slots, so the slot lies within the region, which the handle keeps
            // (R8).
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
    ) -> Result<SlotRef, PoolError> {
        let slot = self.classes[class].slot;
        // Whole slots and whole pages; both are powers of two.
        let unit = slot.max(page());
        let bytes = (self.arena - self.arena % unit).max(unit);
        let arena = match self.make(arenas, bytes, slot) {
            Err(PoolError::Exhausted { .. }) if bytes > unit => self.make(arenas, unit, slot)?,
            made => made?,
        };
        let slots = arena.region.len() / slot;
        self.classes[class].slots.fetch_add(slots, Relaxed);
        arenas.insert(arena.clone());
        // The first is for the caller.
        arena.live.fetch_add(1, Relaxed);
        for index in 1..slots {
            self.classes[class].free.push(Handle { arena: arena.clone(), index });
        }
        Ok(self.own(Handle { arena, index: 0 }, Some(class)))
    }

    fn own_arena(self: &Arc<Self>, len: usize) -> Result<SlotRef, PoolError> {
        let (budget, usage) = (self.budget, self.usage);
        let bytes = len.checked_next_multiple_of(page()).ok_or(PoolError::TooLarge {
            len,
            budget,
            usage,
        })?;
        // A connection keeps its block for long, and is to have no more than it asked for.
        let fits = |idle| {
            if usage == Use::Control { idle == bytes } else { idle >= bytes && idle / 2 < bytes }
        };
        if let Some(handle) = self.take_idle(fits) {
            return Ok(self.own(handle, None));
        }
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = self.make(&mut arenas, bytes, bytes)?;
        Ok(self.own(Handle { arena, index: 0 }, None))
    }

    /// The shortest idle arena of its own whose length is wanted.
    fn take_idle(&self, wanted: impl Fn(usize) -> bool) -> Option<Handle> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = idle.arenas.iter().enumerate().map(|(at, (h, _))| (at, h.arena.region.len()));
        let (at, _) = fitting.filter(|(_, len)| wanted(*len)).min_by_key(|(_, len)| *len)?;
        Some(idle.arenas.swap_remove(at).0)
    }

    /// Ends arenas of their own: those that have been idle since the last time, at most every
    /// [`BETWEEN_TRIMS`]; without a clock all that are idle.
    pub(crate) fn trim(&self, now: Option<Instant>) {
        // Nobody looks for budget meanwhile, and finds neither an idle arena nor what it takes.
        let arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let old = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Some(now), Some(last)) = (now, idle.trimmed)
                && now.saturating_duration_since(last) < BETWEEN_TRIMS
            {
                return;
            }
            (idle.trimmed, idle.trims) = (now.or(idle.trimmed), idle.trims + 1);
            let trims = idle.trims;
            let is_old = |(_, since): &(Handle, u64)| now.is_none() || since + 1 < trims;
            let (old, young) = idle.arenas.drain(..).partition::<Vec<_>, _>(is_old);
            idle.arenas = young;
            old
        };
        old.into_iter().for_each(|(handle, _)| self.end(handle));
        drop(arenas);
        if self.freed.swap(false, Relaxed) {
            deregistered();
        }
    }

    /// Ends an arena of its own: deregistered and unmapped before the budget says so.
    fn end(&self, handle: Handle) {
        let region = &handle.arena.region;
        self.ledger.index.remove(region);
        let bytes = region.len();
        drop(handle);
        self.ledger.budgets.give(self.usage, bytes);
        self.freed.store(true, Relaxed);
    }

    /// Maps and registers an arena; takes idle ones down if the budget needs it.
    fn make(
        &self,
        arenas: &mut Slab<Arc<Arena>>,
        bytes: usize,
        slot: usize,
    ) -> Result<Arc<Arena>, PoolError> {
        if !self.take_budget(arenas, bytes) {
            return Err(PoolError::Exhausted {
                len: bytes,
                budget: self.budget,
                usage: self.usage,
            });
        }
        let made =
            Mapping::new(bytes, self.ledger.sizes.huge_pages, Place::Any).and_then(|mapping| {
                Region::new(mapping, None, &*self.ledger.registrar, Access::Local)
                    .map_err(PoolError::from)
            });
        match made {
            Ok(region) => {
                self.ledger.region_registered(&region);
                Ok(Arc::new(Arena { region, slot, live: AtomicUsize::new(0) }))
            }
            Err(error) => {
                self.ledger.budgets.give(self.usage, bytes);
                Err(error)
            }
        }
    }

    /// Takes `bytes` of the budget. Takes idle arenas down for it, but only if that is enough.
    fn take_budget(&self, arenas: &mut Slab<Arc<Arena>>, bytes: usize) -> bool {
        while !self.ledger.budgets.take(self.usage, bytes, self.budget) {
            if let Some(handle) = self.take_idle(|_| true) {
                self.end(handle);
                continue;
            }
            let idle: Vec<usize> = arenas
                .iter()
                .filter(|(_, a)| a.live.load(Relaxed) == 0)
                .map(|(key, _)| key)
                .collect();
            let bound =
                idle.iter().filter_map(|key| arenas.get(*key)).map(|a| a.region.len()).sum();
            let held = self.ledger.budgets.used(self.usage).saturating_sub(bound);
            let enough = held.saturating_add(bytes) <= self.budget;
            // Someone may take a slot of one first: then the next, or none.
            if !(enough && idle.into_iter().any(|key| self.take_down(arenas, key))) {
                return self.ledger.budgets.take(self.usage, bytes, self.budget);
            }
        }
        true
    }

    /// Takes down an arena, if all its slots are free.
    fn take_down(&self, arenas: &mut Slab<Arc<Arena>>, key: usize) -> bool {
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
        self.ledger.index.remove(&arena.region);
        let bytes = arena.region.len();
        // Every handle is here, so these are the last references: deregistered and unmapped before
        // the budget says so.
        drop((mine, arenas.remove(key), arena));
        self.ledger.budgets.give(self.usage, bytes);
        self.freed.store(true, Relaxed);
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
}

impl Drop for SlotRef {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else {
            return;
        };
        let arenas = &self.arenas;
        arenas.ledger.counters.of(arenas.usage).fetch_sub(self.len, Relaxed);
        match self.class.and_then(|class| arenas.classes.get(class)) {
            Some(class) => {
                class.in_use.fetch_sub(1, Relaxed);
                handle.arena.live.fetch_sub(1, Relaxed);
                // Moved, not cloned: whoever has all handles of an arena has it alone.
                class.free.push(handle);
            }
            None => {
                let mut idle = arenas.idle.lock().unwrap_or_else(PoisonError::into_inner);
                let trims = idle.trims;
                idle.arenas.push((handle, trims));
            }
        }
        if arenas.usage == Use::Send {
            arenas.freed();
        }
    }
}

/// Every slot is free by now: each holds the arenas.
impl Drop for Arenas {
    fn drop(&mut self) {
        for class in &self.classes {
            while class.free.pop().is_some() {}
        }
        let arenas = self.arenas.get_mut().unwrap_or_else(PoisonError::into_inner);
        for arena in std::mem::take(arenas).into_iter().map(|(_, arena)| arena) {
            self.ledger.index.remove(&arena.region);
            let bytes = arena.region.len();
            drop(arena);
            self.ledger.budgets.give(self.usage, bytes);
        }
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        let handles = std::mem::take(&mut idle.arenas);
        handles.into_iter().for_each(|(handle, _)| self.end(handle));
        deregistered();
    }
}
