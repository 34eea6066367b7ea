//! Checks of this host: the system's own information, and tests on its RDMA devices. This file
//! reads /proc, /sys and /dev, whose content is never required: missing, unreadable or malformed
//! content gives `None`.
//!
//! | file | what |
//! |---|---|
//! | `check` | the checks in their order, and the transport's own decision |
//! | `kernel`, `sysfs`, `limits` | interpret the content of these files |
//! | `loopback` | connects a device to itself |

pub(super) mod check;
pub(super) mod kernel;
pub(super) mod limits;
mod loopback;
pub(super) mod sysfs;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::PathBuf;

/// Maximum number of bytes to read. No relevant file is longer.
const MAX: u64 = 256 * 1024;

/// The file system, or a directory that replaces it in tests.
#[derive(Debug, Clone)]
pub(super) struct SystemFiles(PathBuf);

impl SystemFiles {
    pub(super) fn real() -> Self {
        Self(PathBuf::from("/"))
    }

    #[cfg(test)]
    pub(super) fn at(dir: &std::path::Path) -> Self {
        Self(dir.to_owned())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The file's text, trimmed. `None` if the file is empty or cannot be read.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        let mut text = Vec::new();
        File::open(self.path(path)).ok()?.take(MAX).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// The names in a directory, in natural order.
    pub(super) fn list(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.len(), name.clone()));
        names
    }

    /// The last component of a symbolic link's target.
    pub(super) fn target(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// Opens a device file for reading and writing, and closes it again.
    pub(super) fn try_open(&self, path: &str) -> io::Result<()> {
        OpenOptions::new().read(true).write(true).open(self.path(path)).map(drop)
    }
}

/// Returns the part after the colon, such as `ACTIVE` for `4: ACTIVE`.
pub(super) fn after_colon(text: &str) -> &str {
    text.split_once(':').map_or(text, |(_, word)| word).trim()
}

/// Parses a decimal number, or a hexadecimal number with 0x.
pub(super) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}
