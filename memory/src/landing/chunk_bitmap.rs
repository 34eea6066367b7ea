//! A bitmap of a chunk's granules, in which the bits of taken granules are set.
//!
//! In the bitmap of granted and filled granules, only the owner of the chunk takes granules. So a
//! granule that the owner has seen free stays free until the owner takes it. In the bitmap of held
//! granules, any thread may take a run. In both bitmaps, any thread may clear bits with an atomic
//! and-not, so that freeing takes no lock. Clearing a bit is a release operation and reading it an
//! acquire operation: all accesses by the last holder of the memory happen before the accesses by
//! the next holder.
//!
//! The code is checked with loom: tests/loom.rs compiles this file with loom's atomics.

use crate::atomics::{AtomicU64, Ordering};

const WORD: usize = u64::BITS as usize;

/// The bitmap of one chunk.
#[derive(Debug)]
pub(crate) struct ChunkBitmap {
    words: Box<[AtomicU64]>,
    len: usize,
}

impl ChunkBitmap {
    /// Creates a bitmap of `len` free granules.
    pub(crate) fn new(len: usize) -> Self {
        ChunkBitmap { words: (0..len.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect(), len }
    }

    /// The number of granules.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The runs of free granules in order, as start and length.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next(at, false);
            // The end of a run is read once. Granules that are freed later form another run.
            at = self.next(start, true);
            (start < self.len).then_some((start, at - start))
        })
    }

    /// Returns the first taken granule from `at` on, or the first free granule if `taken` is false.
    /// Returns `len` if there is no such granule.
    fn next(&self, mut at: usize, taken: bool) -> usize {
        while at < self.len {
            let word = self.words[at / WORD].load(Ordering::Acquire);
            let hits = (if taken { word } else { !word }) >> (at % WORD);
            if hits != 0 {
                return (at + hits.trailing_zeros() as usize).min(self.len);
            }
            at = (at / WORD + 1) * WORD;
        }
        self.len
    }

    /// The start of the first free run of at least `len` granules.
    pub(crate) fn find(&self, len: usize) -> Option<usize> {
        self.runs().find(|(_, run)| *run >= len).map(|(start, _)| start)
    }

    /// The longest free run, as start and length.
    pub(crate) fn longest(&self) -> Option<(usize, usize)> {
        self.runs().max_by_key(|(_, len)| *len)
    }

    /// The length of the longest run that would be free if these granules were taken.
    pub(crate) fn longest_without(&self, start: usize, len: usize) -> usize {
        let end = start + len;
        let runs = self.runs().map(|(at, run)| {
            let before = (at + run).min(start).saturating_sub(at);
            let behind = (at + run).saturating_sub(at.max(end));
            before.max(behind)
        });
        runs.max().unwrap_or(0)
    }

    /// Whether all granules are free.
    pub(crate) fn is_free(&self) -> bool {
        self.next(0, true) == self.len
    }

    /// The number of granules that are taken.
    pub(crate) fn taken(&self) -> usize {
        self.words.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Takes free granules. Only the chunk's owner may call this function.
    pub(crate) fn take(&self, start: usize, len: usize) {
        for (word, mask) in masks(start, len) {
            let before = self.words[word].fetch_or(mask, Ordering::AcqRel);
            debug_assert_eq!(before & mask, 0, "a granule was taken twice");
        }
    }

    /// Takes granules unless the first of them is taken, and returns whether it took them. Several
    /// threads may try to take the same run at the same time, but no thread may take a run that
    /// partly overlaps another run.
    pub(crate) fn try_take(&self, start: usize, len: usize) -> bool {
        let mut masks = masks(start, len);
        let Some((word, mask)) = masks.next() else { return false };
        let first = 1 << (start % WORD);
        if self.words[word].fetch_or(mask, Ordering::AcqRel) & first != 0 {
            return false;
        }
        masks.for_each(|(word, mask)| {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        });
        true
    }

    /// Whether a granule is taken.
    pub(crate) fn is_taken(&self, at: usize) -> bool {
        self.words[at / WORD].load(Ordering::Acquire) >> (at % WORD) & 1 == 1
    }

    /// Frees taken granules. Returns false if one of these granules was free already.
    pub(crate) fn free(&self, start: usize, len: usize) -> bool {
        let mut all = true;
        for (word, mask) in masks(start, len) {
            all &= self.words[word].fetch_and(!mask, Ordering::AcqRel) & mask == mask;
        }
        all
    }
}

/// The words that a range covers, each with a mask of the range's bits in that word.
fn masks(start: usize, len: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = start + len;
    let mut at = start;
    std::iter::from_fn(move || {
        let bit = at % WORD;
        let count = (WORD - bit).min(end - at);
        let word = at / WORD;
        at += count;
        (count > 0).then(|| (word, (u64::MAX >> (WORD - count)) << bit))
    })
}
