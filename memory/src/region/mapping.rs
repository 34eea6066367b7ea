//! Mapped memory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::file_limit::retry;
use super::memfd;
use super::page::{HUGE_PAGE, HugePages};
use super::random_address::map_at_random;
use crate::error::PoolError;
use crate::process::Process;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// Flags for memory of this process only.
const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Number of bytes populated at a time.
const POPULATE_STEP: usize = 64 << 10;
/// The size of the smallest page in bytes.
const MIN_PAGE: usize = 4096;

/// The place of a mapping in the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapPlace {
    /// At an address that the kernel chooses, usually next to other mappings.
    Any,
    /// At an address that the kernel chooses, aligned to a huge page. With [`Any`](Self::Any), a
    /// mapping of 2 MiB becomes a huge page only by chance on kernels before 6.7, which align
    /// mappings to ordinary pages.
    HugePage,
    /// At an address that peers cannot guess.
    Random,
}

/// Mapped memory of this process, or of a file that peers may map. The memory is page aligned. It
/// is zeroed when it is mapped, unless it maps a file that exists already.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// Whether peers may have mapped the memory and may write to it.
    shared: bool,
    /// The process that has mapped the memory, which is not mapped in children (MADV_DONTFORK).
    process: Process,
}

// SAFETY: a mapping is plain memory, owned by this value. Slots and pieces determine who may access
// which part (R8).
unsafe impl Send for Mapping {}
// SAFETY: as above; only the address is reachable through &Mapping.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn new(len: usize, huge: HugePages, place: MapPlace) -> Result<Self, PoolError> {
        if huge == HugePages::Explicit && len.is_multiple_of(HUGE_PAGE) {
            static WARNED: AtomicBool = AtomicBool::new(false);
            // The page size is explicit, because the default may differ and only whole pages can be
            // unmapped.
            match Self::map(
                len,
                READ_WRITE,
                ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
                None,
                place,
            ) {
                Ok(mapping) => return Ok(mapping),
                Err(error) if !WARNED.swap(true, Relaxed) => {
                    crate::throttled!(
                        warn,
                        %error, len,
                        "no explicit huge pages (reserve some in /proc/sys/vm/nr_hugepages); \
                         using ordinary ones"
                    );
                }
                Err(_) => {}
            }
        }
        let huge = huge != HugePages::Off && len >= HUGE_PAGE;
        let place = if huge && place == MapPlace::Any { MapPlace::HugePage } else { place };
        let mapping = Self::map(len, READ_WRITE, ANONYMOUS, None, place)
            .map_err(|source| PoolError::Map { len, source })?;
        if huge {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        Ok(mapping)
    }

    /// Maps a new file that peers can also map, and that can neither shrink nor grow. All of its
    /// pages are allocated, because a peer refuses a file with holes.
    pub(crate) fn shared(len: usize, huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        let file = memfd::sealed(c"tonic-rdma-landing", len)?;
        let mapping = Self::map(len, READ_WRITE, libc::MAP_SHARED, Some(&file), MapPlace::Any)?;
        if huge != HugePages::Off && len >= HUGE_PAGE {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        mapping.populate(libc::MADV_POPULATE_WRITE)?;
        Ok((mapping, file))
    }

    /// Maps a new file that peers can map for reading. The size and the pages of the file are
    /// fixed, and only this mapping can write to the file.
    pub(crate) fn lendable(len: usize, huge: HugePages) -> io::Result<(Self, OwnedFd)> {
        let file = memfd::allocated(c"tonic-rdma-lent", len)?;
        let mut mapping = Self::map(len, READ_WRITE, libc::MAP_SHARED, Some(&file), MapPlace::Any)?;
        mapping.shared = false;
        if huge != HugePages::Off && len >= HUGE_PAGE {
            mapping.advise(libc::MADV_HUGEPAGE);
        }
        memfd::seal_for_readers(&file)?;
        mapping.populate(libc::MADV_POPULATE_WRITE)?;
        Ok((mapping, file))
    }

    /// Maps a file for reading.
    pub(crate) fn read_only(len: usize, file: &OwnedFd) -> io::Result<Self> {
        let mut mapping =
            Self::map(len, libc::PROT_READ, libc::MAP_SHARED, Some(file), MapPlace::Any)?;
        mapping.shared = false;
        mapping.populate(libc::MADV_POPULATE_READ)?;
        Ok(mapping)
    }

    /// Maps the file of a [`shared`](Self::shared) mapping a second time.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn again(len: usize, file: &OwnedFd) -> io::Result<Self> {
        Self::map(len, READ_WRITE, libc::MAP_SHARED, Some(file), MapPlace::Any)
    }

    fn map(
        len: usize,
        prot: libc::c_int,
        flags: libc::c_int,
        file: Option<&OwnedFd>,
        place: MapPlace,
    ) -> io::Result<Self> {
        let map = |at: usize, len: usize| {
            let (at, fd) =
                (std::ptr::without_provenance_mut(at), file.map_or(-1, AsRawFd::as_raw_fd));
            // SAFETY: a new mapping affects no existing one: an address without MAP_FIXED is a
            // hint, which the kernel ignores if something is mapped there (R8).
            let ptr = unsafe { libc::mmap(at, len, prot, flags, fd, 0) };
            if ptr == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            Ok(NonNull::new(ptr.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?)
        };
        let unmap = |ptr: NonNull<u8>, len: usize| {
            // SAFETY: a part of what `map` has just returned, and no reference to it exists (R8).
            let _ = unsafe { libc::munmap(ptr.as_ptr().cast(), len) };
        };
        let ptr = match place {
            MapPlace::Any => map(0, len)?,
            MapPlace::Random => map_at_random(len, |at| map(at, len), |ptr| unmap(ptr, len))?,
            MapPlace::HugePage => {
                let all = map(0, len + HUGE_PAGE)?;
                let before = all.as_ptr().align_offset(HUGE_PAGE);
                // SAFETY: the mapping is a huge page longer than what is kept of it (R8).
                let (ptr, behind) = unsafe { (all.add(before), all.add(before + len)) };
                if before > 0 {
                    unmap(all, before);
                }
                unmap(behind, HUGE_PAGE - before);
                ptr
            }
        };
        let mapping = Mapping { ptr, len, shared: file.is_some(), process: Process::current() };
        // A child of fork() must not share pages that the device writes to. After copy-on-write,
        // the parent could be left with pages that the device does not know.
        mapping.advise(libc::MADV_DONTFORK);
        Ok(mapping)
    }

    /// Touches each page, so that the page is allocated and mapped. The pages are touched in
    /// pieces, so that other threads can map memory between two pieces (R20). On Linux 5.14 and
    /// later, `advice` makes the kernel do this.
    fn populate(&self, advice: libc::c_int) -> io::Result<()> {
        for at in (0..self.len).step_by(POPULATE_STEP) {
            let len = POPULATE_STEP.min(self.len - at);
            // SAFETY: the range lies in this mapping, whose contents no advice used here changes
            // (R8).
            let piece = unsafe { self.ptr.add(at) };
            // SAFETY: as above.
            match retry(|| unsafe { libc::madvise(piece.as_ptr().cast(), len, advice) }) {
                Ok(()) => continue,
                Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
                Err(_) => {}
            }
            for page in (0..len).step_by(MIN_PAGE) {
                // SAFETY: within the mapping, which can be read. The value is not used, and no code
                // has a reference to the memory yet (R8). A file that is mapped for reading has all
                // pages.
                unsafe { piece.add(page).read_volatile() };
            }
        }
        Ok(())
    }

    fn advise(&self, advice: libc::c_int) {
        // SAFETY: the range is this mapping. No advice used here changes its contents, except
        // MADV_REMOVE in `drop`.
        let advised =
            retry(|| unsafe { libc::madvise(self.ptr.as_ptr().cast(), self.len, advice) });
        if let Err(error) = advised {
            tracing::debug!(%error, advice, "madvise failed");
        }
    }

    /// Asks the kernel to take further pages from a NUMA node while the node has free memory
    /// (mbind(2), MPOL_PREFERRED). A kernel without nodes, or a sandbox, may refuse the call.
    pub(crate) fn prefer_node(&self, node: u32) {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let mut nodes: [libc::c_ulong; 1024 / BITS] = [0; 1024 / BITS];
        let Some(word) = nodes.get_mut(node as usize / BITS) else { return };
        *word = 1 << (node as usize % BITS);
        // SAFETY: the range is this mapping, whose contents no policy changes. The call gets the
        // number of bits of the mask plus one, and reads only the bits of the mask (R8).
        let refused = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.ptr.as_ptr(),
                self.len,
                libc::MPOL_PREFERRED,
                nodes.as_ptr(),
                nodes.len() * BITS + 1,
                0,
            )
        };
        if refused != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, node, "memory is taken from any NUMA node");
        }
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        if self.shared {
            // A peer that keeps its mapping must not keep the memory, so the pages are returned to
            // the system now.
            self.advise(libc::MADV_REMOVE);
        }
        // SAFETY: mapped in `map` and unmapped only here; a registration has been dropped before
        // (field order in Region).
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random places are also found under the sanitizers, which leave the program only part of the
    /// address space.
    #[test]
    fn mappings_at_random_places_are_ordinary_memory() {
        let len = 64 << 10;
        let mappings: Vec<Mapping> =
            (0..32).map(|_| Mapping::new(len, HugePages::Off, MapPlace::Random).unwrap()).collect();
        for (i, mapping) in mappings.iter().enumerate() {
            // SAFETY: the mapping is `len` bytes long, zeroed, and nobody else's (R8).
            let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.ptr().as_ptr(), len) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(i as u8 + 1);
        }
        for (i, mapping) in mappings.iter().enumerate() {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(mapping.ptr().as_ptr(), len) };
            assert!(bytes.iter().all(|byte| *byte == i as u8 + 1));
        }
        let mut starts: Vec<usize> = mappings.iter().map(|m| m.ptr().addr().get()).collect();
        starts.sort_unstable();
        let adjacent = starts.windows(2).filter(|pair| pair[1] - pair[0] < 1 << 20).count();
        assert_eq!(adjacent, 0, "{starts:x?}");
    }

    /// Returns a figure from smaps for the mapping that contains an address. The kernel may have
    /// merged this mapping with others.
    #[cfg(not(miri))]
    fn smaps(start: usize, what: &str) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let is_of = |line: &str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let [from, to] =
                range.map(|(from, to)| [from, to])?.map(|at| u64::from_str_radix(at, 16));
            Some((from.ok()?..to.ok()?).contains(&(start as u64)))
        };
        let mut lines = smaps.lines().skip_while(|line| is_of(line) != Some(true));
        let line = lines.find(|line| line.starts_with(what)).expect("smaps has the line");
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Makes 50 mappings of each kind, so that no address is aligned by chance.
    #[test]
    fn huge_pages_are_whole_wherever_they_lie() {
        for place in [MapPlace::Random, MapPlace::Any] {
            for _ in 0..50 {
                let mapping = Mapping::new(HUGE_PAGE, HugePages::Transparent, place).unwrap();
                assert!(mapping.ptr().addr().get().is_multiple_of(HUGE_PAGE));
            }
        }
    }

    /// Returns the kernel's setting for transparent huge pages of 2 MiB: `always`, `madvise` or
    /// `never`.
    #[cfg(not(miri))]
    fn when_huge() -> String {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}")).ok()
        };
        let chosen = |file: &str| {
            let modes = read(file)?;
            Some(modes.split_once('[')?.1.split_once(']')?.0.to_owned())
        };
        let in_general = chosen("enabled").unwrap_or("never".into());
        match chosen("hugepages-2048kB/enabled") {
            Some(mode) if mode == "inherit" => in_general,
            Some(mode) => mode,
            // Kernels before 6.8 have one size: 32 MiB with pages of 16 KiB.
            None if read("hpage_pmd_size").is_some_and(|size| size.trim() != "2097152") => {
                "never".into()
            }
            None => in_general,
        }
    }

    #[cfg(not(miri))]
    #[test]
    fn a_mapping_of_a_huge_page_may_be_one() {
        let when = when_huge();
        for huge in [HugePages::Transparent, HugePages::Off] {
            let mapping = Mapping::new(HUGE_PAGE, huge, MapPlace::Any).unwrap();
            let start = mapping.ptr().addr().get();
            let eligible = smaps(start, "THPeligible:") == 1;
            match (when.as_str(), huge) {
                // Kernels before 6.7 align such a mapping only to an ordinary page.
                ("always", HugePages::Off) => {
                    assert!(eligible || !start.is_multiple_of(HUGE_PAGE));
                }
                ("always" | "madvise", HugePages::Transparent) => assert!(eligible, "{when}"),
                _ => assert!(!eligible, "{when} {huge:?}"),
            }
        }
    }
}
