//! Writes incoming files under a temporary name and renames them once they are complete.
//!
//! The server uses this module for puts, and the client uses it for gets.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::{Bytes, BytesMut};
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::costs;
use crate::digest::Digest;
use crate::disk::{self, ALIGN, Access, Direct, MIN_LEN};
use crate::source::BLOCK;

/// Maximum number of chunks queued for the disk, in addition to the chunk being written.
const WRITE_BEHIND: usize = 2;

/// Permission bits of a file whose sender names none, before the umask applies.
const DEFAULT_MODE: u32 = 0o666;

/// A file that several transfers write to, each to its own part.
///
/// The kernel lets one thread write to a file at a time, and the others spin. A [`Writer`] that
/// writes through the page cache therefore takes the lock `turn`, on which waiters sleep.
#[derive(Debug)]
pub(crate) struct Written {
    file: File,
    turn: Mutex<()>,
    /// The same file with O_DIRECT, opened when the first large chunk is written. `None` if the
    /// file cannot be opened with O_DIRECT.
    direct: OnceLock<Option<Direct>>,
}

impl Written {
    fn new(file: File) -> Arc<Written> {
        Arc::new(Written { file, turn: Mutex::new(()), direct: OnceLock::new() })
    }

    /// Returns the file for O_DIRECT, and the number of bytes at the start of a chunk whose write
    /// can bypass the page cache. Returns `None` if no byte can.
    fn direct(&self, offset: u64, chunk: &[u8]) -> Option<(&Direct, usize)> {
        if (chunk.len() as u64) < MIN_LEN {
            disk::too_short();
            return None;
        }
        let direct = self.open_direct()?;
        Some((direct, direct.writable(offset, chunk))).filter(|(_, len)| *len > 0)
    }

    /// Whether the write of a chunk of this length may bypass the page cache.
    fn takes_direct(&self, len: usize) -> bool {
        len as u64 >= MIN_LEN && self.open_direct().is_some()
    }

    fn open_direct(&self) -> Option<&Direct> {
        let open = || Direct::open(&self.file, Access::Write);
        self.direct.get_or_init(open).as_ref()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for Written {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

/// A file without its final name. The file is removed on drop, unless it is to be kept.
pub(crate) struct Pending {
    dir: Arc<Dir>,
    temp: String,
    file: Arc<Written>,
    on_drop: OnDrop,
}

/// How a file that never got its final name is treated on drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnDrop {
    Remove,
    Keep,
}

impl Pending {
    /// Creates the empty file `temp`, which must not exist, in `dir`. If `private`, no other user
    /// may read the file until it is complete. Otherwise the file has the usual permission bits of
    /// a new file.
    pub(crate) fn create(dir: Arc<Dir>, temp: String, private: bool) -> io::Result<Pending> {
        let mode = if private { 0o600 } else { DEFAULT_MODE };
        let options = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).clone();
        let file = Written::new(dir.open_with(&temp, &options)?.into_std());
        Ok(Pending { dir, temp, file, on_drop: OnDrop::Remove })
    }

    /// Opens the file `temp` that an earlier transfer left in `dir`, or creates it.
    pub(crate) fn reopen(dir: Arc<Dir>, temp: String) -> io::Result<Pending> {
        let options = OpenOptions::new().read(true).write(true).create(true).mode(0o600).clone();
        let file = Written::new(dir.open_with(&temp, &options)?.into_std());
        Ok(Pending { dir, temp, file, on_drop: OnDrop::Keep })
    }

    /// Keeps the file on drop, so that a later transfer can resume.
    pub(crate) fn keep(&mut self) {
        self.on_drop = OnDrop::Keep;
    }

    /// Removes the file on drop.
    pub(crate) fn discard(&mut self) {
        self.on_drop = OnDrop::Remove;
    }

    pub(crate) fn file(&self) -> &Arc<Written> {
        &self.file
    }

    /// Renames the file to `name` in `dir`, which must be on the same file system, and replaces a
    /// file of that name. With `sync` the new name is durable on return.
    pub(crate) fn place(mut self, dir: &Dir, name: &str, sync: bool) -> io::Result<()> {
        if sync {
            self.file.sync_all()?;
        }
        self.dir.rename(&self.temp, dir, name)?;
        self.on_drop = OnDrop::Keep;
        if sync { sync_dir(dir) } else { Ok(()) }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.on_drop == OnDrop::Remove
            && let Err(error) = self.dir.remove_file(&self.temp)
        {
            tracing::warn!("the temporary file {} could not be removed: {error}", self.temp);
        }
    }
}

/// Syncs the entries of a directory to disk, if the file system supports it.
pub(crate) fn sync_dir(dir: &Dir) -> io::Result<()> {
    match dir.open(".")?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

/// A destination for chunks.
pub(crate) trait Room: Send + 'static {
    fn file(&self) -> &Arc<Written>;

    /// The offset in the file at which this destination begins, in bytes.
    fn begin(&self) -> u64;

    /// Calls `write` if `len` bytes may be written at `offset`, counted from the start of this
    /// destination. `write` writes these bytes.
    fn admit(
        &mut self,
        offset: u64,
        len: usize,
        write: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<()>;
}

/// A part of a file with a single writer.
pub(crate) struct Part {
    /// The file that the part belongs to.
    pub(crate) file: Arc<Written>,
    /// Offset of the part in bytes.
    pub(crate) offset: u64,
}

impl Room for Part {
    fn file(&self) -> &Arc<Written> {
        &self.file
    }

    fn begin(&self) -> u64 {
        self.offset
    }

    fn admit(
        &mut self,
        _offset: u64,
        _len: usize,
        write: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        write()
    }
}

/// Writes all of `bytes` at `offset`, without copying them first.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)?;
    costs::written(bytes.len() as u64);
    Ok(())
}

/// Whether the sender of a body can still change its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// The sender can still change the bytes. The bytes are copied before they are checked, and the
    /// copy is written.
    MayChange,
    /// The sender cannot change the bytes, or is trusted not to change them. The bytes are checked
    /// and written in place.
    Settled,
}

impl Body {
    /// Returns the bytes, or a copy if their sender can still change them.
    pub(crate) fn settle(self, bytes: Bytes) -> Bytes {
        match self {
            Body::MayChange => Private::default().copy(&bytes),
            Body::Settled => bytes,
        }
    }
}

/// Reusable memory for copies of received bytes.
#[derive(Debug, Default)]
struct Private(BytesMut);

impl Private {
    /// Returns a copy that begins at a multiple of [`ALIGN`], for a write that bypasses the page
    /// cache.
    fn copy(&mut self, bytes: &[u8]) -> Bytes {
        costs::settled(bytes.len());
        let pad = |buf: &BytesMut| buf.as_ptr().align_offset(ALIGN as usize);
        let mut buf = std::mem::take(&mut self.0);
        buf.clear();
        if buf.capacity() < pad(&buf).saturating_add(bytes.len()) {
            buf = BytesMut::with_capacity(bytes.len() + ALIGN as usize);
        }
        let pad = pad(&buf);
        buf.resize(pad, 0);
        buf.extend_from_slice(bytes);
        buf.freeze().split_off(pad)
    }

    /// Takes back the memory of a copy.
    fn reclaim(&mut self, copy: Bytes) {
        self.0 = copy.try_into_mut().unwrap_or_default();
    }

    /// Returns a copy that is valid until the next call.
    fn block(&mut self, bytes: &[u8]) -> &[u8] {
        costs::settled(bytes.len());
        self.0.clear();
        self.0.extend_from_slice(bytes);
        &self.0
    }
}

/// A write failed. [`Writer::finish`] returns the error.
#[derive(Debug)]
pub(crate) struct Stopped;

/// Writes on a blocking thread, concurrently with the network. Dropping the writer ends the thread.
pub(crate) struct Writer {
    chunks: mpsc::Sender<Bytes>,
    thread: JoinHandle<io::Result<Digest>>,
}

impl Writer {
    /// Starts the thread. Needs a tokio runtime.
    pub(crate) fn start(mut room: impl Room, body: Body) -> Writer {
        let (chunks, mut queue) = mpsc::channel::<Bytes>(WRITE_BEHIND);
        let thread = tokio::task::spawn_blocking(move || {
            let (mut digest, mut private) = (Digest::default(), Private::default());
            let file = room.file().clone();
            while let Some(mut chunk) = queue.blocking_recv() {
                let may_change = body == Body::MayChange;
                // The disk reads the chunk later, so the whole chunk is copied first. For the page
                // cache, each block is copied below.
                let whole = may_change && file.takes_direct(chunk.len());
                if whole {
                    chunk = private.copy(&chunk);
                }
                let at = room.begin() + digest.size;
                match file.direct(at, &chunk) {
                    Some((direct, len)) => {
                        let (from, mut digest_of) = (digest.size, Some(&mut digest));
                        room.admit(from, chunk.len(), &mut || {
                            // The checksum is computed while the disk takes the bytes.
                            let meanwhile = || {
                                digest_of.take().into_iter().for_each(|digest| digest.add(&chunk));
                            };
                            let done = direct.write(at, chunk.slice(..len), meanwhile)?;
                            let rest = chunk.get(done..).unwrap_or_default();
                            write_at(&file, rest, at + done as u64)
                        })?;
                    }
                    None => {
                        let _turn = file.turn();
                        // Each block is written right after its checksum is computed, while the
                        // block is still in the processor's cache.
                        for block in chunk.chunks(BLOCK) {
                            let (from, at) = (digest.size, room.begin() + digest.size);
                            let copies = may_change && !whole;
                            let block = if copies { private.block(block) } else { block };
                            digest.add(block);
                            room.admit(from, block.len(), &mut || write_at(&file, block, at))?;
                        }
                    }
                }
                if whole {
                    private.reclaim(chunk);
                }
            }
            Ok(digest)
        });
        Writer { chunks, thread }
    }

    /// Queues a chunk. Waits while the queue is full.
    pub(crate) async fn push(&mut self, chunk: Bytes) -> Result<(), Stopped> {
        self.chunks.send(chunk).await.map_err(|_| Stopped)
    }

    /// Waits until all chunks are written, and returns their digest.
    pub(crate) async fn finish(self) -> io::Result<Digest> {
        drop(self.chunks);
        self.thread.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use cap_std::ambient_authority;

    use super::*;
    use crate::attributes::Attributes;

    fn dir() -> (tempfile::TempDir, Arc<Dir>) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(temp.path(), ambient_authority()).unwrap();
        (temp, Arc::new(dir))
    }

    async fn written(pending: &Pending, offset: u64, chunks: &[&'static [u8]]) -> Digest {
        let part = Part { file: pending.file().clone(), offset };
        let mut writer = Writer::start(part, Body::Settled);
        for chunk in chunks {
            writer.push(Bytes::from_static(chunk)).await.unwrap();
        }
        writer.finish().await.unwrap()
    }

    #[tokio::test]
    async fn a_placed_file_is_whole_and_alone() {
        let (temp, dir) = dir();
        let pending = Pending::create(dir.clone(), "t".into(), true).unwrap();
        let digest = written(&pending, 0, &[b"0123456789".as_slice(); 20]).await;
        assert_eq!(digest, Digest::of(&b"0123456789".repeat(20)));
        let attributes = Attributes { mode: Some(0o040), modified: Some(std::time::UNIX_EPOCH) };
        attributes.apply(pending.file(), 0o400).unwrap();
        pending.place(&dir, "name", true).unwrap();
        assert_eq!(std::fs::read(temp.path().join("name")).unwrap(), b"0123456789".repeat(20));
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
        let metadata = std::fs::metadata(temp.path().join("name")).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o440);
        assert_eq!(metadata.modified().unwrap(), std::time::UNIX_EPOCH);
    }

    #[tokio::test]
    async fn ranges_land_where_they_belong() {
        let (temp, dir) = dir();
        let mut pending = Pending::create(dir.clone(), "t".into(), true).unwrap();
        written(&pending, 10, &[b"", b"abc", b"", b"def"]).await;
        written(&pending, 3, &[b"xyz"]).await;
        pending.keep();
        drop(pending);
        assert_eq!(std::fs::read(temp.path().join("t")).unwrap(), b"\0\0\0xyz\0\0\0\0abcdef");
        let mut again = Pending::reopen(dir, "t".into()).unwrap();
        assert_eq!(again.file().metadata().unwrap().len(), 16);
        again.discard();
        drop(again);
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn chunks_of_many_blocks_are_written_and_checked_whole() {
        let (temp, dir) = dir();
        let mut pending = Pending::create(dir.clone(), "t".into(), true).unwrap();
        let content: Vec<u8> = (0..3 * BLOCK as u32 + 5).map(|n| (n >> 3) as u8).collect();
        let part = Part { file: pending.file().clone(), offset: 7 };
        let mut writer = Writer::start(part, Body::Settled);
        for chunk in
            [&content[..2 * BLOCK], &content[2 * BLOCK..2 * BLOCK + 1], &content[2 * BLOCK + 1..]]
        {
            writer.push(Bytes::copy_from_slice(chunk)).await.unwrap();
        }
        assert_eq!(writer.finish().await.unwrap(), Digest::of(&content));
        pending.keep();
        assert!(std::fs::read(temp.path().join("t")).unwrap()[7..] == content);
    }

    /// Bytes that can still change are copied, once, before they are checked, whether their write
    /// uses the page cache or bypasses it.
    #[tokio::test]
    async fn what_may_change_is_copied_before_it_is_checked() {
        let (temp, dir) = dir();
        let content: Vec<u8> = (0..3 * BLOCK as u32 + 5).map(|n| (n >> 3) as u8).collect();
        let chunk = Bytes::from(content.clone());
        for (body, copies) in [(Body::MayChange, true), (Body::Settled, false)] {
            let own = body.settle(chunk.clone());
            assert_eq!((own == chunk, own.as_ptr() != chunk.as_ptr()), (true, copies));
            for offset in [0, 7] {
                let mut pending = Pending::create(dir.clone(), "t".into(), true).unwrap();
                let part = Part { file: pending.file().clone(), offset };
                let before = costs::Costs::now().settled_bytes;
                let mut writer = Writer::start(part, body);
                writer.push(chunk.clone()).await.unwrap();
                writer.push(chunk.clone()).await.unwrap();
                assert_eq!(writer.finish().await.unwrap(), Digest::of(&content.repeat(2)));
                let copied = costs::Costs::now().settled_bytes - before;
                // Other tests copy at the same time.
                assert!(!copies || copied >= 2 * chunk.len() as u64, "{copied}");
                let file = std::fs::read(temp.path().join("t")).unwrap();
                assert!(file[offset as usize..] == content.repeat(2));
                pending.discard();
            }
        }
    }

    #[test]
    fn copies_begin_at_pages_and_use_their_memory_again() {
        let mut private = Private::default();
        let mut places = std::collections::HashSet::new();
        for len in [300_000, 5, 299_999, 300_000] {
            let copy = private.copy(&vec![7; len]);
            assert!(copy.len() == len && copy.iter().all(|byte| *byte == 7));
            assert!(copy.as_ptr().addr().is_multiple_of(ALIGN as usize));
            places.insert(copy.as_ptr());
            private.reclaim(copy);
        }
        assert_eq!(places.len(), 1);
    }

    #[tokio::test]
    async fn a_dropped_file_is_gone() {
        let (temp, dir) = dir();
        let pending = Pending::create(dir.clone(), "t".into(), false).unwrap();
        written(&pending, 0, &[b"half"]).await;
        drop(pending);
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_placed_is_gone() {
        let (temp, dir) = dir();
        std::fs::create_dir(temp.path().join("taken")).unwrap();
        let pending = Pending::create(dir.clone(), "t".into(), true).unwrap();
        assert!(pending.place(&dir, "taken", true).is_err());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_disk_that_is_full_says_so() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = write_at(&full, b"x", 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        write_at(&full, b"", 0).unwrap();
    }
}
