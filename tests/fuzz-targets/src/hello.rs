//! The private data of connect, accept and reject.

use std::ops::Range;

use tonic_rdma_proto::{Accept, Hello, Reject};

/// Bytes of a hello that no decoder reads.
const RESERVED: Range<usize> = 40..48;

/// Private data must be refused, or mean the same after encoding it again, with or without padding.
///
/// # Panics
/// The decoder is wrong.
pub fn hello(data: &[u8]) {
    if let Ok(hello) = Hello::decode(data) {
        let again = hello.encode();
        assert_eq!(Hello::decode(&again), Ok(hello));
        let mut means = data[..again.len()].to_vec();
        means[RESERVED].fill(0);
        assert_eq!(means, again, "every byte but the reserved ones means something");
        let settings = hello.settings;
        assert!(settings.recv_slots >= 4 && settings.slot_size >= 512 && settings.max_streams > 0);
        assert!((512..=settings.slot_size).contains(&settings.rest_slot_size));
        assert!(settings.align.is_power_of_two() && settings.align <= 4096);
    }
    if let Ok(accept) = Accept::decode(data) {
        assert_eq!(Accept::decode(&accept.encode()), Ok(accept));
    }
    if let Ok(reject) = Reject::decode(data) {
        // A version mismatch is skipped: it decodes to the sender's versions, and encodes to this
        // crate's.
        if !matches!(reject, Reject::Version { .. }) {
            assert_eq!(Reject::decode(&reject.encode()), Ok(reject));
        }
    }
}
