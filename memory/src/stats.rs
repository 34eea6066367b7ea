//! The figures of a pool.

use std::fmt;

/// The use of a piece of memory. Each use has its own budget, so that no use can starve another
/// (R11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Buffers that the application fills and sends.
    Send,
    /// Memory that peers may write to.
    Landing,
    /// RECV rings, SEND slots and staging blocks of connections.
    Control,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::Send => "send",
            Use::Landing => "landing",
            Use::Control => "control",
        })
    }
}

/// One size class of send memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a slot.
    pub slot: usize,
    /// The number of slots.
    pub slots: usize,
    /// The number of slots in use.
    pub in_use: usize,
}

/// The figures of a pool at one moment, in bytes unless stated otherwise. While the pool is in use
/// they are not an atomic snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Pool memory that is mapped and registered, in use or not, and landing memory that is about
    /// to be registered.
    pub registered: usize,
    /// Application memory that is registered with the pool's device.
    pub application: usize,
    /// Send memory held as buffers or `Bytes`.
    pub send: usize,
    /// Control memory held by connections.
    pub control: usize,
    /// Landing memory that peers may write to.
    pub granted: usize,
    /// Landing memory that has been written and is not free again.
    pub filled: usize,
    /// The part of `filled` that the application [holds](crate::Landed::hold).
    pub held: usize,
    /// Landing memory leased to connections, granted or not.
    pub leased: usize,
    /// The maximum of `registered` so far.
    pub high_water: usize,
    /// The part of `send` that is lent to peers.
    pub lent: usize,
    /// Lent memory that is part of `application`, or that other peers have lent this process.
    /// Memory that several messages carry counts once for each message.
    pub lent_application: usize,
    /// The number of registrations since the pool was made.
    pub registrations: u64,
    /// The number of requests for send memory that had to wait.
    pub waits: u64,
    /// The size classes of send memory. Requests above the largest have dedicated arenas, which are
    /// not included.
    pub classes: Vec<ClassStats>,
}

impl PoolStats {
    /// The sum of all memory in use: 0 when all of it has been returned.
    pub fn in_use_bytes(&self) -> usize {
        self.send + self.control + self.granted + self.filled
    }
}
