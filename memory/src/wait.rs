//! WaiterCount for send memory, in order.
//!
//! | a waiter is | when |
//! |---|---|
//! | queued | it has been polled and there was no memory, or others waited before it |
//! | served | memory came free; it holds a buffer and has been woken |
//! | gone | it took the buffer, or was dropped: then a buffer that it held goes on to the next |

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::buf::PinnedBuf;
use crate::error::PoolError;
use crate::pool::{Pool, Shared};
use crate::waiter_count::WaiterCount;

#[derive(Debug)]
struct Waiter {
    id: u64,
    len: usize,
    waker: Waker,
    served: Option<Result<PinnedBuf, PoolError>>,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    waiters: VecDeque<Waiter>,
}

/// The queue, and a count of it that is read without the lock.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// Those that have not been served.
    waiting: WaiterCount,
    queue: Mutex<Queue>,
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anyone waits: whoever comes now comes after them.
    pub(crate) fn any(&self) -> bool {
        self.waiting.count() > 0
    }

    /// Memory has come free.
    pub(crate) fn freed(&self, shared: &Arc<Shared>) {
        if self.waiting.any_after_free() {
            self.serve(shared);
        }
    }

    fn serve(&self, shared: &Arc<Shared>) {
        let mut wakes = Vec::new();
        {
            let mut queue = self.lock();
            for waiter in queue.waiters.iter_mut() {
                if waiter.served.is_some() {
                    continue;
                }
                match shared.take_send(waiter.len) {
                    Err(PoolError::Exhausted { .. }) => break,
                    result => {
                        waiter.served = Some(result);
                        self.waiting.leave();
                        wakes.push(waiter.waker.clone());
                    }
                }
            }
        }
        wakes.into_iter().for_each(Waker::wake);
    }
}

/// The future of [`Pool::alloc`].
///
/// Cancel safe: dropping it gives up its place, and passes memory that it had been given to the
/// next.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Alloc {
    pool: Pool,
    len: usize,
    id: Option<u64>,
}

impl Alloc {
    pub(crate) fn new(pool: Pool, len: usize) -> Self {
        Alloc { pool, len, id: None }
    }

    fn leave(&mut self) -> Option<Waiter> {
        let id = self.id.take()?;
        let waiters = &self.pool.0.waiters;
        let mut queue = waiters.lock();
        let at = queue.waiters.iter().position(|w| w.id == id)?;
        let waiter = queue.waiters.remove(at)?;
        if waiter.served.is_none() {
            waiters.waiting.leave();
        }
        Some(waiter)
    }
}

impl Future for Alloc {
    type Output = Result<PinnedBuf, PoolError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let shared = this.pool.0.clone();
        let waiters = &shared.waiters;
        if let Some(id) = this.id {
            let mut queue = waiters.lock();
            if let Some(waiter) =
                queue.waiters.iter_mut().find(|w| w.id == id && w.served.is_none())
            {
                let old = std::mem::replace(&mut waiter.waker, cx.waker().clone());
                // The old one is dropped without the lock: that may drop a task, and what it owns.
                drop(queue);
                drop(old);
                return Poll::Pending;
            }
            drop(queue);
            let served = this.leave().and_then(|waiter| waiter.served);
            return Poll::Ready(served.unwrap_or_else(|| this.pool.try_alloc(this.len)));
        }
        match this.pool.try_alloc(this.len) {
            Err(PoolError::Exhausted { .. }) => {}
            result => return Poll::Ready(result),
        }
        let id = {
            let mut queue = waiters.lock();
            let id = queue.next;
            queue.next += 1;
            queue.waiters.push_back(Waiter {
                id,
                len: this.len,
                waker: cx.waker().clone(),
                served: None,
            });
            waiters.waiting.enter();
            id
        };
        this.id = Some(id);
        shared.counters.waits.fetch_add(1, Ordering::Relaxed);
        // Memory may have come free before the place was taken.
        waiters.serve(&shared);
        let served = waiters.lock().waiters.iter().any(|w| w.id == id && w.served.is_some());
        if served { self.poll(cx) } else { Poll::Pending }
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if self.id.is_some() {
            // A buffer that it held is dropped outside the lock, which serves the next; if it held
            // none, it may have stood in the way of one that needs less.
            drop(self.leave());
            self.pool.0.waiters.freed(&self.pool.0);
        }
    }
}
