//! A buffer to encode into that leaves large `Bytes` where they lie.

use std::collections::VecDeque;

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// A `Bytes` that belongs into an encoded message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// In front of it stand this many of the bytes that were copied.
    pub at: usize,
    /// The bytes, as they were put.
    pub bytes: Bytes,
    /// They came as a buffer, as protobuf's `bytes` fields do, and not as a slice, as its strings
    /// do.
    pub is_buf: bool,
}

/// A [`BufMut`] that copies small things to one buffer, and keeps what is put as `Bytes` of some
/// length as segments.
///
/// ```
/// use bytes::{BufMut, Bytes, BytesMut};
/// use std::collections::VecDeque;
/// use tonic_rdma_memory::{Segment, SegmentBuf};
///
/// let large = Bytes::from(vec![7; 10_000]);
/// let (mut copied, mut segments) = (BytesMut::new(), VecDeque::new());
/// let mut buf = SegmentBuf::new(&mut copied, &mut segments, 4096);
/// buf.put_slice(b"head");
/// buf.put(large.clone());
/// buf.put_slice(b"tail");
/// assert_eq!(buf.len(), 10_008);
/// assert_eq!(&copied[..], b"headtail");
/// assert_eq!(segments[0].at, 4);
/// assert_eq!(segments[0].bytes.as_ptr(), large.as_ptr());
/// ```
#[derive(Debug)]
pub struct SegmentBuf<'a> {
    copied: &'a mut BytesMut,
    segments: &'a mut VecDeque<Segment>,
    keep: usize,
    /// Bytes of segments.
    kept: usize,
    /// Those of them that had to be copied to become segments.
    moved: usize,
}

impl<'a> SegmentBuf<'a> {
    /// Copies to `copied`, which is empty, and appends what has at least `keep` bytes to
    /// `segments`.
    pub fn new(copied: &'a mut BytesMut, segments: &'a mut VecDeque<Segment>, keep: usize) -> Self {
        SegmentBuf { copied, segments, keep, kept: 0, moved: 0 }
    }

    /// Bytes put.
    pub fn len(&self) -> usize {
        self.copied.len() + self.kept
    }

    /// Whether nothing was put.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of segments.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Bytes of segments that were copied because they were not put as `Bytes`: a long string or
    /// `Vec<u8>`.
    pub fn moved(&self) -> usize {
        self.moved
    }

    fn keep(&mut self, bytes: Bytes, is_buf: bool) {
        self.kept += bytes.len();
        self.segments.push_back(Segment { at: self.copied.len(), bytes, is_buf });
    }
}

// SAFETY: chunk_mut, advance_mut and remaining_mut are those of the BytesMut inside, unchanged, and
// nothing else here moves or shrinks it between a chunk_mut and its advance_mut.
unsafe impl BufMut for SegmentBuf<'_> {
    fn remaining_mut(&self) -> usize {
        self.copied.remaining_mut()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        // SAFETY: the caller has initialized `count` bytes of what chunk_mut gave, which was the
        // inner buffer's.
        unsafe { self.copied.advance_mut(count) };
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.copied.chunk_mut()
    }

    fn put<T: Buf>(&mut self, mut src: T) {
        let len = src.remaining();
        if len < self.keep {
            return self.copied.put(src);
        }
        let at = src.chunk().as_ptr();
        let bytes = src.copy_to_bytes(len);
        if bytes.as_ptr() != at {
            self.moved += len;
        }
        self.keep(bytes, true);
    }

    fn put_slice(&mut self, src: &[u8]) {
        if src.len() < self.keep {
            return self.copied.put_slice(src);
        }
        self.moved += src.len();
        self.keep(crate::copy::to_vec(src).into(), false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(copied: &[u8], segments: &VecDeque<Segment>) -> Vec<u8> {
        let (mut all, mut from) = (Vec::new(), 0);
        for segment in segments {
            all.extend_from_slice(&copied[from..segment.at]);
            all.extend_from_slice(&segment.bytes);
            from = segment.at;
        }
        all.extend_from_slice(&copied[from..]);
        all
    }

    #[test]
    fn everything_put_comes_back_in_order() {
        let (mut copied, mut segments) = (BytesMut::new(), VecDeque::new());
        let mut buf = SegmentBuf::new(&mut copied, &mut segments, 4);
        assert!(buf.is_empty());
        buf.put(Bytes::from_static(b"first"));
        buf.put(Bytes::from_static(b"2nd"));
        buf.put_u8(b'/');
        buf.put_slice(b"third");
        buf.put(&b"fourth"[..]);
        buf.put_bytes(b'x', 9);
        buf.put(Bytes::new());
        assert_eq!((buf.len(), buf.kept(), buf.moved()), (29, 16, 11));
        assert_eq!(joined(&copied, &segments), b"first2nd/thirdfourthxxxxxxxxx");
        let is_buf: Vec<bool> = segments.iter().map(|segment| segment.is_buf).collect();
        assert_eq!(is_buf, [true, false, true]);
    }
}
