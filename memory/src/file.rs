//! The type of an open file that can be mapped.

pub(crate) use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
