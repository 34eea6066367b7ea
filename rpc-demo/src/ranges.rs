//! Divides a large file into ranges that are transferred in parallel.

/// The division of a file or object into ranges of equal size. The last range may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ranges {
    /// Bytes of the file or object.
    size: u64,
    /// Bytes of a range, at least 1.
    each: u64,
}

/// Minimum and maximum size of a range in bytes.
pub(crate) const RANGE_MIN: u64 = 64 << 10;
pub(crate) const RANGE_MAX: u64 = 1 << 32;
/// Maximum number of ranges of a file. The checksums of the ranges are kept in memory.
const COUNT_MAX: u64 = 1 << 20;

impl Ranges {
    /// Returns `None` if `each` is not a valid size, or if there would be more than `COUNT_MAX`
    /// ranges.
    pub(crate) fn new(size: u64, each: u64) -> Option<Ranges> {
        let sound = (RANGE_MIN..=RANGE_MAX).contains(&each) && size.div_ceil(each) <= COUNT_MAX;
        sound.then_some(Ranges { size, each })
    }

    /// Divides `size` bytes, up to 4 PiB, into ranges of `wish` bytes, rounded down to whole pages.
    /// The ranges are longer or shorter if `wish` is not a valid size, or would give too many
    /// ranges.
    pub(crate) fn near(size: u64, wish: u64) -> Ranges {
        let least = size.div_ceil(COUNT_MAX).next_power_of_two();
        let each = wish.clamp(RANGE_MIN, RANGE_MAX).max(least);
        // Whole pages, so that reads and writes of each range can bypass the page cache.
        Ranges { size, each: each - each % 4096 }
    }

    /// Bytes of a range.
    pub(crate) fn each(&self) -> u64 {
        self.each
    }

    /// Bytes of the file or object.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn count(&self) -> usize {
        usize::try_from(self.size.div_ceil(self.each)).unwrap_or(usize::MAX)
    }

    /// Offset and length in bytes of range `index`; `None` if there is no such range.
    pub(crate) fn get(&self, index: usize) -> Option<(u64, u64)> {
        let offset = u64::try_from(index).ok()?.checked_mul(self.each)?;
        (offset < self.size).then(|| (offset, self.each.min(self.size - offset)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cover_the_whole_once() {
        for size in [0, 1, RANGE_MIN - 1, RANGE_MIN, RANGE_MIN + 1, 10 * RANGE_MIN, 1 << 40] {
            let ranges = Ranges::near(size, RANGE_MIN);
            let mut at = 0;
            for index in 0..ranges.count() {
                let (offset, length) = ranges.get(index).unwrap();
                assert_eq!(offset, at);
                assert!(length > 0 && length <= ranges.each());
                at += length;
            }
            assert_eq!(at, size);
            assert_eq!(ranges.get(ranges.count()), None);
            assert_eq!(Ranges::new(size, ranges.each()), Some(ranges));
        }
    }

    #[test]
    fn are_never_too_many() {
        assert_eq!(Ranges::new(10, 0), None);
        assert_eq!(Ranges::new(1 << 40, RANGE_MIN), None);
        for size in [1 << 40, (1 << 52) - 1, 1 << 52] {
            let near = Ranges::near(size, RANGE_MIN);
            assert!(near.count() as u64 <= COUNT_MAX && Ranges::new(size, near.each()).is_some());
        }
        assert_eq!(Ranges::near(100 << 20, 8 << 20).each(), 8 << 20);
    }
}
