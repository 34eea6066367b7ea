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

use crate::shm::memory::map_debt::MapCost;
use crate::shm::memory::{FileId, Map};
use crate::shm::ring::Words;
use crate::shm::socket::blocking::PEERS;

/// The assumed limit on the mappings of a process (proc(5), max_map_count) if the real limit cannot
/// be read.
const MAX_MAPPINGS: usize = 65530;
/// Peers' files may have `1 / MAPPINGS_DIVISOR` of a process's mappings.
const MAPPINGS_DIVISOR: usize = 4;

/// The number of bytes of address space that peers' files may take: an eighth of a process's
/// address space on x86-64 (47 bits).
const MAX_MAPPED: u64 = 1 << 44;
/// Peers' files may have `1 / ADDRESS_SPACE_DIVISOR` of RLIMIT_AS.
const ADDRESS_SPACE_DIVISOR: u64 = 8;

/// Maximum bytes of the chunks that a peer keeps in a connection. The chunks take this process's
/// address space, and the peer's memory.
pub(crate) const MAX_CHUNK_BYTES: u64 = 1 << 30;
/// Maximum bytes of a file that is unmapped where it is dropped, such as the rings of a connection.
/// A peer that maps the file often and punches holes into it makes munmap(2) wait, and also makes
/// each page fault in a ring wait. Unmapping a ring of 33 pages took 6 us. On a thread it took 20
/// us, most of which was the switch to the thread and back (perf trace of `compare --rows connect`,
/// Linux 6.18, AMD EPYC, family 25 model 17).
const UNMAP_HERE: usize = 256 << 10;
/// Number of chunks that each connection may always give, even if there are many connections.
const MIN_CHUNKS: usize = 8;

/// Memory that a peer offers, as described by the message that passes the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfferedMemory {
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
    /// The rings of a connection, which are in one file.
    Ring,
    /// The single page of a wake-up channel.
    Page,
    /// Landing memory from a connection that has given `others` before.
    Chunk { others: Given },
    /// Memory lent by a connection that has lent `others` before. Several connections may lend the
    /// same file.
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

    /// The peer's debt for a file of this length, if a connection may give many files of this kind.
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

/// Limits on the mappings and the address space of peers' files.
#[derive(Debug, Clone, Copy)]
struct MapLimits {
    mappings: usize,
    bytes: u64,
}

impl MapLimits {
    fn get() -> MapLimits {
        static LIMITS: PerProcess<MapLimits> = PerProcess::new(|| {
            let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
            let mappings = limit.trim().parse().unwrap_or(MAX_MAPPINGS) / MAPPINGS_DIVISOR;
            let address_space = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
            MapLimits { mappings, bytes: MAX_MAPPED.min(address_space / ADDRESS_SPACE_DIVISOR) }
        });
        *LIMITS
    }
}

/// Counts the peers' files that this process has mapped.
#[derive(Debug)]
struct Mapped {
    files: BTreeSet<FileId>,
    /// The number of rings among the mappings. Each connection counts once, with the ring that this
    /// end writes to.
    rings: usize,
    /// The number of mappings of files that several connections may have given, or that this end
    /// has made.
    again: usize,
    /// Address space of all mappings, in bytes.
    bytes: u64,
}

static MAPPED: PerProcess<Mutex<Mapped>> = PerProcess::new(|| Mutex::new(Mapped::new()));

impl Mapped {
    const fn new() -> Mapped {
        Mapped { files: BTreeSet::new(), rings: 0, again: 0, bytes: 0 }
    }

    /// Whether one more file may be mapped. Once half of the allowed mappings or of the allowed
    /// address space is used, each connection may have only an equal share of a quarter of the
    /// allowed amount. So connections with many files leave room for others. The last sixteenth of
    /// the mappings is reserved for rings and for the pages of wake-up channels.
    fn has_room(&self, usage: Usage, len: u64, limits: MapLimits) -> bool {
        let (mapped, limit) = (self.files.len() + self.again, limits.mappings);
        let given = match usage {
            Usage::Ring | Usage::Page => return mapped < limit,
            Usage::Chunk { others } | Usage::Lent { others } | Usage::Named { others } => others,
        };
        let rings = self.rings.max(1);
        let share = (limit / 4 / rings).max(MIN_CHUNKS);
        let has_mapping = mapped < limit / 2 || given.files < share && mapped < limit - limit / 16;
        let bytes = self.bytes.saturating_add(len);
        // The share is never smaller than the chunks that a connection may give, so that no chunk
        // exceeds the share.
        let share = (limits.bytes / 4 / rings as u64).max(MAX_CHUNK_BYTES);
        let has_bytes = bytes <= limits.bytes / 2
            || given.bytes.saturating_add(len) <= share && bytes <= limits.bytes;
        has_mapping && has_bytes
    }
}

/// A file's entry in [`MAPPED`].
#[derive(Debug)]
struct MapEntry {
    /// `None` for a file that several connections may give, or that this end has made.
    file: Option<FileId>,
    usage: Usage,
    bytes: u64,
}

impl MapEntry {
    fn new(file: Option<FileId>, usage: Usage, len: usize) -> io::Result<MapEntry> {
        let (limits, bytes) = (MapLimits::get(), len as u64);
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let file = file.filter(|_| !usage.may_come_again());
        if file.is_some_and(|file| mapped.files.contains(&file)) {
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
        match file {
            Some(file) => drop(mapped.files.insert(file)),
            None => mapped.again += 1,
        }
        mapped.rings += usize::from(usage == Usage::Ring);
        mapped.bytes += bytes;
        Ok(MapEntry { file, usage, bytes })
    }
}

impl Drop for MapEntry {
    fn drop(&mut self) {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        match self.file {
            Some(file) => drop(mapped.files.remove(&file)),
            None => mapped.again -= 1,
        }
        mapped.rings -= usize::from(self.usage == Usage::Ring);
        mapped.bytes -= self.bytes;
    }
}

/// The mapping of a lent file. The lock lets only one thread at a time map the file.
type Turn = Arc<Mutex<Weak<PeerMap>>>;

/// Files that one or several connections lend.
struct Lent {
    turns: BTreeMap<FileId, Turn>,
    /// When there are this many turns, the turns of files that are no longer mapped are dropped.
    full: usize,
}

static LENT: PerProcess<Mutex<Lent>> =
    PerProcess::new(|| Mutex::new(Lent { turns: BTreeMap::new(), full: MIN_TURNS }));

/// Minimum of `full`.
const MIN_TURNS: usize = 64;

impl Lent {
    fn turn(file: FileId) -> Turn {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.turns.len() >= lent.full {
            // If no other thread holds a turn, its lock is free.
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

/// A mapped file of a peer. No file is mapped twice, except files that several connections may
/// give. All peers together have at most a quarter of the process's mappings. A thread that may
/// block unmaps a file of more than [`UNMAP_HERE`] bytes.
#[derive(Debug)]
pub(crate) struct PeerMap {
    /// `Some` until this value is dropped.
    mapped: Option<(Map, MapEntry)>,
    user: u32,
    cost: Option<MapCost>,
}

impl PeerMap {
    /// Maps a whole file on behalf of a peer that runs as `user`. May block, because the descriptor
    /// may refer to any file.
    ///
    /// # Errors
    /// The errors of [`Map::whole`]. Also fails if the file is mapped already or there are too many
    /// files.
    pub(crate) fn new(file: impl AsFd, len: usize, user: u32, usage: Usage) -> io::Result<PeerMap> {
        let (mut entry, cost) = (None, usage.cost(user, len));
        let accept = |file| {
            entry = Some(MapEntry::new(Some(file), usage, len)?);
            Ok(())
        };
        let map = Map::whole(file, len, accept)?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user, cost })
    }

    /// Maps a whole file on behalf of a peer that runs as `user`, to read bytes that the peer has
    /// lent. A file that is already mapped in this way is not mapped again. May block, because the
    /// descriptor may refer to any file.
    ///
    /// # Errors
    /// The errors of [`Map::read_only`]. Also fails if there are too many files.
    pub(crate) fn lent(
        file: impl AsFd,
        len: usize,
        user: u32,
        others: Given,
    ) -> io::Result<Arc<PeerMap>> {
        let stat = fstat(&file)?;
        let turn = Lent::turn((stat.st_dev, stat.st_ino));
        // The lock is held while the file is mapped, which may take a long time. The lock delays
        // only threads that map the same file.
        let mut lent = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = lent.upgrade().filter(|map| map.len() == len) {
            // The peer is charged for the thread that was woken.
            drop(MapCost::populated((user, others.pid), 0));
            return Ok(map);
        }
        let map = Arc::new(Self::lent_apart(file, len, user, others)?);
        *lent = Arc::downgrade(&map);
        Ok(map)
    }

    /// Like [`lent`](Self::lent), but always makes a new mapping, at its own address.
    ///
    /// # Errors
    /// The errors of [`lent`](Self::lent).
    pub(crate) fn lent_apart(
        file: impl AsFd,
        len: usize,
        user: u32,
        others: Given,
    ) -> io::Result<PeerMap> {
        let usage = Usage::Lent { others };
        let (mut entry, cost) = (None, usage.cost(user, len));
        let map = Map::read_only(file, len, |file| {
            entry = Some(MapEntry::new(Some(file), usage, len)?);
            Ok(())
        })?;
        Ok(PeerMap { mapped: entry.map(|entry| (map, entry)), user, cost })
    }

    /// The address of the first byte, never null. Other processes may write to the memory.
    pub(crate) fn ptr(&self) -> *const u8 {
        let none = || NonNull::<u8>::dangling().as_ptr().cast_const();
        self.mapped.as_ref().map_or_else(none, |(map, _)| map.ptr())
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.mapped.as_ref().map_or(0, |(map, _)| map.len())
    }

    /// Counts a file that has been mapped already. `file` is `None` if this end has made the file.
    ///
    /// # Errors
    /// The file is counted already, or there are too many files.
    pub(crate) fn adopt(
        map: Map,
        file: Option<FileId>,
        user: u32,
        usage: Usage,
    ) -> io::Result<PeerMap> {
        let entry = MapEntry::new(file, usage, map.len())?;
        Ok(PeerMap { mapped: Some((map, entry)), user, cost: None })
    }

    /// Counts bytes that are borrowed from the file.
    pub(crate) fn add_borrowed(&self, len: usize) {
        if let Some(cost) = &self.cost {
            cost.add_used(len as u64);
        }
    }

    /// Copies `src` to `offset`. Returns false if the bytes do not fit there.
    pub(crate) fn write(&mut self, offset: u64, src: &[u8]) -> bool {
        self.mapped.as_mut().is_some_and(|(map, _)| map.write(offset, src))
    }

    /// Frees pages: see [`Map::release`].
    pub(crate) fn release(&self, keep: usize) {
        if let Some((map, _)) = &self.mapped {
            map.release(keep);
        }
    }

    /// Offset after the last byte that was written.
    fn touched(&self) -> usize {
        self.mapped.as_ref().map_or(0, |(map, _)| map.touched())
    }

    /// Whether this end has written nothing to the mapping so far.
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
        if let Some(mapped) = self.mapped.take()
            && mapped.0.len() > UNMAP_HERE
        {
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
    const LIMITS: MapLimits = MapLimits { mappings: 16_382, bytes: MAX_MAPPED };

    #[test]
    fn a_file_is_mapped_once_at_a_time() {
        let file = sealed(c"test", (64 << 10) + 4096).unwrap();
        let map = || {
            let ([map, _], id) = Map::parts(&file, [4096, 4096])?;
            PeerMap::adopt(map, Some(id), 0, Usage::Ring)
        };
        let first = map().unwrap();
        let error = map().unwrap_err();
        assert!(error.to_string().contains("given already"), "{error}");
        drop(first);
        map().unwrap();
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
        // Two users lend the same file.
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
        // The file is already mapped on behalf of another peer.
        drop(PeerMap::lent(&file, 4096, 1, others(102)).unwrap());
        assert_eq!((owed(101), owed(102) > 0), (0, true));
        drop(first);
        let unread = owed(101);
        assert!(unread > 0, "it was taken back unread");
        let read = PeerMap::lent(&file, 4096, 1, others(103)).unwrap();
        read.add_borrowed(1 << 30);
        drop(read);
        let least = owed(103);
        assert!(least > 0 && least <= unread / 4, "it was used: {least} of {unread}");
        let usage = Usage::Chunk { others: others(103) };
        let (chunk, unused) =
            (sealed(c"test", 4 << 20).unwrap(), sealed(c"test", 4 << 20).unwrap());
        rustix::io::pwrite(&chunk, &vec![0; 4 << 20], 0).unwrap();
        let mut written = PeerMap::new(&chunk, 4 << 20, 1, usage).unwrap();
        assert!(written.write(0, &vec![1; 4 << 20]));
        drop(written);
        assert!(owed(103) < 1 << 20, "it was used: {}", owed(103));
        let before = owed(103);
        PeerMap::new(&unused, 4 << 20, 1, usage).unwrap_err();
        assert!(owed(103) >= before + (1 << 19), "a file with holes was looked at");
    }

    /// Connections that give as many files as they may.
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

    /// The attack: each connection offers a file of 64 GiB as a buffer, and then shorter files.
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
