//! Memory of the application that is registered with the device of a pool.
//!
//! | who holds a [`PoolRegistration`] | so that |
//! |---|---|
//! | the application | it can send from the memory |
//! | the bytes of a work request ([`PinnedBytes`](crate::PinnedBytes)) | the keys work until the device is done (R9) |
//!
//! The last of them deregisters the memory, and then drops it.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use crate::error::RegionError;
use crate::ledger::{KeepAlive, Ledger};
use crate::registrar::{Access, Memory, Registration};

/// Bytes from which a thread of its own unpins the memory: to unpin a mebibyte takes about as long
/// as to start a thread.
const OWN_THREAD: usize = 1 << 20;

/// A registration of application memory with the device of one pool. Cheap to clone; the last clone
/// deregisters it.
#[derive(Clone)]
pub struct PoolRegistration(KeepAlive);

/// The fields are dropped in their order: the keys stop working before the memory is dropped, and
/// the registrar outlives them.
struct Held {
    /// `None` once it has been dropped.
    registration: Option<Box<dyn Registration>>,
    memory: Bytes,
    ledger: Arc<Ledger>,
}

/// What is registered, and in the index.
struct Registered(Option<Held>);

impl PoolRegistration {
    pub(crate) fn new(ledger: Arc<Ledger>, memory: Bytes) -> Result<Self, RegionError> {
        let len = memory.len();
        let Some(addr) = NonNull::new(memory.as_ptr().cast_mut()).filter(|_| len > 0) else {
            return Ok(PoolRegistration(Arc::new(Registered(None))));
        };
        if ledger.index.overlaps(&memory) {
            return Err(RegionError::Overlap { len });
        }
        check_limit(&ledger, len)?;
        // SAFETY: `memory` keeps the range readable, and is dropped after the registration: `Held`.
        // Nobody writes to it by this registration, which allows reading only (R9, R12).
        let registration = unsafe {
            let access = Access::LocalRead;
            ledger.registrar.register(Memory { addr, len, access, file: None })
        }?;
        let keys = (registration.lkey(), registration.iova());
        let range = memory.clone();
        ledger.counters.registrations.fetch_add(1, Relaxed);
        ledger.counters.application.fetch_add(len, Relaxed);
        let held = Held { registration: Some(registration), memory, ledger: ledger.clone() };
        let keep_alive: KeepAlive = Arc::new(Registered(Some(held)));
        if ledger.index.insert_application(&range, keys, &keep_alive) {
            return Ok(PoolRegistration(keep_alive));
        }
        // Another thread has registered a part of it meanwhile. Its entry stays.
        if let Ok(mut registered) = keep_alive.downcast::<Registered>()
            && let Some(registered) = Arc::get_mut(&mut registered)
            && let Some(held) = registered.0.take()
        {
            ledger.counters.application.fetch_sub(len, Relaxed);
            drop(held);
        }
        Err(RegionError::Overlap { len })
    }
}

/// Checks that the pool could still use all of its memory.
fn check_limit(ledger: &Ledger, len: usize) -> Result<(), RegionError> {
    let Some((left, memlock)) = ledger.memlock_left() else { return Ok(()) };
    let reserved = ledger.sizes.total.saturating_sub(ledger.budgets.total()) as u64;
    if len as u64 <= left.saturating_sub(reserved) {
        return Ok(());
    }
    let limit = memlock.soft.unwrap_or(u64::MAX);
    Err(RegionError::Memlock { len, limit, pinned: memlock.pinned, reserved })
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        let len = held.memory.len();
        held.ledger.index.remove(held.memory.as_ptr().addr());
        held.ledger.counters.application.fetch_sub(len, Relaxed);
        if len < OWN_THREAD || !held.ledger.registrar.is_slow() {
            return drop(held);
        }
        // If there is no thread for it, the memory is dropped with the closure, here.
        let thread = std::thread::Builder::new().name("tonic-rdma-unpin".into());
        if let Err(error) = thread.spawn(move || drop(held)) {
            tracing::debug!(%error, len, "no thread to deregister memory");
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.registration = None;
        // Connections may wait until the process can pin memory again.
        self.ledger.deregistered();
    }
}

impl fmt::Debug for PoolRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holders = Arc::strong_count(&self.0);
        f.debug_struct("PoolRegistration").field("holders", &holders).finish_non_exhaustive()
    }
}
