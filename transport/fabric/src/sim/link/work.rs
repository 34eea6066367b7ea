//! Work requests of a simulated link, and the memory that they read and write.
//!
//! [`Checksums`] checks that the memory of posted work does not change (R10). A real device does
//! not make this check. [`Unordered`] holds WRITEs whose bytes arrive in any order, as with
//! IBV_ACCESS_RELAXED_ORDERING. All bytes have arrived when the RECV of a later message completes,
//! but perhaps not earlier.

use std::collections::VecDeque;
use std::ptr::NonNull;

use tonic_rdma_memory::{PinnedBuf, PinnedBytes};

use crate::control_block::ControlBlock;
use crate::link::WriteSource;
use crate::queue::HeldMemory;
use crate::sim::config::Rng;
use crate::sim::faults::Delay;
use crate::sim::memory::RegionTable;

/// One work request.
#[derive(Debug)]
pub(super) struct SimWorkRequest {
    pub(super) seq: u64,
    pub(super) addr: NonNull<u8>,
    /// The address of the same bytes for the device.
    pub(super) iova: u64,
    pub(super) len: usize,
    pub(super) lkey: u32,
    /// Address and key of a WRITE.
    pub(super) remote: Option<(u64, u32)>,
    /// The delay until the request is delivered.
    pub(super) delay: Delay,
}

// SAFETY: `addr` points into memory that the link owns (its block) or holds in its send queue; it
// is used by the link's owner only.
unsafe impl Send for SimWorkRequest {}
// SAFETY: &SimWorkRequest gives no access to the memory.
unsafe impl Sync for SimWorkRequest {}

/// Memory that work reads: its address in this process, its address and key for the device, and its
/// length.
pub(super) struct Source {
    pub(super) addr: NonNull<u8>,
    pub(super) iova: u64,
    pub(super) lkey: u32,
    pub(super) len: usize,
}

impl Source {
    /// A part of the block, whose address for the device is the virtual address.
    pub(super) fn in_block(block: &ControlBlock, offset: usize, len: usize) -> Option<Source> {
        let addr = block.range(offset, len)?;
        Some(Source { addr, iova: addr.as_ptr() as u64, lkey: block.lkey(), len })
    }
}

/// Splits a WRITE's source into the owner of its memory and the place of its bytes.
pub(super) fn write_source(src: WriteSource, block: &ControlBlock) -> Option<(HeldMemory, Source)> {
    fn at(addr: u64) -> NonNull<u8> {
        // Pool memory never has the address 0, so the fallback is never used.
        NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize))
            .unwrap_or(NonNull::dangling())
    }
    fn bytes(b: PinnedBytes) -> (HeldMemory, Source) {
        let source = Source { addr: at(b.addr()), iova: b.iova(), lkey: b.lkey(), len: b.len() };
        (HeldMemory::Bytes(b), source)
    }
    fn buf(b: PinnedBuf) -> (HeldMemory, Source) {
        let source = Source { addr: at(b.addr()), iova: b.addr(), lkey: b.lkey(), len: b.len() };
        (HeldMemory::Buf(b), source)
    }
    Some(match src {
        WriteSource::Bytes(b) => bytes(b),
        WriteSource::Buf(b) => buf(b),
        WriteSource::Staged { offset, len } => {
            (HeldMemory::Staging, Source::in_block(block, offset, len)?)
        }
        WriteSource::Any(_) => return None,
    })
}

/// Checksums of the memory that posted work reads, in the order in which the work was posted.
#[derive(Debug, Default)]
pub(super) struct Checksums(VecDeque<Checksum>);

#[derive(Debug)]
struct Checksum {
    seq: u64,
    addr: NonNull<u8>,
    len: usize,
    sum: u64,
}

// SAFETY: the pointers are used by the link's owner only, under the contract of `watch`.
unsafe impl Send for Checksums {}
// SAFETY: &Checksums gives no access to the memory.
unsafe impl Sync for Checksums {}

impl Checksums {
    /// Records the memory that work `seq` reads.
    ///
    /// # Safety
    /// The range is readable, and nobody writes there while a method of this value runs, until
    /// `seq` is done or `clear` is called.
    pub(super) unsafe fn watch(&mut self, seq: u64, addr: NonNull<u8>, len: usize) {
        // SAFETY: the caller's promise.
        let sum = unsafe { sum(addr, len) };
        self.0.push_back(Checksum { seq, addr, len, sum });
    }

    /// Whether the memory that work `seq` reads is unchanged.
    pub(super) fn is_same(&self, seq: u64) -> bool {
        // SAFETY: `seq` is not done: the promise made to `watch` holds.
        let same = |s: &Checksum| unsafe { sum(s.addr, s.len) } == s.sum;
        self.0.iter().find(|s| s.seq == seq).is_none_or(same)
    }

    /// Forgets work up to `seq`, which has completed. Returns whether all memory that this work
    /// reads is unchanged.
    pub(super) fn done(&mut self, seq: u64) -> bool {
        let mut same = true;
        while let Some(first) = self.0.front().filter(|s| s.seq <= seq) {
            // SAFETY: as above.
            same &= unsafe { sum(first.addr, first.len) } == first.sum;
            self.0.pop_front();
        }
        same
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// A fast checksum that depends on every bit.
///
/// # Safety
/// The range is readable and nobody writes there during the call.
unsafe fn sum(addr: NonNull<u8>, len: usize) -> u64 {
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(addr.as_ptr(), len) };
    let mix = |h: u64, word: u64| (h.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    let words = bytes.chunks_exact(8);
    let rest = words.remainder().iter().fold(0, |h, b| mix(h, u64::from(*b)));
    words.fold(rest, |h, word| {
        mix(
            h,
            u64::from_le_bytes([
                word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
            ]),
        )
    })
}

/// Bytes in transit, with their address and key.
#[derive(Debug, Default)]
pub(super) struct Unordered(Vec<(Vec<u8>, u64, u32)>);

impl Unordered {
    /// Lets a part of a WRITE arrive, and keeps the rest. Returns false if the key does not allow
    /// the WRITE.
    ///
    /// # Safety
    /// The contract of [`RegionTable::write`].
    pub(super) unsafe fn write(
        &mut self,
        table: &RegionTable,
        (rkey, addr): (u32, u64),
        (src, len): (NonNull<u8>, usize),
        rng: &mut Rng,
    ) -> bool {
        if !table.is_writable(rkey, addr, len) {
            return false;
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(src.as_ptr(), len) };
        let (head, tail) = bytes.split_at(rng.up_to(len as u32) as usize);
        let mut parts = [(head.to_vec(), addr), (tail.to_vec(), addr + head.len() as u64)];
        if rng.one_in(2) {
            parts.reverse();
        }
        let [(mut now, at), (later, later_at)] = parts;
        // Sometimes no part arrives yet.
        match rng.one_in(3) {
            true => self.0.push((now, at, rkey)),
            // SAFETY: the source is a copy of this link's own.
            false => unsafe {
                let src = NonNull::from(now.as_mut_slice()).cast();
                table.write(rkey, at, src, now.len());
            },
        }
        self.0.push((later, later_at, rkey));
        true
    }

    /// Lets all bytes in transit arrive, in any order.
    pub(super) fn arrive(&mut self, table: &RegionTable, rng: &mut Rng) {
        while !self.0.is_empty() {
            let (mut bytes, addr, rkey) =
                self.0.swap_remove(rng.up_to(self.0.len() as u32 - 1) as usize);
            let src = NonNull::from(bytes.as_mut_slice()).cast();
            // SAFETY: the source is a copy of this link's own.
            unsafe { table.write(rkey, addr, src, bytes.len()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_seen_until_work_is_done() {
        let mut memory = vec![7u8; 100];
        let at = |memory: &mut Vec<u8>, n: usize| NonNull::new(&raw mut memory[n]).unwrap();
        let mut sums = Checksums::default();
        let (a, b) = (at(&mut memory, 0), at(&mut memory, 50));
        // SAFETY: both ranges lie in `memory`, which is changed between the calls only.
        unsafe {
            sums.watch(1, a, 50);
            sums.watch(2, b, 50);
        }
        assert!(sums.is_same(1) && sums.is_same(2));
        // SAFETY: within `memory`.
        unsafe { *b.as_ptr().add(49) = 8 };
        assert!(sums.is_same(1) && !sums.is_same(2));
        assert!(sums.done(1));
        assert!(!sums.done(2));
        assert!(sums.is_same(2), "done work is forgotten");
    }
}
