//! The type of an open file where files have no descriptors. There is no value of it, as such a
//! system shares no memory.

use std::io;

/// An open file. This platform has no such value.
#[derive(Debug)]
pub struct OwnedFd(Nothing);

#[derive(Clone, Copy, Debug)]
enum Nothing {}

impl OwnedFd {
    /// Another descriptor of the file.
    ///
    /// # Errors
    /// None, as there is no file.
    pub fn try_clone(&self) -> io::Result<OwnedFd> {
        match self.0 {}
    }
}

/// A file that is lent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BorrowedFd<'a>(&'a OwnedFd);

impl BorrowedFd<'_> {
    /// Another descriptor of the file.
    ///
    /// # Errors
    /// None, as there is no file.
    pub(crate) fn try_clone_to_owned(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }
}

/// An owner of a file.
pub(crate) trait AsFd {
    /// Lends the file.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl AsFd for OwnedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        BorrowedFd(self)
    }
}
