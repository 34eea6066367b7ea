//! What a pool holds, and where it is.

use std::fmt;

/// What memory is for. Each use has a budget of its own, so that none can starve another (R11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Buffers that the application fills and sends.
    Send,
    /// What peers may write to.
    Landing,
    /// RECV rings, SEND slots and staging of connections.
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

/// Bytes of one size class of send memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a slot.
    pub slot: usize,
    /// Slots that exist.
    pub slots: usize,
    /// Slots in use.
    pub in_use: usize,
}

/// A pool's figures at one moment, in bytes where nothing else is said. Taken while the pool is in
/// use, they may be off by what moves meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Mapped and registered, in use or not.
    pub registered: usize,
    /// Send memory held as buffers or `Bytes`.
    pub send: usize,
    /// Control memory held by connections.
    pub control: usize,
    /// Landing memory that peers may write to.
    pub granted: usize,
    /// Landing memory that has been written and is held as `Bytes`.
    pub filled: usize,
    /// Landing memory leased to connections, granted or not.
    pub leased: usize,
    /// The most that was registered at once.
    pub high_water: usize,
    /// Registrations made since the pool was.
    pub registrations: u64,
    /// Requests that had to wait.
    pub waits: u64,
    /// Size classes of send memory; requests above the largest have arenas of their own and are not
    /// in here.
    pub classes: Vec<ClassStats>,
}

impl PoolStats {
    /// Everything that is held by someone: 0 when all has come back.
    pub fn in_use_bytes(&self) -> usize {
        self.send + self.control + self.granted + self.filled
    }
}
