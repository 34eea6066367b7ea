//! Application memory that peers on this host map: [`LandableBuf`], to which peers can write, and
//! [`LendableMemory`], which can be lent to peers.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;

use super::memfd;
use crate::file::{AsFd, BorrowedFd, OwnedFd};
use crate::region::mapping::Mapping;
use crate::region::page::{HugePages, page};

/// A mapped memory file that peers on this host can map and write to. As the buffer of a
/// [`NamedBuffer`](crate::NamedBuffer), this memory receives messages over shared memory without
/// another copy.
///
/// The file has a fixed length, which no peer can change, and begins as zeros. Children of fork(2)
/// do not have the file mapped.
///
/// **Use it only with trusted peers.** A mapping cannot be taken away from another process. A
/// process that has mapped the file can write to it, and to nothing else, for as long as that
/// process runs, even after the application has taken the buffer back. Peers that keep to the
/// protocol unmap the file when its registration ends.
#[derive(Debug)]
pub struct LandableBuf {
    mapping: Mapping,
    /// The length in bytes, at most the length of the mapping.
    len: usize,
    file: Arc<OwnedFd>,
}

impl LandableBuf {
    /// Makes a file of `len` zero bytes, and maps the file. The pages are transparent huge pages if
    /// the system has them for shared memory.
    ///
    /// # Errors
    /// `InvalidInput` if `len` is 0. Otherwise the errors of memfd_create(2), ftruncate(2),
    /// fcntl(2) and mmap(2).
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let mapped = len.checked_next_multiple_of(page()).filter(|mapped| *mapped > 0);
        let mapped = mapped.ok_or_else(|| {
            let what = format!("{len} bytes cannot be mapped: a buffer has 1 byte or more");
            io::Error::new(io::ErrorKind::InvalidInput, what)
        })?;
        let (mapping, file) = Mapping::shared(mapped, HugePages::Transparent)?;
        Ok(LandableBuf { mapping, len, file: Arc::new(file) })
    }

    /// The file, for peers to map.
    pub(crate) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }
}

impl Deref for LandableBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `len` bytes, and in this process only this value
        // accesses it (R8). A peer that was granted the memory, and breaks the protocol, spoils
        // only bytes that it may write.
        unsafe { std::slice::from_raw_parts(self.mapping.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for LandableBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; it is mapped writable.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.ptr().as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for LandableBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// A mapped memory file to fill, [`freeze`](Self::freeze), and
/// [register](crate::Pool::register_lendable). The pages of the file hold nothing else.
///
/// The file has a fixed length, and begins as zeros. Children of fork(2) do not have the file
/// mapped.
#[derive(Debug)]
pub struct LendableBuf {
    mapping: Mapping,
    /// The length in bytes, at most the length of the mapping.
    len: usize,
    file: OwnedFd,
}

impl LendableBuf {
    /// Makes a file of `len` zero bytes, with all of its pages, and maps the file. Only this value
    /// can write to the file. The pages are transparent huge pages if the system has them for
    /// shared memory.
    ///
    /// # Errors
    /// `InvalidInput` if `len` is 0. Otherwise the errors of memfd_create(2), fallocate(2), mmap(2)
    /// and fcntl(2). Linux before 5.1 has no F_SEAL_FUTURE_WRITE, and fcntl(2) returns EINVAL
    /// there.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let mapped = len.checked_next_multiple_of(page()).filter(|mapped| *mapped > 0);
        let mapped = mapped.ok_or_else(|| no_memory(len as u64))?;
        let (mapping, file) = Mapping::lendable(mapped, HugePages::Transparent)?;
        Ok(LendableBuf { mapping, len, file })
    }

    /// Returns the memory, which nobody can write to from now on.
    pub fn freeze(self) -> LendableMemory {
        let LendableBuf { mapping, len, file } = self;
        LendableMemory { mapping, len, file }
    }
}

impl Deref for LendableBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `len` bytes, and only this value accesses it (R8).
        unsafe { std::slice::from_raw_parts(self.mapping.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for LendableBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; it is mapped writable, and no other process can write to the file.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.ptr().as_ptr(), self.len) }
    }
}

/// Application memory in a memory file whose size, pages and contents cannot change. So peers on
/// this host can map the memory and read lent bytes in place (see
/// [`Pool::register_lendable`](crate::Pool::register_lendable)). Nobody can truncate the file, so
/// no access to the memory ends a process with SIGBUS. A peer that is lent a part of this memory
/// sees all of it. So the memory should hold only data that is meant for its readers. Children of
/// fork(2) do not have the memory mapped.
#[derive(Debug)]
pub struct LendableMemory {
    mapping: Mapping,
    /// The length in bytes, at most the length of the mapping.
    len: usize,
    file: OwnedFd,
}

impl LendableMemory {
    /// Takes a memory file (memfd_create(2)) that this or another process has filled. Seals the
    /// file against shrinking, growing and writing, allocates missing pages, and maps the file
    /// read-only. Blocks until the file is mapped.
    ///
    /// Linux before 6.2 does not register such memory with RDMA devices (EFAULT), because these
    /// kernels do not pin shared read-only mappings. Those kernels do register a [`LendableBuf`].
    ///
    /// # Errors
    /// `InvalidInput` with the reason: the file is no memory file, has huge pages, is empty, does
    /// not allow sealing (MFD_ALLOW_SEALING) or is still mapped for writing. Other errors come from
    /// fcntl(2), fallocate(2) and mmap(2).
    pub fn from_file(file: impl Into<OwnedFd>) -> io::Result<Self> {
        let file = file.into();
        let len = memfd::len_of_ordinary_pages(&file)?;
        let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or_else(|| no_memory(len))?;
        memfd::seal_contents(&file, len)?;
        let mapping = Mapping::read_only(len, &file)?;
        Ok(LendableMemory { mapping, len, file })
    }

    /// Returns all of the memory.
    pub fn bytes(this: Arc<Self>) -> Bytes {
        Bytes::from_owner(LendableOwner(this))
    }

    /// The length in bytes, at least 1.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false, because there is at least 1 byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl AsRef<[u8]> for LendableMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `len` bytes. Nobody writes to it: the file is sealed
        // against writing, and `freeze` consumed the value that had a writable mapping (R8).
        unsafe { std::slice::from_raw_parts(self.mapping.ptr().as_ptr(), self.len) }
    }
}

/// The owner of the `Bytes` over a [`LendableMemory`].
struct LendableOwner(Arc<LendableMemory>);

impl AsRef<[u8]> for LendableOwner {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl AsFd for LendableMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn no_memory(len: u64) -> io::Error {
    let what = format!("{len} bytes cannot be mapped: memory that is lent has 1 byte or more");
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;

    fn memfd(flags: libc::c_uint) -> File {
        // SAFETY: the name ends with a zero byte; the descriptor is new, and nothing else owns it.
        unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), flags);
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            File::from_raw_fd(fd)
        }
    }

    fn refused(file: File) -> String {
        let error = LendableMemory::from_file(file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        error.to_string()
    }

    /// Checks that a peer with the descriptor cannot change the memory.
    fn is_out_of_reach(memory: &LendableMemory) {
        let fd = memory.as_fd().as_raw_fd();
        let mut file = File::from(memory.as_fd().try_clone_to_owned().unwrap());
        assert_eq!(file.write(b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(Mapping::again(memory.len(), &file.into()).is_err(), "mapped for writing");
        // SAFETY: the descriptor is open; the arguments are numbers.
        unsafe {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            assert_eq!(libc::fallocate(fd, punch, 0, 4096), -1);
        }
    }

    #[test]
    fn a_buffer_is_filled_and_then_stays() {
        let mut buf = LendableBuf::zeroed(5000).unwrap();
        assert!(buf.iter().all(|byte| *byte == 0) && buf.len() == 5000);
        buf[4990..].fill(7);
        let memory = buf.freeze();
        assert_eq!((memory.as_ref()[4989], memory.as_ref()[4999], memory.len()), (0, 7, 5000));
        is_out_of_reach(&memory);
        assert!(LendableBuf::zeroed(0).unwrap_err().to_string().contains("0 bytes"));
    }

    #[test]
    fn files_are_taken_as_they_were_filled() {
        let mut file = memfd(libc::MFD_ALLOW_SEALING);
        file.write_all(&[5; 10_000]).unwrap();
        // Adds a part that nobody has written.
        file.set_len(100_001).unwrap();
        let mut other = file.try_clone().unwrap();
        let memory = LendableMemory::from_file(file).unwrap();
        assert_eq!(memory.len(), 100_001);
        assert!(memory.as_ref().iter().enumerate().all(|(at, b)| *b == 5 * u8::from(at < 10_000)));
        is_out_of_reach(&memory);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&other.metadata().unwrap());
        assert!(blocks * 512 >= 100_001, "{blocks} blocks");
        other.rewind().unwrap();
        assert_eq!(other.read(&mut [0; 10]).unwrap(), 10);
        assert_eq!(other.write(b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_file_that_is_sealed_already_gets_its_pages() {
        let sparse = memfd(libc::MFD_ALLOW_SEALING);
        sparse.set_len(100_000).unwrap();
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
        // SAFETY: the descriptor is open; the arguments are numbers.
        let sealed = unsafe { libc::fcntl(sparse.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        assert_eq!(sealed, 0);
        let seen = sparse.try_clone().unwrap();
        let memory = LendableMemory::from_file(sparse).unwrap();
        assert!(memory.as_ref().iter().all(|byte| *byte == 0));
        let blocks = std::os::unix::fs::MetadataExt::blocks(&seen.metadata().unwrap());
        assert!(blocks * 512 >= 100_000, "{blocks} blocks");
    }

    /// Another holder of the file changes its length until it is sealed.
    #[test]
    fn a_file_that_is_cut_meanwhile_is_refused_or_whole() {
        for round in 0..200 {
            let file = memfd(libc::MFD_ALLOW_SEALING);
            file.set_len(64 << 10).unwrap();
            let other = file.try_clone().unwrap();
            let cuts = std::thread::spawn(move || {
                for len in [4096, 128 << 10].into_iter().cycle() {
                    if other.set_len(len).is_err() {
                        break;
                    }
                }
            });
            match LendableMemory::from_file(file) {
                // Reads of missing pages would end the process.
                Ok(memory) => assert!(memory.as_ref().iter().all(|byte| *byte == 0), "{round}"),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}"),
            }
            cuts.join().unwrap();
        }
    }

    #[test]
    fn what_its_owner_could_still_change_is_refused() {
        let file = memfd(libc::MFD_ALLOW_SEALING);
        file.set_len(4096).unwrap();
        let owned = OwnedFd::from(file.try_clone().unwrap());
        let mapping = Mapping::again(4096, &owned).unwrap();
        assert!(refused(file).contains("mapped for writing"));
        drop(mapping);
        LendableMemory::from_file(owned).unwrap();
        let unsealable = memfd(0);
        unsealable.set_len(4096).unwrap();
        assert!(refused(unsealable).contains("MFD_ALLOW_SEALING"));
        assert!(refused(memfd(libc::MFD_ALLOW_SEALING)).contains("0 bytes"));
        let huge = memfd(libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB);
        assert!(refused(huge).contains("huge pages"));
        assert!(refused(File::open("Cargo.toml").unwrap()).contains("no memory file"));
    }

    #[test]
    fn a_buffer_is_as_long_as_it_was_made() {
        let mut buf = LandableBuf::zeroed(5000).unwrap();
        assert!(buf.iter().all(|byte| *byte == 0) && buf.len() == 5000);
        buf[4990..].fill(7);
        let again = Mapping::again(5000_usize.next_multiple_of(page()), buf.file()).unwrap();
        // SAFETY: the byte lies in the mapping, and nobody writes to it now.
        assert_eq!(unsafe { again.ptr().add(4999).read() }, 7, "a peer sees another file");
        // SAFETY: as above.
        unsafe { again.ptr().add(1).write(5) };
        assert_eq!((buf[1], buf.as_mut().len()), (5, 5000));
        assert!(LandableBuf::zeroed(0).unwrap_err().to_string().contains("0 bytes"));
        assert!(LandableBuf::zeroed(usize::MAX).is_err());
    }
}
