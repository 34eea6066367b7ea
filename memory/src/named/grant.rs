//! The part of a named buffer that a peer may write to.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::NamedLease;
use crate::error::RegionError;
use crate::landing::Landing;
use crate::ledger::Ledger;
use crate::registered::{freeing, pin};
use crate::registrar::{Access, Memory, Registration};

/// A part of a named buffer that is granted, or about to be: a peer may write to it.
///
/// Drop it only when nothing can write to it any longer: after ABORT, or when the queue pair has
/// been destroyed (R9).
pub struct NamedGrant {
    range: Range<usize>,
    registered: Registered,
}

/// A registration that ends before the lease is given up: the order of the fields.
struct Held {
    /// `None` once it has been dropped.
    registration: Option<Box<dyn Registration>>,
    len: usize,
    lease: NamedLease,
    ledger: Arc<Ledger>,
}

/// What is registered, until it is dropped.
struct Registered(Option<Held>);

impl NamedGrant {
    fn new(
        ledger: Arc<Ledger>,
        lease: NamedLease,
        range: Range<usize>,
    ) -> Result<Self, RegionError> {
        let buffer = &lease.0.0;
        let len = range.len();
        let mut state = buffer.state();
        if range.is_empty()
            || range.end > buffer.len
            || range.start != state.filled
            || state.granted
        {
            return Err(RegionError::Overlap { len, pool: false });
        }
        state.granted = true;
        drop(state);
        // Ends the grant if what follows fails.
        let mut held = Held { registration: None, len: 0, lease, ledger };
        // SAFETY: the range has been checked.
        let addr = unsafe { held.lease.0.0.start.add(range.start) };
        let ledger = held.ledger.clone();
        let registration = pin(&ledger, NonNull::slice_from_raw_parts(addr, len), || {
            // SAFETY: the lease keeps the buffer mapped and writable, and is dropped after the
            // registration: `Held`. Nothing of this process reads or writes the range while it is
            // granted (R8, R9).
            unsafe {
                let access = Access::RemoteWrite;
                ledger.registrar.register(Memory { addr, len, access, file: None })
            }
        })?;
        held.ledger.counters.registrations.fetch_add(1, Relaxed);
        held.ledger.counters.application.fetch_add(len, Relaxed);
        (held.registration, held.len) = (Some(registration), len);
        Ok(NamedGrant { range, registered: Registered(Some(held)) })
    }

    fn registration(&self) -> Option<&dyn Registration> {
        self.registered.0.as_ref()?.registration.as_deref()
    }

    /// The address to which the peer directs its WRITEs (iova).
    pub fn addr(&self) -> u64 {
        self.registration().map_or(0, Registration::iova)
    }

    /// The remote key.
    pub fn rkey(&self) -> u32 {
        self.registration().map_or(0, Registration::rkey)
    }

    /// The length in bytes.
    pub fn capacity(&self) -> usize {
        self.range.len()
    }

    /// The peer has written the first `len` bytes, at most the capacity, and has sent DONE. They
    /// are viewed from now on, and the key is withdrawn: by a thread of its own if the device takes
    /// time for it. Until then the peer can change them.
    pub fn filled(self, len: usize) -> Bytes {
        let NamedGrant { range, registered } = self;
        let Some(lease) = registered.0.as_ref().map(|held| held.lease.clone()) else {
            return Bytes::new();
        };
        let end = range.start + len.min(range.len());
        lease.0.0.state().filled = end;
        let bytes = lease.view(range.start..end).unwrap_or_default();
        drop(registered);
        bytes
    }
}

impl fmt::Debug for NamedGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamedGrant").field("range", &self.range).finish_non_exhaustive()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        // To unpin the memory takes time, and the connection is locked.
        match held.ledger.registrar.is_slow() {
            true => freeing::free(if held.ledger.registrar.pins() { held.len } else { 0 }, held),
            false => drop(held),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.registration = None;
        self.lease.0.0.state().granted = false;
        self.ledger.counters.application.fetch_sub(self.len, Relaxed);
        // Connections may wait until the process can pin memory again.
        self.ledger.deregistered();
    }
}

/// Where the thread leaves the grant.
type Slot = Mutex<Option<Result<NamedGrant, RegionError>>>;

/// A part of a named buffer that is being registered. Dropping it gives the registration up.
#[derive(Debug)]
pub struct NamedRegistration(Arc<Slot>);

impl NamedRegistration {
    /// The grant, or why there is none, once.
    pub fn take_result(&self) -> Option<Result<NamedGrant, RegionError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Landing {
    /// Whether a peer can write to memory that is not the pool's. It cannot where it has to map a
    /// file of it.
    pub fn can_name(&self) -> bool {
        !self.ledger().registrar.wants_file()
    }

    /// Registers a part of a named buffer, so that the peer of this connection can write to it:
    /// what follows the filled bytes. Where the registrar is slow, the landing thread does it, and
    /// wakes the [waker](Landing::register_waker) then.
    ///
    /// The result has [`RegionError::Memlock`] if RLIMIT_MEMLOCK does not leave enough beside what
    /// the pool may use, [`RegionError::Overlap`] if another part of the buffer is granted, and
    /// [`RegionError::Register`] if the device or the kernel refuses.
    pub fn register_named(&self, lease: NamedLease, range: Range<usize>) -> NamedRegistration {
        let slot = Arc::<Slot>::default();
        let (ledger, waiter) = (self.ledger().clone(), self.waiter().clone());
        if !self.uses_thread() {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(NamedGrant::new(ledger, lease, range));
            return NamedRegistration(slot);
        }
        let result = Arc::downgrade(&slot);
        self.ledger().landing_thread.run(Box::new(move || {
            if result.strong_count() == 0 {
                return;
            }
            let made = NamedGrant::new(ledger, lease, range);
            if let Some(slot) = result.upgrade() {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
                waiter.wake();
            }
        }));
        NamedRegistration(slot)
    }
}
