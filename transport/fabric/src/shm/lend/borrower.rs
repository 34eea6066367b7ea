//! What a link's peer has lent.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{FileType, fstat};

use super::{MAX_BYTES, MAX_FILES};
use crate::link::Lent;
use crate::returns::Returns;
use crate::shm::memory::peer_map::{Offered, PeerMap};

/// A file, mapped, and the writing end of the peer's pipe if that came with it.
#[derive(Debug)]
pub(crate) struct TakenFile {
    map: Arc<PeerMap>,
    reads: Option<OwnedFd>,
}

impl TakenFile {
    /// Maps a file of `len` bytes that a peer of this user has passed, with or without the pipe.
    /// May block. Descriptors that are not kept stay in `fds`.
    ///
    /// # Errors
    /// `InvalidData` if it is nothing that may be lent; others if this process cannot map it.
    pub(crate) fn new(
        fds: &mut Vec<OwnedFd>,
        len: u64,
        user: u32,
        others: usize,
    ) -> io::Result<TakenFile> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let reads = match fds.len() {
            1 => None,
            2 if FileType::from_raw_mode(fstat(&fds[1])?.st_mode) == FileType::Fifo => fds.pop(),
            _ => return Err(wrong("neither a file nor a file and a pipe")),
        };
        let file = fds.first().ok_or_else(|| wrong("no file"))?;
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(TakenFile { map: PeerMap::lent(file, len, user, others)?, reads })
    }
}

/// Memory of the peer that this process has mapped.
#[derive(Debug)]
struct File {
    map: Arc<PeerMap>,
    addr: u64,
    /// As long as it is there, the peer keeps what it has lent, also when the connection has ended.
    /// Closing a pipe does not block.
    _reads: Arc<OwnedFd>,
}

/// The reading end of a link.
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

    /// Whether a file may be offered. Returns the number of those that were before.
    ///
    /// # Errors
    /// What the peer did wrong.
    pub(crate) fn check(&self, offered: Offered) -> Result<usize, String> {
        let Offered { key, len, .. } = offered;
        let (count, total) = (self.files.len() + 1, self.bytes.saturating_add(len));
        if len == 0 || count > MAX_FILES || total > MAX_BYTES {
            return Err(format!(
                "more memory than a peer may lend: {count} files, {total} bytes; the limit is \
                 {MAX_FILES} and {MAX_BYTES}"
            ));
        }
        match self.files.contains_key(&key) {
            true => Err(format!("memory with key {key:#x} is lent twice")),
            false => Ok(self.files.len()),
        }
    }

    /// Adds a file that was checked, and is mapped now.
    ///
    /// # Errors
    /// What the peer did wrong.
    pub(crate) fn insert(&mut self, offered: Offered, taken: TakenFile) -> Result<(), String> {
        let Offered { key, addr, len } = offered;
        let TakenFile { map, reads } = taken;
        let reads = match (&self.reads, reads) {
            (None, Some(reads)) => self.reads.insert(Arc::new(reads)),
            (Some(reads), None) => reads,
            _ => return Err("a pipe comes with the first memory that is lent".to_owned()),
        };
        self.files.insert(key, Arc::new(File { map, addr, _reads: reads.clone() }));
        self.bytes += len;
        Ok(())
    }

    /// The peer takes a file back, which may be one that could not be mapped. What is still read of
    /// it stays mapped.
    pub(crate) fn forget(&mut self, key: u32) {
        if let Some(file) = self.files.remove(&key) {
            self.bytes -= file.map.len() as u64;
        }
    }

    /// Bytes that the peer has lent. The lease returns when the last part of them is dropped.
    ///
    /// # Errors
    /// What the peer did wrong: key, address and length must make sense against what it has lent
    /// (R15).
    pub(crate) fn borrow(&self, lent: Lent, len: u32) -> Result<Bytes, String> {
        let Lent { lease, key, addr } = lent;
        let wrong = || format!("lease {lease} of {len} bytes at {addr:#x} with key {key:#x}");
        let file = self.files.get(&key).ok_or_else(wrong)?;
        let at = addr.checked_sub(file.addr).and_then(|at| usize::try_from(at).ok());
        let (at, len) = (at.ok_or_else(wrong)?, len as usize);
        if at.checked_add(len).is_none_or(|end| end > file.map.len()) {
            return Err(wrong());
        }
        let (file, returns) = (file.clone(), self.returns.clone());
        Ok(Bytes::from_owner(Borrowed { at, len, lease, file, returns }))
    }
}

/// The owner of lent bytes.
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
        // SAFETY: the bytes lie in the mapping, which keeps its size and its pages and lives as
        // long as this value (R15). This process does not write there. The peer must not, until the
        // lease is returned (R8). One that does can spoil only what it sent itself, and `Landed`
        // hides the bytes from all code that would rely on them; the application, which may see
        // them, is told so.
        unsafe { std::slice::from_raw_parts(start.add(self.at), self.len) }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.returns.push(self.lease);
    }
}
