//! The server's directory. Objects are plain files below this directory, and no name leads out of
//! it.
//!
//! Every path is resolved beneath the root's own descriptor (cap-std: `openat2` with
//! RESOLVE_BENEATH where the kernel has it), so neither `..` nor a symbolic link leaves the root. A
//! link inside the root is followed on the way to an object, but an object itself is a regular
//! file.
//!
//! All functions block on the disk.

mod error;
mod list;
mod record;
mod remove;
mod upload;
mod upload_calls;

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use error::Doing;
pub(crate) use error::StoreError;
pub(crate) use remove::Removed;
use rustix::fs::{FlockOperation, OFlags, flock};
use upload::Uploads;
pub(crate) use upload::{UploadError, Wanted};

use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::names::{Name, PRIVATE_DIR};
use crate::sink::{Pending, sync_dir};

/// Permission bits that the server needs in order to serve a file or a directory.
pub(crate) const MIN_FILE: u32 = 0o400;
pub(crate) const MIN_DIRECTORY: u32 = 0o500;

/// The file that the server locks while it uses the root.
const LOCK: &str = "lock";

/// An open root.
pub(crate) struct Store {
    root: Dir,
    temp: Arc<Dir>,
    next: AtomicU64,
    uploads: Uploads,
    options: Options,
    /// The lock file, held open for its lock.
    _lock: File,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Whether files and directories are synced before anything is acknowledged.
    pub(crate) sync: bool,
    /// How long the received part of an interrupted upload is kept.
    pub(crate) keep_uploads: Duration,
}

/// An object, open for reading.
pub(crate) struct Object {
    /// The file, positioned at its start.
    pub(crate) file: File,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Mode and time.
    pub(crate) attributes: Attributes,
    /// Identifies the version of the object. The value changes when the object is replaced or
    /// changed.
    pub(crate) version: String,
    /// CRC32C of the content as it was stored, if it is known and the file has not changed since.
    pub(crate) recorded: Option<u32>,
}

/// A root cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("there is no directory '{0}'; make it with mkdir -p, or name another with --root")]
    Missing(String),
    #[error("'{0}' is not a directory; name one with --root")]
    NotADirectory(String),
    #[error(
        "another rpc-demo already serves '{0}'; stop it, or name another directory with --root"
    )]
    Busy(String),
    #[error("cannot use '{0}': {1}; the server needs to read and write there")]
    Io(String, io::Error),
}

impl Store {
    /// Opens `path`, takes its lock, and removes files that an earlier server left unfinished.
    pub(crate) fn open(path: &Path, options: Options) -> Result<Store, OpenError> {
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
        let lock =
            temp.open_with(LOCK, OpenOptions::new().write(true).create(true)).map_err(failed)?;
        let lock = lock.into_std();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => OpenError::Busy(shown.clone()),
            other => failed(other.into()),
        })?;
        let store = Store {
            root,
            temp: Arc::new(temp),
            next: AtomicU64::new(0),
            uploads: Uploads::default(),
            options,
            _lock: lock,
        };
        let stale = store.remove_stale().map_err(failed)?;
        if stale > 0 {
            tracing::warn!(
                "removed {stale} unfinished files that an earlier server left in {shown}"
            );
        }
        if !store.begin(false).and_then(|probe| record::supported(probe.file())).map_err(failed)? {
            tracing::warn!(
                "the file system of {shown} keeps no extended attributes: CRC32Cs are checked in transfers, \
                 but not remembered for stored files"
            );
        }
        Ok(store)
    }

    /// Creates a file under a temporary name. For `private`, see [`Pending::create`].
    pub(crate) fn begin(&self, private: bool) -> io::Result<Pending> {
        Pending::create(self.temp.clone(), format!("{}.part", self.number()), private)
    }

    /// A number that this server has not used yet.
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Free bytes, if the file system reports them.
    pub(crate) fn free(&self) -> Option<u64> {
        let stat = rustix::fs::fstatvfs(&self.root).ok()?;
        // Some network file systems report no figures at all.
        (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Stores the CRC32C of a complete file in the file's attribute, and renames the file to
    /// `name`. If the store syncs, both are durable on return.
    pub(crate) fn commit(
        &self,
        pending: Pending,
        digest: Digest,
        attributes: &Attributes,
        name: &Name,
    ) -> Result<(), StoreError> {
        let (parent, last) = name.split();
        let dir = self.make_dir_at(parent).doing("make the directory", parent)?;
        let settle = || {
            // The time is set before the record, because the record contains the time. The mode is
            // set last, because writing the record needs a writable file.
            attributes.apply_time(pending.file())?;
            record::write(pending.file(), digest)?;
            attributes.apply_mode(pending.file(), MIN_FILE)
        };
        settle().doing("write", name.as_str())?;
        pending.place(&dir, last, self.options.sync).doing("write", name.as_str())
    }

    /// Creates a directory and its parents, durably if the store syncs. `writable` makes the
    /// directory writable for the server's user.
    pub(crate) fn make_dir(&self, name: &Name, writable: bool) -> Result<(), StoreError> {
        let make = || {
            let dir = self.make_dir_at(name.as_str())?;
            if writable {
                let dir = dir.open(".")?.into_std();
                let mode = Attributes::of(&dir.metadata()?).mode.unwrap_or_default();
                if mode & 0o700 != 0o700 {
                    Attributes { mode: Some(mode), modified: None }.apply(&dir, 0o700)?;
                }
            }
            Ok(())
        };
        make().doing("make the directory", name.as_str())
    }

    /// Sets mode and time of an object or directory.
    pub(crate) fn set_attributes(
        &self,
        name: &Name,
        attributes: &Attributes,
    ) -> Result<(), StoreError> {
        let set = || {
            if self.root.symlink_metadata(name.as_str())?.is_dir() {
                let dir = self.root.open_dir(name.as_str())?.open(".")?.into_std();
                attributes.apply(&dir, MIN_DIRECTORY)?;
                return if self.options.sync { dir.sync_all() } else { Ok(()) };
            }
            let Object { file, size, attributes: had, recorded, .. } =
                self.read_at(name.as_str())?;
            if let (Some(crc32c), Some(_)) = (recorded, attributes.modified) {
                let mode = attributes.mode.or(had.mode);
                Attributes { mode, modified: None }.apply_mode(&file, 0o600)?;
                attributes.apply_time(&file)?;
                record::write(&file, Digest { size, crc32c })?;
                Attributes { mode, modified: None }.apply_mode(&file, MIN_FILE)?;
            } else {
                attributes.apply(&file, MIN_FILE)?;
            }
            if self.options.sync { file.sync_all() } else { Ok(()) }
        };
        set().doing("set the mode and time of", name.as_str())
    }

    fn sync_dir(&self, dir: &Dir) -> io::Result<()> {
        if self.options.sync { sync_dir(dir) } else { Ok(()) }
    }

    fn make_dir_at(&self, path: &str) -> io::Result<Dir> {
        let mut dir = self.root.open_dir(".")?;
        if path.is_empty() {
            return Ok(dir);
        }
        // In the common case the directory exists.
        match self.root.open_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other,
        }
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let part = &path[..end];
            match self.root.create_dir(part) {
                Ok(()) => self.sync_dir(&dir)?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            dir = self.root.open_dir(part)?;
        }
        Ok(dir)
    }

    pub(crate) fn read(&self, name: &Name) -> Result<Object, StoreError> {
        self.read_at(name.as_str()).doing("read", name.as_str())
    }

    fn read_at(&self, path: &str) -> io::Result<Object> {
        regular(&self.root.symlink_metadata(path)?)?;
        // If a pipe has replaced the file since the check, opening the pipe must not wait for a
        // writer.
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let file =
            self.root.open_with(path, OpenOptions::new().read(true).custom_flags(nonblock))?;
        regular(&file.metadata()?)?;
        let file = file.into_std();
        let recorded = record::read(&file)?;
        let metadata = file.metadata()?;
        Ok(Object {
            size: metadata.len(),
            attributes: Attributes::of(&metadata),
            version: version(&metadata),
            file,
            recorded,
        })
    }
}

/// Returns the version of an object, which changes when its file is replaced or written.
fn version(metadata: &Metadata) -> String {
    let (seconds, nanos) = (metadata.mtime(), metadata.mtime_nsec());
    format!("{:x}-{:x}-{seconds:x}.{nanos:x}", metadata.ino(), metadata.size())
}

/// Fails if the file is not a regular file. Only regular files are objects.
fn regular(metadata: &cap_std::fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        Ok(())
    } else if metadata.is_dir() {
        Err(io::ErrorKind::IsADirectory.into())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is neither a regular file nor a directory",
        ))
    }
}
