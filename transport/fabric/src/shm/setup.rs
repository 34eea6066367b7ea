//! What each end makes for a connection, and what it takes from the peer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::link::LinkConfig;
use crate::shm::memory::map::Map;
use crate::shm::memory::peer_map::{PeerMap, Use};
use crate::shm::ring::{Reader, Shape, Writer};
use crate::shm::wakeup::event_fd::{EventFd, PeerWaker};

/// This end's ring and bell.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) reader: Reader<Map>,
    pub(super) bell: EventFd,
    pub(super) shape: Shape,
    file: OwnedFd,
}

impl Own {
    pub(super) fn new(config: &LinkConfig) -> io::Result<Own> {
        let shape = Shape { slots: config.recv_slots, slot_size: config.slot_size };
        let (map, file) = Map::own(shape.bytes())?;
        let reader = Reader::new(map, shape).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Own { reader, bell: EventFd::new()?, shape, file })
    }

    /// For the peer: the ring, then the bell.
    pub(super) fn with_fds<T>(&self, f: impl FnOnce(&[std::os::fd::BorrowedFd<'_>]) -> T) -> T {
        let bell = self.bell.fd();
        f(&[self.file.as_fd(), bell.as_fd()])
    }
}

/// The peer's ring and bell.
#[derive(Debug)]
pub(super) struct Theirs {
    pub(super) writer: Writer<PeerMap>,
    pub(super) waker: PeerWaker,
}

impl Theirs {
    /// Checks what the peer gave: exactly a ring, which keeps its size and holds the shape, and a
    /// bell. May block: the descriptors can be anything. Those that are not kept are left, to be
    /// closed where that may block.
    ///
    /// `user`: the peer's. `kin`: it could stop this process anyway.
    pub(super) fn new(
        shape: Shape,
        fds: &mut Vec<OwnedFd>,
        user: u32,
        kin: bool,
    ) -> io::Result<Theirs> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let [ring, _bell] = fds.as_slice() else {
            return Err(wrong("the peer's handshake comes without exactly a ring and a bell"));
        };
        let map = PeerMap::new(ring, shape.bytes(), user, Use::Ring)?;
        let writer =
            Writer::new(map, shape).ok_or_else(|| wrong("the peer's ring is too small"))?;
        Ok(Theirs { writer, waker: PeerWaker::new(fds, kin)? })
    }
}
