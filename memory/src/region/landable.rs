//! Application memory that peers on this host can write to.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::mapping::Mapping;
use super::page::{HugePages, page};
use crate::file::OwnedFd;

/// A mapped memory file that peers on this host can map and write to. As the buffer of a
/// [`NamedBuffer`](crate::NamedBuffer), it receives messages over shared memory without another
/// copy.
///
/// The file's length is fixed, and it begins as zeros. It is not mapped in children of fork(2).
///
/// **Use it only with trusted peers.** A mapping cannot be taken away from another process. A
/// process that has mapped the file can write to it, and to nothing else, for as long as it runs,
/// even when the buffer has come back. Peers that keep to the protocol unmap the file when its
/// registration ends.
#[derive(Debug)]
pub struct LandableBuf {
    mapping: Mapping,
    /// The length in bytes, at most the length of the mapping.
    len: usize,
    file: Arc<OwnedFd>,
}

impl LandableBuf {
    /// Makes a file of `len` zero bytes, and maps it. The pages are transparent huge pages if the
    /// system has them for shared memory.
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
        // SAFETY: the mapping has `len` bytes and more, and in this process is this value's alone
        // (R8). A peer that was granted it, and breaks the protocol, spoils what it may write.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_as_long_as_it_was_made() {
        let mut buf = LandableBuf::zeroed(5000).unwrap();
        assert!(buf.iter().all(|byte| *byte == 0) && buf.len() == 5000);
        buf[4990..].fill(7);
        let again = Mapping::again(5000_usize.next_multiple_of(page()), buf.file()).unwrap();
        // SAFETY: the mapping has more bytes than this, and nobody writes to them now.
        assert_eq!(unsafe { again.ptr().add(4999).read() }, 7, "a peer sees another file");
        // SAFETY: as above.
        unsafe { again.ptr().add(1).write(5) };
        assert_eq!((buf[1], buf.as_mut().len()), (5, 5000));
        assert!(LandableBuf::zeroed(0).unwrap_err().to_string().contains("0 bytes"));
        assert!(LandableBuf::zeroed(usize::MAX).is_err());
    }
}
