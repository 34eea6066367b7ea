//! Removes objects, directories, and files that an earlier server left unfinished.

use std::io;
use std::ops::ControlFlow;
use std::time::SystemTime;

use super::error::{Doing, StoreError};
use super::{LOCK, Store, upload};
use crate::names::Name;
use crate::pb::Checksum;
use crate::pb::entry::Kind;

/// The numbers of removed entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Removed {
    pub(crate) files: u64,
    pub(crate) directories: u64,
    /// Bytes of the files.
    pub(crate) bytes: u64,
}

impl Store {
    /// Removes an object or another entry that is not a directory. A directory, with everything
    /// below it, is removed only if `recursive`. The directory disappears immediately, before its
    /// content is removed.
    pub(crate) fn remove(&self, name: &Name, recursive: bool) -> Result<Removed, StoreError> {
        const DOING: &str = "remove";
        let mut removed = Removed::default();
        let metadata = self.root.symlink_metadata(name.as_str()).doing(DOING, name.as_str())?;
        let directory = metadata.is_dir();
        if directory && !recursive {
            let why = "it is a directory; --recursive removes it with everything below it";
            let why = io::Error::new(io::ErrorKind::InvalidInput, why);
            return Err(why).doing(DOING, name.as_str());
        }
        self.list(Some(name), Checksum::Unspecified, |entry| {
            if entry.kind() == Kind::Directory {
                removed.directories += 1;
            } else {
                removed.files += 1;
                removed.bytes += entry.size;
            }
            ControlFlow::Continue(())
        })?;
        let remove = || {
            let (parent, last) = name.split();
            let dir = self.root.open_dir(if parent.is_empty() { "." } else { parent })?;
            if !directory {
                dir.remove_file(last)?;
                return self.sync_dir(&dir);
            }
            let aside = format!("{}.removed", self.number());
            dir.rename(last, &self.temp, &aside)?;
            self.sync_dir(&dir)?;
            self.temp.remove_dir_all(aside)
        };
        remove().doing(DOING, name.as_str())?;
        Ok(removed)
    }

    /// Removes files that an earlier server left unfinished, except uploads that have not expired.
    /// Returns the number of removed files.
    pub(super) fn remove_stale(&self) -> io::Result<usize> {
        let mut count = 0;
        for entry in self.temp.entries()? {
            let entry = entry?;
            let name = entry.file_name();
            let metadata = entry.metadata()?;
            let kept = name == LOCK || (upload::is_upload(&name) && !self.expired(&metadata));
            if kept {
                continue;
            }
            if metadata.is_dir() {
                self.temp.remove_dir_all(&name)?;
            } else {
                entry.remove_file()?;
            }
            count += 1;
        }
        Ok(count)
    }

    /// Whether the received part of an upload is too old to be kept. A modification time in the
    /// future counts as an age of 0.
    pub(super) fn expired(&self, metadata: &cap_std::fs::Metadata) -> bool {
        let modified =
            metadata.modified().map(|time| time.into_std()).unwrap_or(SystemTime::UNIX_EPOCH);
        let age = SystemTime::now().duration_since(modified).unwrap_or_default();
        age >= self.options.keep_uploads
    }
}
