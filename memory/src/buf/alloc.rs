//! Allocation of send memory, with and without waiting.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::arena::Arenas;
use crate::buf::PinnedBuf;
use crate::error::PoolError;
use crate::process::Forked;

/// Allocates `len` bytes, if there is memory now and no request waits.
#[inline]
pub(crate) fn try_alloc(arenas: &Arc<Arenas>, len: usize) -> Result<PinnedBuf, PoolError> {
    if len > arenas.budget() || arenas.is_inherited() || arenas.waiters().any() {
        return Err(refusal(arenas, len));
    }
    arenas.take(len).map(|slot| PinnedBuf::new(slot, len))
}

#[cold]
fn refusal(arenas: &Arenas, len: usize) -> PoolError {
    let (budget, usage) = (arenas.budget(), arenas.usage());
    if len > budget {
        PoolError::TooLarge { len, budget, usage }
    } else if arenas.is_inherited() {
        PoolError::Map { len, source: std::io::Error::other(Forked("the pool")) }
    } else {
        PoolError::Exhausted { len, budget, usage }
    }
}

/// The future of [`Pool::alloc`](crate::Pool::alloc).
///
/// # Cancel safety
/// Dropping the future gives up its place in the queue. Memory that was already assigned to the
/// future goes to the next waiter.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Alloc {
    arenas: Arc<Arenas>,
    len: usize,
    /// The id of the waiter, while the waiter is in the queue.
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
        let id = waiters.join(this.arenas.clone(), this.len, cx.waker().clone());
        this.id = Some(id);
        this.arenas.count_wait();
        // Serve the queue, because memory may have become free before the waiter joined the queue.
        this.arenas.serve();
        if waiters.is_served(id) { self.poll(cx) } else { Poll::Pending }
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if let Some(id) = self.id.take()
            && !self.arenas.is_inherited()
        {
            // Drop a slot that was held for this waiter, outside the lock. The drop serves the next
            // waiter. If no slot was held, serve the queue nevertheless, because this waiter may
            // have blocked a later waiter that needs less memory.
            drop(self.arenas.waiters().leave(id));
            self.arenas.memory_freed();
        }
    }
}
