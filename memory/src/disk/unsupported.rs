//! A ring for systems without io_uring. On such a system, a program that uses a ring compiles, and
//! gets an error when it makes the ring.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::Transfer;
use crate::buf::PinnedBuf;

/// A ring of io_uring, which this system lacks. The type has no values.
#[derive(Clone, Debug)]
pub struct Ring(Infallible);

impl Ring {
    /// Always fails.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn new(_entries: u32) -> io::Result<Ring> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring is Linux only"))
    }

    /// Cannot be called, because the type has no values.
    pub fn read(&self, _: &Arc<File>, _offset: u64, _: PinnedBuf) -> Transfer<PinnedBuf> {
        match self.0 {}
    }

    /// Cannot be called, because the type has no values.
    pub fn write(&self, _: &Arc<File>, _offset: u64, _: Bytes) -> Transfer<Bytes> {
        match self.0 {}
    }

    /// Cannot be called, because the type has no values.
    pub fn in_flight(&self) -> usize {
        match self.0 {}
    }
}
