//! Walks the store.

use std::ffi::OsString;
use std::io;
use std::ops::ControlFlow;

use cap_std::fs::{Metadata, PermissionsExt};

use super::Store;
use super::error::{Doing, StoreError};
use crate::attributes::Attributes;
use crate::names::{Name, PRIVATE_DIR};
use crate::pb::entry::Kind;
use crate::pb::{Checksum, Entry};
use crate::source;

impl Store {
    /// Describes an object or directory.
    pub(crate) fn stat(&self, name: &Name, checksum: Checksum) -> Result<Entry, StoreError> {
        let metadata = self.root.symlink_metadata(name.as_str()).doing("look at", name.as_str())?;
        Ok(self.summed(describe(name.as_str(), &metadata), checksum))
    }

    /// Passes the object `name`, or the directory and everything below it, to `emit`. Parents come
    /// first, and each directory is sorted by name. `None` is the root, which is not passed itself.
    /// Entries that cannot be served have a note.
    pub(crate) fn list(
        &self,
        name: Option<&Name>,
        checksum: Checksum,
        mut emit: impl FnMut(Entry) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let mut levels = Vec::new();
        match name {
            None => levels.push((String::new(), self.children("").doing("list", "")?.into_iter())),
            Some(name) => {
                let metadata =
                    self.root.symlink_metadata(name.as_str()).doing("list", name.as_str())?;
                let entry = describe(name.as_str(), &metadata);
                let directory = entry.kind() == Kind::Directory;
                if emit(self.summed(entry, checksum)).is_break() {
                    return Ok(());
                }
                if directory {
                    let children = self.children(name.as_str()).doing("list", name.as_str())?;
                    levels.push((name.as_str().to_owned(), children.into_iter()));
                }
            }
        }
        while let Some((parent, children)) = levels.last_mut() {
            let Some(child) = children.next() else {
                levels.pop();
                continue;
            };
            let Some((entry, below)) = self.look(parent, &child) else { continue };
            let name = entry.name.clone();
            if emit(self.summed(entry, checksum)).is_break() {
                return Ok(());
            }
            if let Some(below) = below {
                levels.push((name, below.into_iter()));
            }
        }
        Ok(())
    }

    /// Adds the CRC32C to the entry, if it is requested and available.
    fn summed(&self, mut entry: Entry, checksum: Checksum) -> Entry {
        if entry.kind() != Kind::File || checksum == Checksum::Unspecified {
            return entry;
        }
        let crc32c = self.read_at(&entry.name).and_then(|object| match object.recorded {
            None if checksum == Checksum::Computed => {
                source::whole_digest(&object.file).map(|digest| Some(digest.crc32c))
            }
            recorded => Ok(recorded),
        });
        match crc32c {
            Ok(crc32c) => entry.crc32c = crc32c,
            Err(error) => entry.note = error.to_string(),
        }
        entry
    }

    /// Reads one entry, and for a directory the names of its children. `None` if the entry is
    /// hidden or no longer exists.
    fn look(&self, parent: &str, child: &OsString) -> Option<(Entry, Option<Vec<OsString>>)> {
        if parent.is_empty() && child == PRIVATE_DIR {
            return None;
        }
        let lossy = child.to_string_lossy();
        let full = if parent.is_empty() { lossy.to_string() } else { format!("{parent}/{lossy}") };
        if child.to_str().is_none() {
            return Some((noted(full, Kind::Other, "its name is not UTF-8".into()), None));
        }
        if let Err(error) = Name::parse(&full) {
            return Some((
                noted(full, Kind::Other, format!("its name cannot be used: {error}")),
                None,
            ));
        }
        let failed = |full, error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => None,
            _ => Some((noted(full, Kind::Unreadable, error.to_string()), None)),
        };
        let entry = match self.root.symlink_metadata(&full) {
            Ok(metadata) => describe(&full, &metadata),
            Err(error) => return failed(full, error),
        };
        if entry.kind() != Kind::Directory {
            return Some((entry, None));
        }
        match self.children(&full) {
            Ok(children) => Some((entry, Some(children))),
            Err(error) => failed(full, error),
        }
    }

    /// Names in a directory, sorted.
    fn children(&self, path: &str) -> io::Result<Vec<OsString>> {
        let path = if path.is_empty() { "." } else { path };
        let mut names = Vec::new();
        for entry in self.root.read_dir(path)? {
            names.push(entry?.file_name());
        }
        names.sort();
        Ok(names)
    }
}

fn describe(name: &str, metadata: &Metadata) -> Entry {
    let entry = |kind: Kind, size| {
        let attributes = Attributes {
            mode: Some(metadata.permissions().mode() & 0o777),
            modified: metadata.modified().ok().map(|time| time.into_std()),
        };
        let attributes = Some(attributes.into());
        Entry { name: name.to_owned(), kind: kind.into(), size, attributes, ..Entry::default() }
    };
    if metadata.is_file() {
        entry(Kind::File, metadata.len())
    } else if metadata.is_dir() {
        entry(Kind::Directory, 0)
    } else if metadata.is_symlink() {
        noted(name.to_owned(), Kind::Other, "a symbolic link".into())
    } else {
        noted(name.to_owned(), Kind::Other, "a special file".into())
    }
}

fn noted(name: String, kind: Kind, note: String) -> Entry {
    Entry { name, kind: kind.into(), note, ..Entry::default() }
}
