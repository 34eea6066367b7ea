//! Files of /proc.

use std::fs::File;
use std::io::{self, Read as _};

/// Initial capacity in bytes, more than the length of the files that are read for each connection.
/// These files report no length, so `fs::read_to_string` would begin with 32 bytes.
const CAPACITY: usize = 4096;

/// Reads the file, usually with two read(2) calls.
pub(crate) fn read(path: &str) -> io::Result<String> {
    let mut text = String::with_capacity(CAPACITY);
    File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}
