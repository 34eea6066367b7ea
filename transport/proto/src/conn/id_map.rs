//! Tables by stream id.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::ids::StreamId;

/// A hasher for stream ids. The peer chooses the ids, but can have no more than `max_streams` of
/// them at once, so collisions are harmless.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 << 8) ^ u64::from(*b);
        }
    }
    fn write_u32(&mut self, n: u32) {
        let spread = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = spread ^ (spread >> 32);
    }
}

pub(super) type Ids<V> = HashMap<u32, V, BuildHasherDefault<IdHasher>>;

/// A map by stream id, for the driver's own state of each stream.
pub type StreamMap<V> = HashMap<StreamId, V, BuildHasherDefault<IdHasher>>;
