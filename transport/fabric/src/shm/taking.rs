//! Files that a link's peer has given, until they are mapped.

use std::io;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::shm::lend::borrower::TakenFile;
use crate::shm::memory::peer_map::{OfferedMemory, PeerMap, Usage};
use crate::shm::socket::{Socket, SocketMessage, TakeFds};
use crate::timer::Timer;

/// A peer's file while a thread maps it.
#[derive(Debug)]
pub(super) enum Pending {
    Chunk(OfferedMemory, TakeFds<PeerMap>),
    Lent(OfferedMemory, TakeFds<TakenFile>),
    Named(OfferedMemory, TakeFds<PeerMap>),
}

/// Starts to map the file that came with a message, for writing.
pub(super) fn take_file(socket: &Socket, len: u64, usage: Usage) -> TakeFds<PeerMap> {
    let size = usize::try_from(len).unwrap_or(usize::MAX);
    let user = socket.peer().uid;
    socket.take_fds(move |taken| match taken.fds.as_slice() {
        [file] => PeerMap::new(file, size, user, usage),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not exactly one file")),
    })
}

/// A message whose file stays in the socket until the peer owes less
/// ([`map_debt`](crate::shm::memory::map_debt)). Until then the link reads no later message from
/// the socket, and does not notice that the peer has ended.
#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) message: SocketMessage,
    timer: Timer,
}

impl Deferred {
    /// Creates a value for a message that is handled after `time`.
    pub(super) fn new(message: SocketMessage, time: Duration) -> Deferred {
        let mut timer = Timer::new();
        timer.set(Instant::now() + time);
        Deferred { message, timer }
    }

    /// Becomes ready once, when the time has passed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.poll(cx).map(drop)
    }
}
