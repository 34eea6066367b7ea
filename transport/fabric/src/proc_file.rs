//! Files of /proc.

use std::fs::File;
use std::io::{self, Read as _};

/// More than the length of the files that are read for each connection. `fs::read_to_string` begins
/// with 32 bytes, because these files report no length.
const CAPACITY: usize = 4096;

/// Reads the file, usually with two read(2) calls.
pub(crate) fn read(path: &str) -> io::Result<String> {
    let mut text = String::with_capacity(CAPACITY);
    File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}
