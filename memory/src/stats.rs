//! The figures of a pool.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

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
    /// The size of a slot in bytes.
    pub slot: usize,
    /// The number of slots.
    pub slots: usize,
    /// The number of slots in use.
    pub in_use: usize,
}

/// The figures of a pool at one moment, in bytes unless stated otherwise. While the pool is in use,
/// the figures are not an atomic snapshot.
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
    /// Landing memory that peers have filled and that is not free again yet.
    pub filled: usize,
    /// The part of `filled` that the application [holds](crate::Landed::hold).
    pub held: usize,
    /// Landing memory leased to connections, granted or not.
    pub leased: usize,
    /// The maximum of `registered` so far.
    pub high_water: usize,
    /// The part of `send` that is lent to peers.
    pub lent: usize,
    /// Lent memory that is part of `application`, or that other peers have lent to this process.
    /// Memory that several messages carry counts once for each message.
    pub lent_application: usize,
    /// The number of registrations since the pool was made.
    pub registrations: u64,
    /// The number of requests for send memory that had to wait.
    pub waits: u64,
    /// The size classes of send memory. Requests above the largest class have dedicated arenas,
    /// which are not included.
    pub classes: Vec<ClassStats>,
}

impl PoolStats {
    /// The sum of all memory in use: 0 when all of it has been returned.
    pub fn in_use_bytes(&self) -> usize {
        self.send + self.control + self.granted + self.filled
    }
}

/// The counters behind [`PoolStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) send: AtomicUsize,
    pub(crate) control: AtomicUsize,
    pub(crate) granted: AtomicUsize,
    pub(crate) filled: AtomicUsize,
    /// The part of `filled` that the application holds.
    pub(crate) held: AtomicUsize,
    /// The total size of the chunks in which held pieces lie.
    pub(crate) pinned: AtomicUsize,
    /// Registered application memory, in bytes.
    pub(crate) application: AtomicUsize,
    /// The part of `send` that is lent to peers.
    pub(crate) lent: AtomicUsize,
    /// Lent memory outside the pool. Memory that is lent several times counts each time.
    pub(crate) lent_application: AtomicUsize,
    pub(crate) registrations: AtomicU64,
    pub(crate) waits: AtomicU64,
}

impl Counters {
    pub(crate) fn of(&self, usage: Use) -> &AtomicUsize {
        match usage {
            Use::Send => &self.send,
            Use::Landing => &self.granted,
            Use::Control => &self.control,
        }
    }

    pub(crate) fn snapshot(&self) -> PoolStats {
        PoolStats {
            send: self.send.load(Relaxed),
            control: self.control.load(Relaxed),
            granted: self.granted.load(Relaxed),
            filled: self.filled.load(Relaxed),
            held: self.held.load(Relaxed),
            application: self.application.load(Relaxed),
            lent: self.lent.load(Relaxed),
            lent_application: self.lent_application.load(Relaxed),
            registrations: self.registrations.load(Relaxed),
            waits: self.waits.load(Relaxed),
            ..PoolStats::default()
        }
    }
}
