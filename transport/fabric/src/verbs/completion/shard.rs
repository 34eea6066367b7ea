//! The completion queues of a device in one runtime. The queues share a channel and a task that
//! waits for events of this channel.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::{fmt, future, io, mem};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;

use crate::turn;
use crate::verbs::completion::Cq;
use crate::verbs::completion::async_events::AsyncEvents;
use crate::verbs::completion::channel::CompChannel;
use crate::verbs::completion::dispatch::{Dispatch, Failure, ReactorStep};
use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;

/// A new queue has room for this many queue pairs of the size of its first queue pair. The queue
/// has more room if the shard already has a large queue.
const FIRST_MEMBERS: u32 = 8;

/// The shards of this process. A device has one shard in each runtime that has links on the device,
/// so that no link depends on whether another runtime is polled.
static SHARDS: Mutex<Vec<Weak<Shard>>> = Mutex::new(Vec::new());

pub(super) struct Shard {
    device: Arc<DeviceContext>,
    runtime: Id,
    queues: Mutex<Queues>,
    reactor: OnceLock<AbortHandle>,
    /// True once the reactor has ended, because its runtime has ended or the channel has failed.
    orphaned: AtomicBool,
    channel: AsyncFd<CompChannel>,
    /// The device's asynchronous events. `None` if these events are not available. Failures of
    /// queues then stay unknown.
    events: Option<AsyncEvents>,
}

#[derive(Default)]
struct Queues {
    live: Vec<(usize, Weak<SharedCq>)>,
    next_key: usize,
    /// Number of entries of the largest queue so far.
    largest: u32,
}

/// A completion queue that queue pairs share.
pub(super) struct SharedCq {
    /// The state of the queue. This field stands before `_shard`, so the queue is dropped before
    /// the shard's channel.
    dispatch: Mutex<Dispatch<Cq>>,
    /// The address of the queue, which is needed to make queue pairs. libibverbs is thread-safe.
    cq: usize,
    entries: u32,
    /// Number of entries that are reserved for queue pairs.
    reserved: Mutex<u32>,
    _shard: Arc<Shard>,
}

impl fmt::Debug for SharedCq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedCq").field("entries", &self.entries).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes tasks. The caller must hold no lock, because a waker may run any code.
pub(super) fn wake_all(wake: &mut Vec<Waker>) {
    wake.drain(..).for_each(Waker::wake);
}

impl SharedCq {
    /// Reserves room for `entries` completions in a queue of the current runtime, which may be a
    /// new queue. A new queue has at most `max_entries` entries.
    ///
    /// # Errors
    /// The device or the runtime refuses.
    pub(super) fn reserve(
        device: &Arc<DeviceContext>,
        entries: u32,
        max_entries: u32,
    ) -> io::Result<Arc<SharedCq>> {
        let shard = Shard::current(device)?;
        for queue in shard.all() {
            // A failed queue stays alive as long as queue pairs are on it.
            if !queue.dispatch().has_failed() && queue.try_reserve(entries) {
                return Ok(queue);
            }
        }
        let (key, largest) = {
            let mut queues = lock(&shard.queues);
            queues.next_key += 1;
            (queues.next_key, queues.largest)
        };
        let wanted = entries.saturating_mul(FIRST_MEMBERS).max(largest.saturating_mul(2));
        let mut depth = wanted.clamp(entries, max_entries.max(entries));
        // The memory of a queue may count against RLIMIT_MEMLOCK, so a smaller queue is tried if a
        // large one is refused.
        let cq = loop {
            match Cq::new(device, shard.channel.get_ref(), key, depth) {
                Err(error) if depth > entries => {
                    tracing::debug!(%error, depth, "a smaller completion queue is tried");
                    depth = (depth / 2).max(entries);
                }
                made => break made?,
            }
        };
        let queue = Arc::new(SharedCq {
            cq: cq.as_ptr().expose_provenance(),
            dispatch: Mutex::new(Dispatch::new(cq, depth as usize)),
            entries: depth,
            reserved: Mutex::new(entries),
            _shard: shard.clone(),
        });
        let mut queues = lock(&shard.queues);
        queues.largest = queues.largest.max(depth);
        queues.live.retain(|(_, queue)| queue.strong_count() > 0);
        queues.live.push((key, Arc::downgrade(&queue)));
        drop(queues);
        if shard.orphaned.load(Ordering::SeqCst) {
            queue.dispatch().orphan(&mut Vec::new());
        }
        Ok(queue)
    }

    fn try_reserve(&self, entries: u32) -> bool {
        let mut reserved = lock(&self.reserved);
        let fits = self.entries - *reserved >= entries;
        *reserved += if fits { entries } else { 0 };
        fits
    }

    /// Frees reserved entries.
    pub(super) fn release(&self, entries: u32) {
        *lock(&self.reserved) -= entries;
    }

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::ibv_cq {
        std::ptr::with_exposed_provenance_mut(self.cq)
    }

    /// Locks the queue: nobody else polls it while the guard lives.
    pub(super) fn dispatch(&self) -> MutexGuard<'_, Dispatch<Cq>> {
        lock(&self.dispatch)
    }

    /// Locks the queue, unless somebody else polls it.
    pub(super) fn try_dispatch(&self) -> Option<MutexGuard<'_, Dispatch<Cq>>> {
        match self.dispatch.try_lock() {
            Ok(dispatch) => Some(dispatch),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Shard {
    /// Returns the device's shard in the current runtime. The caller must run in a runtime.
    fn current(device: &Arc<DeviceContext>) -> io::Result<Arc<Shard>> {
        let runtime = Handle::try_current().map_err(io::Error::other)?.id();
        let mut shards = lock(&SHARDS);
        shards.retain(|shard| shard.strong_count() > 0);
        let found = shards.iter().filter_map(Weak::upgrade).find(|shard| {
            shard.runtime == runtime
                && Arc::ptr_eq(&shard.device, device)
                && !shard.orphaned.load(Ordering::SeqCst)
        });
        if let Some(shard) = found {
            return Ok(shard);
        }
        // SAFETY: the descriptor belongs to the channel, which the AsyncFd owns and which never
        // replaces it.
        let channel = unsafe {
            AsyncFd::register_with_interest(CompChannel::new(device)?, Interest::READABLE)
        }?;
        let shard = Arc::new(Shard {
            device: device.clone(),
            runtime,
            queues: Mutex::default(),
            reactor: OnceLock::new(),
            orphaned: AtomicBool::new(false),
            channel,
            events: AsyncEvents::new(device)
                .inspect_err(|error| tracing::debug!(%error, "no asynchronous events"))
                .ok(),
        });
        let reactor = Reactor { shard: Arc::downgrade(&shard), looking: Vec::new() };
        let _ = shard.reactor.set(tokio::spawn(reactor.run()).abort_handle());
        shards.push(Arc::downgrade(&shard));
        Ok(shard)
    }

    // No queue is dropped under the lock. Destroying a queue waits until its events are
    // acknowledged. The reactor may hold an event while it waits for the lock.

    fn find(&self, key: usize) -> Option<Arc<SharedCq>> {
        let queues = lock(&self.queues);
        queues.live.iter().find(|(known, _)| *known == key).and_then(|(_, queue)| queue.upgrade())
    }

    fn all(&self) -> Vec<Arc<SharedCq>> {
        lock(&self.queues).live.iter().filter_map(|(_, queue)| queue.upgrade()).collect()
    }

    fn has_one_queue(&self) -> bool {
        let queues = lock(&self.queues);
        queues.live.iter().filter(|(_, queue)| queue.strong_count() > 0).count() == 1
    }

    /// Takes events of the channel, which is ready, and adds their queues to `fired`. Returns
    /// `Pending` if the channel may hold more events but the turn of the task is over (R20).
    fn take_events(
        &self,
        cx: &mut Context<'_>,
        fired: &mut Vec<Arc<SharedCq>>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(turn::charge(cx, &mut 1));
            let Some(event) = self.channel.get_ref().next()? else { return Poll::Ready(Ok(())) };
            let Some(queue) = self.find(event.key) else {
                event.ack();
                continue;
            };
            let may_have_more = {
                let mut dispatch = queue.dispatch();
                dispatch.queue_mut().took_event();
                dispatch.take_event()
            };
            fired.push(queue);
            // Asking the kernel for an event that cannot be there costs a system call.
            if !may_have_more && self.has_one_queue() {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Marks as failed the queues whose failure the device reports. If the device itself has
    /// failed, marks all of its queues.
    fn poll_async_events(&self, cx: &mut Context<'_>, wake: &mut Vec<Waker>) {
        let Some(events) = &self.events else { return };
        // The failed queue may belong to another runtime.
        let of_device = || {
            let shards: Vec<_> = lock(&SHARDS).iter().filter_map(Weak::upgrade).collect();
            shards.into_iter().filter(|shard| Arc::ptr_eq(&shard.device, &self.device))
        };
        let find = |cq| of_device().flat_map(|shard| shard.all()).find(|queue| queue.cq == cq);
        let mut failed = Vec::new();
        match events.poll(cx, find, &mut failed) {
            Ok(false) => {}
            Ok(true) => {
                tonic_rdma_memory::throttled!(
                    error,
                    device = self.device.name,
                    "the device has failed; its connections end"
                );
                for queue in of_device().flat_map(|shard| shard.all()) {
                    queue.dispatch().fail(Failure::DeviceFatal, wake);
                }
            }
            Err(error) => {
                tracing::debug!(device = self.device.name, %error, "no asynchronous events any more");
            }
        }
        for queue in failed {
            tonic_rdma_memory::throttled!(
                error,
                device = self.device.name,
                "a completion queue has overrun"
            );
            queue.dispatch().fail(Failure::Overrun, wake);
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        if let Some(reactor) = self.reactor.get() {
            reactor.abort();
        }
    }
}

/// The task that waits for the events of a channel.
struct Reactor {
    /// The shard, which the links keep alive.
    shard: Weak<Shard>,
    /// Queues that the reactor will look at again.
    looking: Vec<Weak<SharedCq>>,
}

impl Reactor {
    async fn run(mut self) {
        let (mut fired, mut wake) = (Vec::new(), Vec::new());
        future::poll_fn(|cx| self.poll(cx, &mut fired, &mut wake)).await;
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        fired: &mut Vec<Arc<SharedCq>>,
        wake: &mut Vec<Waker>,
    ) -> Poll<()> {
        let Some(shard) = self.shard.upgrade() else { return Poll::Ready(()) };
        fired.extend(mem::take(&mut self.looking).iter().filter_map(Weak::upgrade));
        while let Poll::Ready(ready) = shard.channel.poll_read_ready(cx) {
            // The runtime is ending, so the channel cannot be waited on. From now on the links poll
            // their queues themselves: see `Reactor::drop`.
            let Ok(mut guard) = ready else { return Poll::Ready(()) };
            let Poll::Ready(taken) = shard.take_events(cx, fired) else { break };
            if let Err(error) = taken {
                tonic_rdma_memory::throttled!(error, device = shard.device.name, %error, "ibv_get_cq_event failed");
                let failure = Failure::from(error);
                shard.all().iter().for_each(|queue| queue.dispatch().fail(failure, wake));
                wake_all(wake);
                return Poll::Ready(());
            }
            guard.clear_ready();
        }
        shard.poll_async_events(cx, wake);
        for queue in fired.drain(..) {
            let next = queue.dispatch().look(wake);
            match next {
                Ok(ReactorStep::Wait) => {}
                Ok(ReactorStep::LookAgain) => self.looking.push(Arc::downgrade(&queue)),
                Err(error) => {
                    tonic_rdma_memory::throttled!(error, device = shard.device.name, %error, "a completion queue failed");
                    queue.dispatch().fail(error.into(), wake);
                }
            }
        }
        wake_all(wake);
        if !self.looking.is_empty() {
            // Yielding lets every other task run before this task looks at the queues again.
            let _ = future::Future::poll(pin!(tokio::task::yield_now()), cx);
        }
        Poll::Pending
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        let Some(shard) = self.shard.upgrade() else { return };
        // The flag is set before the existing queues are marked, so that queues made later see it.
        shard.orphaned.store(true, Ordering::SeqCst);
        let mut wake = Vec::new();
        shard.all().iter().for_each(|queue| queue.dispatch().orphan(&mut wake));
        wake_all(&mut wake);
    }
}
