//! Arenas: mapped once, registered once, cut into slots.
//!
//! A slot is free (its handle is in a free list), or owned by exactly one [`SlotRef`].
//!
//! | from | to | by |
//! |---|---|---|
//! | free | owned | `Arenas::take`, which pops its handle |
//! | owned | free | drop of the `SlotRef`, which pushes the handle back |
//!
//! The lists are lock-free; a lock is taken only to make an arena or to take one down.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam::queue::SegQueue;
use slab::Slab;

use crate::config::Sizes;
use crate::error::PoolError;
use crate::pool::Shared;
use crate::region::{Mapping, PAGE, Region};
use crate::registrar::Access;
use crate::stats::{ClassStats, Use};

/// Slot sizes in bytes. Longer requests get arenas of their own.
const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// One registered mapping and its slots.
#[derive(Debug)]
pub(crate) struct Arena {
    region: Region,
    slot: usize,
    /// Slots in use; one more while it is being taken down, so that nobody takes from it.
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
}

/// A slot, owned.
#[derive(Debug)]
pub(crate) struct SlotRef {
    shared: Arc<Shared>,
    arena: Arc<Arena>,
    index: usize,
    /// None: an arena of its own.
    class: Option<usize>,
    usage: Use,
}

impl Arenas {
    pub(crate) fn new(usage: Use, budget: usize, sizes: &Sizes) -> Self {
        // Send memory is cut into classes that fit its budget at least twice; a connection's control block always has
        // an arena of its own.
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
            arena: (sizes.send / 8).clamp(CLASSES[0], 1 << 20),
        }
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
    pub(crate) fn take(&self, shared: &Arc<Shared>, len: usize) -> Result<SlotRef, PoolError> {
        let (usage, budget) = (self.usage, self.budget);
        if len > budget {
            return Err(PoolError::TooLarge { len, budget, usage });
        }
        let Some(first) = self.classes.iter().position(|c| c.slot >= len) else {
            return self.own_arena(shared, len);
        };
        if let Some(slot) = self.pop(shared, first) {
            return Ok(slot);
        }
        match self.grow(shared, first) {
            Ok(slot) => Ok(slot),
            // Better a larger slot than none.
            Err(error) => (first + 1..self.classes.len()).find_map(|c| self.pop(shared, c)).ok_or(error),
        }
    }

    fn pop(&self, shared: &Arc<Shared>, class: usize) -> Option<SlotRef> {
        let Handle { arena, index } = self.classes[class].free.pop()?;
        arena.live.fetch_add(1, Relaxed);
        Some(self.own(shared, arena, index, Some(class)))
    }

    fn own(&self, shared: &Arc<Shared>, arena: Arc<Arena>, index: usize, class: Option<usize>) -> SlotRef {
        shared.counters.of(self.usage).fetch_add(arena.slot, Relaxed);
        if let Some(class) = class {
            self.classes[class].in_use.fetch_add(1, Relaxed);
        }
        SlotRef { shared: shared.clone(), arena, index, class, usage: self.usage }
    }

    fn grow(&self, shared: &Arc<Shared>, class: usize) -> Result<SlotRef, PoolError> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        // Someone may have grown it meanwhile.
        if let Some(slot) = self.pop(shared, class) {
            return Ok(slot);
        }
        let slot = self.classes[class].slot;
        let arena = match self.make(shared, &mut arenas, self.arena.max(slot), slot) {
            Err(PoolError::Exhausted { .. }) if self.arena > slot => {
                self.make(shared, &mut arenas, slot, slot)?
            }
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
        Ok(self.own(shared, arena, 0, Some(class)))
    }

    fn own_arena(&self, shared: &Arc<Shared>, len: usize) -> Result<SlotRef, PoolError> {
        let (budget, usage) = (self.budget, self.usage);
        let bytes = len.checked_next_multiple_of(PAGE).ok_or(PoolError::TooLarge { len, budget, usage })?;
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = self.make(shared, &mut arenas, bytes, bytes)?;
        Ok(self.own(shared, arena, 0, None))
    }

    /// Maps and registers an arena; takes idle ones down if the budget needs it.
    fn make(
        &self,
        shared: &Arc<Shared>,
        arenas: &mut Slab<Arc<Arena>>,
        bytes: usize,
        slot: usize,
    ) -> Result<Arc<Arena>, PoolError> {
        while !shared.budgets.take(self.usage, bytes, self.budget) {
            if !self.reclaim(shared, arenas) {
                return Err(PoolError::Exhausted { len: bytes, budget: self.budget, usage: self.usage });
            }
        }
        let made = Mapping::new(bytes, shared.sizes.huge_pages).and_then(|mapping| {
            Region::new(mapping, &*shared.registrar, Access::Local).map_err(|(error, _)| error.into())
        });
        match made {
            Ok(region) => {
                shared.counters.registrations.fetch_add(1, Relaxed);
                shared.index.insert(&region);
                Ok(Arc::new(Arena { region, slot, live: AtomicUsize::new(0) }))
            }
            Err(error) => {
                shared.budgets.give(self.usage, bytes);
                Err(error)
            }
        }
    }

    /// Takes down one arena whose slots are all free. False if there is none.
    fn reclaim(&self, shared: &Shared, arenas: &mut Slab<Arc<Arena>>) -> bool {
        let Some((key, class)) = arenas.iter().find_map(|(key, arena)| {
            let class = self.classes.iter().position(|c| c.slot == arena.slot)?;
            (arena.live.load(Relaxed) == 0).then_some((key, class))
        }) else {
            return false;
        };
        let arena = arenas[key].clone();
        let list = &self.classes[class].free;
        let total = arena.region.len() / arena.slot;
        // Its handles are taken out of the list; someone may take one first.
        let mut mine = Vec::with_capacity(total);
        let mut others = Vec::new();
        while let Some(handle) = list.pop() {
            if Arc::ptr_eq(&handle.arena, &arena) { mine.push(handle) } else { others.push(handle) }
        }
        others.into_iter().for_each(|handle| list.push(handle));
        if mine.len() < total {
            mine.into_iter().for_each(|handle| list.push(handle));
            return false;
        }
        arenas.remove(key);
        self.classes[class].slots.fetch_sub(total, Relaxed);
        shared.index.remove(&arena.region);
        shared.budgets.give(self.usage, arena.region.len());
        // With the handles and this reference the last ones go: the region is deregistered and unmapped.
        true
    }
}

impl SlotRef {
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        // SAFETY: index < slots, so the slot lies within the region (R8).
        unsafe { self.arena.region.ptr().add(self.index * self.arena.slot) }
    }

    pub(crate) fn len(&self) -> usize {
        self.arena.slot
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.arena.region.lkey()
    }
}

impl Drop for SlotRef {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.counters.of(self.usage).fetch_sub(self.arena.slot, Relaxed);
        let arenas = shared.arenas(self.usage);
        match self.class {
            Some(class) => {
                arenas.classes[class].in_use.fetch_sub(1, Relaxed);
                self.arena.live.fetch_sub(1, Relaxed);
                arenas.classes[class].free.push(Handle { arena: self.arena.clone(), index: self.index });
            }
            None => {
                shared.index.remove(&self.arena.region);
                shared.budgets.give(self.usage, self.arena.region.len());
            }
        }
        if self.usage == Use::Send {
            shared.waiters.freed(shared);
        }
    }
}
