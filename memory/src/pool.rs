//! The pool of registered memory, and its handles.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;

use crate::arena::Arenas;
use crate::buf::{Alloc, PinnedBuf, PinnedBytes, try_alloc};
use crate::config::{Pinning, PoolConfig, PoolSizes};
use crate::error::{PoolError, RegionError, RegisterError};
use crate::file::{AsFd, OwnedFd};
use crate::landing::Landing;
use crate::ledger::{Ledger, unpinning};
use crate::lent::LendableBytes;
use crate::memlock::Memlock;
use crate::region::lendable::LendableMemory;
use crate::region::memfd;
use crate::registered::other_pools::OtherPools;
use crate::registered::{Owner, PoolRegistration, freeing};
use crate::registrar::{LendScope, Registrar};
use crate::stats::{PoolStats, Use};

/// Memory that is registered with one device: for sending, for landing, and for the connections'
/// own use. Cheap to clone.
///
/// Memory is mapped and registered when it is first needed, within the budgets, and never per
/// message (R12).
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

struct Inner {
    send: Arc<Arenas>,
    control: Arc<Arenas>,
    other_pools: Arc<OtherPools>,
    ledger: Arc<Ledger>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("sizes", &self.ledger.sizes).finish_non_exhaustive()
    }
}

impl Pool {
    /// Makes a pool for the device behind `registrar`. This function pins no memory.
    ///
    /// If registering pins memory, this function raises the soft RLIMIT_MEMLOCK of the process to
    /// the hard limit. The pool shrinks to the bytes that the limit leaves, minus a margin for the
    /// rest of the process. The margin is half of these bytes, at most 256 KiB. Only memory that
    /// the process has already pinned counts, so a second pool of the process does not know how
    /// much the first pool will pin later. If the limit later leaves less, connections wait for
    /// landing memory, as in a smaller pool. They wait only while this pool has some landing
    /// memory, or while other pools of the process hold memory that those pools may return. The
    /// connections wait for other pools for at most two seconds after the last return. Other
    /// requests fail with [`PoolError::Register`].
    ///
    /// # Errors
    /// [`PoolError::Memlock`] if the limit leaves less than [`MIN_POOL`](crate::MIN_POOL).
    /// [`PoolError::TooSmall`] if the configured total is less than that. [`PoolError::Parts`] if
    /// the configured parts leave too little for landing or for connections.
    pub fn new(config: PoolConfig, registrar: Arc<dyn Registrar>) -> Result<Pool, PoolError> {
        let memlock = if registrar.pins() {
            Memlock::raise()
                .inspect_err(
                    |error| crate::throttled!(warn, %error, "RLIMIT_MEMLOCK cannot be read; no limit is assumed"),
                )
                .ok()
                // Landing threads and the thread that frees application memory are about to unpin
                // these bytes.
                .map(|limits| {
                    let soon = (unpinning() + freeing::bytes()) as u64;
                    Memlock { pinned: limits.pinned.saturating_sub(soon), ..limits }
                })
        } else {
            None
        };
        let sizes = config.fit(memlock.as_ref(), Pinning::of(&*registrar))?;
        tracing::debug!(?sizes, ?memlock, "pool of pinned memory");
        let (send, control) = (sizes.send, sizes.control);
        let ledger = Arc::new(Ledger::new(sizes, registrar));
        Ok(Pool(Arc::new(Inner {
            send: Arc::new(Arenas::new(Use::Send, send, ledger.clone())),
            control: Arc::new(Arenas::new(Use::Control, control, ledger.clone())),
            other_pools: Arc::default(),
            ledger,
        })))
    }

    /// Returns a handle of this pool whose send buffers serve one peer, and may be
    /// [lent](Self::lend) to that peer. Such buffers lie in arenas from which no other handle
    /// allocates, each in a file of its own. So a peer that maps such a file, whole and read-only,
    /// finds only memory that this handle allocated.
    /// All handles share the budgets. At most three quarters of the send memory are in such arenas.
    /// Beyond this limit, buffers come from memory that is not lent.
    ///
    /// Returns a plain clone unless the device lends [send memory](LendScope::All).
    #[must_use]
    pub fn for_peer(&self) -> Pool {
        let Inner { send, control, other_pools, ledger } = &*self.0;
        if ledger.registrar.lend_scope() != LendScope::All {
            return self.clone();
        }
        Pool(Arc::new(Inner {
            send: send.for_peer(),
            control: control.clone(),
            other_pools: other_pools.clone(),
            ledger: ledger.clone(),
        }))
    }

    /// Allocates a buffer of `len` bytes to fill and send. Waits until there is memory; requests
    /// are served in the order in which they were first polled.
    ///
    /// # Cancel safety
    /// Cancel safe: see [`Alloc`].
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] at once if `len` exceeds the send budget; [`PoolError::Register`]
    /// and [`PoolError::Map`] if the system gives no memory.
    pub fn alloc(&self, len: usize) -> Alloc {
        Alloc::new(self.0.send.clone(), len)
    }

    /// Allocates a buffer of `len` bytes to fill and send, if there is memory now and no other
    /// request waits.
    ///
    /// # Errors
    /// The errors of [`Pool::alloc`], and [`PoolError::Exhausted`].
    pub fn try_alloc(&self, len: usize) -> Result<PinnedBuf, PoolError> {
        try_alloc(&self.0.send, len)
    }

    /// Allocates memory that a connection keeps for its life: RECV ring and SEND slots.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`], [`PoolError::Exhausted`], [`PoolError::Register`],
    /// [`PoolError::Map`].
    pub fn control(&self, len: usize) -> Result<PinnedBuf, PoolError> {
        self.0.control.take(len).map(|slot| PinnedBuf::new(slot, len))
    }

    /// Allocates control memory that a connection can do without, and that an idle connection
    /// returns: extra RECV slots and staging. Returns `None` if less than a quarter of the control
    /// budget would be left for memory that connections need, or if the system gives no memory.
    pub fn spare(&self, len: usize) -> Option<PinnedBuf> {
        let budget = self.0.control.budget();
        let used = self.0.ledger.counters.of(Use::Control).load(Relaxed);
        (used.saturating_add(len) <= budget - budget / 4).then(|| self.control(len).ok()).flatten()
    }

    /// Deregisters control memory that has been unused for at least a second at `now`, a time of
    /// the caller's clock, except small blocks that share a page. Memory that was used more
    /// recently stays registered for the next connection. Does almost nothing if the last trim was
    /// less than a second ago.
    pub fn trim(&self, now: Instant) {
        self.0.control.trim(Some(now));
    }

    /// Deregisters all unused control memory at once, except small blocks that share a page. Call
    /// this function when a connection ends, because perhaps no other connection is left that calls
    /// [`trim`](Pool::trim) later.
    pub fn trim_now(&self) {
        self.0.control.trim(None);
    }

    /// Returns the bytes with their key, if the bytes are a slice of bytes from
    /// [`PinnedBuf::freeze`], of bytes that landed over any connection, of
    /// [registered](Pool::register) memory, or of [another pool's](Pool::share_send_memory) send
    /// memory. The look-up searches a sorted list, without an exclusive lock.
    pub fn resolve(&self, bytes: &Bytes) -> Option<PinnedBytes> {
        if bytes.is_empty() {
            return None;
        }
        let ledger = &self.0.ledger;
        let find = || ledger.index.find(bytes.as_ptr().addr(), bytes.len());
        let found = match find() {
            Some(found) => found,
            None if self.0.other_pools.register(ledger, bytes) => find()?,
            None => return None,
        };
        Some(PinnedBytes::new(bytes.clone(), found))
    }

    /// Lets the devices of both pools send from the send memory of either. An arena is registered
    /// with the other device when bytes of the arena are first [looked up](Self::resolve) there, on
    /// a separate thread if the device is slow. Until the arena is registered, the look-up finds
    /// nothing. The arena stays registered until its pool no longer needs it. Does nothing for
    /// pools of shared memory, whose links send from any memory.
    ///
    /// Such a registration counts against RLIMIT_MEMLOCK, in addition to the arena's first
    /// registration. An arena is not registered unless the limit leaves room for all memory that
    /// both pools may still use. After a refusal, ten seconds pass before the next attempt.
    pub fn share_send_memory(&self, other: &Pool) {
        let pools = [self, other].map(|pool| &pool.0);
        if !pools.iter().any(|pool| pool.ledger.registrar.wants_file()) {
            pools[0].other_pools.add(&pools[1].ledger);
            pools[1].other_pools.add(&pools[0].ledger);
        }
    }

    /// Returns the bytes with the key and the address at which a peer on this host can read them.
    /// Returns `None` unless the bytes lie in memory of this handle that [is for a
    /// peer](Self::for_peer), in memory that was [registered for lending](Self::register_lendable),
    /// or in memory that [a peer has lent](Self::register_lent). Also returns `None` if peers have
    /// already been lent the maximum: see [`LendableBytes`].
    pub fn lend(&self, bytes: &Bytes) -> Option<LendableBytes> {
        LendableBytes::new(&self.0.ledger, self.0.send.peer(), self.resolve(bytes)?)
    }

    /// Registers application memory with the device, so that any part of the memory can be sent in
    /// place. The memory stays registered while the returned value, a clone of it, or
    /// [resolved](Pool::resolve) bytes of the memory are alive, even after the pool is dropped. The
    /// last holder deregisters the memory and drops it, on a dedicated thread if the device is
    /// slow.
    ///
    /// The device only reads the memory, which need not be page-aligned. Blocks until the pages are
    /// pinned.
    ///
    /// If the memory is mapped from a file, nobody may truncate the file until the memory is
    /// dropped. Otherwise the process ends with SIGBUS, as with any other code that reads such a
    /// mapping (mmap(2)). Nobody can truncate a memory file that is sealed with F_SEAL_SHRINK.
    ///
    /// # Errors
    /// [`RegionError::Memlock`] if RLIMIT_MEMLOCK does not leave enough beyond the memory that the
    /// pool may use. [`RegionError::Overlap`] if a part of the given memory is registered already,
    /// or is pool memory. [`RegionError::Register`] if the device or the kernel refuses.
    pub fn register(&self, memory: Bytes) -> Result<PoolRegistration, RegionError> {
        PoolRegistration::new(self.0.ledger.clone(), memory, Owner::Application, None)
    }

    /// Registers application memory like [`register`](Self::register). Unless the device lends
    /// [nothing](LendScope::Nothing), the memory can also be [lent](Self::lend) to processes on
    /// this host. Such a process maps all of the memory.
    ///
    /// # Errors
    /// The errors of [`register`](Self::register), and [`RegionError::Register`] if the process has
    /// no descriptor left.
    pub fn register_lendable(
        &self,
        memory: Arc<LendableMemory>,
    ) -> Result<PoolRegistration, RegionError> {
        let file = memory.as_fd().try_clone_to_owned();
        let file = file.map_err(|error| RegisterError::new(memory.len(), error))?;
        let bytes = LendableMemory::bytes(memory);
        PoolRegistration::new(self.0.ledger.clone(), bytes, Owner::Application, Some(file))
    }

    /// Registers memory that a peer has lent to this process, so that it can be [lent](Self::lend)
    /// to other peers. `memory` maps all of `file`. This memory does not count as application
    /// memory.
    ///
    /// # Errors
    /// The errors of [`register`](Self::register).
    pub fn register_lent(
        &self,
        memory: Bytes,
        file: OwnedFd,
    ) -> Result<PoolRegistration, RegionError> {
        PoolRegistration::new(self.0.ledger.clone(), memory, Owner::Peer, Some(file))
    }

    /// Creates the allocator of landing memory for one connection, limited only by the landing
    /// budget.
    pub fn landing(&self) -> Landing {
        self.landing_up_to(usize::MAX)
    }

    /// Creates the allocator of landing memory for one connection, which may lease up to `limit`
    /// bytes at a time. A limit below the pool's [chunk](PoolSizes::chunk) allows only shorter
    /// chunks, and a limit below 4 KiB allows no chunks.
    pub fn landing_up_to(&self, limit: usize) -> Landing {
        Landing::new(self.0.ledger.clone(), limit)
    }

    /// Records that no landing memory was available, so that [`may_land`](Self::may_land) makes a
    /// chunk to check whether memory is available.
    pub fn cannot_land(&self) {
        self.0.ledger.cannot_land.store(true, Relaxed);
    }

    /// Checks that the pool has landing memory, or that the process may make and pin a chunk. The
    /// limits may have been lowered since the pool was made, and other pools may have used up what
    /// the limits allow. After [`cannot_land`](Self::cannot_land), each call makes a chunk and
    /// drops it, until a call succeeds. Such a call may take a few milliseconds.
    ///
    /// # Errors
    /// [`PoolError::Memlock`] or [`PoolError::File`] if a peer's WRITEs would find no landing
    /// memory; [`PoolError::Register`] if WRITEs found no landing memory before, and a chunk still
    /// cannot be made.
    pub fn may_land(&self) -> Result<(), PoolError> {
        if self.0.ledger.cannot_land.load(Relaxed) {
            let chunk = self.config().chunk;
            let mut probe = self.landing();
            let made = probe.alloc_spare(chunk)?;
            drop((made, probe));
            self.0.ledger.cannot_land.store(false, Relaxed);
        }
        let Ledger { sizes, budgets, registrar, .. } = &*self.0.ledger;
        if registrar.wants_file() {
            let len = sizes.chunk;
            match memfd::may_make(len) {
                // A shortage is no error here. The shortage may be over when a chunk is made.
                // Otherwise the attempt to make the chunk fails.
                Err(source) if !is_shortage(&source) => {
                    return Err(PoolError::File { len, source });
                }
                _ => {}
            }
        }
        // If the process has pinned more than the limit allows, leased chunks do not help, because
        // the next connection has to register its own chunks.
        let over = |memlock: &Memlock| memlock.soft.is_some_and(|limit| limit < memlock.pinned);
        match self.0.ledger.landing_left() {
            // Leased memory becomes free again, so connections can wait for it.
            Some((left, memlock))
                if (left < sizes.chunk && budgets.used(Use::Landing) == 0 && unpinning() == 0)
                    || over(&memlock) =>
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

    /// Whether registering memory pins pages, which takes time.
    pub fn pins(&self) -> bool {
        self.0.ledger.registrar.pins()
    }

    /// The sizes, after fitting into RLIMIT_MEMLOCK.
    pub fn config(&self) -> &PoolSizes {
        &self.0.ledger.sizes
    }

    /// Returns a snapshot of the pool's figures.
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

/// Whether the error reports that the process or its host is short of descriptors or memory at the
/// moment.
fn is_shortage(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}
