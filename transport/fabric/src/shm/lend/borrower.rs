//! The memory that a link's peer has lent.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use rustix::fs::{FileType, fstat};
use tonic_rdma_memory::{PerProcess, Pool, PoolRegistration};

use super::MAX_KEPT;
use crate::link::Lent;
use crate::returns::Returns;
use crate::shm::memory::peer_map::{Given, OfferedMemory, PeerMap};
use crate::shm::memory::table::ChunkTable;
use crate::shm::offers::{MAX_BYTES, MAX_FILES};
use crate::shm::socket::wire::LendOn;

/// A mapped file, and the writing end of the peer's pipe if the pipe came with the file.
#[derive(Debug)]
pub(crate) struct TakenFile {
    map: Arc<PeerMap>,
    reads: Option<OwnedFd>,
    /// The writing end of the owner's pipe, if the peer has lent the file on.
    owner: Option<(OwnedFd, KeptDescriptor)>,
    /// The registration, if the file can be lent on.
    registration: Option<(PoolRegistration, KeptDescriptor)>,
}

/// Parameters for taking a file.
#[derive(Debug)]
pub(crate) struct Taking {
    pub(crate) offered: OfferedMemory,
    pub(crate) lend_on: LendOn,
    /// The peer's user.
    pub(crate) user: u32,
    /// The files that the link has taken before.
    pub(crate) others: Given,
    /// The pool that may lend the file on.
    pub(crate) pool: Option<Pool>,
}

impl TakenFile {
    /// Maps a file that a peer has passed, and takes the pipes that belong to the file. May block.
    /// Descriptors that are not kept stay in `fds`.
    ///
    /// # Errors
    /// `InvalidData` if the descriptors are not a file that may be lent, with its pipes. Other
    /// errors mean that this process cannot map the file, or already keeps the maximum number of
    /// descriptors.
    pub(crate) fn new(fds: &mut Vec<OwnedFd>, taking: Taking) -> io::Result<TakenFile> {
        let Taking { offered, lend_on, user, others, pool } = taking;
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        for pipe in fds.iter().skip(1) {
            if FileType::from_raw_mode(fstat(pipe)?.st_mode) != FileType::Fifo {
                return Err(wrong("neither a file nor a file and a pipe"));
            }
        }
        let full = || io::Error::new(io::ErrorKind::QuotaExceeded, "too many descriptors are kept");
        let (owner, pipes) = match (lend_on, fds.len()) {
            (LendOn::Done, 2 | 3) => (fds.pop(), fds.len() - 1),
            (LendOn::Never | LendOn::Allowed, 1 | 2) => (None, fds.len() - 1),
            _ => return Err(wrong("neither a file nor a file and a pipe")),
        };
        let count = |owner| Some((owner, KeptDescriptor::count()?));
        let owner = owner.map(|owner| count(owner).ok_or_else(full)).transpose()?;
        let reads = if pipes == 1 { fds.pop() } else { None };
        let file = fds.first().ok_or_else(|| wrong("no file"))?;
        let len = usize::try_from(offered.len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let Some(pool) = pool.filter(|_| lend_on == LendOn::Allowed) else {
            let map = PeerMap::lent(file, len, user, others)?;
            return Ok(TakenFile { map, reads, owner, registration: None });
        };
        // Each link has its own mapping, so the address of borrowed bytes shows which link has
        // borrowed them.
        let map = Arc::new(PeerMap::lent_apart(file, len, user, others)?);
        let registration = KeptDescriptor::count().and_then(|counted| {
            let file = fds.drain(..1).next()?;
            match pool.register_lent(Bytes::from_owner(BorrowedFile(map.clone())), file) {
                Ok(registration) => Some((registration, counted)),
                Err(error) => {
                    tracing::debug!(%error, "memory that a peer lends is not lent on");
                    None
                }
            }
        });
        Ok(TakenFile { map, reads, owner, registration })
    }
}

/// The owner of the `Bytes` over a whole borrowed file.
struct BorrowedFile(Arc<PeerMap>);

impl AsRef<[u8]> for BorrowedFile {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as for `Borrowed`. Nobody reads these bytes. They only say where the memory lies,
        // and keep it mapped.
        unsafe { std::slice::from_raw_parts(self.0.ptr(), self.0.len()) }
    }
}

/// Counts a descriptor that is kept for as long as a peer wants. All peers together have at most
/// [`MAX_KEPT`] such descriptors.
#[derive(Debug)]
struct KeptDescriptor;

static KEPT: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

impl KeptDescriptor {
    /// Counts one more descriptor. `None` if the maximum is reached.
    fn count() -> Option<Self> {
        // Dropping the value ends the count.
        let counted = KeptDescriptor;
        (KEPT.fetch_add(1, Relaxed) < MAX_KEPT).then_some(counted)
    }
}

impl Drop for KeptDescriptor {
    fn drop(&mut self) {
        KEPT.fetch_sub(1, Relaxed);
    }
}

/// Peer memory that this process has mapped.
#[derive(Debug)]
struct File {
    map: Arc<PeerMap>,
    addr: u64,
    /// The registration of the memory, which also keeps the mapping.
    _registration: Option<(PoolRegistration, KeptDescriptor)>,
    /// The writing ends of the peer's pipe and, for re-lent memory, of the owner's pipe. While
    /// these ends are open, the peer and the owner keep the memory, even after the connection has
    /// ended. Closing a pipe does not block.
    _reads: Arc<OwnedFd>,
    _owner: Option<(OwnedFd, KeptDescriptor)>,
}

/// The side of a link that reads lent memory.
#[derive(Debug, Default)]
pub(crate) struct Borrower {
    files: HashMap<u32, Arc<File>>,
    bytes: u64,
    reads: Option<Arc<OwnedFd>>,
    returns: Arc<Returns>,
}

impl Borrower {
    pub(crate) fn returns(&self) -> &Returns {
        &self.returns
    }

    /// Checks whether process `pid` may offer a file. Returns the number and the total length of
    /// the files that are lent already.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn check(&self, offered: OfferedMemory, pid: u32) -> Result<Given, String> {
        let OfferedMemory { key, len, .. } = offered;
        let (count, total) = (self.files.len() + 1, self.bytes.saturating_add(len));
        if len == 0 || count > MAX_FILES || total > MAX_BYTES {
            return Err(format!(
                "more memory than a peer may lend: {count} files, {total} bytes; the limit is \
                 {MAX_FILES} and {MAX_BYTES}"
            ));
        }
        match self.files.contains_key(&key) {
            true => Err(format!("memory with key {key:#x} is lent twice")),
            false => Ok(Given { files: self.files.len(), bytes: self.bytes, pid }),
        }
    }

    /// Adds a file that was checked and is now mapped.
    ///
    /// # Errors
    /// A description of the peer's breach.
    pub(crate) fn insert(
        &mut self,
        offered: OfferedMemory,
        taken: TakenFile,
        table: &ChunkTable,
    ) -> Result<(), String> {
        let OfferedMemory { key, addr, len } = offered;
        let TakenFile { map, reads, owner, registration } = taken;
        let reads = match (&self.reads, reads) {
            (None, Some(reads)) => self.reads.insert(Arc::new(reads)),
            (Some(reads), None) => reads,
            _ => return Err("a pipe comes with the first memory that is lent".to_owned()),
        };
        let lend_key = registration.as_ref().and_then(|(registration, _)| registration.lend_key());
        if let Some(key) = lend_key {
            table.set_owner(key, reads);
        }
        let (_reads, _owner, _registration) = (reads.clone(), owner, registration);
        self.files.insert(key, Arc::new(File { map, addr, _registration, _reads, _owner }));
        self.bytes += len;
        Ok(())
    }

    /// Handles a peer's message that takes a file back. This end may have failed to map the file.
    /// Bytes that are still read stay mapped.
    pub(crate) fn forget(&mut self, key: u32) {
        if let Some(file) = self.files.remove(&key) {
            self.bytes -= file.map.len() as u64;
        }
    }

    /// Returns bytes that the peer has lent. The lease is returned when the last part of the bytes
    /// is dropped.
    ///
    /// # Errors
    /// A description of the peer's breach. Key, address and length must match memory that the peer
    /// has lent (R15).
    pub(crate) fn borrow(&self, lent: Lent, len: u32) -> Result<Bytes, String> {
        let Lent { lease, key, addr } = lent;
        let wrong = || format!("lease {lease} of {len} bytes at {addr:#x} with key {key:#x}");
        let file = self.files.get(&key).ok_or_else(wrong)?;
        let at = addr.checked_sub(file.addr).and_then(|at| usize::try_from(at).ok());
        let (at, len) = (at.ok_or_else(wrong)?, len as usize);
        if at.checked_add(len).is_none_or(|end| end > file.map.len()) {
            return Err(wrong());
        }
        file.map.add_borrowed(len);
        let (file, returns) = (file.clone(), self.returns.clone());
        Ok(Bytes::from_owner(Borrowed { at, len, lease, file, returns }))
    }
}

/// Borrowed bytes. The value keeps the mapping, and returns the lease when it is dropped. The
/// application may see bytes that the peer changes, and SECURITY.md warns about such peers.
struct Borrowed {
    /// `at + len` is at most the length of the mapping.
    at: usize,
    len: usize,
    lease: u32,
    file: Arc<File>,
    returns: Arc<Returns>,
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        let start = self.file.map.ptr();
        // SAFETY: the bytes lie in the mapping, which lives as long as this value. Its file keeps
        // its size (R15) and its pages: `Map::read_only` has found all pages at a time when the
        // seals already forbade removing any. This process does not write to the bytes. The peer
        // must not write to them until the lease is returned (R8). A peer that does so can spoil
        // only its own message, and `Landed` keeps the transport and the codec from parsing bytes
        // that may still change.
        unsafe { std::slice::from_raw_parts(start.add(self.at), self.len) }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.returns.push(self.lease);
    }
}
