//! Finds the registered region that an address range lies in.

use crossbeam::sync::ShardedLock;

use crate::region::Region;

#[derive(Clone, Copy, Debug)]
struct Entry {
    start: usize,
    end: usize,
    lkey: u32,
    iova: u64,
}

/// The registered regions, sorted by address. Every sender reads it, but it changes only when an
/// arena or a chunk is made or removed. Hence a sharded lock, of which a reader takes one shard.
#[derive(Debug, Default)]
pub(crate) struct Index(ShardedLock<Vec<Entry>>);

impl Index {
    pub(crate) fn insert(&self, region: &Region) {
        let (start, lkey, iova) = (region.start(), region.lkey(), region.iova());
        let entry = Entry { start, end: start + region.len(), lkey, iova };
        let mut entries = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let at = entries.partition_point(|e| e.start < entry.start);
        entries.insert(at, entry);
    }

    pub(crate) fn remove(&self, region: &Region) {
        let mut entries = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        entries.retain(|e| e.start != region.start());
    }

    /// The lkey and the iova of a range, if it lies in one region.
    pub(crate) fn find(&self, start: usize, len: usize) -> Option<(u32, u64)> {
        let entries = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let at = entries.partition_point(|e| e.start <= start).checked_sub(1)?;
        let entry = entries.get(at)?;
        let within = start.checked_add(len)? <= entry.end;
        within.then(|| (entry.lkey, entry.iova + (start - entry.start) as u64))
    }
}
