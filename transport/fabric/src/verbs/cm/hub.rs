//! The event channel that the ids of a runtime share, and the task that hands each event to its id.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::{fmt, future, io};

use rdma_sys::rdma_cm_event_type as kind;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Handle, Id};
use tokio::task::AbortHandle;

use crate::verbs::cm::channel::{Channel, RawEvent, RawId};
use crate::verbs::discovery::is_inherited;

/// Maximum number of connect requests that wait to be accepted. Further requests are rejected.
pub(crate) const BACKLOG: usize = 128;

/// Maximum number of events that a task takes in one turn, so that a flood of connect requests does
/// not occupy a worker of the runtime.
const MAX_EVENTS: usize = 64;

/// Hubs of this process, one for each runtime with ids, so that no id depends on whether another
/// runtime is polled.
static HUBS: Mutex<Vec<Weak<Hub>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event channel of a runtime.
pub(super) struct Hub {
    runtime: Id,
    /// The lock is held while an event is read, because the library may then modify the id's queue
    /// pair.
    reading: Mutex<()>,
    /// Event queues, keyed by the address of the id.
    queues: Mutex<HashMap<usize, Arc<Mutex<EventQueue>>>>,
    reactor: OnceLock<AbortHandle>,
    /// True once the reactor has ended, because its runtime has ended or the channel has failed.
    orphaned: AtomicBool,
    channel: AsyncFd<Arc<Channel>>,
}

/// Events of one id, and the task that waits for them.
#[derive(Debug, Default)]
struct EventQueue {
    events: VecDeque<CmEvent>,
    waker: Option<Waker>,
}

/// An event of an id.
#[derive(Debug)]
pub(crate) struct CmEvent {
    /// `RDMA_CM_EVENT_...`
    pub(crate) kind: kind::Type,
    /// A negative errno, or a reject reason.
    pub(crate) status: i32,
    /// Private data of the event. InfiniBand and RoCE pad this data with zeros.
    pub(crate) private_data: Vec<u8>,
    /// The request, if the event is a connect request.
    pub(crate) request: Option<CmRequest>,
}

/// The new id of a connect request, and its events.
#[derive(Debug)]
pub(crate) struct CmRequest {
    /// The subscription, dropped before the id is destroyed.
    pub(super) events: Subscription,
    pub(super) id: RawId,
}

/// The subscription of an id to a hub. A subscription receives the id's events until it is dropped,
/// and must be dropped before the id is destroyed.
pub(super) struct Subscription {
    hub: Arc<Hub>,
    id: usize,
    queue: Arc<Mutex<EventQueue>>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").finish_non_exhaustive()
    }
}

impl Hub {
    /// Returns the hub of the current runtime. The caller must run in a runtime.
    ///
    /// # Errors
    /// The connection manager or the runtime refuses.
    pub(super) fn current() -> io::Result<Arc<Hub>> {
        let runtime = Handle::try_current().map_err(io::Error::other)?.id();
        let mut hubs = lock(&HUBS);
        hubs.retain(|hub| hub.strong_count() > 0);
        let found = hubs
            .iter()
            .filter_map(Weak::upgrade)
            .find(|hub| hub.runtime == runtime && !hub.orphaned.load(Ordering::SeqCst));
        if let Some(hub) = found {
            return Ok(hub);
        }
        // SAFETY: the descriptor belongs to the channel, which the AsyncFd keeps alive and which
        // never replaces it.
        let channel =
            unsafe { AsyncFd::register_with_interest(Channel::new()?, Interest::READABLE) }?;
        let hub = Arc::new(Hub {
            runtime,
            reading: Mutex::default(),
            queues: Mutex::default(),
            reactor: OnceLock::new(),
            orphaned: AtomicBool::new(false),
            channel,
        });
        let reactor = CmReactor(Arc::downgrade(&hub));
        let _ = hub.reactor.set(tokio::spawn(reactor.run()).abort_handle());
        hubs.push(Arc::downgrade(&hub));
        Ok(hub)
    }

    pub(super) fn channel(&self) -> &Arc<Channel> {
        self.channel.get_ref()
    }

    /// Subscribes to the events of an id.
    pub(super) fn subscribe(self: &Arc<Hub>, id: &RawId) -> Subscription {
        let id = id.as_ptr().addr();
        let queue = Arc::<Mutex<EventQueue>>::default();
        lock(&self.queues).insert(id, queue.clone());
        Subscription { hub: self.clone(), id, queue }
    }

    /// Takes at most [`MAX_EVENTS`] events from the channel. Returns false if the channel is empty.
    fn take_events(self: &Arc<Hub>) -> io::Result<bool> {
        for _ in 0..MAX_EVENTS {
            let reading = lock(&self.reading);
            let Some(waker) = self.channel().next(|event| self.deliver(event))? else {
                return Ok(false);
            };
            drop(reading);
            waker.into_iter().for_each(Waker::wake);
        }
        Ok(true)
    }

    /// Puts an event into the queue of its id, and returns the waker of the task that waits for the
    /// event.
    fn deliver(self: &Arc<Hub>, event: RawEvent) -> Option<Waker> {
        let queue = lock(&self.queues).get(&event.id).cloned()?;
        let RawEvent { kind, status, private_data, request, .. } = event;
        let request = request.map(|id| CmRequest { events: self.subscribe(&id), id });
        let mut queue = lock(&queue);
        if request.is_some() && queue.events.len() >= BACKLOG {
            // The request is rejected when its id is destroyed.
            return None;
        }
        queue.events.push_back(CmEvent { kind, status, private_data, request });
        queue.waker.take()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        if let Some(reactor) = self.reactor.get() {
            reactor.abort();
        }
    }
}

impl Subscription {
    /// Polls for the next event. The task is woken when an event arrives. If the hub is orphaned,
    /// the task is woken at once to poll again.
    ///
    /// # Errors
    /// The channel fails.
    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<CmEvent>> {
        let orphaned = self.is_orphaned();
        if orphaned {
            self.hub.take_events()?;
        }
        let mut queue = lock(&self.queue);
        if let Some(event) = queue.events.pop_front() {
            return Poll::Ready(Ok(event));
        }
        if queue.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            queue.waker = Some(cx.waker().clone());
        }
        drop(queue);
        // The hub may have been orphaned in the meantime, before its reactor could find this waker.
        if self.is_orphaned() {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Pauses the hub: nobody reads its events while the guard lives.
    pub(super) fn pause(&self) -> MutexGuard<'_, ()> {
        lock(&self.hub.reading)
    }

    pub(super) fn is_orphaned(&self) -> bool {
        self.hub.orphaned.load(Ordering::SeqCst)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        lock(&self.hub.queues).remove(&self.id);
        // Connect requests that nobody has taken are destroyed here, together with their
        // subscriptions.
        let events = std::mem::take(&mut lock(&self.queue).events);
        drop(events);
    }
}

/// The task that waits for the events of a channel. The ids keep the hub alive.
struct CmReactor(Weak<Hub>);

impl CmReactor {
    async fn run(self) {
        future::poll_fn(|cx| self.poll(cx)).await;
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(hub) = self.0.upgrade() else { return Poll::Ready(()) };
        loop {
            let Poll::Ready(ready) = hub.channel.poll_read_ready(cx) else { return Poll::Pending };
            let Ok(mut guard) = ready else { return Poll::Ready(()) };
            match hub.take_events() {
                Ok(false) => guard.clear_ready(),
                Ok(true) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Err(error) => {
                    // Polls of the ids also fail.
                    tonic_rdma_memory::throttled!(error, %error, "rdma_get_cm_event failed");
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for CmReactor {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        let Some(hub) = self.0.upgrade() else { return };
        // The flag is set before the waiting tasks are woken, so that a later wait sees it.
        hub.orphaned.store(true, Ordering::SeqCst);
        let queues: Vec<_> = lock(&hub.queues).values().cloned().collect();
        let wakers: Vec<_> = queues.iter().filter_map(|queue| lock(queue).waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}
