//! One end of a wake-up channel between two processes. The channel consists of two eventfds and a
//! page. The channel serves all connections between a runtime of one process and a runtime of the
//! other.
//!
//! A sender that finds a connection waiting sets the connection's bit in the page. If the receiving
//! process sleeps, the sender also signals the eventfd of that process. The receiver takes the
//! bits, and wakes exactly the tasks of those connections:
//!
//! | connections | event | what it does |
//! |---|---|---|
//! | one | the eventfd is signalled | announces that it sleeps, takes the bits |
//! | several | the eventfd is signalled | takes the bits, and wakes the poller |
//! | several | the poller runs, and there are bits | takes them; the poller runs again after other tasks |
//! | several | a connection's task runs, and there are bits | takes them; the poller does not count its next run as unsuccessful |
//! | several | the poller has run [`LINGER`] times without success | announces that it sleeps, takes the bits |
//!
//! So a runtime that is busy with these connections sees bits without a system call. A channel with
//! one connection costs as much as a private eventfd. The poller is a separate task, so the runtime
//! always polls it. For this reason, a task that does not poll its link delays no other connection.
//!
//! The poller may be queued on a thread that a task blocks. Any connection whose task runs on
//! another thread then takes the bits.
//!
//! A channel ends some time after its last connection (`idle`), when its runtime ends, or when the
//! eventfd fails, which is the peer's fault. A peer that keeps setting bits keeps the poller
//! running, in turn with all other tasks. Such bits wake only the tasks of that peer's connections,
//! each once a turn.
//!
//! While the runtime is busy with the connections of a channel, the poller takes the bits, so that
//! the peer need not signal the eventfd:
//!
//! | the poller | event | next |
//! |---|---|---|
//! | Sleeps | the eventfd is signalled | Runs |
//! | Runs | a connection is woken, by the poller or by a connection's task | Runs, after the other tasks |
//! | Runs | no connection is woken for the [`LINGER`]th time | Sleeps, with the flag raised and no bits set |
//! | any | the channel has ended | Ended |
//! | any | the runtime ends | Ended, together with the channel |

use std::future::Future;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};

use tokio::runtime::Handle;

use crate::shm::memory::Map;
use crate::shm::memory::peer_map::PeerMap;
use crate::shm::ring::Words as _;
use crate::shm::same_user::lives;
use crate::shm::wakeup::event_fd::{ChannelEnd, EventFds};
use crate::shm::wakeup::wake_cost::monotonic;
use crate::shm::wakeup::wake_page::{CAPACITY, Direction, Stage, WORDS};

/// The size of the page in bytes.
pub(crate) const PAGE_BYTES: usize = 2 * WORDS * 8;

/// The page. Either this end or the peer made the page's file.
#[derive(Debug)]
enum ChannelPage {
    Own(Map),
    Peer(PeerMap),
}

#[derive(Debug, Default)]
struct WakeChannelState {
    /// The task of each connection. `None` until the connection has waited.
    tasks: Vec<Option<Waker>>,
    free: Vec<u16>,
    members: u16,
    /// Whether the last connection has ended since the last call to `was_used`. `None` while no
    /// task keeps the channel for further connections.
    used: Option<bool>,
    poller: Option<Waker>,
    has_poller: bool,
    /// The page's file. This end sends the file to the peer until the peer has used the page.
    file: Option<Arc<OwnedFd>>,
}

/// One end of a channel.
#[derive(Debug)]
pub(crate) struct WakeChannel {
    page: ChannelPage,
    event_fds: EventFds,
    /// The waker that the eventfd calls.
    waker: Waker,
    runtime: Handle,
    /// The confirmed peer's pidfd (`same_user`).
    peer: OnceLock<OwnedFd>,
    /// The process that made the channel. A child of fork(2) also has the channel, but without the
    /// page.
    process: u32,
    ended: AtomicBool,
    /// Whether the peer caused the channel's end.
    is_broken: AtomicBool,
    /// Whether the channel has several connections.
    is_shared: AtomicBool,
    /// Whether a connection's task has taken bits since the poller last ran.
    found: AtomicBool,
    state: Mutex<WakeChannelState>,
}

/// The waker that the eventfd calls. The runtime holds this waker, so the waker must not keep the
/// channel alive.
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
    /// Makes a channel. Must be called within a tokio runtime.
    pub(crate) fn make() -> io::Result<Arc<WakeChannel>> {
        let (page, file) = Map::create(PAGE_BYTES)?;
        WakeChannel::new(EventFds::make()?, ChannelPage::Own(page), Some(file))
    }

    /// Makes this end from the peer's eventfds and page. Must be called within a tokio runtime.
    pub(crate) fn take(event_fds: [OwnedFd; 2], page: PeerMap) -> io::Result<Arc<WakeChannel>> {
        WakeChannel::new(EventFds::take(event_fds)?, ChannelPage::Peer(page), None)
    }

    fn new(
        event_fds: EventFds,
        page: ChannelPage,
        file: Option<OwnedFd>,
    ) -> io::Result<Arc<WakeChannel>> {
        let state = WakeChannelState { file: file.map(Arc::new), ..WakeChannelState::default() };
        let channel = Arc::new_cyclic(|channel| WakeChannel {
            page,
            event_fds,
            waker: Waker::from(Arc::new(Signal(channel.clone()))),
            runtime: Handle::current(),
            peer: OnceLock::new(),
            process: std::process::id(),
            ended: AtomicBool::new(false),
            is_broken: AtomicBool::new(false),
            is_shared: AtomicBool::new(false),
            found: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        channel.arm()?;
        channel.inbound().set_stage(Stage::InUse);
        channel.inbound().raise();
        Ok(channel)
    }

    fn direction(&self, end: ChannelEnd) -> Direction<'_> {
        let words = match &self.page {
            ChannelPage::Own(map) => map.words(),
            ChannelPage::Peer(map) => map.words(),
        };
        // The range is within bounds, because a page of this length was mapped.
        Direction(match end {
            ChannelEnd::Maker => &words[..WORDS],
            ChannelEnd::Taker => &words[WORDS..2 * WORDS],
        })
    }

    /// The direction in which the peer wakes this end.
    fn inbound(&self) -> Direction<'_> {
        self.direction(self.event_fds.end())
    }

    fn outbound(&self) -> Direction<'_> {
        self.direction(self.event_fds.end().other())
    }

    fn state(&self) -> MutexGuard<'_, WakeChannelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The reason why the channel has ended, as an error for connections that the channel no longer
    /// wakes.
    pub(super) fn why_ended(&self) -> io::Error {
        match self.is_broken.load(Ordering::Acquire) {
            true => io::Error::new(io::ErrorKind::InvalidData, "it has broken the wake-up channel"),
            false => io::Error::other("the runtime that this end is woken by has ended"),
        }
    }

    /// Makes the eventfd wake this end.
    fn arm(&self) -> io::Result<()> {
        self.event_fds.arm(&mut Context::from_waker(&self.waker))
    }

    /// Handles a signal of the eventfd, or the end of the runtime.
    fn signalled(&self) {
        if let Err(error) = self.arm() {
            let is_broken = error.kind() == io::ErrorKind::InvalidData;
            self.is_broken.store(is_broken, Ordering::Release);
            return self.end();
        }
        let poller = match self.is_shared.load(Ordering::Relaxed) {
            true => self.state().poller.clone(),
            false => None,
        };
        match poller {
            Some(poller) => poller.wake(),
            None => self.inbound().raise(),
        }
        self.wake_tasks();
    }

    /// Wakes the tasks of the connections whose bits are set, and returns their number.
    fn wake_tasks(&self) -> usize {
        self.wake_tasks_except(CAPACITY)
    }

    fn wake_tasks_except(&self, running: u16) -> usize {
        let mut woken = 0;
        for connection in self.inbound().take() {
            // Wake the task without the lock.
            let task = self.state().tasks.get(usize::from(connection)).and_then(Option::clone);
            if let Some(task) = task {
                if connection != running {
                    task.wake();
                }
                woken += 1;
            }
        }
        woken
    }

    /// Like [`wake_tasks`](Self::wake_tasks), but does not wake the connection `running`, whose
    /// task calls this function before it checks for messages. The task takes the bits because the
    /// poller may have to wait. The call costs one load while no bit is set.
    #[inline]
    pub(super) fn wake_others(&self, running: u16) {
        if self.inbound().has_bits() && self.wake_tasks_except(running) > 0 {
            self.found.store(true, Ordering::Relaxed);
        }
    }

    /// Runs the poller's turn: wakes the tasks of the connections whose bits are set. Returns
    /// whether the bit of a connection was taken since the last turn, by the poller or by a
    /// connection's task.
    pub(super) fn poll(&self) -> bool {
        let found = self.found.load(Ordering::Relaxed);
        if found {
            self.found.store(false, Ordering::Relaxed);
        }
        self.wake_tasks() > 0 || found
    }

    /// Wakes a connection that waits at the peer. Returns whether the wake-up took a system call.
    /// `stamp` gets the time before the call.
    pub(super) fn wake_peer(&self, connection: u16, stamp: impl FnOnce(u64)) -> bool {
        let outbound = self.outbound();
        // The time is read first. Once the bit is set, the peer may run and begin its next wait,
        // which this wake-up does not end.
        let now = outbound.may_sleep().then(monotonic);
        let sleeps = outbound.set(connection);
        if sleeps {
            now.map(stamp);
            // Ignore an error, because the call fails only if the peer itself has emptied the
            // counter.
            let _ = self.event_fds.wake();
        }
        sleeps
    }

    /// Adds a connection. Returns its number, and whether the caller has to spawn a poller. `None`
    /// if there are too many connections, or the channel has ended.
    pub(super) fn add(&self) -> Option<(u16, bool)> {
        let mut state = self.state();
        if self.has_ended() {
            return None;
        }
        let connection = match state.free.pop() {
            Some(free) => free,
            None => {
                let next = u16::try_from(state.tasks.len()).ok().filter(|next| *next < CAPACITY)?;
                state.tasks.push(None);
                next
            }
        };
        state.members += 1;
        self.is_shared.store(state.members > 1, Ordering::Relaxed);
        let spawn = state.members > 1 && !state.has_poller;
        state.has_poller |= spawn;
        Some((connection, spawn))
    }

    /// Removes a connection. Returns true after the last connection, if the caller has to make the
    /// channel wait for another one (`idle`).
    pub(super) fn remove(&self, connection: u16) -> bool {
        let mut state = self.state();
        let task = state.tasks.get_mut(usize::from(connection)).and_then(Option::take);
        state.free.push(connection);
        state.members -= 1;
        self.is_shared.store(state.members > 1, Ordering::Relaxed);
        let is_idle = state.members == 0 && state.used.replace(true).is_none();
        drop(state);
        drop(task);
        is_idle
    }

    /// The runtime in which the channel may wait. `None` if the channel has ended, or in a child of
    /// fork(2).
    pub(super) fn runtime(&self) -> Option<&Handle> {
        (!self.has_ended() && self.process == std::process::id()).then_some(&self.runtime)
    }

    /// Whether the last connection has ended since the last call.
    pub(super) fn was_used(&self) -> bool {
        self.state().used.replace(false) == Some(true)
    }

    /// Ends the channel if it has no connection. Otherwise the channel waits again when its last
    /// connection ends.
    pub(super) fn end_if_idle(&self) {
        let mut state = self.state();
        state.used = None;
        let is_idle = state.members == 0;
        if is_idle {
            self.ended.store(true, Ordering::Release);
        }
        drop(state);
        if is_idle {
            self.end();
        }
    }

    /// Sets the task that is woken for the connection.
    pub(super) fn set_task(&self, connection: u16, task: &Waker) {
        let mut state = self.state();
        let task = Some(task.clone());
        let old = match state.tasks.get_mut(usize::from(connection)) {
            Some(known) => std::mem::replace(known, task),
            None => None,
        };
        // Drop the old waker without the lock, because the last of a task's wakers may drop
        // connections.
        drop((state, old));
    }

    /// Sets the poller's task.
    fn set_poller(&self, task: &Waker) {
        let mut state = self.state();
        let is_known = state.poller.as_ref().is_some_and(|known| known.will_wake(task));
        let old = if is_known { None } else { state.poller.replace(task.clone()) };
        drop((state, old));
    }

    /// Ends the channel. The connections notice that the channel no longer wakes them, and the
    /// poller ends.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        if self.process != std::process::id() {
            return;
        }
        self.inbound().set_stage(Stage::Ended);
        let mut state = self.state();
        let (tasks, poller) = (state.tasks.clone(), state.poller.take());
        state.file = None;
        drop(state);
        tasks.into_iter().flatten().chain(poller).for_each(Waker::wake);
    }

    /// Returns the page's file if it still has to be sent, because the peer has not used the page
    /// so far. The outer `None` means that the channel has ended at the peer, so further
    /// connections need another channel.
    pub(super) fn offer(&self) -> Option<Option<Arc<OwnedFd>>> {
        match self.settle() {
            Stage::Offered => self.state().file.clone().map(Some),
            Stage::InUse => Some(None),
            Stage::Ended => None,
        }
    }

    /// Closes the page's descriptor if the peer has used the page. Returns the peer's state of the
    /// channel.
    pub(super) fn settle(&self) -> Stage {
        let stage = self.outbound().stage();
        if stage != Stage::Offered {
            drop(self.state().file.take());
        }
        stage
    }

    /// Keeps a pidfd until the channel is gone.
    pub(super) fn keep_peer(&self, pidfd: OwnedFd) {
        let _ = self.peer.set(pidfd);
    }

    /// Whether the process whose pidfd the channel keeps lives.
    pub(super) fn peer_lives(&self) -> bool {
        self.peer.get().is_some_and(lives)
    }

    /// The eventfds to send to the peer. This end waits for the first eventfd.
    pub(crate) fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.event_fds.fds()
    }
}

/// The number of unsuccessful turns before the poller sleeps. Each turn comes after all other tasks
/// that can run.
const LINGER: u32 = 2;

#[derive(Debug)]
pub(super) struct Poller {
    channel: Arc<WakeChannel>,
    /// The number of unsuccessful turns since a connection was last woken.
    in_vain: u32,
}

impl Poller {
    pub(super) fn new(channel: Arc<WakeChannel>) -> Poller {
        Poller { channel, in_vain: 0 }
    }
}

impl Future for Poller {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Poller { channel, in_vain } = &mut *self;
        channel.set_poller(cx.waker());
        if channel.has_ended() {
            return Poll::Ready(());
        }
        *in_vain = if channel.poll() { 0 } else { *in_vain + 1 };
        if *in_vain >= LINGER {
            *in_vain = 0;
            channel.inbound().raise();
            if channel.wake_tasks() == 0 {
                return Poll::Pending;
            }
            channel.inbound().lower();
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Poller {
    /// Ends the channel. A runtime that ends drops the poller, so the channel also ends with its
    /// runtime.
    fn drop(&mut self) {
        self.channel.end();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::sync::atomic::{AtomicU64, AtomicUsize};
    use std::task::Poll;

    use super::*;
    use crate::shm::memory::peer_map::Usage;
    use crate::shm::wakeup::idle::tests::has_ended;
    use crate::shm::wakeup::{ChannelMember, Wakeup};

    fn words() -> Vec<AtomicU64> {
        (0..WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn each_bit_that_was_set_is_taken_once() {
        let words = words();
        let direction = Direction(&words);
        assert_eq!(direction.take().count(), 0);
        let set = [0, 1, 63, 64, 1000, CAPACITY - 1];
        for connection in set.iter().chain(&set) {
            assert!(!direction.set(*connection), "the process does not sleep");
        }
        assert!(direction.has_bits());
        assert!(direction.take().eq(set));
        assert!(!direction.has_bits() && direction.take().next().is_none());
    }

    #[test]
    fn a_process_that_sleeps_is_woken_once() {
        let words = words();
        let direction = Direction(&words);
        direction.raise();
        assert_eq!([7, 7, 8].map(|connection| direction.set(connection)), [true, false, false]);
        direction.raise();
        direction.lower();
        assert!(!direction.set(9));
        assert!(direction.take().eq([7, 8, 9]));
    }

    /// Whatever the peer writes, each connection is woken once at most.
    #[test]
    fn any_content_is_taken() {
        let words = words();
        words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        let direction = Direction(&words);
        assert!(direction.take().eq(0..CAPACITY));
        assert_eq!(direction.take().count(), 0);
        words[8].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(direction.take().count(), 0, "no bits");
        assert_eq!(direction.stage(), Stage::Ended, "no number of a stage");
        for stage in [Stage::InUse, Stage::Ended, Stage::Offered] {
            direction.set_stage(stage);
            assert_eq!(direction.stage(), stage);
        }
    }

    /// Both ends of a channel.
    fn channel() -> [Arc<WakeChannel>; 2] {
        let maker = WakeChannel::make().unwrap();
        let (file, mut id) = (maker.offer().flatten().unwrap(), (0, 0));
        let page = Map::new(&file, PAGE_BYTES, |file| {
            id = file;
            Ok(())
        });
        let page = PeerMap::adopt(page.unwrap(), Some(id), 0, Usage::Page).unwrap();
        let event_fds = maker.event_fds().map(|fd| fd.try_clone_to_owned().unwrap());
        let taker = WakeChannel::take(event_fds, page).unwrap();
        [maker, taker]
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waiting connections, and how often each was woken.
    struct Waiting {
        ends: Vec<Wakeup>,
        counts: Vec<Arc<Count>>,
    }

    impl Waiting {
        fn on(channel: &Arc<WakeChannel>, connections: usize) -> Waiting {
            let counts: Vec<Arc<Count>> = (0..connections).map(|_| Arc::default()).collect();
            let ends = counts.iter().map(|count| {
                let mut end = Wakeup::Channel(ChannelMember::join(channel).unwrap());
                let waker = Waker::from(count.clone());
                end.listen(&mut Context::from_waker(&waker)).unwrap();
                end
            });
            Waiting { ends: ends.collect(), counts }
        }

        fn woken(&self) -> Vec<usize> {
            self.counts.iter().map(|count| count.0.load(Ordering::SeqCst)).collect()
        }
    }

    /// Yields for as long as the reactor and the pollers need.
    async fn turns() {
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
    }

    /// Lets other tasks run once.
    async fn other_tasks() {
        let mut ran = false;
        std::future::poll_fn(|cx| match std::mem::replace(&mut ran, true) {
            true => Poll::Ready(()),
            false => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await;
    }

    /// Wakes connections, and returns the number of system calls.
    fn wake(channel: &WakeChannel, connections: impl IntoIterator<Item = u16>) -> usize {
        connections.into_iter().filter(|connection| channel.wake_peer(*connection, |_| ())).count()
    }

    #[tokio::test]
    async fn exactly_those_that_were_sent_something_are_woken() {
        for connections in [1, 2, 70] {
            let ends = channel();
            let waiting = ends.each_ref().map(|end| Waiting::on(end, connections));
            turns().await;
            let mut expected = [vec![0; connections], vec![0; connections]];
            for round in 0..20_usize {
                for from in [round % 2, 0, 1] {
                    let some = (0..connections).step_by(1 + round % 3);
                    let system_calls = wake(&ends[from], some.clone().map(|at| at as u16));
                    assert_eq!(system_calls, 1, "one for all of them");
                    some.for_each(|at| expected[1 - from][at] += 1);
                    turns().await;
                    assert_eq!(waiting.each_ref().map(Waiting::woken), expected, "{round}");
                }
            }
        }
    }

    /// While a runtime works, the poller sees bits without a system call.
    #[tokio::test]
    async fn a_runtime_that_is_awake_is_not_woken() {
        // Runs as a task, because the runtime polls its main future only after many tasks.
        let works = tokio::spawn(async {
            let [maker, taker] = channel();
            let waiting = Waiting::on(&taker, 2);
            turns().await;
            assert_eq!(wake(&maker, [0]), 1);
            while waiting.woken() == [0, 0] {
                tokio::task::yield_now().await;
            }
            for round in 1..100 {
                assert_eq!(wake(&maker, [1, 0]), 0, "{round}");
                while waiting.woken()[1] < round {
                    other_tasks().await;
                }
            }
            turns().await;
            assert_eq!(wake(&maker, [1]), 1, "it sleeps again");
        });
        works.await.unwrap();
    }

    #[tokio::test]
    async fn any_bits_wake_each_connection_once_and_no_other() {
        let [maker, taker] = channel();
        let waiting = Waiting::on(&taker, 40);
        turns().await;
        for connection in 0..CAPACITY {
            maker.outbound().set(connection);
        }
        assert_eq!((taker.wake_tasks(), taker.wake_tasks()), (40, 0));
        assert_eq!(waiting.woken(), [1; 40]);
        let gone = waiting.counts.clone();
        drop(waiting);
        maker.outbound().set(3);
        assert_eq!((taker.wake_tasks(), gone[3].0.load(Ordering::SeqCst)), (0, 1));
    }

    #[tokio::test]
    async fn it_takes_as_many_connections_as_it_has_bits_and_ends_after_the_last() {
        let [maker, taker] = channel();
        let mut members: Vec<_> =
            (0..CAPACITY).map(|_| ChannelMember::join(&maker).unwrap()).collect();
        assert!((0..9).all(|_| ChannelMember::join(&maker).is_none()));
        assert_eq!(maker.state().tasks.len(), usize::from(CAPACITY), "no room for those refused");
        members.truncate(7);
        assert!(ChannelMember::join(&maker).is_some());
        assert!(matches!(maker.offer(), Some(None)), "the peer has the page");
        drop(Waiting::on(&taker, 1));
        has_ended(&taker).await;
        assert!(maker.offer().is_none(), "the peer's end has ended");
        drop(members);
        has_ended(&maker).await;
        assert!(ChannelMember::join(&maker).is_none());
        let held = Arc::downgrade(&maker);
        drop(maker);
        turns().await;
        assert!(held.upgrade().is_none(), "the poller has ended");
    }

    /// An end that the peer has ended is not offered again, even if this end never checked the
    /// channel while the peer used it.
    #[tokio::test]
    async fn an_end_that_the_peer_has_ended_is_not_offered_again() {
        let [maker, taker] = channel();
        drop(Waiting::on(&taker, 1));
        has_ended(&taker).await;
        assert!(maker.state().file.is_some() && maker.offer().is_none());
        assert!(maker.state().file.is_none(), "closed");
    }

    /// A bit may have been set for a connection that is gone, and whose place another connection
    /// now has.
    #[tokio::test]
    async fn a_place_is_used_again() {
        let [maker, taker] = channel();
        let mut waiting = Waiting::on(&taker, 3);
        turns().await;
        maker.outbound().set(1);
        let gone = (waiting.ends.remove(1), waiting.counts.remove(1));
        drop(gone.0);
        let new = Waiting::on(&taker, 1);
        assert_eq!(new.ends[0].value(), 2, "the place of the one that is gone");
        taker.wake_tasks();
        assert_eq!((new.woken(), waiting.woken()), (vec![1], vec![0, 0]), "once in vain");
        assert_eq!(gone.1.0.load(Ordering::SeqCst), 0);
        taker.inbound().raise();
        assert_eq!(wake(&maker, [1]), 1);
        turns().await;
        assert_eq!((new.woken(), waiting.woken()), (vec![2], vec![0, 0]));
    }

    /// The poller may be queued behind a task that blocks its thread.
    #[tokio::test]
    async fn a_task_that_runs_wakes_the_others() {
        let [maker, taker] = channel();
        let waiting = Waiting::on(&taker, 3);
        // Tells the peer that the poller runs.
        taker.inbound().lower();
        assert_eq!(wake(&maker, [0, 2]), 0);
        waiting.ends[0].wake_others();
        assert_eq!(waiting.woken(), [0, 0, 1], "the one that runs is not woken");
        assert!(taker.poll() && !taker.poll(), "the poller is told");
        waiting.ends[0].wake_others();
        assert_eq!(waiting.woken(), [0, 0, 1]);
    }

    /// tokio immediately wakes a task that has used up its budget.
    #[test]
    fn it_is_made_without_any_budget_left() {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(std::future::poll_fn(|cx| {
            while tokio::task::coop::has_budget_remaining() {
                let _ = std::pin::pin!(tokio::task::coop::consume_budget()).poll(cx);
            }
            let ends = channel();
            ends[0].signalled();
            assert!(!tokio::task::coop::has_budget_remaining());
            assert!(ends.iter().all(|end| !end.has_ended()));
            Poll::Ready(())
        }));
    }

    /// The child has the channel but not the page.
    #[tokio::test]
    async fn a_child_may_drop_it() {
        let [maker, taker] = channel();
        let waiting = Waiting::on(&taker, 2);
        // SAFETY: the child calls only what is safe after fork(2) in a process with several
        // threads: the C library keeps its heap usable, and no other thread has the locks of this
        // channel. This rests on no rule.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the call takes only a number. The alarm ends the child if a lock is never
            // freed.
            unsafe { libc::alarm(20) };
            drop(waiting);
            // SAFETY: ends this process, which has nothing to tidy up.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: writes to `status` until it returns. A signal may end the wait.
        while unsafe { libc::waitpid(child, &raw mut status, 0) } != child {}
        assert_eq!(status, 0, "{}", libc::WTERMSIG(status));
        assert_eq!(maker.outbound().stage(), Stage::InUse, "it is the parent's");
        drop(waiting);
        has_ended(&taker).await;
        assert_eq!(maker.outbound().stage(), Stage::Ended);
    }

    #[test]
    fn it_ends_with_its_runtime() {
        for connections in [1, 2] {
            let build = || tokio::runtime::Builder::new_current_thread().enable_all().build();
            let (one, other) = (build().unwrap(), build().unwrap());
            let make = |connections| {
                let ends = channel();
                let waiting = Waiting::on(&ends[1], connections);
                (ends, waiting)
            };
            let (_ended, mut lost) = one.block_on(async { make(connections) });
            let (ends, waiting) = other.block_on(async { make(connections) });
            drop(one);
            assert!(lost.woken().iter().all(|woken| *woken >= 1), "told that it has ended");
            let cx = &mut Context::from_waker(Waker::noop());
            assert!(lost.ends.iter_mut().all(|end| end.listen(cx).is_err()));
            other.block_on(async {
                turns().await;
                assert_eq!(wake(&ends[0], [0]), 1);
                turns().await;
            });
            assert_eq!(waiting.woken()[0], 1);
        }
    }
}
