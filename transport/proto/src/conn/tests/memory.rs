//! Landing memory of one end in tests.

use std::collections::BTreeMap;

use super::super::*;

const GRANULE: usize = 4096;

/// Landing memory. Every region has an rkey of its own, so that a WRITE to memory that is no longer
/// granted is detected.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) budget: usize,
    pub(super) used: usize,
    pub(super) peak: usize,
    /// Whether the peer is hostile, so that its WRITEs and DONEs need not agree.
    pub(super) lenient: bool,
    regions: BTreeMap<u32, Region>,
    next: u32,
}

#[derive(Debug)]
struct Region {
    addr: u64,
    data: Vec<u8>,
    /// The offset of the first WRITE.
    begin: Option<usize>,
    written: usize,
    filled: bool,
    /// The offset in the field, if the memory belongs to the application, so that it does not count
    /// towards the budget.
    named: Option<u32>,
}

impl Memory {
    pub(super) fn new(budget: usize) -> Memory {
        Memory { budget, used: 0, peak: 0, lenient: false, regions: BTreeMap::new(), next: 0 }
    }

    /// Application memory for the part of a field that begins at this offset.
    pub(super) fn name(&mut self, offset: u32, len: u32) -> GrantMemory {
        self.next += 1;
        let rkey = self.next;
        let addr = (u64::from(rkey) << 32) + u64::from(offset) % 4096;
        let data = vec![0xee; len as usize];
        let region =
            Region { addr, data, begin: None, written: 0, filled: false, named: Some(offset) };
        self.regions.insert(rkey, region);
        GrantMemory { key: rkey as usize, addr, rkey, len }
    }

    pub(super) fn alloc(&mut self, want: u32, min: u32) -> Option<GrantMemory> {
        let free = (self.budget - self.used) / GRANULE * GRANULE;
        let capacity = (want as usize).next_multiple_of(GRANULE).min(free);
        if capacity < min as usize {
            return None;
        }
        self.next += 1;
        let rkey = self.next;
        let addr = u64::from(rkey) << 32;
        self.used += capacity;
        self.peak = self.peak.max(self.used);
        let data = vec![0xee; capacity];
        let region = Region { addr, data, begin: None, written: 0, filled: false, named: None };
        self.regions.insert(rkey, region);
        Some(GrantMemory { key: rkey as usize, addr, rkey, len: capacity as u32 })
    }

    /// The offset in the field at which a WRITE to named memory lands.
    pub(super) fn offset_in_field(&self, write: &Write) -> Option<u64> {
        let region = self.regions.get(&write.rkey)?;
        Some(u64::from(region.named?) + (write.addr - region.addr))
    }

    /// Executes a WRITE as the NIC does. Panics if it is not within a live grant.
    pub(super) fn write(&mut self, write: &Write) {
        if self.lenient {
            return;
        }
        let region =
            self.regions.get_mut(&write.rkey).expect("WRITE to memory that is not granted");
        assert!(!region.filled, "WRITE behind DONE");
        let at = write.addr.checked_sub(region.addr).expect("WRITE in front of the grant") as usize;
        let begin = *region.begin.get_or_insert(at);
        assert!(begin < GRANULE, "a message begins in the first granule");
        assert_eq!(at, begin + region.written, "WRITEs of a grant leave gaps or overlap");
        region.data[at..at + write.src.len()].copy_from_slice(&write.src);
        region.written += write.src.len();
    }

    pub(super) fn filled(&mut self, key: usize, begin: usize, len: usize) -> &[u8] {
        let region =
            self.regions.get_mut(&(key as u32)).expect("landed in memory that is not granted");
        assert!(!std::mem::replace(&mut region.filled, true));
        let written = (region.begin.unwrap_or(0), region.written);
        assert!(self.lenient || written == (begin, len), "DONE of other bytes than were written");
        &region.data[begin..begin + len]
    }

    pub(super) fn free(&mut self, key: usize) {
        let region = self.regions.remove(&(key as u32)).expect("freed twice");
        self.used -= if region.named.is_some() { 0 } else { region.data.len() };
    }
}
