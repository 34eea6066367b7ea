//! The address in landing memory at which a message begins.
//!
//! The receiver's hello requires an alignment. The receiver's modulus is the larger of this
//! alignment and [`LINE`]:
//!
//! | the message has | required alignment | its longest aligned segment lands, modulo the modulus |
//! |---|---|---|
//! | aligned segments | `LINE` or more | at 0 |
//! | aligned segments | less | at the address of its source modulo `LINE`, if this address is a multiple of the alignment; otherwise at 0 |
//! | none | any | if its longest segment is pinned, this segment lands at the address of its source modulo `LINE`; if the segment is staged, the message begins at 0 |
//!
//! So the source and destination addresses of this segment are equal modulo `LINE`, with two
//! exceptions: the receiver requires an alignment that the source does not have, or the segment is
//! staged and the message has no aligned segment. On some processors a copy between addresses that
//! differ modulo `LINE` is several times slower.
//!
//! With this table the sender computes the **begin** of the message: the address of the message's
//! first byte, modulo the modulus. A REQUEST states the begin, and the receiver grants memory whose
//! address is congruent to the begin. Each further part starts at an address congruent to the end
//! of the previous part. In a standing grant, the sender writes from the first address that is
//! congruent to the begin, and DONE states the offset of that address in the grant.

use crate::payload::Payload;

/// Bytes of a cache line. The module's documentation says which segments have source and
/// destination addresses that are equal modulo this number.
pub(crate) const LINE: u32 = 64;

/// A power of two, modulo which addresses are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Modulus(u32);

impl Modulus {
    /// The modulus for a receiver that requires the alignment `align`, which has been validated.
    pub(super) fn of(align: u16) -> Self {
        Modulus(LINE.max(align.into()))
    }

    /// Returns the modulus, which is greater than the begin of any message.
    pub(super) fn get(self) -> u32 {
        self.0
    }

    pub(super) fn rest(self, number: u64) -> u32 {
        (number & u64::from(self.0 - 1)) as u32
    }
}

/// The begin of a message whose receiver requires the alignment `align`.
pub(super) fn begin(payload: &Payload, align: u16) -> u32 {
    let modulus = Modulus::of(align);
    let Some(lead) = payload.lead() else { return 0 };
    let wanted = match lead.aligned {
        true if u32::from(align) >= LINE || lead.source & (u64::from(align) - 1) != 0 => 0,
        false if !lead.pinned => return 0,
        _ => lead.source & u64::from(LINE - 1),
    };
    modulus.rest(wanted.wrapping_sub(lead.at))
}

/// The offset in a grant at `addr` at which a message with this begin has to start.
pub(super) fn offset(modulus: Modulus, addr: u64, begin: u32) -> u32 {
    modulus.rest(u64::from(begin).wrapping_sub(addr))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Bytes whose address is `place` modulo 4096.
    fn lies_at(place: usize, len: usize) -> Bytes {
        let all = Bytes::from(vec![1; len + 2 * 4096]);
        let at = (place + 4096 - all.as_ptr() as usize % 4096) % 4096;
        all.slice(at..at + len)
    }

    /// The address at which the second of three segments lands, modulo the receiver's modulus.
    fn second(align: u16, place: usize, pinned: bool, aligned: bool) -> u32 {
        let mut payload = Payload::new();
        payload.push(lies_at(0, 22), true);
        match aligned {
            true => payload.push_aligned(lies_at(place, 9000), pinned),
            false => payload.push(lies_at(place, 9000), pinned),
        }
        payload.push_aligned(lies_at(5, 22), true);
        let begin = begin(&payload, align);
        assert!(begin < Modulus::of(align).get());
        Modulus::of(align).rest(u64::from(begin) + 22)
    }

    #[test]
    fn the_longest_aligned_segment_lands_as_asked() {
        for align in [64, 128, 256, 512, 1024, 2048, 4096] {
            for place in [0, 1, 63, 64, 4095] {
                for pinned in [false, true] {
                    assert_eq!(second(align, place, pinned, true), 0, "{align} {place}");
                }
            }
        }
        for (align, place, lands) in [
            (1, 0, 0),
            (1, 5, 5),
            (1, 100, 36),
            (1, 4095, 63),
            (2, 5, 0),
            (2, 6, 6),
            (8, 24, 24),
            (8, 28, 0),
            (32, 96, 32),
            (32, 100, 0),
        ] {
            assert_eq!(second(align, place, false, true), lands, "{align} {place}");
        }
    }

    #[test]
    fn a_message_without_one_is_in_phase_where_it_is_written_from_its_place() {
        for align in [1, 64, 4096] {
            let whole = |place, pinned| {
                let mut payload = Payload::new();
                payload.push(lies_at(place, 9000), pinned);
                begin(&payload, align)
            };
            assert_eq!((whole(100, true), whole(100, false), whole(0, true)), (36, 0, 0));
        }
        assert_eq!(begin(&Payload::new(), 64), 0);
    }

    #[test]
    fn what_is_not_aligned_does_not_lead_where_something_is() {
        let mut payload = Payload::new();
        payload.push(lies_at(7, 9000), true);
        payload.push_aligned(lies_at(9, 100), true);
        assert_eq!((u64::from(begin(&payload, 64)) + 9000) % 64, 0);
    }

    #[test]
    fn the_offset_into_a_grant_follows_its_address() {
        for (align, addr, begin, offset_) in [
            (64, 0x1000, 42, 42),
            (64, 0x1010, 42, 26),
            (64, 0x1030, 42, 58),
            (4096, 0x1800, 42, 2090),
        ] {
            assert_eq!(offset(Modulus::of(align), addr, begin), offset_);
        }
        assert_eq!(offset(Modulus::of(1), u64::MAX - 1, 0), 2);
    }
}
