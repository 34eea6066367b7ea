//! The landing thread's work for which an allocator waits: see [`making`](super::making).

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::chunk::Lease;
use super::making::{AllocKind, AllocRequest, Failed, Making};
use crate::error::RegisterError;
use crate::landing::Landing;
use crate::ledger::Waiting;

impl Landing {
    /// Whether the landing thread makes the chunks. This needs a waker, by which the thread wakes
    /// the owner.
    pub(crate) fn uses_thread(&self) -> bool {
        self.has_waker && self.ledger.registrar.is_slow()
    }

    /// Asks the landing thread to make a chunk for this lease.
    pub(super) fn begin_making(&mut self, lease: Lease, request: AllocRequest) {
        self.making = Some(Making::begin(lease, request));
        self.record_leased();
    }

    /// Takes the chunk that has been made since the last call, or the error.
    /// [`alloc`](Landing::alloc) and [`alloc_spare`](Landing::alloc_spare) also do this.
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
            // Drop the error, because no caller waits for this chunk any more.
            Err(_) if request.kind != AllocKind::Spare && self.waiter.state() == Waiting::No => {}
            Err(error) => self.failed = Some(Failed { request, error }),
        }
        self.record_leased();
    }

    /// Takes the error of the last attempt to make a chunk, if it applies to `request`.
    pub(super) fn take_failed(&mut self, request: AllocRequest) -> Option<RegisterError> {
        let failed = self.failed.take_if(|failed| failed.request.kind == request.kind)?;
        (failed.request.needed <= request.needed).then_some(failed.error)
    }

    /// The size of the chunk that is being made, in bytes.
    pub(super) fn making_bytes(&self) -> usize {
        self.making.as_ref().map_or(0, |making| making.bytes)
    }

    /// The total size of this allocator's chunks that the landing thread has not freed yet.
    pub(super) fn freeing(&self) -> usize {
        self.waiter.freeing.load(SeqCst)
    }

    /// Whether a chunk of at least `needed` bytes is being made.
    pub(super) fn is_made(&self, needed: usize) -> bool {
        self.making.as_ref().is_some_and(|making| making.bytes >= needed)
    }

    /// Whether memory for a chunk of `needed` bytes becomes free as soon as the landing thread has
    /// freed this allocator's chunks.
    pub(super) fn is_freed(&self, needed: usize) -> bool {
        let freeing = self.freeing();
        freeing > 0
            && self.leased().saturating_add(needed) <= self.lease_cap()
            && self.ledger.landing_free().saturating_add(freeing) >= needed
    }

    /// Whether a chunk of `needed` bytes can be made after the shorter chunk that is being made
    /// now.
    pub(super) fn is_next(&self, needed: usize) -> bool {
        self.making.is_some()
            && self.leased().saturating_add(self.freeing()).saturating_add(needed)
                <= self.lease_cap()
            && self.ledger.landing_free() >= needed
    }

    /// Whether a chunk is being made, or has been made and not [collected](Landing::collect). The
    /// owner is woken when the chunk has been made, and should then allocate again.
    pub fn is_making(&self) -> bool {
        self.making.is_some()
    }

    /// Whether the last call to [`alloc`](Landing::alloc) returned `None` although memory is not
    /// short: the chunk for it is being made, or chunks that this connection has returned are not
    /// free yet.
    pub fn is_pending(&self) -> bool {
        self.is_pending
    }
}
