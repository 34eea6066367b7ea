//! Files on their way in: written under a temporary name, shown under their own only when whole.
//!
//! Both ends use it: the server for `put`, the client for `get`.

use crate::digest::Digest;
use bytes::Bytes;
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Chunks that may wait for the disk; one more is being written.
const WRITE_BEHIND: usize = 4;

/// A file that has no name of its own yet. Dropping it removes it.
pub(crate) struct Pending {
    dir: Arc<Dir>,
    temp: String,
    file: File,
    digest: Digest,
    mode: u32,
    placed: bool,
}

/// Permission bits of a file that comes without any.
const DEFAULT_MODE: u32 = 0o666;

impl Pending {
    /// Makes the empty file `temp` in `dir`; that name must be free. `mode` are the permission bits that it shall have
    /// in the end, less those of the umask.
    pub(crate) fn create(dir: Arc<Dir>, temp: String, mode: Option<u32>) -> io::Result<Pending> {
        let mode = mode.unwrap_or(DEFAULT_MODE) & 0o777;
        // Until it is whole its owner may write.
        let options = OpenOptions::new().write(true).create_new(true).mode(mode | 0o600).clone();
        let file = dir.open_with(&temp, &options)?.into_std();
        Ok(Pending { dir, temp, file, digest: Digest::default(), mode, placed: false })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.digest.add(bytes);
        Ok(())
    }

    /// What has been written.
    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// The file itself, for its attributes.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes the file durable and gives it the name `name` in `dir`, which lies on the same file system, replacing a
    /// file of that name. On an error before the rename nothing is left of it.
    pub(crate) fn place(mut self, dir: &Dir, name: &str) -> io::Result<()> {
        let now = self.file.metadata()?.permissions().mode() & 0o777;
        if now & !self.mode != 0 {
            self.file.set_permissions(Permissions::from_mode(now & self.mode))?;
        }
        self.file.sync_all()?;
        self.dir.rename(&self.temp, dir, name)?;
        self.placed = true;
        sync_dir(dir)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.placed {
            return;
        }
        if let Err(error) = self.dir.remove_file(&self.temp) {
            tracing::warn!("the temporary file {} could not be removed: {error}", self.temp);
        }
    }
}

/// Makes the entries of a directory durable, where the file system knows how to.
pub(crate) fn sync_dir(dir: &Dir) -> io::Result<()> {
    match dir.open(".")?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

/// The disk refused a write; [`Writer::finish`] tells why.
#[derive(Debug)]
pub(crate) struct Stopped;

/// Writes a [`Pending`] file on a blocking thread, while the network goes on. Dropping it removes the file.
pub(crate) struct Writer {
    chunks: mpsc::Sender<Bytes>,
    thread: JoinHandle<io::Result<Pending>>,
}

impl Writer {
    /// Begins. Needs a tokio runtime.
    pub(crate) fn start(mut pending: Pending) -> Writer {
        let (chunks, mut queue) = mpsc::channel::<Bytes>(WRITE_BEHIND);
        let thread = tokio::task::spawn_blocking(move || {
            while let Some(chunk) = queue.blocking_recv() {
                pending.write(&chunk)?;
            }
            Ok(pending)
        });
        Writer { chunks, thread }
    }

    /// Hands a chunk over; waits while the disk is behind.
    pub(crate) async fn push(&mut self, chunk: Bytes) -> Result<(), Stopped> {
        self.chunks.send(chunk).await.map_err(|_| Stopped)
    }

    /// Waits until all is written.
    pub(crate) async fn finish(self) -> io::Result<Pending> {
        drop(self.chunks);
        self.thread.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cap_std::ambient_authority;

    fn dir() -> (tempfile::TempDir, Arc<Dir>) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(temp.path(), ambient_authority()).unwrap();
        (temp, Arc::new(dir))
    }

    #[tokio::test]
    async fn a_placed_file_is_whole_and_alone() {
        let (temp, dir) = dir();
        let mut writer = Writer::start(Pending::create(dir.clone(), "t".into(), Some(0o440)).unwrap());
        for _ in 0..20 {
            writer.push(Bytes::from_static(b"0123456789")).await.unwrap();
        }
        let pending = writer.finish().await.unwrap();
        assert_eq!(pending.digest().size, 200);
        pending.place(&dir, "name").unwrap();
        assert_eq!(std::fs::read(temp.path().join("name")).unwrap(), b"0123456789".repeat(20));
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
        let mode = std::fs::metadata(temp.path().join("name")).unwrap().permissions().mode();
        // The umask may take more away.
        assert_eq!(mode & 0o337, 0, "{mode:o}");
        assert_eq!(mode & 0o400, 0o400, "{mode:o}");
    }

    #[tokio::test]
    async fn a_dropped_file_is_gone() {
        let (temp, dir) = dir();
        let mut writer = Writer::start(Pending::create(dir.clone(), "t".into(), Some(0o440)).unwrap());
        writer.push(Bytes::from_static(b"half")).await.unwrap();
        drop(writer.finish().await.unwrap());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_placed_is_gone() {
        let (temp, dir) = dir();
        std::fs::create_dir(temp.path().join("taken")).unwrap();
        let pending = Pending::create(dir.clone(), "t".into(), Some(0o440)).unwrap();
        assert!(pending.place(&dir, "taken").is_err());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}
