//! A chunk that the landing thread makes for a connection's allocator.
//!
//! If the registrar [is slow](crate::Registrar::is_slow), the landing thread makes chunks
//! (`ledger::landing_thread`). At most one chunk is being made for an allocator. The allocator
//! takes the lease first, so the chunk counts as leased and needs no claim.
//!
//! | the chunk is | on | next |
//! |---|---|---|
//! | none | an allocation finds no piece, and takes the lease of a chunk | queued |
//! | queued | the thread's turn | made, and the owner is woken; or failed, after the lease has been returned |
//! | queued | the owner gives up ([`Landing::trim`](crate::Landing::trim), or drop) | none: the thread returns the lease, or makes the chunk and frees it |
//! | made | the next call of the owner | none: it is one of the owner's chunks |
//! | failed | the next call of the owner | none: the error is kept |
//!
//! | an error is | on | next |
//! |---|---|---|
//! | kept | an allocation of the same kind needs a chunk that is as long or longer | returned, in place of another attempt |
//! | kept | an allocation of the same kind needs a shorter chunk, or [`Landing::stop_waiting`](crate::Landing::stop_waiting) | dropped |

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::chunk::{Chunk, Lease};
use crate::error::RegisterError;

/// The allocator function that a chunk is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AllocKind {
    Needed,
    Spare,
    Meanwhile,
}

/// The place where the landing thread leaves the chunk or the error.
type Slot = Mutex<Option<Result<Chunk, RegisterError>>>;

/// A chunk that is queued, made or failed. Dropping this value gives the chunk up.
#[derive(Debug)]
pub(super) struct Making {
    /// The result. The thread has a weak reference, so a result without an owner is dropped.
    slot: Arc<Slot>,
    /// The size of the lease in bytes.
    pub(super) bytes: usize,
    pub(super) request: AllocRequest,
}

/// The allocation that a chunk is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocRequest {
    pub(super) kind: AllocKind,
    /// The minimum size of the chunk in bytes.
    pub(super) needed: usize,
}

/// A failed attempt.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) request: AllocRequest,
    pub(super) error: RegisterError,
}

impl Making {
    /// Asks the landing thread to make a chunk for this lease, and then to wake the allocator's
    /// owner.
    pub(super) fn begin(lease: Lease, request: AllocRequest) -> Self {
        let slot = Arc::<Slot>::default();
        let (bytes, waiter, ledger) = (lease.bytes(), lease.waiter.clone(), lease.ledger.clone());
        let result = Arc::downgrade(&slot);
        ledger.landing_thread.run(Box::new(move || {
            if result.strong_count() == 0 {
                return;
            }
            let made = catch_unwind(AssertUnwindSafe(|| make(lease))).unwrap_or_else(|_| {
                crate::throttled!(error, "registering landing memory panicked");
                Err(RegisterError::new(bytes, io::Error::other("it panicked")))
            });
            if let Some(slot) = result.upgrade() {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
                waiter.wake();
            }
        }));
        Making { slot, bytes, request }
    }

    /// Takes the chunk, or the reason why it could not be made. Returns `None` while the chunk is
    /// being made, and after the result has been taken.
    pub(super) fn take_result(&self) -> Option<Result<Chunk, RegisterError>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Makes the chunk if RLIMIT_MEMLOCK still has room for it and for the pool's reserve for
/// connections. The limit is checked here because chunks ahead of this one in the queue may have
/// been pinned since the lease was taken.
fn make(lease: Lease) -> Result<Chunk, RegisterError> {
    let bytes = lease.bytes();
    match lease.ledger.landing_left() {
        Some((left, _)) if left < bytes => {
            Err(RegisterError::new(bytes, io::Error::from_raw_os_error(libc::ENOMEM)))
        }
        _ => Chunk::new(lease),
    }
}
