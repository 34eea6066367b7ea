//! The result of a handshake: this end's ring, the peer's ring, and how the ends wake each other.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::FabricError;
use crate::link_config::LinkConfig;
use crate::shm::memory::Map;
use crate::shm::memory::peer_map::{PeerMap, Usage};
use crate::shm::ring::{Reader, Shape, Writer};
use crate::shm::wakeup::channel::PAGE_BYTES;
use crate::shm::wakeup::channels::PeerFiles;
use crate::shm::wakeup::event_fd;

/// This end's ring.
#[derive(Debug)]
pub(super) struct OwnEnd {
    pub(super) reader: Reader<Map>,
    pub(super) shape: Shape,
    /// The descriptor for the peer.
    pub(super) file: OwnedFd,
}

impl OwnEnd {
    /// The shape of the ring that this end makes for a connection.
    pub(super) fn shape(config: &LinkConfig) -> Shape {
        Shape { slots: config.recv_slots, slot_size: config.slot_size }
    }

    pub(super) fn new(config: &LinkConfig) -> Result<OwnEnd, FabricError> {
        let shape = OwnEnd::shape(config);
        let len = shape.bytes();
        let failed = |source| FabricError::MemoryFile { len, source: Arc::new(source) };
        let (map, file) = Map::create(len).map_err(failed)?;
        let reader = Reader::new(map, shape);
        let reader = reader.ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        Ok(OwnEnd { reader, shape, file })
    }
}

/// The peer's ring, and the files of a wake-up channel if one is used.
#[derive(Debug)]
pub(super) struct PeerEnd {
    pub(super) writer: Writer<PeerMap>,
    pub(super) files: Option<PeerFiles>,
}

impl PeerEnd {
    /// Checks the peer's files. The first file must be a ring of fixed size, large enough for the
    /// slots in `shape`. A client may also send the eventfds and the page of a wake-up channel. May
    /// block, because a descriptor may refer to any file. Descriptors that are not kept stay in
    /// `fds`, and the caller must close these descriptors on a thread that may block. Dropping the
    /// result does not block, because closing an eventfd never blocks.
    ///
    /// `user` is the peer's user. `takes_channel` says whether this end and the peer can have a
    /// wake-up channel.
    pub(super) fn new(
        shape: Shape,
        fds: &mut Vec<OwnedFd>,
        user: u32,
        takes_channel: bool,
    ) -> io::Result<PeerEnd> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let (ring, channel) = match fds.as_slice() {
            [ring] => (ring, None),
            [ring, peers, own, page] => (ring, Some((peers, own, page))),
            _ => return Err(wrong("neither a ring nor a ring, two eventfds and a page")),
        };
        let map = PeerMap::new(ring, shape.bytes(), user, Usage::Ring)?;
        let writer =
            Writer::new(map, shape).ok_or_else(|| wrong("the peer's ring is too small"))?;
        let Some((peers, own, page)) = channel else { return Ok(PeerEnd { writer, files: None }) };
        let are_event_fds = [event_fd::check(peers)?, event_fd::check(own)?] == [true; 2];
        let mut page_id = (0, 0);
        let page = Map::new(page, PAGE_BYTES, |id| {
            page_id = id;
            Ok(())
        })?;
        let files = (takes_channel && are_event_fds).then(|| {
            let event_fds = [fds.remove(1), fds.remove(1)];
            PeerFiles { event_fds, page, page_id, user }
        });
        Ok(PeerEnd { writer, files })
    }
}
