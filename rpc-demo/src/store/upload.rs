//! Uploads: objects that arrive in ranges, and may be taken up again after an interruption.
//!
//! An upload's file has its full length from the beginning and is filled range by range. Which
//! ranges it holds is kept in memory only. After an interruption that is found out by comparing
//! checksums of its ranges with those of the sender's file: nothing else than the content itself
//! can be wrong about it, also after a crash.
//!
//! | state of a range | on | becomes |
//! |---|---|---|
//! | `Missing` | claim | `Writing` |
//! | `Missing` | its checksum was told to the client | `Present` |
//! | `Writing` | its bytes were found right | `Present` |
//! | `Writing` | the claim is dropped | `Missing` |
//! | `Present` | claim (the client's bytes differ) | `Writing` |
//!
//! An upload ends when it is finished, aborted, taken over by a client that resumes it, or idle for
//! long. From then on no write reaches its file, wherever its writers are.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::{Doing, Store, StoreError};
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::names::Name;
use crate::ranges::Ranges;
use crate::sink::{Pending, Room, Written, write_at};
use crate::source;

/// An upload that nobody uses for so long is closed; what it has received stays.
const IDLE: Duration = Duration::from_secs(600);
/// Uploads open at once: each holds a file open.
const OPEN_MAX: usize = 256;

const SUFFIX: &str = ".upload";

/// An open upload.
pub(crate) struct Upload {
    name: Name,
    ranges: Ranges,
    attributes: Attributes,
    temp: String,
    file: Arc<Written>,
    /// Taken when it ends.
    pending: Mutex<Option<Pending>>,
    /// Read-locked around each write, so that none follows its closing.
    open: RwLock<bool>,
    parts: Mutex<Vec<Part>>,
    used: Mutex<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Missing,
    Writing,
    /// With this CRC32C.
    Present(u32),
}

/// What a client asks for.
pub(crate) struct Wanted {
    pub(crate) name: Name,
    pub(crate) ranges: Ranges,
    pub(crate) attributes: Attributes,
    /// Take up what an earlier upload has received.
    pub(crate) resume: bool,
}

/// Why an upload cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    #[error(
        "the server knows no such upload; it was restarted, or another client took the upload over; repeat the \
         command with --resume"
    )]
    Unknown,
    #[error("range {0} is none of the {1} ranges of '{2}'")]
    NoSuchRange(u64, usize, Name),
    #[error("range {0} of '{1}' is arriving already")]
    Twice(usize, Name),
    #[error("{0} of the {1} ranges of '{2}' have not arrived")]
    Incomplete(usize, usize, Name),
    #[error(
        "'{name}' arrived as {stored} where {promised} was sent; nothing was stored, send it again"
    )]
    Differs { name: Name, stored: Digest, promised: Digest },
    #[error("'{0}' cannot be taken: {OPEN_MAX} uploads are open; try again later")]
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
    open: Mutex<HashMap<String, Arc<Upload>>>,
    /// Held while one begins: no two take up the same file.
    beginning: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What they guard is changed in single steps.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a file in the server's own directory is what an upload has received.
pub(super) fn is_one(file: &OsStr) -> bool {
    file.to_str().is_some_and(|name| name.ends_with(SUFFIX))
}

impl Store {
    /// Begins an upload. Returns the text that names it, itself, and whether an earlier one was
    /// taken up.
    pub(crate) fn begin_upload(&self, wanted: Wanted) -> Result<(String, bool), UploadError> {
        let _one = lock(&self.uploads.beginning);
        let Wanted { name, ranges, attributes, resume } = wanted;
        let stem = stem(&name, ranges.size());
        self.close_where(|upload| {
            (resume && upload.name == name && upload.ranges.size() == ranges.size())
                || upload.idle()
        });
        if lock(&self.uploads.open).len() >= OPEN_MAX {
            return Err(UploadError::TooMany(name));
        }
        let begin = || -> io::Result<(Pending, String, bool)> {
            let mut found = None;
            for temp in self.left_of(&stem)? {
                if resume && found.is_none() {
                    found = Some(temp);
                } else {
                    self.temp.remove_file(temp)?;
                }
            }
            if let Some(temp) = found {
                return Ok((Pending::reopen(self.temp.clone(), temp.clone())?, temp, true));
            }
            loop {
                let temp = format!("{stem}{}{SUFFIX}", self.number());
                match Pending::create(self.temp.clone(), temp.clone(), attributes.mode.is_some()) {
                    // One of an earlier server's that is kept.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    made => return Ok((made?, temp, false)),
                }
            }
        };
        let doing = |result: io::Result<_>| result.doing("write", name.as_str());
        let (mut pending, temp, resumed) = doing(begin())?;
        let has =
            pending.file().metadata().map(|metadata| metadata.blocks() * 512).unwrap_or_default();
        let need = ranges.size().saturating_sub(has);
        if let Some(free) = self.free().filter(|free| *free < need) {
            return Err(UploadError::NoRoom { name, need, free });
        }
        pending.file().set_len(ranges.size()).doing("write", name.as_str())?;
        pending.keep();
        let upload = Upload {
            file: pending.file().clone(),
            parts: Mutex::new(vec![Part::Missing; ranges.count()]),
            pending: Mutex::new(Some(pending)),
            open: RwLock::new(true),
            used: Mutex::new(Instant::now()),
            name,
            ranges,
            attributes,
            temp,
        };
        let id = format!("{:032x}", rand::random::<u128>());
        lock(&self.uploads.open).insert(id.clone(), Arc::new(upload));
        Ok((id, resumed))
    }

    /// Files of closed uploads whose names begin with `stem`, the last written first.
    fn left_of(&self, stem: &str) -> io::Result<Vec<String>> {
        let mut left = Vec::new();
        for entry in self.temp.entries()? {
            let entry = entry?;
            let Ok(temp) = entry.file_name().into_string() else { continue };
            if temp.starts_with(stem) && temp.ends_with(SUFFIX) && !self.is_open(&temp) {
                left.push((entry.metadata()?.modified()?.into_std(), temp));
            }
        }
        left.sort();
        Ok(left.into_iter().rev().map(|(_, temp)| temp).collect())
    }

    fn is_open(&self, temp: &str) -> bool {
        lock(&self.uploads.open).values().any(|upload| upload.temp == temp)
    }

    /// An open upload by its text.
    pub(crate) fn upload(&self, id: &str) -> Result<Arc<Upload>, UploadError> {
        let upload = lock(&self.uploads.open).get(id).cloned().ok_or(UploadError::Unknown)?;
        *lock(&upload.used) = Instant::now();
        Ok(upload)
    }

    /// Shows the object, if it is whole and `promised` is what it amounts to.
    pub(crate) fn finish_upload(&self, id: &str, promised: Digest) -> Result<Digest, UploadError> {
        let upload = self.upload(id)?;
        let stored = upload.digest()?;
        if stored != promised {
            // What is wrong cannot be told from what is right.
            self.abort_upload(id)?;
            return Err(UploadError::Differs { name: upload.name.clone(), stored, promised });
        }
        lock(&self.uploads.open).remove(id);
        let pending = upload.close().ok_or(UploadError::Unknown)?;
        self.commit(pending, stored, &upload.attributes, &upload.name)?;
        Ok(stored)
    }

    /// Ends an upload and removes what it has received.
    pub(crate) fn abort_upload(&self, id: &str) -> Result<(), UploadError> {
        let upload = lock(&self.uploads.open).remove(id).ok_or(UploadError::Unknown)?;
        if let Some(mut pending) = upload.close() {
            pending.discard();
        }
        Ok(())
    }

    /// Closes uploads that nobody uses, and removes what was left of others too long ago.
    pub(crate) fn sweep_uploads(&self) -> io::Result<()> {
        let _one = lock(&self.uploads.beginning);
        self.close_where(Upload::idle);
        for entry in self.temp.entries()? {
            let entry = entry?;
            let name = entry.file_name();
            let open = name.to_str().is_some_and(|temp| self.is_open(temp));
            if is_one(&name) && !open && self.expired(&entry.metadata()?) {
                entry.remove_file()?;
            }
        }
        Ok(())
    }

    fn close_where(&self, which: impl Fn(&Upload) -> bool) {
        lock(&self.uploads.open).retain(|_, upload| {
            let close = which(upload);
            if close {
                // Its file stays.
                drop(upload.close());
            }
            !close
        });
    }
}

impl Upload {
    /// What it will be called.
    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// How it is cut.
    pub(crate) fn ranges(&self) -> Ranges {
        self.ranges
    }

    fn idle(&self) -> bool {
        lock(&self.used).elapsed() > IDLE && !lock(&self.parts).contains(&Part::Writing)
    }

    /// From here on nothing is written to its file.
    fn close(&self) -> Option<Pending> {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
        lock(&self.pending).take()
    }

    /// What the ranges amount to, if all are there.
    fn digest(&self) -> Result<Digest, UploadError> {
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

    /// Reads what it has received and tells the checksum of each range; those count as present
    /// unless the client sends them again. Blocks.
    pub(crate) fn checksums(&self, mut emit: impl FnMut(u32) -> ControlFlow<()>) -> io::Result<()> {
        source::checksums(&self.file, &self.ranges, |index, digest| {
            if let Some(part @ Part::Missing) = lock(&self.parts).get_mut(index) {
                *part = Part::Present(digest.crc32c);
            }
            *lock(&self.used) = Instant::now();
            emit(digest.crc32c)
        })
    }

    /// The right to write one range.
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

/// The right to write one range of an upload. Clones share it; it ends with the last of them.
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

    /// The range holds what was sent.
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

    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let right = &self.0;
        if offset.saturating_add(bytes.len() as u64) > right.length {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "more bytes came than the range has",
            ));
        }
        let open = right.upload.open.read().unwrap_or_else(PoisonError::into_inner);
        if !*open {
            return Err(io::Error::other("the upload has ended; repeat the command with --resume"));
        }
        write_at(&right.upload.file, bytes, right.offset + offset)
    }
}

/// What the files of uploads of this name and size begin with. Two names may share it; the content
/// then differs, and is sent.
fn stem(name: &Name, size: u64) -> String {
    format!("{:016x}-{size}-", crate::names::hash(name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::super::Options;
    use super::*;
    use crate::ranges::RANGE_MIN;

    const EACH: usize = RANGE_MIN as usize;

    fn store(dir: &std::path::Path) -> Store {
        Store::open(dir, Options { sync: false, keep_uploads: Duration::from_secs(3600) }).unwrap()
    }

    fn content() -> Vec<u8> {
        (0..EACH as u32 * 2 + 100).map(|n| (n >> 5) as u8).collect()
    }

    fn wanted(resume: bool) -> Wanted {
        Wanted {
            name: Name::parse("dir/large").unwrap(),
            ranges: Ranges::new(content().len() as u64, RANGE_MIN).unwrap(),
            attributes: Attributes::default(),
            resume,
        }
    }

    fn send(store: &Store, id: &str, index: usize) {
        let content = content();
        let part = content.chunks(EACH).nth(index).unwrap();
        let mut claim = store.upload(id).unwrap().claim(index as u64).unwrap();
        assert_eq!(claim.length(), part.len() as u64);
        claim.write(&part[..100], 0).unwrap();
        claim.write(&part[100..], 100).unwrap();
        claim.complete(crc32c::crc32c(part));
    }

    #[test]
    fn ranges_in_any_order_make_the_object() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (id, resumed) = store.begin_upload(wanted(false)).unwrap();
        assert!(!resumed);
        for index in [2, 0] {
            send(&store, &id, index);
        }
        let whole = Digest::of(&content());
        assert!(matches!(store.finish_upload(&id, whole), Err(UploadError::Incomplete(1, 3, _))));
        assert!(!dir.path().join("dir").exists());
        send(&store, &id, 1);
        assert_eq!(store.finish_upload(&id, whole).unwrap(), whole);
        assert_eq!(std::fs::read(dir.path().join("dir/large")).unwrap(), content());
        assert!(matches!(store.upload(&id), Err(UploadError::Unknown)));
    }

    #[test]
    fn what_is_there_is_found_by_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let first = store(dir.path());
        let (id, _) = first.begin_upload(wanted(false)).unwrap();
        send(&first, &id, 1);
        drop(first);
        let next = store(dir.path());
        let (id, resumed) = next.begin_upload(wanted(true)).unwrap();
        assert!(resumed);
        let mut found = Vec::new();
        let upload = next.upload(&id).unwrap();
        let collect = |crc32c| {
            found.push(crc32c);
            ControlFlow::Continue(())
        };
        upload.checksums(collect).unwrap();
        let expected: Vec<_> = content().chunks(EACH).map(crc32c::crc32c).collect();
        assert_eq!(found[1], expected[1]);
        assert!(found[0] != expected[0] && found[2] != expected[2]);
        // Zeros count as present until they are sent again.
        assert!(matches!(
            next.finish_upload(&id, Digest::of(b"")),
            Err(UploadError::Differs { .. })
        ));
        assert!(matches!(next.upload(&id), Err(UploadError::Unknown)));
        let (id, resumed) = next.begin_upload(wanted(true)).unwrap();
        assert!(!resumed, "what did not add up is gone");
        next.abort_upload(&id).unwrap();
        assert_eq!(std::fs::read_dir(dir.path().join(".rpc-demo-tmp")).unwrap().count(), 1);
    }

    #[test]
    fn one_that_resumes_takes_over() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (old, _) = store.begin_upload(wanted(false)).unwrap();
        let mut late = store.upload(&old).unwrap().claim(0).unwrap();
        assert!(matches!(store.upload(&old).unwrap().claim(0), Err(UploadError::Twice(0, _))));
        assert!(matches!(
            store.upload(&old).unwrap().claim(3),
            Err(UploadError::NoSuchRange(3, 3, _))
        ));
        let (new, resumed) = store.begin_upload(wanted(true)).unwrap();
        assert!(resumed);
        assert!(matches!(store.upload(&old), Err(UploadError::Unknown)));
        late.write(b"late", 0).unwrap_err();
        for index in 0..3 {
            send(&store, &new, index);
        }
        store.finish_upload(&new, Digest::of(&content())).unwrap();
        late.write(b"late", 0).unwrap_err();
        assert_eq!(std::fs::read(dir.path().join("dir/large")).unwrap(), content());
    }

    #[test]
    fn two_at_once_do_not_mix() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let (one, _) = store.begin_upload(wanted(false)).unwrap();
        let (two, _) = store.begin_upload(wanted(false)).unwrap();
        for index in 0..3 {
            send(&store, &one, index);
        }
        assert!(matches!(
            store.finish_upload(&two, Digest::of(&content())),
            Err(UploadError::Incomplete(3, 3, _))
        ));
        store.finish_upload(&one, Digest::of(&content())).unwrap();
        // A claim that is dropped can be made again, and a range has an end.
        drop(store.upload(&two).unwrap().claim(0).unwrap());
        let mut claim = store.upload(&two).unwrap().claim(2).unwrap();
        claim.write(&[0; 101], 0).unwrap_err();
    }

    #[test]
    fn what_is_old_goes() {
        let dir = tempfile::tempdir().unwrap();
        let temp = dir.path().join(".rpc-demo-tmp");
        let files = || std::fs::read_dir(&temp).unwrap().count() - 1;
        let first = store(dir.path());
        first.begin_upload(wanted(false)).unwrap();
        first.sweep_uploads().unwrap();
        assert_eq!(files(), 1);
        drop(first);
        std::fs::write(temp.join("7.part"), "").unwrap();
        std::fs::create_dir_all(temp.join("8.removed/sub")).unwrap();
        drop(store(dir.path()));
        assert_eq!(files(), 1);
        let next =
            Store::open(dir.path(), Options { sync: false, keep_uploads: Duration::ZERO }).unwrap();
        assert_eq!(files(), 0);
        next.begin_upload(wanted(false)).unwrap();
        next.sweep_uploads().unwrap();
        assert_eq!(files(), 1, "one that is open is not swept");
    }
}
