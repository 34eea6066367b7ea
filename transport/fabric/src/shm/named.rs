//! Application buffers of this end that a link's peer may map and write to.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::link::Shared;
use crate::shm::memory::table::{ChunkTable, RevokedKeys};
use crate::shm::offers::{Offer, Offers, Taken};
use crate::shm::socket::wire::Message;
use crate::shm::socket::{Socket, is_end};

/// The buffers offered on one link.
#[derive(Debug)]
pub(crate) struct Named {
    offers: Offers,
    /// Whether the peer accepts buffers.
    taken: bool,
}

impl Named {
    pub(crate) fn new(taken: Taken) -> Named {
        Named { offers: Offers::default(), taken: taken.peer.named }
    }

    /// Offers a buffer to the peer, unless the buffer was already offered, and returns the state of
    /// the offer. `None` if there is no such buffer.
    ///
    /// # Errors
    /// The errors of the socket.
    pub(crate) fn share(
        &mut self,
        key: u32,
        (socket, table, revoked): (&Socket, &ChunkTable, &Arc<RevokedKeys>),
    ) -> io::Result<Option<Shared>> {
        if !self.taken {
            return Ok(Some(Shared::No));
        }
        match self.offers.get(key) {
            Some(Offer::Taken) => return Ok(Some(Shared::Yes)),
            Some(Offer::Open) => return Ok(Some(Shared::Asked)),
            Some(Offer::Declined) => return Ok(Some(Shared::No)),
            None => {}
        }
        let Some(buffer) = table.share_named(key, revoked) else { return Ok(None) };
        if !self.offers.has_room(buffer.len) {
            return Ok(Some(Shared::No));
        }
        let message = Message::Name { key, addr: buffer.addr, len: buffer.len };
        match socket.send(&message.encode(), &[buffer.file.as_fd()]) {
            // The socket is full, so a later call offers the buffer.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(Some(Shared::No));
            }
            // A later poll reports that the peer has ended the link.
            Err(error) if is_end(&error) => {}
            sent => sent?,
        }
        self.offers.add(key, buffer.len);
        Ok(Some(Shared::Asked))
    }

    /// Records that the peer has mapped a buffer, or cannot map the buffer.
    pub(crate) fn answered(&mut self, key: u32, taken: bool) {
        self.offers.answered(key, taken);
    }

    /// Whether the peer was offered the buffer with this key.
    pub(crate) fn has_offered(&self, key: u32) -> bool {
        self.offers.get(key).is_some()
    }

    /// Records that the buffer with this key is no longer registered.
    pub(crate) fn take_back(&mut self, key: u32) {
        self.offers.take_back(key);
    }
}
