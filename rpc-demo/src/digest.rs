//! Length and CRC32C of a file or object, computed incrementally.

use std::fmt;

use crate::pb;

/// Length and CRC-32C (Castagnoli) of the bytes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest {
    /// Length in bytes.
    pub(crate) size: u64,
    pub(crate) crc32c: u32,
}

impl Digest {
    /// The digest of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Digest {
        Digest { size: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) }
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
        self.size += bytes.len() as u64;
    }

    /// Returns the digest of the bytes of `self` followed by the bytes of `next`, without reading
    /// them again.
    pub(crate) fn then(self, next: Digest) -> Digest {
        let length = usize::try_from(next.size).unwrap_or(usize::MAX);
        Digest {
            size: self.size + next.size,
            crc32c: crc32c::crc32c_combine(self.crc32c, next.crc32c, length),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes with CRC32C {:08x}", self.size, self.crc32c)
    }
}

impl From<Digest> for pb::Digest {
    fn from(digest: Digest) -> pb::Digest {
        pb::Digest { size: digest.size, crc32c: digest.crc32c }
    }
}

impl From<pb::Digest> for Digest {
    fn from(digest: pb::Digest) -> Digest {
        Digest { size: digest.size, crc32c: digest.crc32c }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_what_the_whole_gives() {
        let mut whole = Digest::default();
        whole.add(b"123456789");
        assert_eq!(whole.crc32c, 0xe306_9283, "the check value of CRC-32C");
        let mut pieces = Digest::default();
        pieces.add(b"1234");
        pieces.add(b"");
        pieces.add(b"56789");
        assert_eq!(pieces, whole);
        let joined = Digest::default()
            .then(Digest::of(b"12345"))
            .then(Digest::of(b""))
            .then(Digest::of(b"6789"));
        assert_eq!(joined, whole);
    }
}
