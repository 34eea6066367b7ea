//! The result of a handshake: the rings of the connection, and the files of a wake-up channel.
//!
//! Both rings are in one file, which the accepting end makes. The connecting end's ring begins at
//! the next multiple of 64 KiB after the accepting end's ring.

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

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// The rings of a connection: the ring from which this end reads, and the peer's.
#[derive(Debug)]
pub(super) struct Rings {
    pub(super) reader: Reader<Map>,
    pub(super) writer: Writer<PeerMap>,
}

impl Rings {
    /// The shape of the ring from which an end with this configuration reads.
    pub(super) fn shape(config: &LinkConfig) -> Shape {
        Shape { slots: config.recv_slots, slot_size: config.slot_size }
    }

    /// Makes the rings at the accepting end. Also returns the file to pass to the peer. `user` is
    /// the peer's user.
    ///
    /// # Errors
    /// `MemoryFile` if the file cannot be made or mapped.
    pub(super) fn make(
        own: Shape,
        peers: Shape,
        user: u32,
    ) -> Result<(Rings, OwnedFd), FabricError> {
        let lens = [own.bytes(), peers.bytes()];
        let made = Map::create_parts(lens).and_then(|([reader, writer], file)| {
            let writer = PeerMap::adopt(writer, None, user, Usage::Ring)?;
            Ok((Rings::of((reader, own), (writer, peers))?, file))
        });
        let len = lens.iter().sum();
        made.map_err(|source| FabricError::MemoryFile { len, source: Arc::new(source) })
    }

    /// Maps the rings at the connecting end. May block, because a descriptor may refer to any file.
    /// Descriptors stay in `fds`, and the caller must close them on a thread that may block.
    ///
    /// # Errors
    /// There is not exactly one descriptor, the file cannot be mapped safely or is mapped already,
    /// or too many files of peers are mapped.
    pub(super) fn take(own: Shape, peers: Shape, fds: &[OwnedFd], user: u32) -> io::Result<Rings> {
        let [file] = fds else { return Err(wrong("not exactly one file, that of the rings")) };
        let ([writer, reader], id) = Map::parts(file, [peers.bytes(), own.bytes()])?;
        let writer = PeerMap::adopt(writer, Some(id), user, Usage::Ring)?;
        Rings::of((reader, own), (writer, peers))
    }

    fn of(own: (Map, Shape), peers: (PeerMap, Shape)) -> io::Result<Rings> {
        let reader = Reader::new(own.0, own.1).ok_or_else(|| wrong("the ring is too small"))?;
        let writer = Writer::new(peers.0, peers.1);
        let writer = writer.ok_or_else(|| wrong("the peer's ring is too small"))?;
        Ok(Rings { reader, writer })
    }
}

/// Checks the eventfds and the page of a channel that a connecting peer of this user has made. May
/// block, because a descriptor may refer to any file. Descriptors that are not kept stay in `fds`,
/// and the caller must close them on a thread that may block. Dropping the result does not block,
/// because closing an eventfd never blocks. The result is `None` if the eventfds cannot be told
/// from other files.
///
/// # Errors
/// The descriptors are not two eventfds and a page.
pub(super) fn channel_files(fds: &mut Vec<OwnedFd>, user: u32) -> io::Result<Option<PeerFiles>> {
    let [peers, own, page] = fds.as_slice() else {
        return Err(wrong("not two eventfds and a page"));
    };
    let are_event_fds = [event_fd::check(peers)?, event_fd::check(own)?] == [true; 2];
    let mut page_id = (0, 0);
    let page = Map::new(page, PAGE_BYTES, |id| {
        page_id = id;
        Ok(())
    })?;
    Ok(are_event_fds.then(|| {
        let event_fds = [fds.remove(0), fds.remove(0)];
        PeerFiles { event_fds, page, page_id, user }
    }))
}
