//! The operations on a store's uploads: begin, finish, abort and sweep.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use super::Store;
use super::error::Doing;
use super::upload::{MAX_OPEN, Part, SUFFIX, Upload, UploadError, Wanted, is_upload, lock};
use crate::digest::Digest;
use crate::names::Name;
use crate::sink::Pending;

impl Store {
    /// Begins an upload. Returns the upload's id, and whether the upload continues an earlier
    /// upload.
    pub(crate) fn begin_upload(&self, wanted: Wanted) -> Result<(String, bool), UploadError> {
        let _one = lock(&self.uploads.beginning);
        let Wanted { name, ranges, attributes, resume } = wanted;
        let stem = stem(&name, ranges.size());
        self.close_where(|upload| {
            (resume && upload.name == name && upload.ranges.size() == ranges.size())
                || upload.is_idle()
        });
        if lock(&self.uploads.open).len() >= MAX_OPEN {
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
                    // An upload to an earlier server left a file of this name.
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

    /// Files of closed uploads whose names begin with `stem`, the newest first.
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

    /// Finds an open upload by its id.
    pub(crate) fn upload(&self, id: &str) -> Result<Arc<Upload>, UploadError> {
        let upload = lock(&self.uploads.open).get(id).cloned().ok_or(UploadError::Unknown)?;
        *lock(&upload.used) = Instant::now();
        Ok(upload)
    }

    /// Makes the object visible, if it is complete and has the digest `promised`.
    pub(crate) fn finish_upload(&self, id: &str, promised: Digest) -> Result<Digest, UploadError> {
        let upload = self.upload(id)?;
        let stored = upload.digest()?;
        if stored != promised {
            // The whole upload is aborted, because it is unknown which range is wrong.
            self.abort_upload(id)?;
            return Err(UploadError::Differs { name: upload.name.clone(), stored, promised });
        }
        lock(&self.uploads.open).remove(id);
        let pending = upload.close().ok_or(UploadError::Unknown)?;
        self.commit(pending, stored, &upload.attributes, &upload.name)?;
        Ok(stored)
    }

    /// Ends an upload and removes its file.
    pub(crate) fn abort_upload(&self, id: &str) -> Result<(), UploadError> {
        let upload = lock(&self.uploads.open).remove(id).ok_or(UploadError::Unknown)?;
        if let Some(mut pending) = upload.close() {
            pending.discard();
        }
        Ok(())
    }

    /// Closes idle uploads, and removes the expired files of closed uploads.
    pub(crate) fn sweep_uploads(&self) -> io::Result<()> {
        let _one = lock(&self.uploads.beginning);
        self.close_where(Upload::is_idle);
        for entry in self.temp.entries()? {
            let entry = entry?;
            let name = entry.file_name();
            let open = name.to_str().is_some_and(|temp| self.is_open(temp));
            if is_upload(&name) && !open && self.expired(&entry.metadata()?) {
                entry.remove_file()?;
            }
        }
        Ok(())
    }

    fn close_where(&self, which: impl Fn(&Upload) -> bool) {
        lock(&self.uploads.open).retain(|_, upload| {
            let close = which(upload);
            if close {
                // The file of a closed upload stays.
                drop(upload.close());
            }
            !close
        });
    }
}

/// The prefix of the file names of uploads with this name and size. If two names have the same
/// prefix, an upload may continue the file of the other name. The ranges then differ, and are sent
/// again.
fn stem(name: &Name, size: u64) -> String {
    format!("{:016x}-{size}-", crate::names::hash(name.as_str()))
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::time::Duration;

    use super::super::Options;
    use super::super::upload::Claim;
    use super::*;
    use crate::attributes::Attributes;
    use crate::ranges::{RANGE_MIN, Ranges};
    use crate::sink::{Room, write_at};

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

    fn write(claim: &mut Claim, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        let (file, at) = (claim.file().clone(), claim.begin() + offset);
        claim.admit(offset, bytes.len(), &mut || write_at(&file, bytes, at))
    }

    fn send(store: &Store, id: &str, index: usize) {
        let content = content();
        let part = content.chunks(EACH).nth(index).unwrap();
        let mut claim = store.upload(id).unwrap().claim(index as u64).unwrap();
        assert_eq!(claim.length(), part.len() as u64);
        write(&mut claim, &part[..100], 0).unwrap();
        write(&mut claim, &part[100..], 100).unwrap();
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
        write(&mut late, b"late", 0).unwrap_err();
        for index in 0..3 {
            send(&store, &new, index);
        }
        store.finish_upload(&new, Digest::of(&content())).unwrap();
        write(&mut late, b"late", 0).unwrap_err();
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
        // A dropped claim can be made again, and a write beyond the end of a range fails.
        drop(store.upload(&two).unwrap().claim(0).unwrap());
        let mut claim = store.upload(&two).unwrap().claim(2).unwrap();
        write(&mut claim, &[0; 101], 0).unwrap_err();
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
