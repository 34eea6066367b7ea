//! The wake-up channels of this process, and which of them a connection joins.
//!
//! The connecting end chooses: a channel of its runtime to the same process and the same runtime
//! there, whichever of the two made it; else it makes one. It names the channel by the number that
//! the maker gave it, and sends eventfd and page along until the peer says, in the page, that it
//! has them in use. The accepting end joins the channel of that number, if it is one with this
//! process and of this runtime; else it takes what came along. With neither it has no channel: both
//! ends of the connection are then woken by messages, or the other alone is by its own.
//!
//! A number means nothing without the process that it comes with: pid and start time, which were
//! checked while a pidfd said that the process lives (`same_user`). So neither a child of a process
//! nor a later one with its pid gets into its channels, and what a process says about channels of
//! its own concerns itself.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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
static NUMBERS: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
struct Entry {
    /// This process: a child of fork(2) has the list, too.
    process: u32,
    runtime: Id,
    peer: Process,
    peer_runtime: u64,
    number: u64,
    end: End,
    channel: Weak<WakeChannel>,
}

impl Entry {
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
    let mut hasher = DefaultHasher::new();
    Handle::current().id().hash(&mut hasher);
    hasher.finish().max(1)
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

/// Chooses the channel of a connection to a runtime of this process, or makes one.
pub(crate) fn choose(peer: Process, peer_runtime: u64) -> io::Result<Chosen> {
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
            return Ok(Chosen { member, name, files: page.map(|page| (channel, page)) });
        }
    }
    let channel = WakeChannel::make()?;
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let page = channel.offer().flatten().ok_or(io::ErrorKind::Other)?;
    let member = Member::join(&channel).ok_or(io::ErrorKind::Other)?;
    add(&mut channels, peer, peer_runtime, number, End::Maker, &channel);
    let name = ChannelName { number, end: End::Maker, runtime: runtime() };
    Ok(Chosen { member, name, files: Some((channel, page)) })
}

/// Joins the channel that a connecting peer has named; `files` came along. `None`: there is no such
/// channel, and nothing to make it of.
pub(crate) fn join(
    peer: Process,
    name: ChannelName,
    files: Option<PeerFiles>,
) -> io::Result<Option<Member>> {
    let mut channels = lock();
    let end = name.end.other();
    let named =
        |entry: &&Entry| entry.is_with(peer) && entry.number == name.number && entry.end == end;
    let mut known = channels.iter().filter(named).filter_map(|entry| entry.channel.upgrade());
    if let Some(member) = known.find_map(|channel| Member::join(&channel)) {
        return Ok(Some(member));
    }
    let (Some(files), End::Taker) = (files, end) else { return Ok(None) };
    let page = PeerMap::adopt(files.page, files.page_id, files.user, Usage::Page)?;
    let channel = WakeChannel::take(files.event_fd, page)?;
    let member = Member::join(&channel);
    add(&mut channels, peer, name.runtime, name.number, end, &channel);
    Ok(member)
}

fn add(
    channels: &mut Vec<Entry>,
    peer: Process,
    peer_runtime: u64,
    number: u64,
    end: End,
    channel: &Arc<WakeChannel>,
) {
    channels.retain(|entry| entry.channel.strong_count() > 0);
    channels.push(Entry {
        process: std::process::id(),
        runtime: Handle::current().id(),
        peer,
        peer_runtime,
        number,
        end,
        channel: Arc::downgrade(channel),
    });
}
