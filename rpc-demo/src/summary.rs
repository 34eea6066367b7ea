//! The closing line of a transfer.

use crate::names::Shown;
use crate::net::Route;
use std::fmt;
use std::time::Duration;

/// What went over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Bytes of the files.
    pub(crate) bytes: u64,
    /// Files.
    pub(crate) files: u64,
    /// Directories.
    pub(crate) directories: u64,
    /// Links and special files that were left out.
    pub(crate) skipped: u64,
}

/// A transfer that succeeded. Shown in one line, made for people and easy to search:
///
/// ```text
/// put 'tree': 1073741824 bytes in 61 files, 16 directories, 3.208 s, 0.335 GB/s, CRC32C ok, 0 bytes by RDMA WRITE (0.0 %), path tcp (no-device: ...)
/// ```
pub(crate) struct Summary<'a> {
    /// `put` or `get`.
    pub(crate) verb: &'static str,
    /// The name in the store.
    pub(crate) name: &'a str,
    /// How much.
    pub(crate) tally: Tally,
    /// From the first request to the last answer, syncing to disk included.
    pub(crate) elapsed: Duration,
    /// Which way.
    pub(crate) route: Route,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { bytes, files, directories, skipped } = self.tally;
        let seconds = self.elapsed.as_secs_f64();
        let rate = if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
        write!(
            f,
            "{} '{}': {bytes} bytes in {}",
            self.verb,
            Shown(self.name),
            count(files, "file", "files")
        )?;
        if directories > 0 {
            write!(f, ", {}", count(directories, "directory", "directories"))?;
        }
        if skipped > 0 {
            write!(f, ", {skipped} skipped")?;
        }
        write!(f, ", {seconds:.3} s, {rate:.3} GB/s, CRC32C ok, {}", self.route)
    }
}

fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
