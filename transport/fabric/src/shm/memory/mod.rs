//! Memory that two processes share.
//!
//! | module | what |
//! |---|---|
//! | `peer_map` | maps a peer's file once, and unmaps it on another thread |
//! | `map_debt` | charges peers for files that this end has mapped or checked |
//! | `chunks` | the peer's landing chunks: limits, WRITEs |
//! | `table` | this process's landing chunks, keyed by remote key |
//!
//! # Mapped files
//!
//! A [`Map`] is a file mapped into this process: the rings of a connection, or a file that a peer
//! gave.
//!
//! The process that offers memory must have allocated that memory. Landing memory and lent memory
//! must have all pages when they are offered: a process that touches a hole allocates the page, and
//! the kernel charges the page to that process. SEEK_HOLE finds holes without allocating anything.
//! SEEK_HOLE also reports a hole for a page that was allocated (fallocate(2)) but never touched.
//!
//! A lent file keeps its pages, because its seals forbid punching holes. The maker of landing
//! memory can take pages away later (FALLOC_FL_PUNCH_HOLE), because it must be able to free pages
//! even if the peer keeps its mapping. So this process allocates no page before it writes there,
//! and a mapping begins without pages. A WRITE first reads one byte of each window of
//! [`FAULT_AROUND`] bytes that no earlier WRITE has reached. With one fault, the kernel then maps
//! the pages that the file has in the window. The kernel allocates at most the page that was read,
//! which is about to be written.

pub(super) mod chunks;
pub(super) mod map_debt;
pub(super) mod peer_map;
pub(super) mod table;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{SealFlags, SeekFrom, Stat, fcntl_get_seals, fstat, seek};
use rustix::io::retry_on_intr;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use tonic_rdma_memory::Process;

use crate::shm::ring::Words;
use crate::turn::COPY_UNIT;

/// Number of bytes around a fault that the kernel maps if the file has these pages
/// (fault_around_bytes, 64 KiB unless configured).
const FAULT_AROUND: usize = 64 << 10;
/// The size in bytes of the largest ordinary page of any kernel. The length of a file may be
/// rounded up to a multiple of this size.
const MAX_PAGE: u64 = 64 << 10;
/// Number of bytes to unmap at a time. While the kernel unmaps these bytes, no other thread can map
/// memory.
const UNMAP_STEP: usize = 4 << 20;

/// Device and inode of a file.
pub(crate) type FileId = (u64, u64);

/// The seals of a file that nobody can truncate.
const KEEPS_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);
/// The seals of a file whose pages are fixed. Either only the maker of the file can write to the
/// file, or nobody can.
const READ_ONLY: [SealFlags; 2] =
    [KEEPS_SIZE.union(SealFlags::FUTURE_WRITE), KEEPS_SIZE.union(SealFlags::WRITE)];

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Checks that a file can safely be accessed for as long as it is mapped.
fn check(file: impl AsFd, len: usize, any_of: &[SealFlags]) -> io::Result<Stat> {
    // The call fails for a file that is not a memory file.
    let seals = fcntl_get_seals(&file)
        .map_err(|e| invalid(format!("not a file that can be sealed ({e})")))?;
    // If the peer frees a huge page, the host may have no huge page left when this process touches
    // the memory. The kernel would then kill this process.
    if !tonic_rdma_memory::memfd::has_ordinary_pages(file.as_fd())? {
        return Err(invalid("not a file of ordinary pages".to_owned()));
    }
    if !any_of.iter().any(|wanted| seals.contains(*wanted)) {
        return Err(invalid(format!("a file that is not sealed with {any_of:?} ({seals:?})")));
    }
    let stat = fstat(&file)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let max_size = (len as u64).next_multiple_of(MAX_PAGE);
    // A page fault waits while the peer punches a hole around the faulting address. The limit on
    // the file's size bounds that wait.
    if len == 0 || size < len as u64 || size > max_size {
        return Err(invalid(format!("a file of {size} bytes, {len} are to be mapped")));
    }
    Ok(stat)
}

/// Checks that a file has all of its pages. Allocates no pages.
fn check_pages(file: impl AsFd, stat: &Stat) -> io::Result<()> {
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let hole = seek(&file, SeekFrom::Hole(0))?;
    if hole < size {
        let what = format!(
            "a file of {size} bytes with a hole at {hole}: whoever gives memory writes to each of \
             its pages first"
        );
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
    }
    Ok(())
}

/// The offset of the second of two parts of a file, and the length of the file.
fn second_part([first, second]: [usize; 2]) -> (usize, usize) {
    let offset = first.next_multiple_of(MAX_PAGE as usize);
    (offset, offset + second)
}

/// A mapping that other processes write to. Except for lent bytes (`lend::borrower`), this process
/// never accesses a mapping through a reference to plain bytes.
#[derive(Debug)]
pub(crate) struct Map {
    ptr: NonNull<u8>,
    len: usize,
    /// Offset after the last byte that was written.
    touched: usize,
    /// The process that made the mapping. Children of this process do not have the mapping
    /// (MADV_DONTFORK).
    process: Process,
}

// SAFETY: the mapping is owned by this value; it is reached only through atomics, raw copies and,
// for lent bytes, the slices of `Borrowed`.
unsafe impl Send for Map {}
// SAFETY: as above: `words` gives atomics, `write` takes &mut self.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len` bytes of a file. The file must be sealed so that nobody can truncate
    /// it, because touching truncated memory would kill this process. The file may be longer, up to
    /// the next multiple of 64 KiB. `accept` gets the file's identity and may refuse the file.
    ///
    /// # Errors
    /// The file is no memory file of ordinary pages, is not sealed against shrinking and growing,
    /// is too short or too long, or cannot be mapped.
    pub(crate) fn new(
        file: impl AsFd,
        len: usize,
        accept: impl FnOnce(FileId) -> io::Result<()>,
    ) -> io::Result<Map> {
        let stat = check(&file, len, &[KEEPS_SIZE])?;
        accept((stat.st_dev, stat.st_ino))?;
        Map::of(file, len, READ_WRITE)
    }

    /// Maps both parts of a file with the layout of [`create_parts`](Self::create_parts). Returns
    /// the parts and the file's identity. Each part is unmapped by itself.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub(crate) fn parts(file: impl AsFd, lens: [usize; 2]) -> io::Result<([Map; 2], FileId)> {
        let stat = check(&file, second_part(lens).1, &[KEEPS_SIZE])?;
        Ok((Map::map_parts(file, lens)?, (stat.st_dev, stat.st_ino)))
    }

    /// Maps the whole file with one call. The first part ends where the second part begins.
    fn map_parts(file: impl AsFd, lens: [usize; 2]) -> io::Result<[Map; 2]> {
        let (offset, len) = second_part(lens);
        let mut first = Map::of(file, len, READ_WRITE)?;
        // SAFETY: the offset lies within the mapping. The second part takes over what lies behind
        // the offset, and the first part does not reach it any more (R15).
        let ptr = unsafe { first.ptr.add(offset) };
        first.len = offset;
        let second = Map { ptr, len: len - offset, touched: 0, process: Process::current() };
        Ok([first, second])
    }

    /// Like [`new`](Self::new), but requires a file that has all of its pages.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and `UnexpectedEof` if the file has a hole.
    pub(crate) fn whole(
        file: impl AsFd,
        len: usize,
        accept: impl FnOnce(FileId) -> io::Result<()>,
    ) -> io::Result<Map> {
        let stat = check(&file, len, &[KEEPS_SIZE])?;
        check_pages(&file, &stat)?;
        accept((stat.st_dev, stat.st_ino))?;
        Map::of(file, len, READ_WRITE)
    }

    /// Maps a file of `len` bytes for reading, with all of its pages, if nobody can truncate the
    /// file or take its pages away. `accept` is as for [`new`](Self::new).
    ///
    /// # Errors
    /// The errors of [`whole`](Self::whole). Also fails if the file is not sealed against writing
    /// other than through existing mappings.
    pub(crate) fn read_only(
        file: impl AsFd,
        len: usize,
        accept: impl FnOnce(FileId) -> io::Result<()>,
    ) -> io::Result<Map> {
        let stat = check(&file, len, &READ_ONLY)?;
        // A read would allocate missing pages, and the kernel would charge them to this process.
        // Nobody can remove existing pages, because either seal forbids punching holes.
        check_pages(&file, &stat).map_err(|error| invalid(error.to_string()))?;
        accept((stat.st_dev, stat.st_ino))?;
        let map = Map::of(file, len, ProtFlags::READ)?;
        map.populate();
        Ok(map)
    }

    /// Populates the mapping's page tables, piece by piece. Other threads can map memory between
    /// two pieces (R20).
    fn populate(&self) {
        for at in (0..self.len).step_by(COPY_UNIT) {
            let len = COPY_UNIT.min(self.len - at);
            let populated = retry_on_intr(|| {
                // SAFETY: the range lies in this mapping, and its contents stay as they are (R15).
                unsafe { madvise(self.ptr.as_ptr().add(at).cast(), len, Advice::LinuxPopulateRead) }
            });
            if let Err(error) = populated {
                // Kernels before 5.14 do not know this advice, and map pages when they are first
                // read.
                return tracing::debug!(%error, "MADV_POPULATE_READ");
            }
        }
    }

    /// The address of the first byte. Other processes may write to the memory.
    pub(crate) fn ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn of(file: impl AsFd, len: usize, prot: ProtFlags) -> io::Result<Map> {
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that keeps its
        // size.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) }?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Map { ptr, len, touched: 0, process: Process::current() };
        // A child of fork() has no use for the mapping, and would keep the peer's memory alive.
        // SAFETY: the range is this mapping, and its contents stay as they are.
        if let Err(error) = unsafe { madvise(map.ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }
        {
            tracing::debug!(%error, "MADV_DONTFORK");
        }
        Ok(map)
    }

    /// Creates a file of this process and maps the file. The file begins without pages.
    pub(crate) fn create(len: usize) -> io::Result<(Map, OwnedFd)> {
        let file = tonic_rdma_memory::memfd::sealed(c"tonic-rdma-page", len)?;
        Ok((Map::of(&file, len, READ_WRITE)?, file))
    }

    /// Creates a file of this process with two parts, and maps both. The second part begins at the
    /// next multiple of 64 KiB. The file begins without pages.
    pub(crate) fn create_parts(lens: [usize; 2]) -> io::Result<([Map; 2], OwnedFd)> {
        let file = tonic_rdma_memory::memfd::sealed(c"tonic-rdma-rings", second_part(lens).1)?;
        Ok((Map::map_parts(&file, lens)?, file))
    }

    /// Frees the pages after the first `keep` bytes, in both processes. The freed bytes read as
    /// zeros afterwards.
    pub(crate) fn release(&self, keep: usize) {
        // SAFETY: takes a number and accesses no memory; this rests on no rule.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let Ok(page @ 1..) = usize::try_from(page) else { return };
        let keep = keep.next_multiple_of(page);
        let Some(len) = self.len.checked_sub(keep).filter(|len| *len > 0) else { return };
        let released = retry_on_intr(|| {
            // SAFETY: the range lies in this mapping and begins at a page; nobody has a reference
            // to plain bytes of it, and a read of the atomics finds zeros (R15).
            unsafe { madvise(self.ptr.as_ptr().add(keep).cast(), len, Advice::LinuxRemove) }
        });
        if let Err(error) = released {
            tracing::debug!(%error, "MADV_REMOVE");
        }
    }

    /// Copies `src` to `offset`. Returns false if the bytes do not fit there.
    pub(crate) fn write(&mut self, offset: u64, src: &[u8]) -> bool {
        let end =
            usize::try_from(offset).ok().and_then(|at| Some((at, at.checked_add(src.len())?)));
        let Some((at, end)) = end else { return false };
        if end > self.len {
            return false;
        }
        self.touch(at, end);
        // SAFETY: at .. end lies within the mapping, whose file keeps its size (R15). The peer may
        // remove pages at any time, and a write allocates them again. This process does not use the
        // bytes that `touch` reads, and has no reference to them. Source and destination differ,
        // because the destination is the peer's file.
        unsafe { tonic_rdma_memory::copy(src.as_ptr(), self.ptr.as_ptr().add(at), src.len()) };
        true
    }

    /// Maps the file's pages in those windows of `at .. end` that no earlier write has reached.
    fn touch(&mut self, at: usize, end: usize) {
        let mut next = at.max(self.touched);
        while next < end {
            // SAFETY: next lies within the mapping, which keeps its size (R15). The byte that is
            // read is not used.
            unsafe { self.ptr.as_ptr().add(next).read_volatile() };
            let addr = self.ptr.addr().get() + next;
            next += FAULT_AROUND - addr % FAULT_AROUND;
        }
        self.touched = self.touched.max(end);
    }

    /// Offset after the last byte that was written.
    pub(crate) fn touched(&self) -> usize {
        self.touched
    }
}

impl Words for Map {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page aligned, `len` bytes long, and lives as long as self. Its
        // file keeps its size, and a missing page reads as zeros (R15). Other processes may write
        // to the memory at any time, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<AtomicU64>(), self.len / 8) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        for at in (0..self.len).step_by(UNMAP_STEP) {
            let len = UNMAP_STEP.min(self.len - at);
            // SAFETY: mapped in `of`, each part unmapped once, and no borrow outlives self.
            let _ = unsafe { munmap(self.ptr.as_ptr().add(at).cast(), len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn refused(file: impl AsFd, len: usize) -> String {
        Map::new(file, len, |_| Ok(())).unwrap_err().to_string()
    }

    #[test]
    fn only_files_that_keep_their_size_are_mapped() {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8192).unwrap();
        assert!(refused(&file, 4096).contains("not sealed"));
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(refused(&file, 4096).contains("not sealed"), "it could still grow");
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        assert!(refused(&file, 8193).contains("8192 bytes"));
        let long = tonic_rdma_memory::memfd::sealed(c"test", 128 << 10).unwrap();
        assert!(refused(&long, 4096).contains("131072 bytes"), "longer than it should be");
        assert!(refused(&file, 0).contains("0 are to be mapped"));
        Map::new(&file, 8192, |_| Ok(())).unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        assert!(refused(&pipe, 1).contains("not a file that can be sealed"));
        let disk = tempfile::tempfile().unwrap();
        assert!(refused(&disk, 1).contains("not a file that can be sealed"));
    }

    fn page() -> usize {
        // SAFETY: takes a number and touches no memory of ours; this rests on no rule.
        usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
    }

    fn blocks(file: &OwnedFd) -> i64 {
        fstat(file).unwrap().st_blocks
    }

    fn pages(file: &OwnedFd) -> usize {
        usize::try_from(blocks(file)).unwrap() * 512 / page()
    }

    /// A file with a fixed size that has only the pages of these bytes.
    fn with_pages(len: u64, pages: &[std::ops::Range<u64>]) -> OwnedFd {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        for page in pages.iter().flat_map(|bytes| bytes.clone().step_by(4096)) {
            assert_eq!(rustix::io::pwrite(&file, &[0; 4096], page).unwrap(), 4096);
        }
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        file
    }

    /// The attack: a peer makes this process allocate pages that the peer only promises.
    #[test]
    fn files_with_holes_are_refused_and_nothing_of_them_is_made() {
        use rustix::fs::{FallocateFlags, fallocate};
        const LEN: u64 = 1 << 20;
        let keep = FallocateFlags::KEEP_SIZE;
        // This file has as many blocks as it should have, but they lie beyond its end.
        let behind = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&behind, LEN).unwrap();
        fallocate(&behind, keep, LEN, 2 * LEN).unwrap();
        fcntl_add_seals(&behind, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let all = std::slice::from_ref(&(0..LEN));
        let punched = with_pages(LEN, all);
        let last = LEN - MAX_PAGE;
        fallocate(&punched, keep | FallocateFlags::PUNCH_HOLE, last, MAX_PAGE).unwrap();
        let files = [
            (with_pages(LEN, &[]), 0),
            (with_pages(LEN, &[0..2 * MAX_PAGE, 3 * MAX_PAGE..LEN]), 2 * MAX_PAGE),
            (behind, 0),
            (punched, last),
        ];
        for (file, hole) in files {
            let before = blocks(&file);
            fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
            let maps = [
                Map::read_only(&file, LEN as usize, |_| Ok(())),
                Map::whole(&file, LEN as usize, |_| Ok(())),
            ];
            for map in maps {
                let error = map.unwrap_err();
                assert!(error.to_string().contains(&format!("a hole at {hole}:")), "{error}");
            }
            assert_eq!(blocks(&file), before);
        }
        let file = with_pages(LEN, all);
        Map::whole(&file, LEN as usize, |_| Ok(())).unwrap();
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        Map::read_only(&file, LEN as usize, |_| Ok(())).unwrap();
        assert_eq!(blocks(&file), LEN as i64 / 512);
    }

    /// A WRITE allocates only the pages that it writes to. Otherwise a peer could make this process
    /// allocate gigabytes by taking pages away.
    #[test]
    fn only_pages_that_are_written_are_made() {
        let promised = tonic_rdma_memory::memfd::sealed(c"test", 1 << 20).unwrap();
        let mut map = Map::new(&promised, 1 << 20, |_| Ok(())).unwrap();
        assert_eq!(pages(&promised), 0);
        assert!(map.touched() == 0 && map.write(0, &[1]));
        assert_eq!(pages(&promised), 1);
        assert!(map.write(256 << 10, &vec![1; 2 * page()]));
        assert_eq!(pages(&promised), 3);
        assert!(map.write(512 << 10, &[1]) && map.write(640 << 10, &[]));
        assert_eq!(pages(&promised), 4);
        let (own, there) = Map::create(1 << 20).unwrap();
        assert_eq!(blocks(&there), 0);
        own.words().iter().for_each(|word| word.store(1, Ordering::Relaxed));
        assert_eq!(blocks(&there), 2048);
        own.release(page() + 1000);
        assert_eq!(pages(&there), 2, "those that are kept");
        assert_eq!(
            [0, page() + 1000, 2 * page()].map(|at| own.words()[at / 8].load(Ordering::Relaxed)),
            [1, 1, 0]
        );
    }

    /// Existing pages are mapped many at a time.
    #[test]
    fn a_first_write_does_not_fault_page_by_page() {
        let (own, file) = Map::create(1 << 20).unwrap();
        own.words().iter().for_each(|word| word.store(1, Ordering::Relaxed));
        let mut map = Map::new(&file, 1 << 20, |_| Ok(())).unwrap();
        let data = vec![1; 1 << 20];
        // SAFETY: all zeros are a valid rusage, and the call writes to it only.
        let faults = || unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
            usage.ru_minflt
        };
        let before = faults();
        assert!(map.write(0, &data));
        let faults = faults() - before;
        assert!(faults <= 64, "{faults} faults for 256 pages");
    }

    #[test]
    fn writes_stay_within() {
        let (reader, file) = Map::create(4096).unwrap();
        let mut writer = Map::new(&file, 4096, |_| Ok(())).unwrap();
        assert!(writer.write(4088, &[1; 8]));
        assert_eq!(reader.words()[511].load(Ordering::Relaxed), 0x0101_0101_0101_0101);
        for (offset, len) in [(4089, 8), (u64::MAX, 1), (4097, 0), (0, 4097)] {
            assert!(!writer.write(offset, &vec![0; len]), "{offset} {len}");
        }
    }
}
