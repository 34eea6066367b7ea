//! A piece of a body in segments.

use bytes::Bytes;
use smallvec::SmallVec;

/// Where the longest field of type `bytes` lies in a message, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The offset of its first byte.
    pub at: u32,
    /// Its length, which is not 0.
    pub len: u32,
}

impl Field {
    /// The offset behind its last byte.
    pub fn end(self) -> u64 {
        u64::from(self.at) + u64::from(self.len)
    }
}

/// A piece of a body in segments. If it is sent by WRITE, it lands contiguously, and the segments
/// are not copied to join them.
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
    /// A segment may be lent.
    lendable: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Segment {
    bytes: Bytes,
    pinned: bool,
    /// The receiver wants it to land at an aligned address.
    aligned: bool,
    /// It may be lent, so that it does not land.
    lendable: bool,
}

/// The segment that determines the address at which a payload lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lead {
    /// Bytes of the payload in front of it.
    pub(crate) at: u64,
    /// The address of its first byte.
    pub(crate) source: u64,
    pub(crate) pinned: bool,
    pub(crate) aligned: bool,
    /// Bytes.
    pub(crate) len: u64,
}

impl Payload {
    /// Returns an empty payload.
    pub fn new() -> Self {
        Payload::default()
    }

    /// Appends a segment. `pinned` means that it lies in memory that the device can read; otherwise
    /// it is staged.
    pub fn push(&mut self, bytes: Bytes, pinned: bool) {
        self.push_segment(Segment { bytes, pinned, aligned: false, lendable: false });
    }

    /// As [`Payload::push`]. The longest of the segments appended this way lands with its first
    /// byte at a multiple of the alignment that the receiver requires
    /// ([`Config::align`](crate::Config::align)).
    pub fn push_aligned(&mut self, bytes: Bytes, pinned: bool) {
        self.push_segment(Segment { bytes, pinned, aligned: true, lendable: false });
    }

    /// As [`Payload::push`], or [`Payload::push_aligned`], for bytes that the driver may be able to
    /// lend: see [`Connection::poll_lend`](crate::Connection::poll_lend).
    pub fn push_lendable(&mut self, bytes: Bytes, pinned: bool, aligned: bool) {
        self.lendable |= !bytes.is_empty();
        self.push_segment(Segment { bytes, pinned, aligned, lendable: true });
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

    /// Whether a segment may be lent.
    pub(crate) fn has_lendable(&self) -> bool {
        self.lendable
    }

    /// The segments that may be lent, each for itself, and what lies between them. All but the last
    /// are followed by more.
    pub(crate) fn into_parts(self) -> SmallVec<[Payload; 3]> {
        let mut parts = SmallVec::<[Payload; 3]>::new();
        for segment in self.segments.into_iter().skip(self.first) {
            let lendable = segment.lendable;
            match parts.last_mut().filter(|part| !lendable && !part.lendable) {
                Some(part) => part.push_segment(segment),
                None => {
                    let mut part = Payload { lendable, ..Payload::default() };
                    part.push_segment(segment);
                    parts.push(part);
                }
            }
        }
        parts
    }

    /// What is not lent after all.
    pub(crate) fn not_lendable(mut self) -> Self {
        self.lendable = false;
        self.segments.iter_mut().for_each(|segment| segment.lendable = false);
        self
    }

    /// The bytes of the first segment.
    pub(crate) fn first_bytes(&self) -> Option<&Bytes> {
        self.segments.get(self.first).map(|segment| &segment.bytes)
    }

    /// The longest aligned segment, or the longest of all if none is aligned; the first of several.
    pub(crate) fn lead(&self) -> Option<Lead> {
        let mut at = 0;
        let mut longest: Option<Lead> = None;
        for Segment { bytes, pinned, aligned, .. } in self.segments.iter().skip(self.first) {
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
