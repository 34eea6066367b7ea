//! The server's directory: objects are plain files under it, and nothing leads out of it.
//!
//! Every path is resolved beneath the root's own descriptor (cap-std: `openat2` with RESOLVE_BENEATH where the kernel
//! has it), so neither `..` nor a symbolic link leaves the root. A link inside it is followed on the way to an object,
//! but an object itself is a regular file.
//!
//! Calls here block on the disk.

mod list;
mod record;

use crate::digest::Digest;
use crate::names::{Name, PRIVATE_DIR};
use crate::sink::{Pending, sync_dir};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt, PermissionsExt};
use rustix::fs::{FlockOperation, OFlags, flock};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Locked by the server that uses the root.
const LOCK: &str = "lock";

/// An open root.
pub(crate) struct Store {
    root: Dir,
    temp: Arc<Dir>,
    next: AtomicU64,
    /// Held open for its lock.
    _lock: File,
}

/// An operation on an object failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} '{name}': {error}")]
pub(crate) struct StoreError {
    /// What was tried.
    pub(crate) doing: &'static str,
    /// On which object or directory.
    pub(crate) name: String,
    /// Why it failed.
    pub(crate) error: io::Error,
}

/// Adds what was being done to what.
trait Doing<T> {
    fn doing(self, doing: &'static str, name: &str) -> Result<T, StoreError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, name: &str) -> Result<T, StoreError> {
        let name = if name.is_empty() { "/" } else { name };
        self.map_err(|error| StoreError { doing, name: crate::names::Shown(name).to_string(), error })
    }
}

/// An object, open for reading.
pub(crate) struct Object {
    /// At its beginning.
    pub(crate) file: File,
    /// Bytes.
    pub(crate) size: u64,
    /// Unix permission bits.
    pub(crate) mode: u32,
    /// CRC32C of the content as it was stored, if that is known and the file was not changed by other means since.
    pub(crate) recorded: Option<u32>,
}

/// A root cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("there is no directory '{0}'; make it with mkdir -p, or name another with --root")]
    Missing(String),
    #[error("'{0}' is not a directory; name one with --root")]
    NotADirectory(String),
    #[error("another rpc-demo serves '{0}' already; stop it, or name another directory with --root")]
    Busy(String),
    #[error("cannot use '{0}': {1}; the server needs to read and write there")]
    Io(String, io::Error),
}

impl Store {
    /// Opens `path`, takes its lock, and removes what an earlier server left unfinished.
    pub(crate) fn open(path: &Path) -> Result<Store, OpenError> {
        let shown = crate::names::Shown(&path.to_string_lossy()).to_string();
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => OpenError::Missing(shown.clone()),
            io::ErrorKind::NotADirectory => OpenError::NotADirectory(shown.clone()),
            _ => OpenError::Io(shown.clone(), error),
        };
        let root = Dir::open_ambient_dir(path, ambient_authority()).map_err(failed)?;
        let failed = |error| OpenError::Io(shown.clone(), error);
        if let Err(error) = root.create_dir(PRIVATE_DIR)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(failed(error));
        }
        let temp = root.open_dir(PRIVATE_DIR).map_err(failed)?;
        let lock = temp.open_with(LOCK, OpenOptions::new().write(true).create(true)).map_err(failed)?;
        let lock = lock.into_std();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => OpenError::Busy(shown.clone()),
            other => failed(other.into()),
        })?;
        let stale = remove_stale(&temp).map_err(failed)?;
        if stale > 0 {
            tracing::warn!("removed {stale} unfinished files that an earlier server left in {shown}");
        }
        let store = Store { root, temp: Arc::new(temp), next: AtomicU64::new(0), _lock: lock };
        if !store.begin(None).and_then(|probe| record::supported(probe.file())).map_err(failed)? {
            tracing::warn!(
                "the file system of {shown} keeps no extended attributes: CRC32Cs are checked in transfers, \
                 but not remembered for stored files"
            );
        }
        Ok(store)
    }

    /// Begins a file that belongs to no name yet; `mode` are the permission bits it shall have.
    pub(crate) fn begin(&self, mode: Option<u32>) -> io::Result<Pending> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // The server itself must be able to read the object again.
        Pending::create(self.temp.clone(), format!("{number}.part"), mode.map(|mode| mode | 0o400))
    }

    /// Bytes that could still be written, where the file system says.
    pub(crate) fn free(&self) -> Option<u64> {
        let stat = rustix::fs::fstatvfs(&self.root).ok()?;
        // Some network file systems report no figures at all.
        (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Shows a whole file under `name`, durably, and records its CRC32C with it.
    pub(crate) fn commit(&self, pending: Pending, name: &Name) -> Result<Digest, StoreError> {
        let digest = pending.digest();
        let (parent, last) = name.split();
        let dir = self.make_dir_at(parent).doing("make the directory", parent)?;
        record::write(pending.file(), digest).doing("write", name.as_str())?;
        pending.place(&dir, last).doing("write", name.as_str())?;
        Ok(digest)
    }

    /// Makes a directory and its parents, durably.
    pub(crate) fn make_dir(&self, name: &Name) -> Result<(), StoreError> {
        self.make_dir_at(name.as_str()).map(drop).doing("make the directory", name.as_str())
    }

    fn make_dir_at(&self, path: &str) -> io::Result<Dir> {
        let mut dir = self.root.open_dir(".")?;
        if path.is_empty() {
            return Ok(dir);
        }
        // The common case: it is there.
        match self.root.open_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let part = &path[..end];
            match self.root.create_dir(part) {
                Ok(()) => sync_dir(&dir)?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            dir = self.root.open_dir(part)?;
        }
        Ok(dir)
    }

    /// Opens an object.
    pub(crate) fn read(&self, name: &Name) -> Result<Object, StoreError> {
        self.read_at(name.as_str()).doing("read", name.as_str())
    }

    fn read_at(&self, path: &str) -> io::Result<Object> {
        regular(&self.root.symlink_metadata(path)?)?;
        // Were it replaced by a pipe in between, opening it must not wait for a writer.
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let file = self.root.open_with(path, OpenOptions::new().read(true).custom_flags(nonblock))?;
        let metadata = file.metadata()?;
        regular(&metadata)?;
        let file = file.into_std();
        let recorded = record::read(&file)?;
        Ok(Object { file, size: metadata.len(), mode: metadata.permissions().mode() & 0o777, recorded })
    }
}

/// An object is a regular file.
fn regular(metadata: &cap_std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(io::ErrorKind::IsADirectory.into())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a regular file nor a directory"))
    }
}

/// Removes unfinished files; returns how many there were.
fn remove_stale(temp: &Dir) -> io::Result<usize> {
    let mut count = 0;
    for entry in temp.entries()? {
        let entry = entry?;
        if entry.file_name() != LOCK {
            entry.remove_file()?;
            count += 1;
        }
    }
    Ok(count)
}
