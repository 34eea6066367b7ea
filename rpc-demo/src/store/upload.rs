//! Uploads: objects that arrive in ranges, and that a client can resume after an interruption.
//!
//! An upload's file has its full length from the start and is filled range by range. The server
//! records only in memory which ranges the file holds. After an interruption, the checksums of the
//! ranges in the file are compared with those of the sender's file. So no stored state can be
//! wrong, even after a crash.
//!
//! | state of a range | on | becomes |
//! |---|---|---|
//! | `Missing` | claim | `Writing` |
//! | `Missing` | its checksum is sent to the client | `Present` |
//! | `Writing` | its bytes have the right checksum | `Present` |
//! | `Writing` | the claim is dropped | `Missing` |
//! | `Present` | claim (the client's bytes differ) | `Writing` |
//!
//! An upload ends when it is finished, aborted, taken over by a client that resumes it, or idle for
//! too long. From then on its writers can no longer write to its file, even if they still run.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::error::StoreError;
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::names::Name;
use crate::ranges::Ranges;
use crate::sink::{Pending, Room, Written};
use crate::source;

/// Time after which an idle upload is closed. The upload's file is kept.
const IDLE: Duration = Duration::from_secs(600);
/// Maximum number of open uploads, each of which holds an open file.
pub(super) const MAX_OPEN: usize = 256;

pub(super) const SUFFIX: &str = ".upload";

pub(crate) struct Upload {
    pub(super) name: Name,
    pub(super) ranges: Ranges,
    pub(super) attributes: Attributes,
    pub(super) temp: String,
    pub(super) file: Arc<Written>,
    /// The file to keep, place or remove. Taken when the upload ends.
    pub(super) pending: Mutex<Option<Pending>>,
    /// Whether writes are allowed. Read-locked around each write, so that no write follows the
    /// close.
    pub(super) open: RwLock<bool>,
    pub(super) parts: Mutex<Vec<Part>>,
    pub(super) used: Mutex<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Missing,
    Writing,
    /// The range is complete, with this CRC32C.
    Present(u32),
}

/// A client's request for an upload.
pub(crate) struct Wanted {
    pub(crate) name: Name,
    pub(crate) ranges: Ranges,
    pub(crate) attributes: Attributes,
    /// Whether to continue an earlier upload.
    pub(crate) resume: bool,
}

/// Why an upload fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error(
        "the server knows no such upload: it was restarted, or another client took the upload over. Repeat the \
         command with --resume"
    )]
    Unknown,
    #[error("range {0} is none of the {1} ranges of '{2}'")]
    NoSuchRange(u64, usize, Name),
    #[error("range {0} of '{1}' is already arriving")]
    Twice(usize, Name),
    #[error("{0} of the {1} ranges of '{2}' have not arrived")]
    Incomplete(usize, usize, Name),
    #[error(
        "'{name}' arrived as {stored} where {promised} was sent; nothing was stored, send it again"
    )]
    Differs { name: Name, stored: Digest, promised: Digest },
    #[error("'{0}' cannot be taken: {MAX_OPEN} uploads are open; try again later")]
    TooMany(Name),
    #[error(
        "cannot write '{name}': {need} bytes of it are to come, and the server's disk has {free} free; free some space \
         under the server's root"
    )]
    NoRoom { name: Name, need: u64, free: u64 },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The uploads that are open.
#[derive(Default)]
pub(super) struct Uploads {
    pub(super) open: Mutex<HashMap<String, Arc<Upload>>>,
    /// Held while an upload begins or old files are removed, so that no two uploads use the same
    /// file and no file in use is removed.
    pub(super) beginning: Mutex<()>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is consistent after a panic: each change is a single step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a file in the server's private directory belongs to an upload.
pub(super) fn is_upload(file: &OsStr) -> bool {
    file.to_str().is_some_and(|name| name.ends_with(SUFFIX))
}

impl Upload {
    /// The name of the object that the upload creates.
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    pub(crate) fn ranges(&self) -> Ranges {
        self.ranges
    }

    pub(super) fn is_idle(&self) -> bool {
        lock(&self.used).elapsed() > IDLE && !lock(&self.parts).contains(&Part::Writing)
    }

    /// Ends the upload. Nothing is written to the upload's file afterwards.
    pub(super) fn close(&self) -> Option<Pending> {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
        lock(&self.pending).take()
    }

    /// The digest of the whole object, if all ranges are present.
    pub(super) fn digest(&self) -> Result<Digest, UploadError> {
        let parts = lock(&self.parts);
        let mut digest = Digest::default();
        let mut missing = 0;
        for (index, part) in parts.iter().enumerate() {
            match (part, self.ranges.get(index)) {
                (Part::Present(crc32c), Some((_, size))) => {
                    digest = digest.then(Digest { size, crc32c: *crc32c });
                }
                _ => missing += 1,
            }
        }
        if missing > 0 {
            return Err(UploadError::Incomplete(missing, parts.len(), self.name.clone()));
        }
        Ok(digest)
    }

    /// Reads the file and emits the checksum of each range. The ranges count as present unless the
    /// client sends them again. Blocks.
    pub(crate) fn checksums(&self, mut emit: impl FnMut(u32) -> ControlFlow<()>) -> io::Result<()> {
        source::checksums(&self.file, &self.ranges, |index, digest| {
            if let Some(part @ Part::Missing) = lock(&self.parts).get_mut(index) {
                *part = Part::Present(digest.crc32c);
            }
            *lock(&self.used) = Instant::now();
            emit(digest.crc32c)
        })
    }

    /// Claims the exclusive right to write one range.
    pub(crate) fn claim(self: Arc<Self>, index: u64) -> Result<Claim, UploadError> {
        let none = || UploadError::NoSuchRange(index, self.ranges.count(), self.name.clone());
        let index_here = usize::try_from(index).map_err(|_| none())?;
        let (offset, length) = self.ranges.get(index_here).ok_or_else(none)?;
        match lock(&self.parts).get_mut(index_here) {
            Some(Part::Writing) => return Err(UploadError::Twice(index_here, self.name.clone())),
            Some(part) => *part = Part::Writing,
            None => return Err(none()),
        }
        Ok(Claim(Arc::new(Right {
            upload: self,
            index: index_here,
            offset,
            length,
            done: AtomicBool::new(false),
        })))
    }
}

/// The exclusive right to write one range of an upload. Clones share the right, and it ends when
/// the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Claim(Arc<Right>);

struct Right {
    upload: Arc<Upload>,
    index: usize,
    offset: u64,
    length: u64,
    done: AtomicBool,
}

impl Claim {
    /// Bytes of the range.
    pub(crate) fn length(&self) -> u64 {
        self.0.length
    }

    /// Marks the range as complete.
    pub(crate) fn complete(&self, crc32c: u32) {
        let right = &self.0;
        if let Some(part) = lock(&right.upload.parts).get_mut(right.index) {
            *part = Part::Present(crc32c);
        }
        right.done.store(true, Ordering::Relaxed);
        *lock(&right.upload.used) = Instant::now();
    }
}

impl Drop for Right {
    fn drop(&mut self) {
        if !*self.done.get_mut()
            && let Some(part) = lock(&self.upload.parts).get_mut(self.index)
        {
            *part = Part::Missing;
        }
    }
}

impl Room for Claim {
    fn file(&self) -> &Arc<Written> {
        &self.0.upload.file
    }

    fn begin(&self) -> u64 {
        self.0.offset
    }

    fn admit(
        &mut self,
        offset: u64,
        len: usize,
        write: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let right = &self.0;
        if offset.saturating_add(len as u64) > right.length {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "more bytes came than the range has",
            ));
        }
        let open = right.upload.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return Err(io::Error::other("the upload has ended; repeat the command with --resume"));
        }
        write()
    }
}
