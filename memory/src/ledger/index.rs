//! An index of registered regions by address.

use std::any::Any;
use std::num::NonZeroU32;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, Weak};

use crossbeam_utils::sync::ShardedLock;

use crate::region::Region;

/// A value that keeps a registration alive. Such a value is needed for memory whose bytes do not
/// keep the registration alive.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// The keys of a region, and the address of its first byte under these keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keys {
    pub(crate) lkey: u32,
    pub(crate) iova: u64,
    /// The key under which the region can be lent to peers.
    pub(crate) lend_key: Option<u32>,
    /// The only peer to which the region can be lent, if it serves one peer.
    pub(crate) for_peer: Option<NonZeroU32>,
}

#[derive(Debug)]
struct IndexEntry {
    start: usize,
    end: usize,
    keys: Keys,
    memory: IndexedMemory,
}

/// The memory of an indexed region.
#[derive(Debug)]
enum IndexedMemory {
    /// Pool memory, whose bytes keep it registered. For send memory, the field refers to the
    /// memory's registrations with further devices.
    Own(Weak<dyn Any + Send + Sync>),
    /// Application memory, or another pool's memory, with its registration. The bytes do not keep
    /// this registration alive.
    Foreign(Weak<dyn Any + Send + Sync>),
}

/// The keys of a range.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) keys: Keys,
    /// The value that keeps the memory registered, if the memory is not the pool's own.
    pub(crate) keep_alive: Option<KeepAlive>,
}

/// The registered regions, sorted by address. Every sender reads the index, and the index changes
/// only when a region is registered or deregistered. So the lock is sharded, and a reader takes one
/// shard.
#[derive(Debug, Default)]
pub(crate) struct Index(ShardedLock<Vec<IndexEntry>>);

impl Index {
    /// Adds pool memory. `further` refers to the memory's registrations with further devices, if
    /// the memory may have any.
    pub(crate) fn insert(&self, region: &Region, further: Weak<dyn Any + Send + Sync>) {
        let (start, end) = (region.start(), region.start() + region.len());
        let (lkey, iova, lend_key) = (region.lkey(), region.iova(), region.lend_key());
        let keys = Keys { lkey, iova, lend_key, for_peer: region.peer() };
        let entry = IndexEntry { start, end, keys, memory: IndexedMemory::Own(further) };
        let is_new = self.insert_entry(entry);
        debug_assert!(is_new, "mapped, and in the index already");
    }

    /// Adds memory that is not the pool's own. Returns false and adds nothing if a part of the
    /// memory is already in the index.
    pub(crate) fn insert_foreign(
        &self,
        memory: NonNull<[u8]>,
        keys: Keys,
        keep_alive: &KeepAlive,
    ) -> bool {
        let start = memory.cast::<u8>().addr().get();
        let memory_of = IndexedMemory::Foreign(Arc::downgrade(keep_alive));
        self.insert_entry(IndexEntry { start, end: start + memory.len(), keys, memory: memory_of })
    }

    fn insert_entry(&self, entry: IndexEntry) -> bool {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let free = overlapping(&entries, entry.start, entry.end).is_none();
        if free {
            let at = entries.partition_point(|e| e.start < entry.start);
            entries.insert(at, entry);
        }
        free
    }

    /// Whether the part of the memory that is in the index is pool memory. `None` if no part is in
    /// the index.
    pub(crate) fn overlaps(&self, memory: NonNull<[u8]>) -> Option<bool> {
        let start = memory.cast::<u8>().addr().get();
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let entry = overlapping(&entries, start, start + memory.len())?;
        Some(matches!(entry.memory, IndexedMemory::Own(_)))
    }

    /// Returns the registrations with further devices that the region around the range has, if the
    /// region is pool memory.
    pub(crate) fn further(&self, start: usize, len: usize) -> Option<KeepAlive> {
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match &containing(&entries, start, len)?.memory {
            IndexedMemory::Own(further) => further.upgrade(),
            IndexedMemory::Foreign(_) => None,
        }
    }

    /// Removes the region that begins at `start`.
    pub(crate) fn remove(&self, start: usize) {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.start != start);
    }

    /// The keys of a range, if it lies in one region.
    pub(crate) fn find(&self, start: usize, len: usize) -> Option<Found> {
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let entry = containing(&entries, start, len)?;
        let keep_alive = match &entry.memory {
            IndexedMemory::Own(_) => None,
            // Find nothing if the last holder is dropping the registration.
            IndexedMemory::Foreign(registration) => Some(registration.upgrade()?),
        };
        let iova = entry.keys.iova + (start - entry.start) as u64;
        Some(Found { keys: Keys { iova, ..entry.keys }, keep_alive })
    }
}

fn containing(entries: &[IndexEntry], start: usize, len: usize) -> Option<&IndexEntry> {
    let at = entries.partition_point(|e| e.start <= start).checked_sub(1)?;
    entries.get(at).filter(|entry| start.checked_add(len).is_some_and(|end| end <= entry.end))
}

fn overlapping(entries: &[IndexEntry], start: usize, end: usize) -> Option<&IndexEntry> {
    let before_end = entries.partition_point(|e| e.start < end);
    before_end.checked_sub(1).and_then(|last| entries.get(last)).filter(|e| start < e.end)
}
