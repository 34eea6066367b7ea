//! The final line of a transfer.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::costs::Costs;
use crate::disk::Disk;
use crate::names::Shown;
use crate::net::Route;

/// The numbers of transferred files, directories and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Tally {
    /// Bytes of the files.
    pub(crate) bytes: u64,
    /// Files, including empty files.
    pub(crate) files: u64,
    /// Directories, including empty directories.
    pub(crate) directories: u64,
    /// Links and special files that were left out.
    pub(crate) skipped: u64,
    /// Bytes that the target already had, included in `bytes`.
    pub(crate) kept_bytes: u64,
    /// Files that the target already had completely, included in `files`.
    pub(crate) kept_files: u64,
}

/// A successful transfer, shown on one line that is readable and easy to search:
///
/// ```text
/// put 'tree': 1073741824 bytes in 61 files, 16 directories, 3.208 s, 0.335 GB/s, CRC32C ok, files 0.0 % by O_DIRECT (page cache: ...), 0 bytes by RDMA WRITE (0.0 %), path tcp (no-device: ...)
/// ```
///
/// With `--json` the same data is one object.
pub(crate) struct Summary<'a> {
    /// `put`, `get` or `cp`.
    pub(crate) verb: &'static str,
    /// The name in the store.
    pub(crate) name: &'a str,
    pub(crate) tally: Tally,
    /// Time from the first request to the last reply, including the sync to disk.
    pub(crate) elapsed: Duration,
    /// Costs of this process during the transfer.
    pub(crate) costs: Costs,
    /// The path of the payload. A copy by `cp` has two paths.
    pub(crate) routes: Routes,
}

/// Paths that the payload took.
pub(crate) enum Routes {
    /// The payload went to one server, or came from one server.
    One(Box<Route>),
    /// The payload was read from one server and written to another, or back to the same server.
    Two { from: Box<Route>, to: Box<Route> },
}

impl Summary<'_> {
    /// Transferred bytes per second.
    fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        let moved = self.tally.bytes - self.tally.kept_bytes;
        if seconds > 0.0 { moved as f64 / seconds } else { 0.0 }
    }

    pub(crate) fn json(&self) -> Json<'_> {
        let (route, from, to) = match &self.routes {
            Routes::One(route) => (Some(&**route), None, None),
            Routes::Two { from, to } => (None, Some(&**from), Some(&**to)),
        };
        Json {
            command: self.verb,
            name: self.name,
            tally: self.tally,
            moved_bytes: self.tally.bytes - self.tally.kept_bytes,
            seconds: self.elapsed.as_secs_f64(),
            bytes_per_second: self.rate(),
            costs: self.costs,
            disk: Disk::of(&self.costs),
            route,
            from,
            to,
        }
    }
}

/// The transfer as `--json` prints it.
#[derive(Serialize)]
pub(crate) struct Json<'a> {
    command: &'static str,
    name: &'a str,
    #[serde(flatten)]
    tally: Tally,
    moved_bytes: u64,
    seconds: f64,
    bytes_per_second: f64,
    costs: Costs,
    disk: Disk,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'a Route>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a Route>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<&'a Route>,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { bytes, files, directories, skipped, kept_bytes, kept_files } = self.tally;
        let files = count(files, "file", "files");
        write!(f, "{} '{}': {bytes} bytes in {files}", self.verb, Shown(self.name))?;
        if directories > 0 {
            write!(f, ", {}", count(directories, "directory", "directories"))?;
        }
        if skipped > 0 {
            write!(f, ", {skipped} skipped")?;
        }
        if kept_files > 0 || kept_bytes > 0 {
            let whole = count(kept_files, "whole file", "whole files");
            write!(f, ", of which {kept_bytes} bytes were there, {whole} among them")?;
        }
        write!(
            f,
            ", {:.3} s, {:.3} GB/s, CRC32C ok, files {}, ",
            self.elapsed.as_secs_f64(),
            self.rate() / 1e9,
            Disk::of(&self.costs)
        )?;
        match &self.routes {
            Routes::One(route) => write!(f, "{route}"),
            Routes::Two { from, to } => write!(f, "from: {from}; to: {to}"),
        }
    }
}

fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}
