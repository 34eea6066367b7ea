//! An index of registered regions by address.

use std::any::Any;
use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError, Weak};

use crossbeam_utils::sync::ShardedLock;

use crate::region::Region;

/// A value that keeps a registration of application memory alive.
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
struct Entry {
    start: usize,
    end: usize,
    keys: Keys,
    /// The registration of application memory. Unlike bytes of pool memory, the application's bytes
    /// do not keep their registration alive.
    application: Option<Weak<dyn Any + Send + Sync>>,
}

/// The keys of a range.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) keys: Keys,
    /// For application memory: the value that keeps it registered.
    pub(crate) keep_alive: Option<KeepAlive>,
}

/// The registered regions, sorted by address. Every sender reads the index, and the index changes
/// only when an arena or a chunk is made or removed. So the lock is sharded, and a reader takes one
/// shard.
#[derive(Debug, Default)]
pub(crate) struct Index(ShardedLock<Vec<Entry>>);

impl Index {
    pub(crate) fn insert(&self, region: &Region) {
        let (start, end) = (region.start(), region.start() + region.len());
        let (lkey, iova, lend_key) = (region.lkey(), region.iova(), region.lend_key());
        let keys = Keys { lkey, iova, lend_key, for_peer: region.peer() };
        let entry = Entry { start, end, keys, application: None };
        let is_new = self.insert_entry(entry);
        debug_assert!(is_new, "mapped, and in the index already");
    }

    /// Adds application memory. Returns false and adds nothing if a part of it is known already.
    pub(crate) fn insert_application(
        &self,
        memory: &[u8],
        keys: Keys,
        keep_alive: &KeepAlive,
    ) -> bool {
        let start = memory.as_ptr().addr();
        let (end, application) = (start + memory.len(), Some(Arc::downgrade(keep_alive)));
        self.insert_entry(Entry { start, end, keys, application })
    }

    fn insert_entry(&self, entry: Entry) -> bool {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let free = overlapping(&entries, entry.start, entry.end).is_none();
        if free {
            let at = entries.partition_point(|e| e.start < entry.start);
            entries.insert(at, entry);
        }
        free
    }

    /// Whether a part of the memory that is already known is pool memory. `None` if no part is
    /// known.
    pub(crate) fn overlaps(&self, memory: &[u8]) -> Option<bool> {
        let start = memory.as_ptr().addr();
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        overlapping(&entries, start, start + memory.len()).map(|e| e.application.is_none())
    }

    /// Removes the region that begins at `start`.
    pub(crate) fn remove(&self, start: usize) {
        let mut entries = self.0.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.start != start);
    }

    /// The keys of a range, if it lies in one region.
    pub(crate) fn find(&self, start: usize, len: usize) -> Option<Found> {
        let entries = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let at = entries.partition_point(|e| e.start <= start).checked_sub(1)?;
        let entry = entries.get(at)?;
        if start.checked_add(len)? > entry.end {
            return None;
        }
        let keep_alive = match &entry.application {
            None => None,
            // Find nothing if the last holder is dropping the registration.
            Some(application) => Some(application.upgrade()?),
        };
        let iova = entry.keys.iova + (start - entry.start) as u64;
        Some(Found { keys: Keys { iova, ..entry.keys }, keep_alive })
    }
}

fn overlapping(entries: &[Entry], start: usize, end: usize) -> Option<&Entry> {
    let before_end = entries.partition_point(|e| e.start < end);
    before_end.checked_sub(1).and_then(|last| entries.get(last)).filter(|e| start < e.end)
}
