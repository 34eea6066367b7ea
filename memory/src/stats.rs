//! What a pool holds, and where it is.

use std::fmt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};

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

/// The live counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) send: AtomicUsize,
    pub(crate) control: AtomicUsize,
    pub(crate) granted: AtomicUsize,
    pub(crate) filled: AtomicUsize,
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
            registrations: self.registrations.load(Relaxed),
            waits: self.waits.load(Relaxed),
            ..PoolStats::default()
        }
    }
}

/// What of each budget is mapped.
#[derive(Debug, Default)]
pub(crate) struct Budgets {
    send: AtomicUsize,
    landing: AtomicUsize,
    control: AtomicUsize,
    /// Raised after a part and lowered before it, so never more than the sum of the parts.
    total: AtomicUsize,
    high_water: AtomicUsize,
}

impl Budgets {
    fn of(&self, usage: Use) -> &AtomicUsize {
        match usage {
            Use::Send => &self.send,
            Use::Landing => &self.landing,
            Use::Control => &self.control,
        }
    }

    /// Takes `len` bytes of a budget, all or nothing.
    pub(crate) fn take(&self, usage: Use, len: usize, budget: usize) -> bool {
        self.take_some(usage, len, len, 1, budget).is_some()
    }

    /// Takes as much as there is of `most` bytes, in multiples of `unit`, at least `least`; or
    /// nothing.
    pub(crate) fn take_some(
        &self,
        usage: Use,
        most: usize,
        least: usize,
        unit: usize,
        budget: usize,
    ) -> Option<usize> {
        let mut len = 0;
        self.of(usage)
            .fetch_update(AcqRel, Acquire, |used| {
                len = budget.saturating_sub(used).min(most);
                len -= len % unit;
                (len >= least && len > 0).then(|| used + len)
            })
            .ok()?;
        self.total.fetch_add(len, AcqRel);
        Some(len)
    }

    /// What was taken has been registered.
    pub(crate) fn registered(&self) {
        self.high_water.fetch_max(self.total(), Relaxed);
    }

    /// Gives bytes back; what they stood for is deregistered and unmapped by now.
    pub(crate) fn give(&self, usage: Use, len: usize) {
        self.total.fetch_sub(len, AcqRel);
        self.of(usage).fetch_sub(len, AcqRel);
    }

    pub(crate) fn used(&self, usage: Use) -> usize {
        self.of(usage).load(Acquire)
    }

    pub(crate) fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    pub(crate) fn high_water(&self) -> usize {
        self.high_water.load(Relaxed)
    }
}
