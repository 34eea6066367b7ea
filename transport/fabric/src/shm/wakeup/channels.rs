//! This process's wake-up channels, and the choice of a channel for each connection.
//!
//! The connecting end chooses a channel between its own runtime and the peer's runtime. Either
//! process may have made the channel. If there is no such channel, the connecting end makes a
//! channel. The connecting end sends the number that the maker gave the channel, and also sends the
//! eventfds and the page unless the peer has already marked the page as used. The accepting end
//! joins the channel with that number, if the channel is between the two processes and belongs to
//! this runtime. Otherwise the accepting end makes its end of a channel from the files that were
//! sent.
//!
//! A connection works in each of these cases:
//!
//! | connecting end | accepting end | when |
//! |---|---|---|
//! | channel | channel | normally |
//! | channel | messages | the accepting end has since ended the channel, has no room in it, or cannot take its files. The accepting end also wakes its peer by messages, and the connecting end's place in the channel stays unused |
//! | messages | messages | the ends are strangers (`same_user`), or the connecting end cannot make a channel |
//!
//! A number is valid only for the process that sends it. The process is identified by its pid and
//! start time, which were checked while a pidfd showed that the process lives (`same_user`). So
//! neither a child of that process nor a later process with the same pid can join the channels of
//! that process, and a process can name only its own channels. A process that executes another
//! program (exec(2)) stays the same process. So numbers begin at a random number, which keeps the
//! new program from naming a channel of the old program. A page that is sent must also be the page
//! that is known for the number.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::{Handle, Id};
use tonic_rdma_memory::PerProcess;

use crate::access::HostProcess;
use crate::shm::memory::peer_map::{PeerMap, Usage};
use crate::shm::memory::{FileId, Map};
use crate::shm::same_user::ConfirmedPeer;
use crate::shm::wakeup::ChannelMember;
use crate::shm::wakeup::channel::WakeChannel;
use crate::shm::wakeup::event_fd::{ChannelEnd, ChannelName};

/// The channels of this process. A list suffices, because there are few channels.
static CHANNELS: PerProcess<Mutex<Vec<ChannelEntry>>> = PerProcess::new(Mutex::default);
/// Random keys for the numbers of channels and runtimes, so that the numbers differ after exec(2).
static KEYS: PerProcess<RandomState> = PerProcess::new(RandomState::new);
static NUMBERS: PerProcess<AtomicU64> =
    PerProcess::new(|| AtomicU64::new(KEYS.hash_one(("numbers", std::process::id()))));

#[derive(Debug)]
struct ChannelEntry {
    runtime: Id,
    peer: HostProcess,
    peer_runtime: u64,
    number: u64,
    end: ChannelEnd,
    /// The page, if the peer has made it.
    page: Option<FileId>,
    channel: Weak<WakeChannel>,
}

impl ChannelEntry {
    /// Creates an entry of the current runtime. The channel keeps the pidfd.
    fn new(
        peer: ConfirmedPeer,
        peer_runtime: u64,
        number: u64,
        end: ChannelEnd,
        page: Option<FileId>,
        channel: &Arc<WakeChannel>,
    ) -> ChannelEntry {
        let runtime = Handle::current().id();
        let ConfirmedPeer { process: peer, pidfd } = peer;
        channel.keep_peer(pidfd);
        let channel = Arc::downgrade(channel);
        ChannelEntry { runtime, peer, peer_runtime, number, end, page, channel }
    }

    /// Whether the entry belongs to the current runtime and to this peer.
    fn is_with(&self, peer: HostProcess) -> bool {
        self.runtime == Handle::current().id() && self.peer == peer
    }
}

fn lock() -> MutexGuard<'static, Vec<ChannelEntry>> {
    CHANNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that distinguishes the current runtime from others in this process. Never 0.
pub(crate) fn runtime() -> u64 {
    KEYS.hash_one(Handle::current().id()).max(1)
}

/// The confirmed peer with this process id, if there is a channel with this peer and the peer still
/// lives. As long as the pidfd shows that the peer lives, no other process has its id.
pub(crate) fn confirmed(pid: u32) -> Option<HostProcess> {
    let channels = lock();
    let mut known = channels.iter().filter(|entry| entry.peer.pid == pid);
    let lives = |entry: &ChannelEntry| entry.channel.upgrade().is_some_and(|c| c.peer_lives());
    known.find(|entry| lives(entry)).map(|entry| entry.peer)
}

/// A peer's eventfds and page, which have been found usable.
#[derive(Debug)]
pub(crate) struct PeerFiles {
    /// The peer waits for the first of these eventfds.
    pub(crate) event_fds: [OwnedFd; 2],
    pub(crate) page: Map,
    pub(crate) page_id: FileId,
    /// The peer's user.
    pub(crate) user: u32,
}

/// The channel that a connecting end has chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) member: ChannelMember,
    pub(crate) name: ChannelName,
    /// The files to send to the peer. `None` if the peer has these files already.
    pub(crate) files: Option<(Arc<WakeChannel>, Arc<OwnedFd>)>,
}

/// Chooses a channel for a connection to the given runtime of a peer, or makes a channel. Returns
/// `None` if no channel can be chosen or made.
pub(crate) fn choose(peer: ConfirmedPeer, peer_runtime: u64) -> Option<Chosen> {
    let (mut channels, process) = (lock(), peer.process);
    // A process that connects to itself has both ends of a channel, and connects at the maker's
    // end.
    let own = process.pid == std::process::id();
    let fits = |entry: &&ChannelEntry| {
        entry.is_with(process)
            && entry.peer_runtime == peer_runtime
            && !(own && entry.end == ChannelEnd::Taker)
    };
    for ChannelEntry { number, end, channel, .. } in channels.iter().filter(fits) {
        if let Some(channel) = channel.upgrade()
            && let Some(page) = channel.offer()
            && let Some(member) = ChannelMember::join(&channel)
        {
            let name = ChannelName { number: *number, end: *end, runtime: runtime() };
            return Some(Chosen { member, name, files: page.map(|page| (channel, page)) });
        }
    }
    let channel = usable(WakeChannel::make())?;
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let page = channel.offer().flatten()?;
    let member = ChannelMember::join(&channel)?;
    let name = ChannelName { number, end: ChannelEnd::Maker, runtime: runtime() };
    add(
        &mut channels,
        ChannelEntry::new(peer, peer_runtime, number, ChannelEnd::Maker, None, &channel),
    );
    Some(Chosen { member, name, files: Some((channel, page)) })
}

/// Logs a failure and turns it into `None`: connections without a channel are woken by messages.
fn usable<T>(made: io::Result<T>) -> Option<T> {
    made.inspect_err(|error| tracing::debug!(%error, "no wake-up channel")).ok()
}

/// Joins the channel that a connecting peer has named. `files` are the files that the peer sent, if
/// any. Returns `None` if there is no such channel, and no files to make the channel from.
pub(crate) fn join(
    peer: ConfirmedPeer,
    name: ChannelName,
    files: Option<PeerFiles>,
) -> Option<ChannelMember> {
    let (mut channels, process) = (lock(), peer.process);
    let end = name.end.other();
    let named = |entry: &ChannelEntry| {
        entry.is_with(process) && entry.number == name.number && entry.end == end
    };
    let page = files.as_ref().map(|files| files.page_id);
    // A channel with another page belongs to an earlier program of the same process (exec(2)).
    channels.retain(|entry| !named(entry) || page.is_none() || entry.page == page);
    let known = channels.iter().filter(|entry| named(entry));
    let mut known = known.filter_map(|entry| entry.channel.upgrade());
    if let Some(member) = known.find_map(|channel| ChannelMember::join(&channel)) {
        return Some(member);
    }
    let (Some(files), ChannelEnd::Taker) = (files, end) else { return None };
    let map = PeerMap::adopt(files.page, Some(files.page_id), files.user, Usage::Page);
    let channel = usable(map.and_then(|map| WakeChannel::take(files.event_fds, map)))?;
    let member = ChannelMember::join(&channel);
    add(&mut channels, ChannelEntry::new(peer, name.runtime, name.number, end, page, &channel));
    member
}

fn add(channels: &mut Vec<ChannelEntry>, entry: ChannelEntry) {
    channels.retain(|entry| entry.channel.strong_count() > 0);
    channels.push(entry);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::wakeup::channel::PAGE_BYTES;
    use crate::shm::wakeup::idle::tests::has_ended;

    const RUNTIME: u64 = 5;

    /// Eventfds and page of a channel as its maker sends them.
    fn files(page: impl std::os::fd::AsFd, channel: &WakeChannel) -> PeerFiles {
        let mut page_id = (0, 0);
        let page = Map::new(page, PAGE_BYTES, |id| {
            page_id = id;
            Ok(())
        });
        let event_fds = channel.event_fds().map(|fd| fd.try_clone_to_owned().unwrap());
        PeerFiles { event_fds, page: page.unwrap(), page_id, user: 0 }
    }

    /// A confirmed peer that claims to be `process`. The pidfd is that of the process that runs
    /// this test.
    fn peer(process: HostProcess) -> ConfirmedPeer {
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
        ConfirmedPeer { process, pidfd }
    }

    /// A peer's channel, and its page.
    fn made() -> (Arc<WakeChannel>, Arc<OwnedFd>) {
        let channel = WakeChannel::make().unwrap();
        let page = channel.offer().flatten().unwrap();
        (channel, page)
    }

    fn is_joined(channel: &WakeChannel) -> bool {
        matches!(channel.offer(), Some(None))
    }

    /// Ends a connection, and waits until its channel has ended.
    async fn end(member: ChannelMember) {
        let channel = member.channel().clone();
        drop(member);
        has_ended(&channel).await;
    }

    #[tokio::test]
    async fn a_channel_is_that_of_one_process() {
        let (process, number) = (HostProcess { pid: 1 << 30, start: 7 }, 11);
        let name = ChannelName { number, runtime: RUNTIME, end: ChannelEnd::Maker };
        let (maker, page) = made();
        assert!(join(peer(process), name, None).is_none());
        let first = join(peer(process), name, Some(files(&page, &maker))).unwrap();
        assert!(is_joined(&maker) && join(peer(process), name, None).is_some());
        let chosen = choose(peer(process), RUNTIME).unwrap();
        assert_eq!((chosen.name.number, chosen.name.end), (number, ChannelEnd::Taker));
        // The pid belongs to another process by now.
        let later = HostProcess { start: 8, ..process };
        assert!(join(peer(later), name, None).is_none());
        assert_ne!(choose(peer(later), RUNTIME).unwrap().name.number, number);
        for other in [
            ChannelName { number: number + 1, ..name },
            ChannelName { end: ChannelEnd::Taker, ..name },
        ] {
            assert!(join(peer(process), other, None).is_none(), "{other:?}");
        }
        let elsewhere = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async { join(peer(process), name, None).is_none() })
        });
        assert!(elsewhere.join().unwrap(), "another runtime");
        drop((first, chosen));
    }

    /// A process that has executed another program keeps its pid and its start time.
    #[tokio::test]
    async fn a_page_that_is_not_the_known_one_is_another_channel() {
        let process = HostProcess { pid: (1 << 30) + 1, start: 7 };
        let name = ChannelName { number: 11, runtime: RUNTIME, end: ChannelEnd::Maker };
        let (old, new) = (made(), made());
        let first = join(peer(process), name, Some(files(&old.1, &old.0))).unwrap();
        let second = join(peer(process), name, Some(files(&new.1, &new.0))).unwrap();
        assert!(is_joined(&old.0) && is_joined(&new.0));
        end(first).await;
        assert!(!is_joined(&old.0) && is_joined(&new.0));
        assert!(join(peer(process), name, None).is_some(), "the new one");
        end(second).await;
        assert!(!is_joined(&new.0));
    }

    #[tokio::test]
    async fn a_channel_that_has_ended_is_made_again_or_done_without() {
        let process = HostProcess { pid: (1 << 30) + 2, start: 7 };
        let name = ChannelName { number: 11, runtime: RUNTIME, end: ChannelEnd::Maker };
        let (maker, page) = made();
        end(join(peer(process), name, Some(files(&page, &maker))).unwrap()).await;
        assert!(join(peer(process), name, None).is_none(), "it has ended");
        let again = join(peer(process), name, Some(files(&page, &maker))).unwrap();
        assert!(is_joined(&maker));
        end(again).await;
        let again = files(&page, &maker);
        let PeerFiles { page, page_id, user, .. } = files(&page, &maker);
        let mapped = PeerMap::adopt(page, Some(page_id), user, Usage::Page).unwrap();
        assert!(join(peer(process), name, Some(again)).is_none(), "it is mapped");
        drop(mapped);
    }

    #[tokio::test]
    async fn the_connections_to_a_runtime_share_a_channel_until_it_ends() {
        let process = HostProcess { pid: (1 << 30) + 3, start: 7 };
        let first = choose(peer(process), RUNTIME).unwrap();
        let (channel, page) = first.files.unwrap();
        let again = choose(peer(process), RUNTIME).unwrap();
        assert!(again.name == first.name && again.files.is_some(), "the peer has not joined it");
        assert_ne!(choose(peer(process), RUNTIME + 1).unwrap().name.number, first.name.number);
        let PeerFiles { event_fds, page, page_id, user } = files(&page, &channel);
        let page = PeerMap::adopt(page, Some(page_id), user, Usage::Page).unwrap();
        let theirs = WakeChannel::take(event_fds, page).unwrap();
        let member = ChannelMember::join(&theirs).unwrap();
        let again = choose(peer(process), RUNTIME).unwrap();
        assert!(again.name == first.name && again.files.is_none());
        drop(member);
        let idle = choose(peer(process), RUNTIME).unwrap();
        assert!(idle.name == first.name && idle.files.is_none(), "it waits for a connection");
        has_ended(&theirs).await;
        assert_ne!(choose(peer(process), RUNTIME).unwrap().name.number, first.name.number);
    }

    /// A confirmed peer's entry in /proc is not read again while the peer lives.
    #[tokio::test]
    async fn a_peer_stays_confirmed_while_it_lives() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        // This start time is made up, so it shows that /proc was not read.
        let process = HostProcess { pid: child.id(), start: 7 };
        assert_eq!(confirmed(child.id()), None);
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let chosen = choose(ConfirmedPeer { process, pidfd }, RUNTIME).unwrap();
        assert_eq!(confirmed(child.id()), Some(process));
        assert_eq!(confirmed(child.id() + 1), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(confirmed(child.id()), None, "another process may have the number now");
        drop(chosen);
    }

    /// Numbers begin at a random number, so that a program that the process executes later cannot
    /// name channels of this program.
    #[test]
    fn numbers_are_not_guessed() {
        assert!(NUMBERS.load(Ordering::Relaxed) > 1 << 20);
    }
}
