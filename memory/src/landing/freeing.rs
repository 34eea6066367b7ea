//! Memory that waits for the landing thread to free it.
//!
//! Until the thread has come to it, the budget does not have its bytes, and the process has them
//! pinned. Whoever decides whether memory is short counts them as free soon, so that nobody gives
//! up more for a connection that is about to get them.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use crate::ledger::{LandingWaiter, Ledger};

/// A chunk that is queued to be freed. Dropped when it has been unmapped, and before the budget
/// gets its bytes: whoever still finds them here is woken by the budget.
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
