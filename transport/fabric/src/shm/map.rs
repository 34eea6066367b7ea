//! Files mapped into this process: rings of its own, and what a peer gave.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::ring::Words;

/// The file system of memfds, as linux/magic.h has it. Huge pages have one of their own.
const TMPFS: u64 = 0x0102_1994;

/// A mapping that other processes write to. Never seen through a reference to plain bytes.
#[derive(Debug)]
pub(super) struct Map {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned by this value; it is reached through atomics and raw copies only.
unsafe impl Send for Map {}
// SAFETY: as above: `words` gives atomics, `write` takes &mut self.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len` bytes of a file, if nobody can cut it short: touching what is gone would kill this process.
    ///
    /// # Errors
    /// It is no memory file of ordinary pages, not sealed against shrinking and growing, too short, or cannot be mapped.
    pub(super) fn new(file: impl AsFd, len: usize) -> io::Result<Map> {
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let wanted = SealFlags::SHRINK | SealFlags::GROW;
        // Fails for anything that is no memory file.
        let seals =
            fcntl_get_seals(&file).map_err(|e| invalid(format!("not a file that can be sealed ({e})")))?;
        // A huge page that the peer gives back may not be there again when it is touched, which kills this process.
        if fstatfs(&file)?.f_type as u64 != TMPFS {
            return Err(invalid("not a file of ordinary pages".to_owned()));
        }
        if !seals.contains(wanted) {
            return Err(invalid(format!(
                "a file that is not sealed against shrinking and growing ({seals:?})"
            )));
        }
        let stat = fstat(&file)?;
        let (size, blocks) = (stat.st_size, u64::try_from(stat.st_blocks).unwrap_or(0));
        if len == 0 || u64::try_from(size).unwrap_or(0) < len as u64 {
            return Err(invalid(format!("a file of {size} bytes, {len} are to be mapped")));
        }
        // Pages that the peer has are mapped at once, which costs less than one by one. Those that it only promises are
        // not: they would be made here, and be this process's to account for.
        Map::of(file, len, blocks.saturating_mul(512) >= len as u64)
    }

    fn of(file: impl AsFd, len: usize, populate: bool) -> io::Result<Map> {
        let flags = if populate { MapFlags::SHARED | MapFlags::POPULATE } else { MapFlags::SHARED };
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that keeps its size.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, &file, 0) }?;
        let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Map { ptr, len };
        // A child of fork() has no use for it, and would keep the peer's memory.
        // SAFETY: the range is this mapping, and its contents stay as they are.
        if let Err(error) = unsafe { madvise(map.ptr.as_ptr().cast(), len, Advice::LinuxDontFork) } {
            tracing::debug!(%error, "MADV_DONTFORK");
        }
        Ok(map)
    }

    /// A file of this process's own, mapped.
    pub(super) fn own(len: usize) -> io::Result<(Map, OwnedFd)> {
        let file = tonic_rdma_memory::memfd::sealed(c"tonic-rdma-ring", len)?;
        Ok((Map::of(&file, len, true)?, file))
    }

    /// Copies `src` to `offset`. False when it does not fit there.
    pub(super) fn write(&mut self, offset: u64, src: &[u8]) -> bool {
        let end = usize::try_from(offset).ok().and_then(|at| Some((at, at.checked_add(src.len())?)));
        let Some((at, end)) = end else { return false };
        if end > self.len {
            return false;
        }
        // SAFETY: at .. end lies within the mapping, which keeps its size (R15). This process does not read there, and
        // has no reference to it. Source and destination differ: the destination is the peer's file.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), self.ptr.as_ptr().add(at), src.len()) };
        true
    }
}

impl Words for Map {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page aligned, `len` bytes long, zeroed when it was made, and lives as long as self;
        // other processes may write to it at any time, which atomics allow.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<AtomicU64>(), self.len / 8) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once, and no borrow outlives self.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::sync::atomic::Ordering;

    fn refused(file: impl AsFd, len: usize) -> String {
        Map::new(file, len).unwrap_err().to_string()
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
        assert!(refused(&file, 0).contains("0 are to be mapped"));
        Map::new(&file, 8192).unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        assert!(refused(&pipe, 1).contains("not a file that can be sealed"));
        let disk = tempfile::tempfile().unwrap();
        assert!(refused(&disk, 1).contains("not a file that can be sealed"));
    }

    /// A peer could otherwise have this process make gigabytes of pages by promising them.
    #[test]
    fn pages_that_are_only_promised_are_not_made() {
        let blocks = |file: &OwnedFd| fstat(file).unwrap().st_blocks;
        let promised = tonic_rdma_memory::memfd::sealed(c"test", 1 << 20).unwrap();
        let mut map = Map::new(&promised, 1 << 20).unwrap();
        assert_eq!(blocks(&promised), 0);
        assert!(map.write(0, &[1]));
        assert_eq!(blocks(&promised), 8);
        let (_own, there) = Map::own(1 << 20).unwrap();
        assert_eq!(blocks(&there), 2048);
    }

    #[test]
    fn writes_stay_within() {
        let (reader, file) = Map::own(4096).unwrap();
        let mut writer = Map::new(&file, 4096).unwrap();
        assert!(writer.write(4088, &[1; 8]));
        assert_eq!(reader.words()[511].load(Ordering::Relaxed), 0x0101_0101_0101_0101);
        for (offset, len) in [(4089, 8), (u64::MAX, 1), (4097, 0), (0, 4097)] {
            assert!(!writer.write(offset, &vec![0; len]), "{offset} {len}");
        }
    }
}
