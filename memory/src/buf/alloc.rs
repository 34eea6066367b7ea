//! Waiting for send memory.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::pinned::PinnedBuf;
use crate::arena::Arenas;
use crate::error::PoolError;

/// A buffer of `len` bytes, if there is memory now and nobody waits for some.
pub(crate) fn try_alloc(arenas: &Arc<Arenas>, len: usize) -> Result<PinnedBuf, PoolError> {
    let (budget, usage) = (arenas.budget(), arenas.usage());
    if len > budget {
        return Err(PoolError::TooLarge { len, budget, usage });
    }
    if arenas.waiters().any() {
        return Err(PoolError::Exhausted { len, budget, usage });
    }
    arenas.take(len).map(|slot| PinnedBuf::new(slot, len))
}

/// The future of [`Pool::alloc`](crate::Pool::alloc).
///
/// Cancel safe: dropping it gives up its place, and passes memory that it had been given to the
/// next.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Alloc {
    arenas: Arc<Arenas>,
    len: usize,
    /// Its place in the queue.
    id: Option<u64>,
}

impl Alloc {
    pub(crate) fn new(arenas: Arc<Arenas>, len: usize) -> Self {
        Alloc { arenas, len, id: None }
    }
}

impl Future for Alloc {
    type Output = Result<PinnedBuf, PoolError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let waiters = this.arenas.waiters();
        if let Some(id) = this.id {
            if waiters.set_waker(id, cx.waker()) {
                return Poll::Pending;
            }
            this.id = None;
            let slot = waiters.leave(id);
            return Poll::Ready(match slot {
                Some(slot) => slot.map(|slot| PinnedBuf::new(slot, this.len)),
                None => try_alloc(&this.arenas, this.len),
            });
        }
        match try_alloc(&this.arenas, this.len) {
            Err(PoolError::Exhausted { .. }) => {}
            result => return Poll::Ready(result),
        }
        let id = waiters.join(this.len, cx.waker().clone());
        this.id = Some(id);
        this.arenas.count_wait();
        // Memory may have come free before the place was taken.
        this.arenas.serve();
        if waiters.is_served(id) { self.poll(cx) } else { Poll::Pending }
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            // A buffer that it held is dropped outside the lock, which serves the next; if it held
            // none, it may have stood in the way of one that needs less.
            drop(self.arenas.waiters().leave(id));
            self.arenas.freed();
        }
    }
}
