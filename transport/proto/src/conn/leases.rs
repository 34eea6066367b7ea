//! The leases of a connection.

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasherDefault;

use super::id_map::IdHasher;

/// Maximum number of leases that a side has of the other, and so may be told of.
pub(super) const MAX_LEASES: usize = 4096;

type LeaseSet = HashSet<u32, BuildHasherDefault<IdHasher>>;

/// What the sides have lent each other.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// Streams with pieces for which the driver decides; each as often as it has some.
    pub(super) queue: VecDeque<u32>,
    /// Streams of the queue whose first such piece waits for the peer to map it.
    pub(super) postponed: Vec<u32>,
    /// Leases that were provided, and have not ended.
    pub(super) out: usize,
    /// Those of them that the peer was told of.
    pub(super) lent: LeaseSet,
    /// Leases that the peer has given, and that are not returned.
    pub(super) borrowed: LeaseSet,
}
