//! An encoding buffer that does not copy large `Bytes`.

use std::collections::VecDeque;

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// A long value of an encoded message, which [`SegmentBuf`] keeps separate from the copied bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The number of copied bytes that precede the value in the message.
    pub at: usize,
    /// The content: the original `Bytes`, or a copy of a value that was not put as `Bytes`.
    pub bytes: Bytes,
    /// Whether the value was put as a buffer, like protobuf's `bytes` fields. If false, the value
    /// was put as a slice, like protobuf's strings.
    pub is_buf: bool,
}

/// A [`BufMut`] that copies short values to one buffer, and collects long values as segments. Long
/// `Bytes` become segments without a copy.
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
    /// Minimum length of a segment.
    min_segment: usize,
    /// The total length of all segments.
    segment_bytes: usize,
    /// The total length of the segments that had to be copied.
    copied_bytes: usize,
}

impl<'a> SegmentBuf<'a> {
    /// Creates a buffer that copies to `copied`, which must be empty, and appends values of at
    /// least `min_segment` bytes to `segments`.
    pub fn new(
        copied: &'a mut BytesMut,
        segments: &'a mut VecDeque<Segment>,
        min_segment: usize,
    ) -> Self {
        SegmentBuf { copied, segments, min_segment, segment_bytes: 0, copied_bytes: 0 }
    }

    /// The number of bytes written so far.
    pub fn len(&self) -> usize {
        self.copied.len() + self.segment_bytes
    }

    /// Whether nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The total length of all segments in bytes.
    pub fn segment_bytes(&self) -> usize {
        self.segment_bytes
    }

    /// The number of bytes in segments that were copied because they were not put as `Bytes`, such
    /// as a long string or `Vec<u8>`.
    pub fn copied_bytes(&self) -> usize {
        self.copied_bytes
    }

    fn push_segment(&mut self, bytes: Bytes, is_buf: bool) {
        self.segment_bytes += bytes.len();
        self.segments.push_back(Segment { at: self.copied.len(), bytes, is_buf });
    }
}

// SAFETY: chunk_mut, advance_mut and remaining_mut are those of the BytesMut inside, and nothing
// else here moves or shrinks it between a chunk_mut and its advance_mut.
unsafe impl BufMut for SegmentBuf<'_> {
    fn remaining_mut(&self) -> usize {
        self.copied.remaining_mut()
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        // SAFETY: the caller has initialized `count` bytes of what chunk_mut returned, which
        // belongs to the inner buffer.
        unsafe { self.copied.advance_mut(count) };
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        self.copied.chunk_mut()
    }

    fn put<T: Buf>(&mut self, mut src: T) {
        let len = src.remaining();
        if len < self.min_segment {
            return self.copied.put(src);
        }
        let at = src.chunk().as_ptr();
        let bytes = src.copy_to_bytes(len);
        if bytes.as_ptr() != at {
            self.copied_bytes += len;
        }
        self.push_segment(bytes, true);
    }

    fn put_slice(&mut self, src: &[u8]) {
        if src.len() < self.min_segment {
            return self.copied.put_slice(src);
        }
        self.copied_bytes += src.len();
        self.push_segment(crate::copy::to_vec(src).into(), false);
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
    fn copied_bytes_and_segments_keep_their_order() {
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
        assert_eq!((buf.len(), buf.segment_bytes(), buf.copied_bytes()), (29, 16, 11));
        assert_eq!(joined(&copied, &segments), b"first2nd/thirdfourthxxxxxxxxx");
        let is_buf: Vec<bool> = segments.iter().map(|segment| segment.is_buf).collect();
        assert_eq!(is_buf, [true, false, true]);
    }
}
