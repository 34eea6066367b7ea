//! Memory files, which systems other than Linux do not have.

use std::ffi::CStr;
use std::io;

use super::mapping::unsupported;
use crate::file::OwnedFd;

/// Fails: there are no memory files.
///
/// # Errors
/// `Unsupported`.
pub fn sealed(_name: &CStr, _len: usize) -> io::Result<OwnedFd> {
    Err(unsupported())
}

/// Fails: there are no memory files.
///
/// # Errors
/// `Unsupported`.
pub fn may_make(_len: usize) -> io::Result<()> {
    Err(unsupported())
}

/// Fails: there are no memory files.
pub(crate) fn len_of_ordinary_pages(_file: &OwnedFd) -> io::Result<u64> {
    Err(unsupported())
}

/// Fails: there are no memory files.
pub(crate) fn seal_contents(_file: &OwnedFd, _len: usize) -> io::Result<()> {
    Err(unsupported())
}
