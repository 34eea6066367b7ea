//! What an allocator has the landing thread do, and waits for: see [`making`](super::making).

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::allocator::Landing;
use super::chunk::Lease;
use super::making::{Failed, Kind, Making, Request};
use crate::error::RegisterError;
use crate::ledger::Waiting;

impl Landing {
    /// Whether the landing thread makes the chunks. It has to wake the owner.
    pub(crate) fn uses_thread(&self) -> bool {
        self.has_waker && self.ledger.registrar.is_slow()
    }

    /// Has a chunk made for this lease.
    pub(super) fn begin_making(&mut self, lease: Lease, request: Request) {
        self.making = Some(Making::begin(lease, request));
        self.record_leased();
    }

    /// Takes the chunk that has been made since the last call, or the error. So do the functions
    /// that allocate.
    pub fn collect(&mut self) {
        if self.making.is_some() {
            self.collect_result();
        }
    }

    #[cold]
    fn collect_result(&mut self) {
        let Some(Making { request, .. }) = &self.making else { return };
        let request = *request;
        let Some(result) = self.making.as_ref().and_then(Making::take_result) else { return };
        self.making = None;
        match result {
            Ok(chunk) => {
                self.retries = 0;
                self.chunks.push(Arc::new(chunk));
            }
            // Nobody waits for it any more, so it is no answer to a later call.
            Err(_) if request.kind != Kind::Spare && self.waiter.state() == Waiting::No => {}
            Err(error) => self.failed = Some(Failed { request, error }),
        }
        self.record_leased();
    }

    /// The error of the last attempt to make a chunk for such a request.
    pub(super) fn take_failed(&mut self, request: Request) -> Option<RegisterError> {
        let failed = self.failed.take_if(|failed| failed.request.kind == request.kind)?;
        (failed.request.needed <= request.needed).then_some(failed.error)
    }

    /// Bytes of the chunk that is being made.
    pub(super) fn making_bytes(&self) -> usize {
        self.making.as_ref().map_or(0, |making| making.bytes)
    }

    /// Bytes of chunks of this allocator that the landing thread has not freed yet.
    pub(super) fn freeing(&self) -> usize {
        self.waiter.freeing.load(SeqCst)
    }

    /// Whether a chunk of at least `needed` bytes is being made.
    pub(super) fn is_made(&self, needed: usize) -> bool {
        self.making.as_ref().is_some_and(|making| making.bytes >= needed)
    }

    /// Whether memory for a chunk of `needed` bytes comes free as soon as the landing thread has
    /// freed chunks of this allocator.
    pub(super) fn is_freed(&self, needed: usize) -> bool {
        let freeing = self.freeing();
        freeing > 0
            && self.leased().saturating_add(needed) <= self.lease_cap()
            && self.ledger.landing_free().saturating_add(freeing) >= needed
    }

    /// Whether a chunk of `needed` bytes can be made as soon as a shorter one has been: one is made
    /// at a time.
    pub(super) fn is_next(&self, needed: usize) -> bool {
        self.making.is_some()
            && self.leased().saturating_add(self.freeing()).saturating_add(needed)
                <= self.lease_cap()
            && self.ledger.landing_free() >= needed
    }

    /// Whether a chunk is being made, or has been and waits to be [collected](Landing::collect):
    /// the owner is woken, and should allocate again.
    pub fn is_making(&self) -> bool {
        self.making.is_some()
    }

    /// Whether the last call of [`alloc`](Landing::alloc) returned `None` only because its chunk is
    /// being made, or because chunks that this connection has returned are not free yet: memory is
    /// not short.
    pub fn is_pending(&self) -> bool {
        self.is_pending
    }
}
