//! Memory that is queued for the landing thread to free.
//!
//! Until the thread has freed this memory, its bytes are missing from the budget and stay pinned.
//! Code that decides whether memory is short counts these bytes as free. Otherwise connections
//! would give up memory for a connection that is about to get these bytes.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use crate::ledger::{LandingWaiter, Ledger};

/// A chunk that is queued to be freed. This value is dropped after the chunk has been unmapped and
/// before the budget gets its bytes. So a waiter that still saw the bytes here is woken when the
/// budget gets them.
#[derive(Debug)]
pub(super) struct Freeing {
    len: usize,
    waiter: Arc<LandingWaiter>,
    ledger: Arc<Ledger>,
}

impl Freeing {
    pub(super) fn begin(ledger: &Arc<Ledger>, waiter: &Arc<LandingWaiter>, len: usize) -> Freeing {
        let freeing = Freeing { len, waiter: waiter.clone(), ledger: ledger.clone() };
        for counter in freeing.counters() {
            counter.fetch_add(len, SeqCst);
        }
        freeing
    }

    fn counters(&self) -> [&AtomicUsize; 2] {
        [&self.waiter.freeing, &self.ledger.budgets.freeing]
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        for counter in self.counters() {
            counter.fetch_sub(self.len, SeqCst);
        }
    }
}
