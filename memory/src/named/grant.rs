//! The part of a named buffer that a peer may write to.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::NamedLease;
use super::pinned::Pinned;
use crate::error::RegionError;
use crate::landing::Landing;
use crate::ledger::Ledger;

/// A part of a named buffer that is granted or about to be granted. A peer may write to this part.
///
/// Drop the grant only when nothing can write to the part any longer: after ABORT, or when the
/// queue pair has been destroyed (R9).
pub struct NamedGrant {
    range: Range<usize>,
    registered: GrantRegistration,
}

/// The registration that a grant keeps until it is dropped.
enum GrantRegistration {
    /// The grant's own registration, which ends with the grant. `None` once the registration has
    /// been dropped.
    Once(Option<LeasedRegistration>),
    /// A registration that the buffer keeps.
    Kept { pinned: Arc<Pinned>, granting: Granting },
}

/// A registration and its lease. The order of the fields matters: the registration ends before the
/// lease is given up.
struct LeasedRegistration {
    pinned: Arc<Pinned>,
    granting: Granting,
}

/// While this value is alive, a part of the buffer counts as granted.
struct Granting(NamedLease);

impl Drop for Granting {
    fn drop(&mut self) {
        self.0.0.0.state().granted = false;
    }
}

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
        let kept = state.kept.clone().filter(|kept| kept.is_of(&ledger));
        let keeps = state.keeps;
        drop(state);
        // Dropping `granting` ends the grant if a later step fails.
        let granting = Granting(lease);
        let buffer = &granting.0.0.0;
        let registered = match (keeps, kept) {
            (true, Some(pinned)) => GrantRegistration::Kept { pinned, granting },
            (true, None) => {
                // SAFETY: the buffer is mapped and writable until its owner is dropped or taken.
                // Both wait until the kept registration has been dropped.
                let pinned =
                    unsafe { Pinned::new(&ledger, buffer.start, buffer.len, granting.0.file()) }?;
                let pinned = Arc::new(pinned);
                let earlier = buffer.state().kept.replace(pinned.clone());
                if let Some(earlier) = earlier {
                    // This clone of the lease is dropped only after the earlier registration has
                    // ended.
                    earlier.end_before(granting.0.clone());
                }
                GrantRegistration::Kept { pinned, granting }
            }
            (false, _) => {
                // SAFETY: the range has been checked.
                let addr = unsafe { buffer.start.add(range.start) };
                // SAFETY: the lease keeps the buffer mapped and writable, and is dropped after the
                // registration: `LeasedRegistration`.
                let pinned = Arc::new(unsafe { Pinned::new(&ledger, addr, len, None) }?);
                GrantRegistration::Once(Some(LeasedRegistration { pinned, granting }))
            }
        };
        Ok(NamedGrant { range, registered })
    }

    fn pinned(&self) -> Option<&Pinned> {
        match &self.registered {
            GrantRegistration::Once(held) => held.as_ref().map(|held| &*held.pinned),
            GrantRegistration::Kept { pinned, .. } => Some(pinned),
        }
    }

    /// The address to which the peer directs its WRITEs (iova).
    pub fn addr(&self) -> u64 {
        let offset = match self.registered {
            GrantRegistration::Once(_) => 0,
            // Here the whole buffer is registered, so the grant begins at its offset in the buffer.
            GrantRegistration::Kept { .. } => self.range.start as u64,
        };
        self.pinned().map_or(0, |pinned| pinned.iova() + offset)
    }

    /// The remote key.
    pub fn rkey(&self) -> u32 {
        self.pinned().map_or(0, Pinned::rkey)
    }

    /// The length in bytes.
    pub fn capacity(&self) -> usize {
        self.range.len()
    }

    /// Turns the grant into bytes after the peer has written the first `len` bytes, at most the
    /// capacity, and has sent DONE. The bytes count as viewed from now on. The key is withdrawn, on
    /// a dedicated thread if the device is slow, unless the buffer keeps its registration. As long
    /// as the key works, the peer can change the bytes.
    pub fn filled(self, len: usize) -> Bytes {
        let NamedGrant { range, registered } = self;
        let granting = match &registered {
            GrantRegistration::Once(held) => held.as_ref().map(|held| &held.granting),
            GrantRegistration::Kept { granting, .. } => Some(granting),
        };
        let Some(lease) = granting.map(|granting| granting.0.clone()) else { return Bytes::new() };
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

impl Drop for GrantRegistration {
    fn drop(&mut self) {
        if let GrantRegistration::Once(held) = self
            && let Some(LeasedRegistration { pinned, granting }) = held.take()
        {
            // If the device is slow, another thread deregisters the memory, because unpinning takes
            // time and the connection is locked.
            pinned.end_before(granting);
        }
    }
}

/// The place where the landing thread leaves the grant or the error.
type Slot = Mutex<Option<Result<NamedGrant, RegionError>>>;

/// A part of a named buffer that is being registered. Dropping this value gives up the
/// registration.
#[derive(Debug)]
pub struct NamedRegistration(Arc<Slot>);

impl NamedRegistration {
    /// Takes the grant, or the reason why registering failed. Returns `None` while the registration
    /// runs, and after the result has been taken.
    pub fn take_result(&self) -> Option<Result<NamedGrant, RegionError>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl NamedLease {
    /// Whether the buffer keeps a registration by this pool, so that a grant needs no new one.
    fn keeps_registration_of(&self, ledger: &Arc<Ledger>) -> bool {
        self.0.0.state().kept.as_ref().is_some_and(|kept| kept.is_of(ledger))
    }
}

impl Landing {
    /// Whether a peer can write to this buffer. A peer that has to map a file can write only to a
    /// [`LandableBuf`](crate::LandableBuf) that is [kept
    /// registered](super::NamedBuffer::keep_registered), because a mapping cannot be revoked.
    pub fn can_name(&self, lease: &NamedLease) -> bool {
        !self.ledger().registrar.wants_file() || lease.file().is_some()
    }

    /// Registers `range`, the part of a named buffer that begins directly after the filled bytes,
    /// so that this connection's peer can write to this part. If the registrar is slow, the landing
    /// thread registers the part and then wakes the [waker](Landing::register_waker). If the buffer
    /// is to be [kept registered](super::NamedBuffer::keep_registered), the whole buffer is
    /// registered, unless it has kept the registration of an earlier grant by this pool.
    ///
    /// The registration fails with [`RegionError::Memlock`] if RLIMIT_MEMLOCK does not leave enough
    /// beyond the memory that the pool may use. It fails with [`RegionError::Overlap`] if another
    /// part of the buffer is granted, or if the range is empty, does not begin directly after the
    /// filled bytes, or exceeds the buffer. It fails with [`RegionError::Register`] if the device
    /// or the kernel refuses.
    pub fn register_named(&self, lease: NamedLease, range: Range<usize>) -> NamedRegistration {
        let slot = Arc::<Slot>::default();
        let (ledger, waiter) = (self.ledger().clone(), self.waiter().clone());
        if !self.uses_thread() || lease.keeps_registration_of(&ledger) {
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
