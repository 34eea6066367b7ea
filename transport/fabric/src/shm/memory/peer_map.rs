//! Files of peers, mapped into this process.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use rustix::fs::fstat;

use crate::shm::memory::map::{FileId, Map};
use crate::shm::ring::Words;
use crate::shm::socket::blocking::PEERS;

/// The kernel's limit on the mappings of a process (proc(5), max_map_count), if it cannot be read.
const MAX_MAPPINGS: usize = 65530;
/// Files of peers may have this fraction, `1 / MAPPINGS_DIVISOR`, of it.
const MAPPINGS_DIVISOR: usize = 4;

/// Chunks that every connection may give, however many connections there are.
const MIN_CHUNKS: usize = 8;

/// Memory that a peer offers, as the message beside its file says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offered {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    /// A connection has one.
    Ring,
    /// Of a wake-up channel, which has one.
    Page,
    /// Landing memory of a connection that has given `others` before.
    Chunk { others: usize },
    /// Memory that a connection has lent, which has lent `others` before. Several connections may
    /// lend the same.
    Lent { others: usize },
    /// A buffer of the application that a connection has offered, which has offered `others`
    /// before. Several connections may offer the same.
    Named { others: usize },
}

impl Usage {
    /// Whether several connections may give the same file.
    fn may_come_again(self) -> bool {
        matches!(self, Usage::Lent { .. } | Usage::Named { .. })
    }
}

/// Files of peers that this process has mapped.
#[derive(Debug)]
struct Mapped {
    files: BTreeSet<FileId>,
    /// How many of these are rings; each is a connection.
    rings: usize,
    /// Mappings of files that several connections may have given.
    again: usize,
}

static MAPPED: Mutex<Mapped> = Mutex::new(Mapped { files: BTreeSet::new(), rings: 0, again: 0 });

impl Mapped {
    /// Whether one more may be mapped, of `limit` in all. Beyond a half of them no connection gets
    /// more chunks than its share of a quarter, so that those who gave many leave places to others;
    /// the last sixteenth is for rings.
    fn has_room(&self, usage: Usage, limit: usize) -> bool {
        let mapped = self.files.len() + self.again;
        match usage {
            Usage::Ring | Usage::Page => mapped < limit,
            Usage::Chunk { .. } | Usage::Lent { .. } | Usage::Named { .. }
                if mapped < limit / 2 =>
            {
                true
            }
            Usage::Chunk { others } | Usage::Lent { others } | Usage::Named { others } => {
                let share = (limit / 4 / self.rings.max(1)).max(MIN_CHUNKS);
                others < share && mapped < limit - limit / 16
            }
        }
    }
}

/// The place of one in [`MAPPED`].
#[derive(Debug)]
struct Entry(FileId, Usage);

impl Entry {
    fn new(file: FileId, usage: Usage) -> io::Result<Entry> {
        static LIMIT: OnceLock<usize> = OnceLock::new();
        let limit = *LIMIT.get_or_init(|| {
            let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
            limit.trim().parse().unwrap_or(MAX_MAPPINGS) / MAPPINGS_DIVISOR
        });
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let once = !usage.may_come_again();
        if once && mapped.files.contains(&file) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a file that was given already",
            ));
        }
        if !mapped.has_room(usage, limit) {
            let what = format!(
                "more files than a connection may give while peers have so many mapped: {} of {limit}, {} connections",
                mapped.files.len() + mapped.again,
                mapped.rings
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        match once {
            true => drop(mapped.files.insert(file)),
            false => mapped.again += 1,
        }
        mapped.rings += usize::from(usage == Usage::Ring);
        Ok(Entry(file, usage))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        match self.1 {
            usage if usage.may_come_again() => mapped.again -= 1,
            _ => drop(mapped.files.remove(&self.0)),
        }
        mapped.rings -= usize::from(self.1 == Usage::Ring);
    }
}

/// A file that is lent, for those who map it one after another.
type Turn = Arc<Mutex<Weak<PeerMap>>>;

/// Files that are lent by one connection or several.
struct Lent {
    turns: BTreeMap<FileId, Turn>,
    /// Number of turns at which those of files that are not mapped any more are dropped.
    full: usize,
}

static LENT: Mutex<Lent> = Mutex::new(Lent { turns: BTreeMap::new(), full: MIN_TURNS });

/// Least number of turns at which some are dropped.
const MIN_TURNS: usize = 64;

impl Lent {
    fn turn(file: FileId) -> Turn {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.turns.len() >= lent.full {
            // A turn that nobody else has is not locked.
            lent.turns.retain(|_, turn| {
                let is_mapped =
                    |turn: &Turn| turn.try_lock().is_ok_and(|map| map.strong_count() > 0);
                Arc::strong_count(turn) > 1 || is_mapped(turn)
            });
            lent.full = (2 * lent.turns.len()).max(MIN_TURNS);
        }
        lent.turns.entry(file).or_default().clone()
    }
}

/// A file of a peer's, mapped. No file is mapped twice, but for those that several connections may
/// give, and all peers together have a quarter of
/// the mappings that the process may have. It is unmapped by a thread that may take its time.
#[derive(Debug)]
pub(crate) struct PeerMap {
    /// There until this is dropped.
    mapped: Option<(Map, Entry)>,
    user: u32,
}

impl PeerMap {
    /// Maps all of a file, on behalf of a peer of this user. May block: the file can be anything.
    ///
    /// # Errors
    /// Those of [`Map::new`], and for other files than rings and pages [`Map::whole`]; the file is
    /// mapped already; or there are too many.
    pub(crate) fn new(file: impl AsFd, len: usize, user: u32, usage: Usage) -> io::Result<PeerMap> {
        let mut entry = None;
        let accept = |file| {
            entry = Some(Entry::new(file, usage)?);
            Ok(())
        };
        let map = match usage {
            // Both ends write to it, and it is short.
            Usage::Ring | Usage::Page => Map::new(file, len, accept),
            Usage::Chunk { .. } | Usage::Lent { .. } | Usage::Named { .. } => {
                Map::whole(file, len, accept)
            }
        }?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user })
    }

    /// Maps all of a file, on behalf of a peer of this user, to read what the peer has lent there.
    /// A file that is mapped so already is not mapped again. May block: the file can be anything.
    ///
    /// # Errors
    /// Those of [`Map::read_only`], or there are too many.
    pub(crate) fn lent(
        file: impl AsFd,
        len: usize,
        user: u32,
        others: usize,
    ) -> io::Result<Arc<PeerMap>> {
        let stat = fstat(&file)?;
        let turn = Lent::turn((stat.st_dev, stat.st_ino));
        // Held while the file is mapped, which may take long: those who lend the same file wait,
        // and nobody else.
        let mut lent = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = lent.upgrade().filter(|map| map.len() == len) {
            return Ok(map);
        }
        let map = Arc::new(Self::lent_apart(file, len, user, others)?);
        *lent = Arc::downgrade(&map);
        Ok(map)
    }

    /// As [`lent`](Self::lent), but mapped for this caller alone, at an address of its own.
    ///
    /// # Errors
    /// Those of [`lent`](Self::lent).
    pub(crate) fn lent_apart(
        file: impl AsFd,
        len: usize,
        user: u32,
        others: usize,
    ) -> io::Result<PeerMap> {
        let mut entry = None;
        let map = Map::read_only(file, len, |file| {
            entry = Some(Entry::new(file, Usage::Lent { others })?);
            Ok(())
        })?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user })
    }

    /// The first byte, never null. Other processes may write to what lies there.
    pub(crate) fn ptr(&self) -> *const u8 {
        let none = || NonNull::<u8>::dangling().as_ptr().cast_const();
        self.mapped.as_ref().map_or_else(none, |(map, _)| map.ptr())
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.mapped.as_ref().map_or(0, |(map, _)| map.len())
    }

    /// Counts a file that is mapped already.
    ///
    /// # Errors
    /// It is counted already, or there are too many.
    pub(crate) fn adopt(map: Map, file: FileId, user: u32, usage: Usage) -> io::Result<PeerMap> {
        Ok(PeerMap { mapped: Some((map, Entry::new(file, usage)?)), user })
    }

    /// Copies `src` to `offset`. False when it does not fit there.
    pub(crate) fn write(&mut self, offset: u64, src: &[u8]) -> bool {
        self.mapped.as_mut().is_some_and(|(map, _)| map.write(offset, src))
    }

    /// Gives pages back: see [`Map::release`].
    pub(crate) fn release(&self, keep: usize) {
        if let Some((map, _)) = &self.mapped {
            map.release(keep);
        }
    }

    /// Whether nothing has been written so far.
    pub(crate) fn is_unused(&self) -> bool {
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
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use tonic_rdma_memory::memfd::sealed;

    use super::*;

    #[test]
    fn a_file_is_mapped_once_at_a_time() {
        let file = sealed(c"test", 4096).unwrap();
        let map = PeerMap::new(&file, 4096, 0, Usage::Ring).unwrap();
        let error = PeerMap::new(&file, 4096, 0, Usage::Ring).unwrap_err();
        assert!(error.to_string().contains("given already"), "{error}");
        drop(map);
        while PeerMap::new(&file, 4096, 0, Usage::Ring).is_err() {
            std::thread::yield_now();
        }
    }

    /// A file that can be lent.
    fn lendable() -> OwnedFd {
        let file = memfd_create(c"test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::io::pwrite(&file, &[0; 4096], 0).unwrap();
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        fcntl_add_seals(&file, seals).unwrap();
        file
    }

    #[test]
    fn a_file_that_takes_long_to_map_holds_up_no_other() {
        let (slow, quick) = (lendable(), lendable());
        let stat = fstat(&slow).unwrap();
        let turn = Lent::turn((stat.st_dev, stat.st_ino));
        let mapping = turn.lock().unwrap();
        // Another user's file, and another of the same user.
        let first = PeerMap::lent(&quick, 4096, 1, 0).unwrap();
        let again = PeerMap::lent(&quick, 4096, 2, 0).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        drop(mapping);
        let map = PeerMap::lent(&slow, 4096, 1, 1).unwrap();
        assert!(!Arc::ptr_eq(&first, &map));
    }

    #[test]
    fn turns_of_files_that_are_gone_are_dropped() {
        let kept = lendable();
        let map = PeerMap::lent(&kept, 4096, 1, 0).unwrap();
        for _ in 0..20 * MIN_TURNS {
            PeerMap::lent(lendable(), 4096, 1, 0).unwrap();
            let lent = LENT.lock().unwrap();
            assert!(lent.turns.len() <= lent.full);
        }
        assert!(LENT.lock().unwrap().full < 10 * MIN_TURNS);
        assert!(Arc::ptr_eq(&map, &PeerMap::lent(&kept, 4096, 1, 0).unwrap()));
    }

    #[test]
    fn what_is_not_mapped_is_an_empty_slice_and_not_null() {
        let none = PeerMap { mapped: None, user: 0 };
        assert!(none.len() == 0 && !none.ptr().is_null());
    }

    /// As many connections as `greedy` give chunks as long as they can; then one comes that wants
    /// a few.
    fn gets_a_few(greedy: usize) -> bool {
        const LIMIT: usize = 16_382;
        let mut mapped = Mapped { files: BTreeSet::new(), rings: 0, again: 0 };
        let mut number = 0;
        let mut map = |mapped: &mut Mapped, usage: Usage| {
            let has = mapped.has_room(usage, LIMIT);
            if has {
                number += 1;
                mapped.files.insert((0, number));
                mapped.rings += usize::from(usage == Usage::Ring);
            }
            has
        };
        assert!((0..greedy).all(|_| map(&mut mapped, Usage::Ring)), "{greedy}");
        for _ in 0..greedy {
            (0..512).take_while(|&others| map(&mut mapped, Usage::Chunk { others })).count();
        }
        map(&mut mapped, Usage::Ring)
            && (0..MIN_CHUNKS).all(|others| map(&mut mapped, Usage::Chunk { others }))
    }

    #[test]
    fn greedy_leave_places_to_others() {
        for greedy in [0, 1, 16, 32, 100, 500, 700] {
            assert!(
                gets_a_few(greedy),
                "{greedy} connections that give 512 chunks each keep others out"
            );
        }
    }
}
