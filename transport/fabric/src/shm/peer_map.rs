//! Files of peers, mapped into this process.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::blocking::PEERS;
use super::map::{FileId, Map};
use super::ring::Words;

/// The kernel's limit on the mappings of a process (proc(5), max_map_count), if it cannot be read.
const MAX_MAPPINGS: usize = 65530;
/// The part of it that files of peers may have.
const SHARE: usize = 4;

/// Files of peers that this process has mapped.
static MAPPED: Mutex<BTreeSet<FileId>> = Mutex::new(BTreeSet::new());

/// The place of one in [`MAPPED`].
#[derive(Debug)]
struct Entry(FileId);

impl Entry {
    fn new(file: FileId) -> io::Result<Entry> {
        static LIMIT: OnceLock<usize> = OnceLock::new();
        let limit = *LIMIT.get_or_init(|| {
            let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
            limit.trim().parse().unwrap_or(MAX_MAPPINGS) / SHARE
        });
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        if mapped.contains(&file) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a file that was given already"));
        }
        if mapped.len() >= limit {
            let what = format!("as many files of peers are mapped as a process may have here: {limit}");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        mapped.insert(file);
        Ok(Entry(file))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        MAPPED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// A file of a peer's, mapped. No file is mapped twice, and all peers together have a quarter of
/// the mappings that the process may have. It is unmapped by a thread that may take its time.
#[derive(Debug)]
pub(super) struct PeerMap {
    /// There until this is dropped.
    mapped: Option<(Map, Entry)>,
    user: u32,
}

impl PeerMap {
    /// Maps all of a file, on behalf of a peer of this user. May block: the file can be anything.
    ///
    /// # Errors
    /// Those of [`Map::new`]; the file is mapped already; or there are too many.
    pub(super) fn new(file: impl AsFd, len: usize, user: u32) -> io::Result<PeerMap> {
        let mut entry = None;
        let map = Map::new(file, len, |file| {
            entry = Some(Entry::new(file)?);
            Ok(())
        })?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user })
    }

    /// Copies `src` to `offset`. False when it does not fit there.
    pub(super) fn write(&mut self, offset: u64, src: &[u8]) -> bool {
        self.mapped.as_mut().is_some_and(|(map, _)| map.write(offset, src))
    }

    /// Whether nothing has been written so far.
    pub(super) fn is_unused(&self) -> bool {
        self.mapped.as_ref().is_none_or(|(map, _)| map.is_untouched())
    }
}

impl Words for PeerMap {
    fn words(&self) -> &[AtomicU64] {
        self.mapped.as_ref().map_or(&[], |(map, _)| map.words())
    }
}

impl Drop for PeerMap {
    fn drop(&mut self) {
        if let Some(mapped) = self.mapped.take() {
            PEERS.run(self.user, move || drop(mapped));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic_rdma_memory::memfd::sealed;

    #[test]
    fn a_file_is_mapped_once_at_a_time() {
        let file = sealed(c"test", 4096).unwrap();
        let map = PeerMap::new(&file, 4096, 0).unwrap();
        let error = PeerMap::new(&file, 4096, 0).unwrap_err();
        assert!(error.to_string().contains("given already"), "{error}");
        drop(map);
        while PeerMap::new(&file, 4096, 0).is_err() {
            std::thread::yield_now();
        }
    }
}
