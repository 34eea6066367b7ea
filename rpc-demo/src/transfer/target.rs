//! The target of a transfer: an object on a server, or a local file.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cap_std::fs::Dir;

use super::origin::blocking;
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::names::Name;
use crate::net::Connection;
use crate::pb::{MakeDirectoryRequest, SetAttributesRequest};
use crate::sink::Pending;
use crate::source;
use crate::tree::shown;

#[derive(Clone)]
pub(crate) enum Target {
    /// An object on a server.
    Object(Connection, Name),
    File(LocalFile),
}

/// A local file below the root of a transfer. No name in the transfer leads out of the root.
#[derive(Clone)]
pub(crate) struct LocalFile {
    /// The root, an open directory.
    pub(crate) root: Arc<Dir>,
    /// The path of `root`, for messages.
    pub(crate) path: PathBuf,
    /// The file's path below `root`, with `/` between components.
    pub(crate) below: String,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Object(_, name) => write!(f, "'{name}'"),
            Target::File(place) => f.write_str(&place.shown()),
        }
    }
}

impl Target {
    pub(super) fn connection(&self) -> Option<&Connection> {
        match self {
            Target::Object(connection, _) => Some(connection),
            Target::File(_) => None,
        }
    }

    /// Creates a directory. `writable` makes it writable for its owner, so that files can be
    /// created in it.
    pub(super) async fn make_directory(&self, writable: bool) -> Result<(), Failure> {
        match self {
            Target::Object(connection, name) => {
                let request = MakeDirectoryRequest { name: name.as_str().to_owned(), writable };
                let made = connection.store().make_directory(request).await;
                let failed = |status| {
                    Failure::status(format!("cannot make the directory '{name}'"), &status)
                };
                made.map(drop).map_err(failed)
            }
            Target::File(place) => {
                let here = place.clone();
                blocking(move || here.make_directory(writable))
                    .await
                    .map_err(|error| place.cannot_write(&error))
            }
        }
    }

    /// Sets mode and modification time of the existing target.
    pub(super) async fn set_attributes(&self, attributes: Attributes) -> Result<(), Failure> {
        match self {
            Target::Object(connection, name) => {
                let attributes = Some(attributes.into());
                let request = SetAttributesRequest { name: name.as_str().to_owned(), attributes };
                let failed = |status| {
                    Failure::status(format!("cannot set the mode and time of '{name}'"), &status)
                };
                connection.store().set_attributes(request).await.map(drop).map_err(failed)
            }
            Target::File(place) => {
                let here = place.clone();
                blocking(move || attributes.apply(&here.open()?, 0))
                    .await
                    .map_err(|error| place.cannot_write(&error))
            }
        }
    }
}

impl LocalFile {
    pub(super) fn shown(&self) -> String {
        shown(&self.path.join(&self.below))
    }

    pub(super) fn cannot_write(&self, error: &io::Error) -> Failure {
        Failure::io(format!("cannot write {}", self.shown()), error)
    }

    /// The directory of the file, created if necessary, and the file's name in it.
    pub(super) fn parent(&self) -> io::Result<(Arc<Dir>, &str)> {
        let Some((parent, last)) = self.below.rsplit_once('/') else {
            return Ok((self.root.clone(), &self.below));
        };
        let dir = match self.root.open_dir(parent) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.root.create_dir_all(parent)?;
                self.root.open_dir(parent)?
            }
            opened => opened?,
        };
        Ok((Arc::new(dir), last))
    }

    fn make_directory(&self, writable: bool) -> io::Result<()> {
        let below = if self.below.is_empty() { "." } else { &self.below };
        if !self.root.is_dir(below) {
            self.root.create_dir_all(below)?;
        }
        if writable {
            let dir = self.open()?;
            let attributes = Attributes { modified: None, ..Attributes::of(&dir.metadata()?) };
            if attributes.mode.is_some_and(|mode| mode & 0o700 != 0o700) {
                attributes.apply(&dir, 0o700)?;
            }
        }
        Ok(())
    }

    /// Opens the existing file, to read it or to change its mode and modification time.
    fn open(&self) -> io::Result<File> {
        let below = if self.below.is_empty() { "." } else { &self.below };
        let metadata = self.root.symlink_metadata(below)?;
        if metadata.is_dir() {
            return Ok(self.root.open_dir(below)?.open(".")?.into_std());
        }
        if !metadata.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(self.root.open(below)?.into_std())
    }

    /// Attributes and digest of the existing target, if it is a file of this size.
    pub(super) fn look(&self, size: u64) -> io::Result<Option<(Attributes, Digest)>> {
        match self.root.symlink_metadata(&self.below) {
            Ok(metadata) if metadata.is_file() && metadata.len() == size => {}
            _ => return Ok(None),
        }
        let file = self.open()?;
        Ok(Some((Attributes::of(&file.metadata()?), source::whole_digest(&file)?)))
    }

    /// Creates a temporary file next to the target, under a free name.
    pub(super) fn temporary(&self, private: bool) -> io::Result<Pending> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (dir, _) = self.parent()?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let temp = format!(".rpc-demo-{}-{number}.part", std::process::id());
            match Pending::create(dir.clone(), temp, private) {
                // An earlier process with the same process ID was killed and left this file.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 100_000 => {}
                other => return other,
            }
        }
    }

    /// Opens or creates the file that receives ranges, next to the target. Its name is the same
    /// after an interruption.
    pub(super) fn partial(&self) -> io::Result<Pending> {
        let (dir, last) = self.parent()?;
        Pending::reopen(dir, format!(".rpc-demo-{:016x}.part", crate::names::hash(last)))
    }

    /// Sets the attributes of a complete file, and renames it to its final name.
    pub(super) fn place(&self, pending: Pending, attributes: &Attributes) -> io::Result<()> {
        let (dir, last) = self.parent()?;
        attributes.apply(pending.file(), 0)?;
        pending.place(&dir, last, true)
    }
}
