//! The pool.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;

use crate::arena::Arenas;
use crate::buf::{Alloc, PinnedBuf, PinnedBytes, try_alloc};
use crate::config::{PoolConfig, Sizes};
use crate::error::PoolError;
use crate::landing::Landing;
use crate::ledger::Ledger;
use crate::memlock::Memlock;
use crate::registrar::Registrar;
use crate::stats::{PoolStats, Use};

/// Memory that one device knows: for sending, for landing, and for the connections' own use. Cheap
/// to clone.
///
/// Memory is mapped and registered when it is first needed, within the budgets, and never per
/// message (R12).
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

struct Inner {
    send: Arc<Arenas>,
    control: Arc<Arenas>,
    ledger: Arc<Ledger>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("sizes", &self.ledger.sizes).finish_non_exhaustive()
    }
}

impl Pool {
    /// Makes a pool for the device behind `registrar`. Nothing is pinned yet.
    ///
    /// If registering pins memory, the soft RLIMIT_MEMLOCK of the process is raised to the hard
    /// one, and the pool shrinks to what the limit leaves, less a margin of half of it up to 256
    /// KiB for the rest of the process. What counts is what the process has pinned by now: of two
    /// pools in one process the second does not know what the first may pin later. If the limit
    /// turns out to be tighter, landing memory is waited for as in a smaller pool, as long as there
    /// is any, and other requests fail with [`PoolError::Register`].
    ///
    /// # Errors
    /// [`PoolError::Memlock`] when less than [`MIN_POOL`](crate::MIN_POOL) is left;
    /// [`PoolError::TooSmall`] when less is configured; [`PoolError::Parts`] when the parts leave
    /// too little for landing or for connections.
    pub fn new(config: PoolConfig, registrar: Arc<dyn Registrar>) -> Result<Pool, PoolError> {
        let memlock = if registrar.pins() {
            Memlock::raise()
                .inspect_err(
                    |error| tracing::warn!(%error, "RLIMIT_MEMLOCK cannot be read; taken as unlimited"),
                )
                .ok()
        } else {
            None
        };
        let sizes = config.fit(memlock.as_ref(), registrar.ignores_ipc_lock())?;
        tracing::debug!(?sizes, ?memlock, "pool of pinned memory");
        let (send, control) = (sizes.send, sizes.control);
        let ledger = Arc::new(Ledger::new(sizes, registrar));
        Ok(Pool(Arc::new(Inner {
            send: Arc::new(Arenas::new(Use::Send, send, ledger.clone())),
            control: Arc::new(Arenas::new(Use::Control, control, ledger.clone())),
            ledger,
        })))
    }

    /// A buffer of `len` bytes to fill and send. Waits for memory, in the order of the first polls.
    ///
    /// Cancel safe: see [`Alloc`].
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] at once when the send budget is smaller than `len`;
    /// [`PoolError::Register`] and [`PoolError::Map`] when the system gives no memory.
    pub fn alloc(&self, len: usize) -> Alloc {
        Alloc::new(self.0.send.clone(), len)
    }

    /// A buffer of `len` bytes to fill and send, if there is memory now and nobody waits for some.
    ///
    /// # Errors
    /// As [`Pool::alloc`], and [`PoolError::Exhausted`].
    pub fn try_alloc(&self, len: usize) -> Result<PinnedBuf, PoolError> {
        try_alloc(&self.0.send, len)
    }

    /// Memory that a connection keeps for its life: RECV ring and SEND slots.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`], [`PoolError::Exhausted`], [`PoolError::Register`],
    /// [`PoolError::Map`].
    pub fn control(&self, len: usize) -> Result<PinnedBuf, PoolError> {
        self.0.control.take(len).map(|slot| PinnedBuf::new(slot, len))
    }

    /// Control memory that a connection can do without, and gives back when it is idle: more RECV
    /// slots, staging. None when less than a quarter of the control budget would be left for what
    /// connections need, or the system gives no memory.
    pub fn spare(&self, len: usize) -> Option<PinnedBuf> {
        let budget = self.0.control.budget();
        let used = self.0.ledger.counters.of(Use::Control).load(Relaxed);
        (used.saturating_add(len) <= budget - budget / 4).then(|| self.control(len).ok()).flatten()
    }

    /// Deregisters control memory that has been in nobody's use for a second at least; `now` is the
    /// caller's clock. It is kept otherwise, for whoever is next. Costs next to nothing when it was
    /// called less than a second ago.
    pub fn trim(&self, now: Instant) {
        self.0.control.trim(Some(now));
    }

    /// Deregisters control memory that is in nobody's use, at once: a connection has ended, and
    /// there may be no other that would [trim](Pool::trim) later.
    pub fn trim_now(&self) {
        self.0.control.trim(None);
    }

    /// The bytes as memory that the device can read, if they lie in this pool: any slice of what
    /// [`PinnedBuf::freeze`] gave or of what landed over any connection. A look-up in a sorted
    /// list; takes no exclusive lock.
    pub fn resolve(&self, bytes: &Bytes) -> Option<PinnedBytes> {
        if bytes.is_empty() {
            return None;
        }
        let (lkey, iova) = self.0.ledger.index.find(bytes.as_ptr().addr(), bytes.len())?;
        Some(PinnedBytes::new(bytes.clone(), lkey, iova))
    }

    /// A landing account for one connection, that may lease what the landing budget has.
    pub fn landing(&self) -> Landing {
        self.landing_up_to(usize::MAX)
    }

    /// A landing account for one connection, that may lease `limit` bytes at a time. Below the
    /// pool's [chunk](Sizes::chunk) it can lease shorter chunks only, and below 4 KiB nothing.
    pub fn landing_up_to(&self, limit: usize) -> Landing {
        Landing::new(self.0.ledger.clone(), limit)
    }

    /// Whether there is landing memory, or the process may pin a chunk: the limit may be lower by
    /// now than it was when the pool was made, and other pools may have used it up.
    ///
    /// # Errors
    /// [`PoolError::Memlock`]: what a connection is sent by WRITE would not find a place.
    pub fn may_land(&self) -> Result<(), PoolError> {
        let Ledger { sizes, budgets, .. } = &*self.0.ledger;
        // Of chunks that are leased now the next user needs one anew.
        let over = |memlock: &Memlock| memlock.soft.is_some_and(|limit| limit < memlock.pinned);
        match self.0.ledger.landing_left() {
            // What is leased comes free again.
            Some((left, memlock))
                if (left < sizes.chunk && budgets.used(Use::Landing) == 0) || over(&memlock) =>
            {
                let Memlock { soft, pinned, .. } = memlock;
                Err(PoolError::Memlock {
                    needed: sizes.chunk as u64,
                    limit: soft.unwrap_or(u64::MAX),
                    pinned,
                })
            }
            _ => Ok(()),
        }
    }

    /// The sizes, after fitting into RLIMIT_MEMLOCK.
    pub fn config(&self) -> &Sizes {
        &self.0.ledger.sizes
    }

    /// The figures now.
    pub fn stats(&self) -> PoolStats {
        let Ledger { budgets, counters, .. } = &*self.0.ledger;
        PoolStats {
            registered: budgets.total(),
            leased: budgets.used(Use::Landing),
            high_water: budgets.high_water(),
            classes: self.0.send.classes(),
            ..counters.snapshot()
        }
    }
}
