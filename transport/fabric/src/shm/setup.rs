//! What a handshake yields: this end's ring and eventfd, and the peer's.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::link::LinkConfig;
use crate::shm::memory::map::Map;
use crate::shm::memory::peer_map::{PeerMap, Usage};
use crate::shm::ring::{Reader, Shape, Writer};
use crate::shm::wakeup::event_fd::{EventFd, PeerWaker};

/// This end's ring and eventfd.
#[derive(Debug)]
pub(super) struct OwnEnd {
    pub(super) reader: Reader<Map>,
    pub(super) event_fd: EventFd,
    pub(super) shape: Shape,
    file: OwnedFd,
}

impl OwnEnd {
    pub(super) fn new(config: &LinkConfig) -> io::Result<OwnEnd> {
        let shape = Shape { slots: config.recv_slots, slot_size: config.slot_size };
        let (map, file) = Map::create(shape.bytes())?;
        let reader = Reader::new(map, shape).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(OwnEnd { reader, event_fd: EventFd::new()?, shape, file })
    }

    /// The descriptors for the peer: the ring, then the eventfd.
    pub(super) fn with_fds<T>(&self, f: impl FnOnce(&[std::os::fd::BorrowedFd<'_>]) -> T) -> T {
        let event_fd = self.event_fd.fd();
        f(&[self.file.as_fd(), event_fd.as_fd()])
    }
}

/// The peer's ring, and how to wake the peer.
#[derive(Debug)]
pub(super) struct PeerEnd {
    pub(super) writer: Writer<PeerMap>,
    pub(super) waker: PeerWaker,
}

impl PeerEnd {
    /// Checks what the peer sent: exactly a ring that keeps its size and holds the shape, and an
    /// eventfd. May block: a descriptor can be of any file. Those that are not kept stay in `fds`,
    /// for the caller to close where that may block.
    ///
    /// `user`: the peer's. `same_user`: the peer could stop this process anyway.
    pub(super) fn new(
        shape: Shape,
        fds: &mut Vec<OwnedFd>,
        user: u32,
        same_user: bool,
    ) -> io::Result<PeerEnd> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let [ring, _event_fd] = fds.as_slice() else {
            return Err(wrong("the peer's handshake comes without exactly a ring and an eventfd"));
        };
        let map = PeerMap::new(ring, shape.bytes(), user, Usage::Ring)?;
        let writer =
            Writer::new(map, shape).ok_or_else(|| wrong("the peer's ring is too small"))?;
        Ok(PeerEnd { writer, waker: PeerWaker::new(fds, same_user)? })
    }
}
