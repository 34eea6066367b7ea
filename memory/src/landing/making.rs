//! The chunk that a connection's allocator is having made.
//!
//! Where the registrar [is slow](crate::Registrar::is_slow), the landing thread makes chunks
//! (`ledger::landing_thread`). An allocator has one made at a time, of which it has the lease from
//! the start: it claims nothing for it, and counts it as leased.
//!
//! | the chunk is | on | next |
//! |---|---|---|
//! | none | an allocation finds no piece, and takes the lease of a chunk | queued |
//! | queued | the thread's turn | made: the owner is woken; or failed: the lease goes back first |
//! | queued | the owner gives up ([`Landing::trim`](crate::Landing::trim), or drop) | none: the thread returns the lease, or makes the chunk and frees it |
//! | made | the next call of the owner | none: it is one of the owner's chunks |
//! | failed | the next call of the owner | none: the error is kept |
//!
//! | an error is | on | next |
//! |---|---|---|
//! | kept | an allocation of the same kind needs a chunk that is as long or longer | returned, in place of another attempt |
//! | kept | one needs a shorter chunk, or [`Landing::stop_waiting`](crate::Landing::stop_waiting) | dropped |

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use super::chunk::{Chunk, Lease};
use crate::error::RegisterError;

/// Which function of the allocator a chunk is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Needed,
    Spare,
    Meanwhile,
}

/// Where the thread leaves the chunk.
type Slot = Mutex<Option<Result<Chunk, RegisterError>>>;

/// A chunk that is queued, made or failed. Dropping it gives the chunk up.
#[derive(Debug)]
pub(super) struct Making {
    /// The thread has a weak reference: a result that has no owner is dropped.
    slot: Arc<Slot>,
    /// Bytes of the lease.
    pub(super) bytes: usize,
    pub(super) request: Request,
}

/// What a chunk is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// Bytes that the chunk has to have at least.
    pub(super) needed: usize,
}

/// An attempt that has failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) request: Request,
    pub(super) error: RegisterError,
}

impl Making {
    /// Has the landing thread make a chunk for this lease, and wake the owner.
    pub(super) fn begin(lease: Lease, request: Request) -> Self {
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

    /// The chunk, or why there is none, once.
    pub(super) fn take_result(&self) -> Option<Result<Chunk, RegisterError>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Makes the chunk, if the process may still pin it and what the pool keeps for connections: chunks
/// in front of it in the queue have been pinned since the lease was taken.
fn make(lease: Lease) -> Result<Chunk, RegisterError> {
    let bytes = lease.bytes();
    match lease.ledger.landing_left() {
        Some((left, _)) if left < bytes => {
            Err(RegisterError::new(bytes, io::Error::from_raw_os_error(libc::ENOMEM)))
        }
        _ => Chunk::new(lease),
    }
}
