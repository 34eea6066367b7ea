//! Pieces of a body, in segments.
//!
//! A body is a stream of bytes in pieces, and not a list of messages. So a small piece may be cut
//! anywhere, and a large piece lands in as many parts as the receiver's memory allows. A message
//! that is granted in one piece lands in one piece.

use std::cmp::Ordering;

use bytes::Bytes;
use smallvec::SmallVec;

/// Where the longest field of type `bytes` lies in a message, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The offset of the field's first byte.
    pub at: u32,
    /// The length of the field, which is not 0.
    pub len: u32,
}

impl Field {
    /// The offset after the field's last byte.
    pub fn end(self) -> u64 {
        u64::from(self.at) + u64::from(self.len)
    }
}

/// Where lent bytes lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentPlace {
    /// The number of the lease, unique among its owner's open leases.
    pub lease: u32,
    /// The key of the memory.
    pub key: u32,
    /// The address of the first byte, valid with that key.
    pub addr: u64,
}

/// A piece of a body, most of which is lent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LentBody {
    /// The bytes before the lent bytes.
    pub head: Bytes,
    /// Where the lent bytes lie.
    pub place: LentPlace,
    /// Number of bytes that are lent.
    pub len: u32,
    /// The bytes after the lent bytes.
    pub tail: Bytes,
}

impl LentBody {
    /// Bytes of the whole piece.
    pub fn total(&self) -> u64 {
        u64::from(self.len) + (self.head.len() + self.tail.len()) as u64
    }
}

/// A piece of a body in segments. A payload that is sent by WRITE lands contiguously, without a
/// copy to join the segments.
///
/// ```
/// use tonic_rdma_proto::Payload;
///
/// let mut payload = Payload::new();
/// payload.push("head ".into(), false);
/// payload.push("in pinned memory".into(), true);
/// assert_eq!(payload.len(), 21);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// Only segments before `first` are empty.
    segments: SmallVec<[Segment; 1]>,
    /// The index of the first segment that has not been taken completely.
    first: usize,
    len: usize,
    /// The segment that may be lent.
    lendable: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) bytes: Bytes,
    pinned: bool,
    /// Whether the segment was appended by [`Payload::push_aligned`].
    aligned: bool,
}

/// The segment that determines the address at which a payload lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lead {
    /// Bytes of the payload in front of the segment.
    pub(crate) at: u64,
    /// The address of the segment's first byte.
    pub(crate) source: u64,
    pub(crate) pinned: bool,
    pub(crate) aligned: bool,
    /// Length of the segment in bytes.
    pub(crate) len: u64,
}

impl Payload {
    /// Returns an empty payload.
    pub fn new() -> Self {
        Payload::default()
    }

    /// Appends a segment. `pinned` means that the segment lies in memory that the device can read.
    /// Otherwise the segment is staged.
    pub fn push(&mut self, bytes: Bytes, pinned: bool) {
        self.push_segment(Segment { bytes, pinned, aligned: false });
    }

    /// Like [`Payload::push`], but the longest of the segments appended this way lands with its
    /// first byte at a multiple of the alignment that the receiver requires
    /// ([`Config::align`](crate::Config::align)).
    pub fn push_aligned(&mut self, bytes: Bytes, pinned: bool) {
        self.push_segment(Segment { bytes, pinned, aligned: true });
    }

    /// Marks the last segment as a segment that may be lent: see
    /// [`Connection::poll_lend`](crate::Connection::poll_lend). If several segments are marked, the
    /// longest may be lent.
    pub fn last_is_lendable(&mut self) {
        let last = self.segments.len().checked_sub(1).and_then(|last| u32::try_from(last).ok());
        let Some(last) = last else { return };
        let len = |at: u32| self.segments.get(at as usize).map_or(0, |segment| segment.bytes.len());
        if self.lendable.is_none_or(|before| len(before) < len(last)) {
            self.lendable = Some(last);
        }
    }

    fn push_segment(&mut self, segment: Segment) {
        if !segment.bytes.is_empty() {
            self.len += segment.bytes.len();
            self.segments.push(segment);
        }
    }

    /// Bytes of all segments.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the segments that have not been taken.
    pub fn into_segments(self) -> impl Iterator<Item = Bytes> {
        self.segments.into_iter().skip(self.first).map(|segment| segment.bytes)
    }

    /// The segment that may be lent. `None` if no segment may be lent, or if a whole segment has
    /// been taken.
    pub(crate) fn lendable(&self) -> Option<&Bytes> {
        let at = self.lendable.filter(|_| self.first == 0)?;
        self.segments.get(at as usize).map(|segment| &segment.bytes)
    }

    /// The segments before the segment that may be lent, that segment, and the segments after it.
    pub(crate) fn around_lendable(&self) -> Option<(&[Segment], &Bytes, &[Segment])> {
        let (head, rest) = self.segments.split_at_checked(self.lendable? as usize)?;
        let (lendable, tail) = rest.split_first()?;
        Some((head, &lendable.bytes, tail))
    }

    /// Forgets that a segment may be lent.
    pub(crate) fn not_lendable(mut self) -> Self {
        self.lendable = None;
        self
    }

    /// Returns the longest aligned segment, or the longest segment if none is aligned. If several
    /// segments have this length, returns the first of them.
    pub(crate) fn lead(&self) -> Option<Lead> {
        let mut at = 0;
        let mut longest: Option<Lead> = None;
        for Segment { bytes, pinned, aligned } in self.segments.iter().skip(self.first) {
            let (source, len) = (bytes.as_ptr() as usize as u64, bytes.len() as u64);
            if longest.is_none_or(|lead| (lead.aligned, lead.len) < (*aligned, len)) {
                longest = Some(Lead { at, source, pinned: *pinned, aligned: *aligned, len });
            }
            at += len;
        }
        longest
    }

    /// The longest aligned segment, if there is one that a REQUEST can state.
    pub(crate) fn field(&self) -> Option<Field> {
        let lead = self.lead().filter(|lead| lead.aligned)?;
        Some(Field { at: u32::try_from(lead.at).ok()?, len: u32::try_from(lead.len).ok()? })
    }

    /// Cuts off the bytes around the [`field`](Self::field), if there are at most `max` of them.
    /// Returns the bytes before the field and the bytes after it.
    pub(crate) fn cut_to_field(&mut self, max: usize) -> Option<(Payload, Payload)> {
        let field = self.field()?;
        if self.len - field.len as usize > max {
            return None;
        }
        let (mut head, mut tail) = (Payload::new(), Payload::new());
        let mut at = 0;
        let segments = std::mem::take(&mut self.segments).into_iter();
        for segment in segments.skip(std::mem::take(&mut self.first)) {
            let len = segment.bytes.len();
            let part = match at.cmp(&(field.at as usize)) {
                Ordering::Less => &mut head,
                Ordering::Equal => &mut *self,
                Ordering::Greater => &mut tail,
            };
            part.segments.push(segment);
            at += len;
        }
        (head.len, self.len) = (field.at as usize, field.len as usize);
        tail.len = at - head.len - self.len;
        self.lendable = None;
        Some((head, tail))
    }

    /// Length of the first segment, and whether it is pinned.
    pub(crate) fn front(&self) -> Option<(usize, bool)> {
        self.segments.get(self.first).map(|segment| (segment.bytes.len(), segment.pinned))
    }

    /// Takes up to `len` bytes from the first segment.
    pub(crate) fn take(&mut self, len: usize) -> Bytes {
        let Some(segment) = self.segments.get_mut(self.first) else { return Bytes::new() };
        let taken = segment.bytes.split_to(segment.bytes.len().min(len));
        self.len -= taken.len();
        if segment.bytes.is_empty() {
            self.first += 1;
        }
        taken
    }
}

/// A payload of one segment that is not pinned.
impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        let mut payload = Payload::new();
        payload.push(bytes, false);
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_taken_in_order_and_empty_ones_are_not_there() {
        let mut payload = Payload::from(Bytes::from_static(b"ab"));
        payload.push(Bytes::new(), true);
        payload.push(Bytes::from_static(b"cdef"), true);
        assert_eq!((payload.len(), payload.front()), (6, Some((2, false))));
        assert_eq!(payload.take(9), "ab");
        assert_eq!(payload.front(), Some((4, true)));
        assert_eq!(payload.take(3), "cde");
        assert_eq!(payload.take(1), "f");
        assert_eq!((payload.len(), payload.is_empty(), payload.front()), (0, true, None));
        assert_eq!(payload.take(1), "");
    }
}
