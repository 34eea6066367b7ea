//! The type of an open file that can be mapped.

#[cfg(unix)]
pub(crate) use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(not(unix))]
pub(crate) use self::elsewhere::{AsFd, BorrowedFd, OwnedFd};

/// The file type of systems without descriptors. The type has no values, because these systems
/// share no memory.
#[cfg(not(unix))]
mod elsewhere {
    use std::io;

    /// An open file. This platform has no such files.
    #[derive(Debug)]
    pub struct OwnedFd(Nothing);

    #[derive(Clone, Copy, Debug)]
    enum Nothing {}

    impl OwnedFd {
        /// Duplicates the descriptor.
        ///
        /// # Errors
        /// None, because there is no file.
        pub fn try_clone(&self) -> io::Result<OwnedFd> {
            match self.0 {}
        }
    }

    /// A borrowed file.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct BorrowedFd<'a>(&'a OwnedFd);

    impl BorrowedFd<'_> {
        /// Duplicates the descriptor.
        ///
        /// # Errors
        /// None, because there is no file.
        pub(crate) fn try_clone_to_owned(&self) -> io::Result<OwnedFd> {
            self.0.try_clone()
        }
    }

    /// A type that has a file.
    pub(crate) trait AsFd {
        /// Borrows the file.
        fn as_fd(&self) -> BorrowedFd<'_>;
    }

    impl AsFd for OwnedFd {
        fn as_fd(&self) -> BorrowedFd<'_> {
            BorrowedFd(self)
        }
    }
}
