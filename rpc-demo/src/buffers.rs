//! Where the bytes of a file are read into.

use bytes::{Bytes, BytesMut};
use std::io::{self, Read};

/// Gives buffers to read into.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {}

impl Buffers {
    /// Ordinary memory.
    pub(crate) fn heap() -> Buffers {
        Buffers {}
    }

    /// A buffer of `size` bytes.
    pub(crate) async fn get(&self, size: usize) -> io::Result<Buffer> {
        Ok(Buffer { bytes: BytesMut::zeroed(size) })
    }
}

/// A buffer to be filled once.
pub(crate) struct Buffer {
    bytes: BytesMut,
}

impl Buffer {
    /// Reads until the buffer is full or the reader has no more.
    pub(crate) fn fill_from(mut self, reader: &mut impl Read) -> io::Result<Bytes> {
        let mut filled = 0;
        while let Some(room) = self.bytes.get_mut(filled..).filter(|room| !room.is_empty()) {
            match reader.read(room) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.bytes.truncate(filled);
        Ok(self.bytes.freeze())
    }
}
