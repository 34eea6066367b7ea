//! Memory that is registered with a pool's device and is not the pool's own: application memory,
//! memory lent by peers, and [another pool's](other_pools) send memory.
//!
//! | who holds a [`PoolRegistration`] | so that |
//! |---|---|
//! | the application, or the arena of the other pool | the memory can be sent from |
//! | the bytes of a work request ([`PinnedBytes`](crate::PinnedBytes)) | the keys work until the device is done (R9) |
//!
//! The last holder deregisters the memory and then drops it, on a dedicated thread if the device is
//! slow (`freeing`). An arena waits for its registrations to end before it unmaps its memory.

pub(crate) mod freeing;
pub(crate) mod other_pools;

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fmt, thread};

use bytes::Bytes;

use crate::error::{RegionError, RegisterError};
use crate::file::OwnedFd;
use crate::ledger::{KeepAlive, Keys, Ledger};
use crate::process::PerProcess;
use crate::region::page::page;
use crate::registrar::{Access, LendScope, Memory, Registration};

/// A registration with the device of one pool. Cheap to clone. The last holder deregisters the
/// memory: a clone, or [`PinnedBytes`](crate::PinnedBytes) of the memory.
#[derive(Clone)]
pub struct PoolRegistration(KeepAlive);

/// The fields are dropped in their order: the keys stop working before the memory is dropped, and
/// the registrar outlives the keys.
struct DeviceRegistration {
    /// `None` once the registration has been dropped.
    registration: Option<Box<dyn Registration>>,
    /// The first byte.
    start: usize,
    len: usize,
    /// The memory, unless an arena owns it.
    memory: Option<Bytes>,
    /// The number of bytes that count as application memory.
    counted: usize,
    lend_key: Option<u32>,
    ledger: Arc<Ledger>,
}

/// The owner of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Application,
    /// A peer, which has lent the memory.
    Peer,
}

/// A registration that is in the index. `None` if the memory is empty, or once the registration has
/// been taken out.
struct Registered(Option<DeviceRegistration>);

impl PoolRegistration {
    /// Registers `memory`. `file` is the file that the memory maps, if it may be lent to peers.
    pub(crate) fn new(
        ledger: Arc<Ledger>,
        memory: Bytes,
        owner: Owner,
        file: Option<OwnedFd>,
    ) -> Result<Self, RegionError> {
        let len = memory.len();
        let Some(addr) = NonNull::new(memory.as_ptr().cast_mut()).filter(|_| len > 0) else {
            return Ok(PoolRegistration(Arc::new(Registered(None))));
        };
        let range = NonNull::slice_from_raw_parts(addr, len);
        let counted = if owner == Owner::Application { len } else { 0 };
        // SAFETY: `memory` keeps the range readable, and is dropped after the registration:
        // `DeviceRegistration`.
        unsafe { Self::of_range(ledger, range, Some(memory), counted, file, None) }
    }

    /// Registers a range. RLIMIT_MEMLOCK must also leave room for all memory of the pool whose
    /// ledger is `other`.
    ///
    /// # Safety
    /// The range is readable until the last clone of the registration has been dropped. `memory`
    /// may own the range, which ensures that the range stays readable.
    unsafe fn of_range(
        ledger: Arc<Ledger>,
        range: NonNull<[u8]>,
        memory: Option<Bytes>,
        counted: usize,
        file: Option<OwnedFd>,
        other: Option<&Ledger>,
    ) -> Result<Self, RegionError> {
        let (addr, len) = (range.cast::<u8>(), range.len());
        if let Some(pool) = ledger.index.overlaps(range) {
            return Err(RegionError::Overlap { len, pool });
        }
        let file = file.filter(|_| ledger.registrar.lend_scope() != LendScope::Nothing);
        let access = if file.is_some() { Access::Lend } else { Access::LocalRead };
        let registration = pin(&ledger, range, other, || {
            // SAFETY: the caller keeps the range readable until the registration is dropped. Nobody
            // writes to it by this registration, which allows reading only (R9, R12).
            unsafe { ledger.registrar.register(Memory { addr, len, access, file }) }
        })?;
        let keys = Keys {
            lkey: registration.lkey(),
            iova: registration.iova(),
            lend_key: (access == Access::Lend).then(|| registration.rkey()),
            for_peer: None,
        };
        ledger.counters.registrations.fetch_add(1, Relaxed);
        ledger.counters.application.fetch_add(counted, Relaxed);
        let held = DeviceRegistration {
            registration: Some(registration),
            start: addr.addr().get(),
            len,
            memory,
            counted,
            lend_key: keys.lend_key,
            ledger: ledger.clone(),
        };
        let keep_alive: KeepAlive = Arc::new(Registered(Some(held)));
        if ledger.index.insert_foreign(range, keys, &keep_alive) {
            return Ok(PoolRegistration(keep_alive));
        }
        // Another thread has registered a part of the memory in the meantime. That thread's entry
        // stays.
        if let Ok(mut registered) = keep_alive.downcast::<Registered>()
            && let Some(registered) = Arc::get_mut(&mut registered)
            && let Some(held) = registered.0.take()
        {
            ledger.counters.application.fetch_sub(counted, Relaxed);
            drop(held);
        }
        Err(RegionError::Overlap { len, pool: false })
    }

    /// The key under which the memory can be lent to peers, or `None` if it cannot be lent.
    pub fn lend_key(&self) -> Option<u32> {
        self.0.downcast_ref::<Registered>()?.0.as_ref()?.lend_key
    }
}

/// This lock is held from the check of the limit until the memory is registered, so that no two
/// regions count on the same room.
static PINNING: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);

/// Registers memory if RLIMIT_MEMLOCK then still leaves room for all memory of this pool, and of
/// the pool whose ledger is `other`.
pub(crate) fn pin(
    ledger: &Ledger,
    memory: NonNull<[u8]>,
    other: Option<&Ledger>,
    register: impl FnOnce() -> Result<Box<dyn Registration>, RegisterError>,
) -> Result<Box<dyn Registration>, RegionError> {
    let pinning = ledger.registrar.pins().then(|| PINNING.lock());
    if pinning.is_some() {
        check_limit(ledger, memory, other)?;
    }
    let registration = register();
    drop(pinning);
    Ok(registration.inspect_err(|_| ledger.not_registered())?)
}

/// Checks that the limit would still leave room for all memory of both pools. If the result depends
/// on memory that is being unpinned, waits until that memory is unpinned.
fn check_limit(
    ledger: &Ledger,
    memory: NonNull<[u8]>,
    other: Option<&Ledger>,
) -> Result<(), RegionError> {
    let start = memory.cast::<u8>().addr().get();
    let pages = (start + memory.len()).next_multiple_of(page()) - (start - start % page());
    loop {
        let unpinning = freeing::bytes();
        let Some((left, memlock)) = ledger.memlock_left() else { return Ok(()) };
        let reserved = [Some(ledger), other].into_iter().flatten().map(Ledger::unused).sum();
        if pages as u64 <= left.saturating_sub(reserved) {
            return Ok(());
        }
        if unpinning == 0 {
            let (len, limit) = (memory.len(), memlock.soft.unwrap_or(u64::MAX));
            return Err(RegionError::Memlock { len, limit, pinned: memlock.pinned, reserved });
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        if held.ledger.is_inherited() {
            return std::mem::forget(held);
        }
        held.ledger.index.remove(held.start);
        held.ledger.counters.application.fetch_sub(held.counted, Relaxed);
        // The last holder may be a completion, whose connection is locked. Unpinning takes time,
        // and the memory's owner belongs to the application, so its Drop may use the connection. An
        // arena waits for the end of its registration here, because it is about to unmap its
        // memory.
        match held.memory.is_some() && held.ledger.registrar.is_slow() {
            true => freeing::free(if held.ledger.registrar.pins() { held.len } else { 0 }, held),
            false => drop(held),
        }
    }
}

impl Drop for DeviceRegistration {
    fn drop(&mut self) {
        self.registration = None;
        // Wake the pools that wait until the process may pin more memory.
        self.ledger.deregistered();
    }
}

impl fmt::Debug for PoolRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holders = Arc::strong_count(&self.0);
        f.debug_struct("PoolRegistration").field("holders", &holders).finish_non_exhaustive()
    }
}
