//! A piece of a body that the peer has lent, except for its ends.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tonic_rdma_memory::{Landed, LandedReader, Window};

use crate::placeholder::HEADER;

/// A piece of a message with lent bytes: the bytes before them, the lent bytes, and the bytes after
/// them.
#[derive(Debug, Default)]
pub struct LentPiece {
    /// The bytes before the lent bytes, in memory that the peer cannot write to.
    pub head: Bytes,
    /// The bytes that the peer has lent.
    pub lent: Landed,
    /// The bytes after the lent bytes, received like `head`.
    pub tail: Bytes,
}

#[expect(clippy::len_without_is_empty, reason = "nothing asks")]
impl LentPiece {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.lent.len() + self.tail.len()
    }

    /// Appends a copy of all bytes to `dst`.
    pub fn append_to(&self, dst: &mut BytesMut) {
        dst.put_slice(&self.head);
        self.lent.append_to(dst);
        dst.put_slice(&self.tail);
    }

    /// Reads the piece as one message, without its header.
    pub(super) fn message(self, window: &mut Window) -> LandedReader<'_> {
        let LentPiece { mut head, lent, tail } = self;
        head.advance(HEADER.min(head.len()));
        Landed::reader_of(vec![head.into(), lent, tail.into()], window)
    }
}
