//! Collects the leases that a link has to return to its peer. Dropping the last bytes of a lease
//! adds the lease.

use std::sync::{Mutex, PoisonError};
use std::task::Waker;

/// Leases that the peer of one link has granted and whose bytes are no longer read. The peer has
/// not been told yet.
#[derive(Debug, Default)]
pub(crate) struct Returns(Mutex<ReturnsState>);

#[derive(Debug, Default)]
struct ReturnsState {
    leases: Vec<u32>,
    waker: Option<Waker>,
}

impl Returns {
    /// Adds a lease, and wakes the link's task.
    pub(crate) fn push(&self, lease: u32) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.leases.push(lease);
        // Waking once is enough, because the task takes all leases.
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Moves the leases to `out`. `waker` is woken when further leases are added.
    pub(crate) fn take(&self, waker: &Waker, out: &mut Vec<u32>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        out.append(&mut state.leases);
        match &mut state.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}
