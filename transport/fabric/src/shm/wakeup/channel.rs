//! The wake-up channel of two processes, as one of them has it: an eventfd and a page, for all
//! connections between a runtime of the one and a runtime of the other.
//!
//! A sender that finds a connection waiting sets its bit in the page, and writes the eventfd only
//! if the receiving process sleeps. The receiver takes the bits, and wakes exactly the tasks of
//! those connections:
//!
//! | connections | event | what it does |
//! |---|---|---|
//! | one | the eventfd is written | says that it sleeps, takes the bits |
//! | several | the eventfd is written | takes the bits, and has the poller run |
//! | several | the poller runs, and there are bits | takes them; the poller runs again after other tasks |
//! | several | the poller has run [`LINGER`](super::poller::LINGER) times for nothing | says that it sleeps, takes the bits |
//!
//! So while the runtime is busy with these connections, it sees bits without a system call. Nothing
//! here is the task of a connection: what a task of the user's does, or fails to do, holds up no
//! other connection.
//!
//! A channel ends with its last connection, and with its runtime.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Wake, Waker};

use crate::shm::memory::map::Map;
use crate::shm::memory::peer_map::PeerMap;
use crate::shm::ring::Words as _;
use crate::shm::wakeup::event_fd::{End, EventFd};
use crate::shm::wakeup::wake_page::{CAPACITY, Direction, WORDS};

/// Bytes of the page.
pub(crate) const PAGE_BYTES: usize = 2 * WORDS * 8;
/// Tasks that are woken at a time, without the lock.
const BATCH: usize = 16;

/// The page, by whose file it is.
#[derive(Debug)]
enum Page {
    Own(Map),
    Peer(PeerMap),
}

#[derive(Debug, Default)]
struct State {
    /// The task of each connection, once it has waited.
    tasks: Vec<Option<Waker>>,
    free: Vec<u16>,
    members: u16,
    poller: Option<Waker>,
    has_poller: bool,
    /// The page, to be sent to the peer until that has it in use.
    file: Option<Arc<OwnedFd>>,
}

/// One end of a channel.
#[derive(Debug)]
pub(crate) struct WakeChannel {
    page: Page,
    event_fd: EventFd,
    /// What the eventfd wakes.
    waker: Waker,
    ended: AtomicBool,
    state: Mutex<State>,
}

/// What the eventfd wakes. The runtime holds it, and so it does not keep the channel.
#[derive(Debug)]
struct Signal(Weak<WakeChannel>);

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(channel) = self.0.upgrade() {
            channel.signalled();
        }
    }
}

impl WakeChannel {
    /// Makes one. Must be called within a tokio runtime.
    pub(crate) fn make() -> io::Result<Arc<WakeChannel>> {
        let (page, file) = Map::create(PAGE_BYTES)?;
        WakeChannel::new(EventFd::make()?, Page::Own(page), Some(file))
    }

    /// Takes the eventfd and the page that the peer has made. Must be called within a tokio
    /// runtime.
    pub(crate) fn take(event_fd: OwnedFd, page: PeerMap) -> io::Result<Arc<WakeChannel>> {
        WakeChannel::new(EventFd::take(event_fd)?, Page::Peer(page), None)
    }

    fn new(event_fd: EventFd, page: Page, file: Option<OwnedFd>) -> io::Result<Arc<WakeChannel>> {
        let state = State { file: file.map(Arc::new), ..State::default() };
        let channel = Arc::new_cyclic(|channel| WakeChannel {
            page,
            event_fd,
            waker: Waker::from(Arc::new(Signal(channel.clone()))),
            ended: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        channel.arm()?;
        channel.inbound().set_in_use(true);
        channel.inbound().raise();
        Ok(channel)
    }

    fn direction(&self, end: End) -> Direction<'_> {
        let words = match &self.page {
            Page::Own(map) => map.words(),
            Page::Peer(map) => map.words(),
        };
        // Within bounds: a page of this length was mapped.
        Direction(match end {
            End::Maker => &words[..WORDS],
            End::Taker => &words[WORDS..2 * WORDS],
        })
    }

    /// What the peer writes to wake this end.
    pub(super) fn inbound(&self) -> Direction<'_> {
        self.direction(self.event_fd.end())
    }

    fn outbound(&self) -> Direction<'_> {
        self.direction(self.event_fd.end().other())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Has the eventfd wake this end.
    pub(super) fn arm(&self) -> io::Result<()> {
        self.event_fd.arm(&mut Context::from_waker(&self.waker))
    }

    /// The eventfd was written, or the runtime ends.
    fn signalled(&self) {
        if self.arm().is_err() {
            return self.end();
        }
        let state = self.state();
        match &state.poller {
            Some(poller) if state.members > 1 => poller.wake_by_ref(),
            _ => self.inbound().raise(),
        }
        drop(state);
        self.wake_tasks();
    }

    /// Wakes the tasks of the connections whose bits are set, and returns their number.
    pub(super) fn wake_tasks(&self) -> usize {
        let (mut taken, mut woken) = (self.inbound().take(), 0);
        loop {
            let mut batch = [const { None }; BATCH];
            let (state, mut found) = (self.state(), 0);
            while found < BATCH
                && let Some(connection) = taken.next()
            {
                if let Some(Some(task)) = state.tasks.get(usize::from(connection)) {
                    batch[found] = Some(task.clone());
                    found += 1;
                }
            }
            drop(state);
            batch.iter_mut().take(found).filter_map(Option::take).for_each(Waker::wake);
            woken += found;
            if found < BATCH {
                return woken;
            }
        }
    }

    /// Wakes a connection of the peer, which waits. True if that took a system call; `stamp` comes
    /// before it.
    pub(super) fn wake_peer(&self, connection: u16, stamp: impl FnOnce()) -> bool {
        let sleeps = self.outbound().set(connection);
        if sleeps {
            stamp();
            // Fails only when the peer has moved the counter itself.
            let _ = self.event_fd.wake();
        }
        sleeps
    }

    /// Adds a connection, and returns its number. `None` when there are too many, or the channel
    /// has ended. True: the channel needs a poller, which is to be spawned.
    pub(super) fn add(&self) -> Option<(u16, bool)> {
        let mut state = self.state();
        if self.has_ended() {
            return None;
        }
        let next = u16::try_from(state.tasks.len()).ok().filter(|next| *next < CAPACITY);
        let connection = match state.free.pop() {
            Some(free) => free,
            None => {
                state.tasks.push(None);
                next?
            }
        };
        state.members += 1;
        let spawn = state.members > 1 && !state.has_poller;
        state.has_poller |= spawn;
        Some((connection, spawn))
    }

    /// Removes a connection. The channel ends with the last.
    pub(super) fn remove(&self, connection: u16) {
        let mut state = self.state();
        let task = state.tasks.get_mut(usize::from(connection)).and_then(Option::take);
        state.free.push(connection);
        state.members -= 1;
        let last = state.members == 0;
        if last {
            self.ended.store(true, Ordering::Release);
        }
        drop(state);
        drop(task);
        if last {
            self.end();
        }
    }

    /// From now on this task is woken for the connection.
    pub(super) fn set_task(&self, connection: u16, task: &Waker) {
        let mut state = self.state();
        if let Some(slot) = state.tasks.get_mut(usize::from(connection)) {
            *slot = Some(task.clone());
        }
    }

    /// The poller's task.
    pub(super) fn set_poller(&self, task: &Waker) {
        let poller = &mut self.state().poller;
        if poller.as_ref().is_none_or(|known| !known.will_wake(task)) {
            *poller = Some(task.clone());
        }
    }

    /// Nobody is woken by this channel any more: its connections find that out, and the poller
    /// ends.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.inbound().set_in_use(false);
        let mut state = self.state();
        let (tasks, poller) = (state.tasks.clone(), state.poller.take());
        state.file = None;
        drop(state);
        tasks.into_iter().flatten().chain(poller).for_each(Waker::wake);
    }

    /// The page, for the peer, if it may not have that yet. `None`: the peer has ended its end, so
    /// further connections need another channel.
    pub(super) fn offer(&self) -> Option<Option<Arc<OwnedFd>>> {
        self.settle();
        match (&self.state().file, self.outbound().is_in_use()) {
            (_, true) => Some(None),
            (Some(file), false) => Some(Some(file.clone())),
            (None, false) => None,
        }
    }

    /// Closes the page's descriptor if the peer has the page.
    pub(super) fn settle(&self) {
        if self.outbound().is_in_use() {
            drop(self.state().file.take());
        }
    }

    /// The eventfd, for the peer.
    pub(crate) fn event_fd(&self) -> impl AsFd {
        self.event_fd.fd()
    }
}
