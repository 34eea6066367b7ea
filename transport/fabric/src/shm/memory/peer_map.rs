//! Files of peers, mapped into this process.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::fstat;
use rustix::process::{Resource, getrlimit};
use tonic_rdma_memory::PerProcess;

use crate::shm::memory::map::{FileId, Map};
use crate::shm::memory::map_debt::MapCost;
use crate::shm::ring::Words;
use crate::shm::socket::blocking::PEERS;

/// The kernel's limit on the mappings of a process (proc(5), max_map_count), if it cannot be read.
const MAX_MAPPINGS: usize = 65530;
/// Files of peers may have this fraction, `1 / MAPPINGS_DIVISOR`, of it.
const MAPPINGS_DIVISOR: usize = 4;

/// Bytes of address space that files of peers may have: an eighth of what a process has on x86-64
/// (47 bits).
const MAX_MAPPED: u64 = 1 << 44;
/// Files of peers may have this fraction, `1 / ADDRESS_SPACE_DIVISOR`, of RLIMIT_AS.
const ADDRESS_SPACE_DIVISOR: u64 = 8;

/// Bytes of the chunks that a peer keeps with a connection, at most: address space of this process,
/// and memory of the peer's.
pub(crate) const MAX_CHUNK_BYTES: u64 = 1 << 30;
/// Chunks that every connection may give, however many connections there are.
const MIN_CHUNKS: usize = 8;

/// Memory that a peer offers, as the message beside its file says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offered {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// The files of one kind that a connection has given and not taken back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Given {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
    /// The id of the peer's process.
    pub(crate) pid: u32,
}

/// The purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    /// A connection has one.
    Ring,
    /// The single page of a wake-up channel.
    Page,
    /// Landing memory of a connection that has given `others` before.
    Chunk { others: Given },
    /// Memory that a connection has lent, which has lent `others` before. Several connections may
    /// lend the same.
    Lent { others: Given },
    /// An application buffer offered by a connection that has offered `others` before. Several
    /// connections may offer the same buffer.
    Named { others: Given },
}

impl Usage {
    /// Whether several connections may give the same file.
    fn may_come_again(self) -> bool {
        matches!(self, Usage::Lent { .. } | Usage::Named { .. })
    }

    /// The peer's debt for a file of this length, if it may give many.
    fn cost(self, user: u32, len: usize) -> Option<MapCost> {
        let len = len as u64;
        match self {
            Usage::Ring | Usage::Page => None,
            Usage::Lent { others } => Some(MapCost::populated((user, others.pid), len)),
            Usage::Chunk { others } | Usage::Named { others } => {
                Some(MapCost::unpopulated((user, others.pid), len))
            }
        }
    }
}

/// How much of this process files of peers may have.
#[derive(Debug, Clone, Copy)]
struct Limits {
    mappings: usize,
    bytes: u64,
}

impl Limits {
    fn get() -> Limits {
        static LIMITS: PerProcess<Limits> = PerProcess::new(|| {
            let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
            let mappings = limit.trim().parse().unwrap_or(MAX_MAPPINGS) / MAPPINGS_DIVISOR;
            let address_space = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
            Limits { mappings, bytes: MAX_MAPPED.min(address_space / ADDRESS_SPACE_DIVISOR) }
        });
        *LIMITS
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
    /// Address space of all of them.
    bytes: u64,
}

static MAPPED: PerProcess<Mutex<Mapped>> = PerProcess::new(|| Mutex::new(Mapped::new()));

impl Mapped {
    const fn new() -> Mapped {
        Mapped { files: BTreeSet::new(), rings: 0, again: 0, bytes: 0 }
    }

    /// Whether one more may be mapped. Beyond a half of the mappings, or of the address space, no
    /// connection gets more than its share of a quarter, so that those who gave many leave places
    /// to others; the last sixteenth of the mappings is for rings.
    fn has_room(&self, usage: Usage, len: u64, limits: Limits) -> bool {
        let (mapped, limit) = (self.files.len() + self.again, limits.mappings);
        let given = match usage {
            Usage::Ring | Usage::Page => return mapped < limit,
            Usage::Chunk { others } | Usage::Lent { others } | Usage::Named { others } => others,
        };
        let rings = self.rings.max(1);
        let share = (limit / 4 / rings).max(MIN_CHUNKS);
        let has_mapping = mapped < limit / 2 || given.files < share && mapped < limit - limit / 16;
        let bytes = self.bytes.saturating_add(len);
        // As much as a connection may give as chunks, so that none of these is refused.
        let share = (limits.bytes / 4 / rings as u64).max(MAX_CHUNK_BYTES);
        let has_bytes = bytes <= limits.bytes / 2
            || given.bytes.saturating_add(len) <= share && bytes <= limits.bytes;
        has_mapping && has_bytes
    }
}

/// The place of one in [`MAPPED`].
#[derive(Debug)]
struct Entry {
    file: FileId,
    usage: Usage,
    bytes: u64,
}

impl Entry {
    fn new(file: FileId, usage: Usage, len: usize) -> io::Result<Entry> {
        let (limits, bytes) = (Limits::get(), len as u64);
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let once = !usage.may_come_again();
        if once && mapped.files.contains(&file) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a file that was given already",
            ));
        }
        if !mapped.has_room(usage, bytes, limits) {
            let what = format!(
                "more than a connection may give while peers have so much mapped: {} files of {}, \
                 {} bytes and {bytes} more of {}, {} connections",
                mapped.files.len() + mapped.again,
                limits.mappings,
                mapped.bytes,
                limits.bytes,
                mapped.rings
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        match once {
            true => drop(mapped.files.insert(file)),
            false => mapped.again += 1,
        }
        mapped.rings += usize::from(usage == Usage::Ring);
        mapped.bytes += bytes;
        Ok(Entry { file, usage, bytes })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        match self.usage {
            usage if usage.may_come_again() => mapped.again -= 1,
            _ => drop(mapped.files.remove(&self.file)),
        }
        mapped.rings -= usize::from(self.usage == Usage::Ring);
        mapped.bytes -= self.bytes;
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

static LENT: PerProcess<Mutex<Lent>> =
    PerProcess::new(|| Mutex::new(Lent { turns: BTreeMap::new(), full: MIN_TURNS }));

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
    cost: Option<MapCost>,
}

impl PeerMap {
    /// Maps all of a file, on behalf of a peer of this user. May block: the file can be anything.
    ///
    /// # Errors
    /// The errors of [`Map::new`], and for files other than rings and pages those of
    /// [`Map::whole`]. Also fails if the file is mapped already or there are too many.
    pub(crate) fn new(file: impl AsFd, len: usize, user: u32, usage: Usage) -> io::Result<PeerMap> {
        let (mut entry, cost) = (None, usage.cost(user, len));
        let accept = |file| {
            entry = Some(Entry::new(file, usage, len)?);
            Ok(())
        };
        let map = match usage {
            // Both ends write to it, and it is short.
            Usage::Ring | Usage::Page => Map::new(file, len, accept),
            Usage::Chunk { .. } | Usage::Lent { .. } | Usage::Named { .. } => {
                Map::whole(file, len, accept)
            }
        }?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user, cost })
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
        others: Given,
    ) -> io::Result<Arc<PeerMap>> {
        let stat = fstat(&file)?;
        let turn = Lent::turn((stat.st_dev, stat.st_ino));
        // Held while the file is mapped, which may take long: those who lend the same file wait,
        // and nobody else.
        let mut lent = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = lent.upgrade().filter(|map| map.len() == len) {
            // A thread was woken to find it.
            drop(MapCost::populated((user, others.pid), 0));
            return Ok(map);
        }
        let map = Arc::new(Self::lent_apart(file, len, user, others)?);
        *lent = Arc::downgrade(&map);
        Ok(map)
    }

    /// Like [`lent`](Self::lent), but mapped for this caller alone, at an address of its own.
    ///
    /// # Errors
    /// Those of [`lent`](Self::lent).
    pub(crate) fn lent_apart(
        file: impl AsFd,
        len: usize,
        user: u32,
        others: Given,
    ) -> io::Result<PeerMap> {
        let usage = Usage::Lent { others };
        let (mut entry, cost) = (None, usage.cost(user, len));
        let map = Map::read_only(file, len, |file| {
            entry = Some(Entry::new(file, usage, len)?);
            Ok(())
        })?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user, cost })
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
        let entry = Entry::new(file, usage, map.len())?;
        Ok(PeerMap { mapped: Some((map, entry)), user, cost: None })
    }

    /// Counts bytes that are borrowed from it.
    pub(crate) fn add_borrowed(&self, len: usize) {
        if let Some(cost) = &self.cost {
            cost.add_used(len as u64);
        }
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

    /// Offset behind the last byte that was written.
    fn touched(&self) -> usize {
        self.mapped.as_ref().map_or(0, |(map, _)| map.touched())
    }

    /// Whether nothing has been written so far.
    pub(crate) fn is_unused(&self) -> bool {
        self.touched() == 0
    }
}

impl Words for PeerMap {
    fn words(&self) -> &[AtomicU64] {
        self.mapped.as_ref().map_or(&[], |(map, _)| map.words())
    }
}

impl Drop for PeerMap {
    fn drop(&mut self) {
        if let Some(cost) = &self.cost {
            cost.add_used(self.touched() as u64);
        }
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
    use crate::shm::memory::map_debt;

    const NONE: Given = Given { files: 0, bytes: 0, pid: 0 };
    const LIMITS: Limits = Limits { mappings: 16_382, bytes: MAX_MAPPED };

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
        let first = PeerMap::lent(&quick, 4096, 1, NONE).unwrap();
        let again = PeerMap::lent(&quick, 4096, 2, NONE).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        drop(mapping);
        let map = PeerMap::lent(&slow, 4096, 1, NONE).unwrap();
        assert!(!Arc::ptr_eq(&first, &map));
    }

    #[test]
    fn turns_of_files_that_are_gone_are_dropped() {
        let kept = lendable();
        let map = PeerMap::lent(&kept, 4096, 1, NONE).unwrap();
        for _ in 0..20 * MIN_TURNS {
            PeerMap::lent(lendable(), 4096, 1, NONE).unwrap();
            let lent = LENT.lock().unwrap();
            assert!(lent.turns.len() <= lent.full);
        }
        assert!(LENT.lock().unwrap().full < 10 * MIN_TURNS);
        assert!(Arc::ptr_eq(&map, &PeerMap::lent(&kept, 4096, 1, NONE).unwrap()));
    }

    #[test]
    fn what_is_not_mapped_is_an_empty_slice_and_not_null() {
        let none = PeerMap { mapped: None, user: 0, cost: None };
        assert!(none.len() == 0 && !none.ptr().is_null());
    }

    #[test]
    fn what_a_file_has_cost_for_nothing_is_owed() {
        let file = lendable();
        let owed = |pid| map_debt::owed((1, pid));
        let others = |pid| Given { pid, ..NONE };
        let first = PeerMap::lent(&file, 4096, 1, others(101)).unwrap();
        // It is mapped already, by another's work.
        drop(PeerMap::lent(&file, 4096, 1, others(102)).unwrap());
        assert_eq!((owed(101), owed(102) > 0), (0, true));
        drop(first);
        assert!(owed(101) > 0, "it was taken back unread");
        let read = PeerMap::lent(&file, 4096, 1, others(103)).unwrap();
        read.add_borrowed(1 << 30);
        drop(read);
        let usage = Usage::Chunk { others: others(103) };
        let (chunk, unused) =
            (sealed(c"test", 4 << 20).unwrap(), sealed(c"test", 4 << 20).unwrap());
        rustix::io::pwrite(&chunk, &vec![0; 4 << 20], 0).unwrap();
        let mut written = PeerMap::new(&chunk, 4 << 20, 1, usage).unwrap();
        assert!(written.write(0, &vec![1; 4 << 20]));
        drop(written);
        assert_eq!(owed(103), 0, "they were used");
        PeerMap::new(&unused, 4 << 20, 1, usage).unwrap_err();
        assert!(owed(103) > 0, "a file with holes was looked at");
    }

    /// Connections that give files as long as they may.
    #[derive(Debug)]
    struct Givers {
        mapped: Mapped,
        number: u64,
    }

    impl Givers {
        fn new(connections: usize) -> Givers {
            let mut givers = Givers { mapped: Mapped::new(), number: 0 };
            assert!((0..connections).all(|_| givers.map(Usage::Ring, 4096)), "{connections}");
            givers
        }

        fn map(&mut self, usage: Usage, len: u64) -> bool {
            let has = self.mapped.has_room(usage, len, LIMITS);
            if has {
                self.number += 1;
                self.mapped.files.insert((0, self.number));
                self.mapped.rings += usize::from(usage == Usage::Ring);
                self.mapped.bytes += len;
            }
            has
        }

        /// One connection gives up to `most` files.
        fn give(&mut self, usage: fn(Given) -> Usage, len: u64, most: usize) -> usize {
            let given = |files| Given { files, bytes: files as u64 * len, pid: 0 };
            (0..most).take_while(|&files| self.map(usage(given(files)), len)).count()
        }
    }

    fn chunk(others: Given) -> Usage {
        Usage::Chunk { others }
    }

    fn named(others: Given) -> Usage {
        Usage::Named { others }
    }

    #[test]
    fn greedy_leave_places_to_others() {
        for greedy in [0, 1, 16, 32, 100, 500, 700] {
            let mut givers = Givers::new(greedy);
            (0..greedy).for_each(|_| {
                givers.give(chunk, 4096, 512);
            });
            assert!(
                givers.map(Usage::Ring, 4096) && givers.give(chunk, 4096, MIN_CHUNKS) == MIN_CHUNKS,
                "{greedy} connections that give 512 chunks each keep others out"
            );
        }
    }

    /// The attack: one file of 64 GiB, offered as a buffer by as many connections as there are, and
    /// shorter ones by those that get no such.
    #[test]
    fn greedy_leave_address_space_to_others() {
        for greedy in [1, 64, 128, 600, 2046] {
            let mut givers = Givers::new(greedy);
            for len in [1 << 36, 1 << 33, 1 << 31, 1 << 30] {
                (0..greedy).for_each(|_| {
                    givers.give(named, len, 1);
                });
            }
            assert!(givers.mapped.bytes <= MAX_MAPPED, "{greedy}: {}", givers.mapped.bytes);
            assert!(givers.map(Usage::Ring, 132 << 10));
            assert_eq!(givers.give(named, 1 << 28, 4), 4, "{greedy} keep others out");
            assert_eq!(givers.give(chunk, 4 << 20, 256), 256, "{greedy} keep others out");
        }
    }
}
