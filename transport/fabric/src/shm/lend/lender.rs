//! The leases of a link, and the files of this process that the link's peer has mapped.

use std::io::{self, PipeReader, pipe};
use std::os::fd::AsFd;
use std::sync::Arc;

use slab::Slab;
use tonic_rdma_memory::{LendScope, LendableBytes};

use crate::access::HostProcess;
use crate::link::Lent;
use crate::shm::lend;
use crate::shm::lend::Permit;
use crate::shm::memory::table::{ChunkTable, RevokedKeys};
use crate::shm::offers::{Offer, Offers, Taken};
use crate::shm::socket::Socket;
use crate::shm::socket::wire::{LendOn, Message};

/// The side of a link that lends memory.
#[derive(Debug)]
pub(crate) struct Lender {
    permit: Arc<Permit>,
    /// The peer's process, if the handshake has shown that the peer could read this process's
    /// memory by other means (`same_user`).
    peer: Option<HostProcess>,
    /// Whether the peer may be lent memory. `None` before the decision.
    allowed: Option<bool>,
    files: Offers,
    leases: Slab<LendableBytes>,
    /// Reports when the peer no longer reads memory that this link has lent.
    reader: Option<PipeReader>,
}

impl Lender {
    /// Returns `None` if no peer may be lent memory, or if this peer accepts no lent memory.
    pub(crate) fn new(
        permit: &Arc<Permit>,
        peer: Option<HostProcess>,
        taken: Taken,
    ) -> Option<Lender> {
        if permit.scope() == LendScope::Nothing || !taken.peer.lent {
            return None;
        }
        let (permit, files, leases) = (permit.clone(), Offers::default(), Slab::new());
        Some(Lender { permit, peer, allowed: None, files, leases, reader: None })
    }

    /// False once it is decided that no memory may be lent to the peer.
    pub(crate) fn may_lend(&self) -> bool {
        self.allowed != Some(false)
    }

    /// Lends bytes if the peer has mapped their file. Offers the file if it was not offered yet.
    /// Returns `None` if the bytes are not lent.
    ///
    /// # Errors
    /// The errors of the socket.
    pub(crate) fn lend(
        &mut self,
        bytes: LendableBytes,
        (socket, table, revoked): (&Socket, &ChunkTable, &Arc<RevokedKeys>),
    ) -> io::Result<Option<Lent>> {
        if !*self.allowed.get_or_insert_with(|| self.permit.allows(socket, self.peer)) {
            return Ok(None);
        }
        let (key, addr) = (bytes.key(), bytes.addr());
        match self.files.get(key) {
            Some(Offer::Taken) => {
                let entry = self.leases.vacant_entry();
                let Ok(lease) = u32::try_from(entry.key()) else { return Ok(None) };
                entry.insert(bytes);
                return Ok(Some(Lent { lease, key, addr }));
            }
            Some(_) => return Ok(None),
            None => {}
        }
        let Some(file) = table.lend(key, revoked) else { return Ok(None) };
        if !self.files.has_room(file.len) {
            return Ok(None);
        }
        let owner = file.owner.get();
        let lend_on = match owner {
            Some(_) => LendOn::Done,
            None if self.permit.lends_on() => LendOn::Allowed,
            None => LendOn::Never,
        };
        let message = Message::Lend { key, addr: file.addr, len: file.len, lend_on }.encode();
        // The first offer includes this link's pipe. If another peer has lent the memory, that
        // peer's pipe is sent with the file.
        let new = if self.reader.is_none() { Some(pipe()?) } else { None };
        let mut fds = vec![file.file.as_fd()];
        fds.extend(new.iter().map(|(_, writer)| writer.as_fd()));
        fds.extend(owner.map(|owner| owner.as_fd()));
        let sent = socket.send(&message, &fds);
        if let (Ok(()), Some((reader, _))) = (&sent, new) {
            self.reader = Some(reader);
        }
        match sent {
            // The socket is full, so a later call offers the file.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
            Ok(()) => {
                self.files.add(key, file.len);
                Ok(None)
            }
        }
    }

    /// Records that the peer has mapped a file, or cannot map the file. This end may have taken the
    /// file back since the offer.
    pub(crate) fn answered(&mut self, key: u32, taken: bool) {
        self.files.answered(key, taken);
    }

    /// Whether the peer was offered the file with this key and has not answered yet.
    pub(crate) fn is_asked(&self, key: u32) -> bool {
        self.files.get(key) == Some(Offer::Open)
    }

    /// Whether the peer was offered the file with this key.
    pub(crate) fn has_offered(&self, key: u32) -> bool {
        self.files.get(key).is_some()
    }

    /// Records that the file with this key is gone.
    pub(crate) fn take_back(&mut self, key: u32) {
        self.files.take_back(key);
    }

    /// Ends a lease, because the peer no longer reads the bytes. Returns false if there is no such
    /// lease.
    pub(crate) fn end_lease(&mut self, lease: u32) -> bool {
        self.leases.try_remove(lease as usize).is_some()
    }
}

impl Drop for Lender {
    /// Keeps the leases, because the peer may still read their bytes.
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take().filter(|_| !self.leases.is_empty()) {
            lend::keep(reader, std::mem::take(&mut self.leases));
        }
    }
}
