//! The wake-up channels of this process, and which of them a connection joins.
//!
//! The connecting end chooses: a channel of its runtime to the same process and the same runtime
//! there, whichever of the two made it; else it makes one. It names the channel by the number that
//! the maker gave it, and sends eventfd and page along until the peer says, in the page, that it
//! has them in use. The accepting end joins the channel of that number, if it is one with this
//! process and of this runtime; else it takes what came along.
//!
//! A connection works with any of these:
//!
//! | connecting end | accepting end | when |
//! |---|---|---|
//! | channel | channel | always, as a rule |
//! | channel | messages | the accepting end has ended the channel meanwhile, has it full, or cannot map it. It wakes its peer by messages, too; the connecting end's place in the channel stays unused |
//! | messages | messages | the ends are strangers (`same_user`), or the connecting end cannot make a channel |
//!
//! A number means nothing without the process that it comes with: pid and start time, which were
//! checked while a pidfd said that the process lives (`same_user`). So neither a child of a process
//! nor a later one with its pid gets into its channels, and what a process says about channels of
//! its own concerns itself. A process that executes another program (exec(2)) stays the same
//! process: numbers begin anywhere, so that the new program names no channel of the old one, and a
//! page that comes along has to be the one that is known.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use tokio::runtime::{Handle, Id};

use crate::shm::memory::map::{FileId, Map};
use crate::shm::memory::peer_map::{PeerMap, Usage};
use crate::shm::same_user::Process;
use crate::shm::wakeup::channel::WakeChannel;
use crate::shm::wakeup::channel_name::ChannelName;
use crate::shm::wakeup::event_fd::End;
use crate::shm::wakeup::member::Member;

/// They are few: a list is enough.
static CHANNELS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());
/// Random, and another after exec(2).
static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
static NUMBERS: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(KEYS.hash_one("numbers")));

#[derive(Debug)]
struct Entry {
    /// This process: a child of fork(2) has the list, too.
    process: u32,
    runtime: Id,
    peer: Process,
    peer_runtime: u64,
    number: u64,
    end: End,
    /// The page, if the peer has made it.
    page: Option<FileId>,
    channel: Weak<WakeChannel>,
}

impl Entry {
    /// One of the current runtime.
    fn new(
        peer: Process,
        peer_runtime: u64,
        number: u64,
        end: End,
        page: Option<FileId>,
        channel: &Arc<WakeChannel>,
    ) -> Entry {
        let (process, runtime) = (std::process::id(), Handle::current().id());
        let channel = Arc::downgrade(channel);
        Entry { process, runtime, peer, peer_runtime, number, end, page, channel }
    }

    /// Whether it is one of the current runtime with this peer.
    fn is_with(&self, peer: Process) -> bool {
        self.process == std::process::id()
            && self.runtime == Handle::current().id()
            && self.peer == peer
    }
}

fn lock() -> MutexGuard<'static, Vec<Entry>> {
    CHANNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What tells the current runtime from others of this process. Not 0.
pub(crate) fn runtime() -> u64 {
    KEYS.hash_one(Handle::current().id()).max(1)
}

/// Eventfd and page of a peer's, found usable.
#[derive(Debug)]
pub(crate) struct PeerFiles {
    pub(crate) event_fd: OwnedFd,
    pub(crate) page: Map,
    pub(crate) page_id: FileId,
    /// The peer's user.
    pub(crate) user: u32,
}

/// What a connecting end has chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) member: Member,
    pub(crate) name: ChannelName,
    /// To be sent to the peer, which may not have them yet.
    pub(crate) files: Option<(Arc<WakeChannel>, Arc<OwnedFd>)>,
}

/// Chooses the channel of a connection to a runtime of this process, or makes one. `None`: there is
/// none, and none can be made.
pub(crate) fn choose(peer: Process, peer_runtime: u64) -> Option<Chosen> {
    let mut channels = lock();
    // With itself a process has both ends of a channel: it connects by that of the maker.
    let own = peer.pid == std::process::id();
    let fits = |entry: &&Entry| {
        entry.is_with(peer)
            && entry.peer_runtime == peer_runtime
            && !(own && entry.end == End::Taker)
    };
    for Entry { number, end, channel, .. } in channels.iter().filter(fits) {
        if let Some(channel) = channel.upgrade()
            && let Some(page) = channel.offer()
            && let Some(member) = Member::join(&channel)
        {
            let name = ChannelName { number: *number, end: *end, runtime: runtime() };
            return Some(Chosen { member, name, files: page.map(|page| (channel, page)) });
        }
    }
    let channel = usable(WakeChannel::make())?;
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let page = channel.offer().flatten()?;
    let member = Member::join(&channel)?;
    let name = ChannelName { number, end: End::Maker, runtime: runtime() };
    add(&mut channels, Entry::new(peer, peer_runtime, number, End::Maker, None, &channel));
    Some(Chosen { member, name, files: Some((channel, page)) })
}

/// What cannot be had is done without: its connections are woken by messages.
fn usable<T>(made: io::Result<T>) -> Option<T> {
    made.inspect_err(|error| tracing::debug!(%error, "no wake-up channel")).ok()
}

/// Joins the channel that a connecting peer has named; `files` came along. `None`: there is no such
/// channel, and nothing that it can be made of.
pub(crate) fn join(peer: Process, name: ChannelName, files: Option<PeerFiles>) -> Option<Member> {
    let mut channels = lock();
    let end = name.end.other();
    let named =
        |entry: &Entry| entry.is_with(peer) && entry.number == name.number && entry.end == end;
    let page = files.as_ref().map(|files| files.page_id);
    // One of another page is of a program that the process ran before.
    channels.retain(|entry| !named(entry) || page.is_none() || entry.page == page);
    let known = channels.iter().filter(|entry| named(entry));
    let mut known = known.filter_map(|entry| entry.channel.upgrade());
    if let Some(member) = known.find_map(|channel| Member::join(&channel)) {
        return Some(member);
    }
    let (Some(files), End::Taker) = (files, end) else { return None };
    let map = PeerMap::adopt(files.page, files.page_id, files.user, Usage::Page);
    let channel = usable(map.and_then(|map| WakeChannel::take(files.event_fd, map)))?;
    let member = Member::join(&channel);
    add(&mut channels, Entry::new(peer, name.runtime, name.number, end, page, &channel));
    member
}

fn add(channels: &mut Vec<Entry>, entry: Entry) {
    channels.retain(|entry| entry.channel.strong_count() > 0);
    channels.push(entry);
}
