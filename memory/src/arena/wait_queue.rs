//! A first-in, first-out queue of waiters for memory.
//!
//! | a waiter is | when |
//! |---|---|
//! | queued | there was no memory, or others were waiting |
//! | served | memory has become free; the queue holds it for the waiter, which has been woken |
//! | gone | it has taken the memory, or was dropped; memory held for it goes to the next waiter |

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::error::PoolError;
use crate::ledger::WaiterCount;

/// The memory that a waiter receives, or the reason why it fails.
pub(crate) type Served<T> = Result<T, PoolError>;

#[derive(Debug)]
struct Waiter<S, T> {
    id: u64,
    /// The allocator of the memory.
    source: S,
    len: usize,
    waker: Waker,
    served: Option<Served<T>>,
}

#[derive(Debug)]
struct Queue<S, T> {
    next_id: u64,
    waiters: VecDeque<Waiter<S, T>>,
}

/// The queue, with a count of its waiters that can be read without the lock.
#[derive(Debug)]
pub(crate) struct WaitQueue<S, T> {
    /// The number of waiters that have not been served.
    unserved: WaiterCount,
    queue: Mutex<Queue<S, T>>,
}

impl<S, T> Default for WaitQueue<S, T> {
    fn default() -> Self {
        let queue = Queue { next_id: 0, waiters: VecDeque::new() };
        WaitQueue { unserved: WaiterCount::default(), queue: Mutex::new(queue) }
    }
}

impl<S, T> WaitQueue<S, T> {
    fn lock(&self) -> MutexGuard<'_, Queue<S, T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a waiter has not been served. A new request then has to queue.
    pub(crate) fn any(&self) -> bool {
        self.unserved.count() > 0
    }

    /// True if a request waits for memory that the caller has just freed.
    pub(crate) fn any_after_free(&self) -> bool {
        self.unserved.any_after_free()
    }

    /// Adds a waiter at the end and returns its id. The caller must then call
    /// [`serve`](Self::serve) once, because memory may have become free just before.
    pub(crate) fn join(&self, source: S, len: usize, waker: Waker) -> u64 {
        let mut queue = self.lock();
        let id = queue.next_id;
        queue.next_id += 1;
        queue.waiters.push_back(Waiter { id, source, len, waker, served: None });
        self.unserved.enter();
        id
    }

    /// Serves and wakes the waiters in their order, until `take` has no more memory.
    pub(crate) fn serve(&self, mut take: impl FnMut(&S, usize) -> Served<T>) {
        let mut wakes = Vec::new();
        {
            let mut queue = self.lock();
            for waiter in queue.waiters.iter_mut() {
                if waiter.served.is_some() {
                    continue;
                }
                match take(&waiter.source, waiter.len) {
                    Err(PoolError::Exhausted { .. }) => break,
                    result => {
                        waiter.served = Some(result);
                        self.unserved.leave();
                        wakes.push(waiter.waker.clone());
                    }
                }
            }
        }
        wakes.into_iter().for_each(Waker::wake);
    }

    /// Replaces the waker of a waiter. Returns false if the waiter has been served.
    pub(crate) fn set_waker(&self, id: u64, waker: &Waker) -> bool {
        let mut queue = self.lock();
        let unserved = queue.waiters.iter_mut().find(|w| w.id == id && w.served.is_none());
        let Some(waiter) = unserved else { return false };
        let old = std::mem::replace(&mut waiter.waker, waker.clone());
        // Drop the old waker outside the lock, because dropping it may drop a task and everything
        // that the task owns.
        drop(queue);
        drop(old);
        true
    }

    /// Whether the waiter has been served.
    pub(crate) fn is_served(&self, id: u64) -> bool {
        self.lock().waiters.iter().any(|w| w.id == id && w.served.is_some())
    }

    /// Removes a waiter. Returns the memory or the error that the queue held for the waiter, if the
    /// waiter has been served.
    pub(crate) fn leave(&self, id: u64) -> Option<Served<T>> {
        let mut queue = self.lock();
        let at = queue.waiters.iter().position(|w| w.id == id)?;
        let waiter = queue.waiters.remove(at)?;
        if waiter.served.is_none() {
            self.unserved.leave();
        }
        drop(queue);
        waiter.served
    }
}
