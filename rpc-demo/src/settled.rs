//! Copies of received bytes that nobody changes any more.
//!
//! What a peer sends over a fast path may lie in memory that the peer can write to, for as long as
//! it is not dropped (SECURITY.md, "What may change after it was received"). A checksum of it could
//! be of other bytes than those that are then stored. So both are made from such a copy.

use bytes::{Bytes, BytesMut};

use crate::costs;
use crate::disk::ALIGN;

/// Makes copies one after another, in the same memory where the last one has been dropped.
#[derive(Debug, Default)]
pub(crate) struct Settled(BytesMut);

impl Settled {
    /// Copies `bytes`. The copy begins at the same place within a page, by which O_DIRECT goes.
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> Bytes {
        let align = ALIGN as usize;
        self.0.clear();
        self.0.reserve(bytes.len() + align);
        let (from, to) = (bytes.as_ptr().addr() % align, self.0.as_ptr().addr() % align);
        let begin = (from + align - to) % align;
        self.0.resize(begin, 0);
        self.0.extend_from_slice(bytes);
        costs::settled(bytes.len() as u64);
        self.0.split().freeze().slice(begin..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_and_lies_alike_in_the_same_memory() {
        let source: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let mut settled = Settled::default();
        let mut places = std::collections::HashSet::new();
        for begin in [0, 1, 4095, 4096, 5000].into_iter().cycle().take(50) {
            for len in [0, 1, 4096, 90_000] {
                let part = &source[begin..begin + len];
                let copy = settled.copy(part);
                assert_eq!(copy, part);
                let place = |bytes: &[u8]| bytes.as_ptr().addr() % 4096;
                assert!(len == 0 || place(&copy) == place(part));
                places.insert(copy.as_ptr().addr() / (1 << 20));
            }
        }
        assert!(places.len() < 20, "{} places of 200 copies", places.len());
    }
}
