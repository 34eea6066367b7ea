//! Checks that the memory of posted work does not change (R10). A real device does not check this.

use std::collections::VecDeque;
use std::ptr::NonNull;

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

    /// Forgets work up to `seq`, which has completed. Returns whether all memory that it reads is
    /// unchanged.
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

/// A fast checksum, which changes with every bit.
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
