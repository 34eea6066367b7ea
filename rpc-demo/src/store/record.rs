//! The CRC32C of a stored object, kept with it in an extended attribute.
//!
//! The attribute is written before the object gets its name, so both appear together. The attribute
//! moves with the file. The record includes length and modification time. A file edited in place no
//! longer matches its record, and is served as it is. If bytes changed while length and time stayed
//! the same, the object is damaged, and reading it detects the damage. A file system without
//! extended attributes keeps no records.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::digest::Digest;

const ATTRIBUTE: &str = "user.rpc-demo.crc32c";

/// Maximum length of a record in bytes: three numbers as text.
const MAX: usize = 80;

/// Whether records can be kept on the file system of this file.
pub(super) fn supported(file: &File) -> io::Result<bool> {
    match rustix::fs::fsetxattr(file, ATTRIBUTE, b"", XattrFlags::empty()) {
        Ok(()) => Ok(true),
        Err(error) if unsupported(error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Records `digest` for a file to which nothing more will be written.
pub(super) fn write(file: &File, digest: Digest) -> io::Result<()> {
    let record = encode(digest.crc32c, stamp(file)?);
    match rustix::fs::fsetxattr(file, ATTRIBUTE, record.as_bytes(), XattrFlags::empty()) {
        Err(error) if unsupported(error) => Ok(()),
        other => Ok(other?),
    }
}

/// The CRC32C recorded for a file, if the record still matches its length and modification time.
pub(super) fn read(file: &File) -> io::Result<Option<u32>> {
    let mut buffer = [0; MAX];
    let length = match rustix::fs::fgetxattr(file, ATTRIBUTE, &mut buffer) {
        Ok(length) => length,
        // There is no record, or another program wrote it.
        Err(Errno::NODATA | Errno::RANGE) => return Ok(None),
        Err(error) if unsupported(error) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let stamp = stamp(file)?;
    Ok(buffer
        .get(..length)
        .and_then(decode)
        .filter(|(_, recorded)| *recorded == stamp)
        .map(|(crc32c, _)| crc32c))
}

/// Length in bytes, modification time in nanoseconds since the epoch.
type Stamp = (u64, i128);

fn stamp(file: &File) -> io::Result<Stamp> {
    let metadata = file.metadata()?;
    Ok((
        metadata.size(),
        i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
    ))
}

fn encode(crc32c: u32, (size, modified): Stamp) -> String {
    format!("{crc32c:08x} {size} {modified}")
}

fn decode(record: &[u8]) -> Option<(u32, Stamp)> {
    let mut fields = std::str::from_utf8(record).ok()?.split(' ');
    let crc32c = u32::from_str_radix(fields.next()?, 16).ok()?;
    let size = fields.next()?.parse().ok()?;
    let modified = fields.next()?.parse().ok()?;
    fields.next().is_none().then_some((crc32c, (size, modified)))
}

fn unsupported(error: Errno) -> bool {
    error == Errno::OPNOTSUPP || error == Errno::NOSYS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_wrote_and_nothing_else() {
        let stamp = (u64::MAX, -1_000_000_000_000_000_000_000);
        assert!(encode(u32::MAX, stamp).len() <= MAX);
        assert_eq!(decode(encode(0xabc, stamp).as_bytes()), Some((0xabc, stamp)));
        for bad in
            ["", "x 1 1", "00000001 1", "00000001 1 1 1", "00000001  1", "100000000 1 1", "\u{ff}"]
        {
            assert_eq!(decode(bad.as_bytes()), None, "{bad:?}");
        }
    }
}
