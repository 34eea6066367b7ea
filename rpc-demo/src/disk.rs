//! Moves files to and from the transport's memory through io_uring, with O_DIRECT, which bypasses
//! the page cache. The disk then reads and writes the memory that the network uses, and no
//! processor copies the data.
//!
//! If O_DIRECT is not possible, files are read and written through the page cache, and the final
//! line of the command gives the first reason ([`Disk`]).

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use serde::Serialize;
use tonic_rdma::PinnedBuf;
use tonic_rdma::disk::{Ring, Transfer};

use crate::costs::{self, Costs};

/// Offsets, lengths and addresses are multiples of this many bytes: a page, which is a multiple of
/// a disk's block size.
pub(crate) const ALIGN: u64 = 4096;
/// Minimum length in bytes of a piece for O_DIRECT. Shorter pieces go through the page cache.
pub(crate) const MIN_LEN: u64 = 64 << 10;

/// Maximum number of reads and writes in flight, for all files. Further reads and writes wait.
const ENTRIES: u32 = 128;

static FORBIDDEN: AtomicBool = AtomicBool::new(false);
/// The first reason for using the page cache.
static REASON: Mutex<Option<String>> = Mutex::new(None);
/// Whether a piece was too short for O_DIRECT. The final line gives this reason if no other reason
/// is recorded.
static SHORT: AtomicBool = AtomicBool::new(false);

/// Makes every file go through the page cache (`--no-direct`).
pub(crate) fn forbid() {
    FORBIDDEN.store(true, Ordering::Relaxed);
}

static LENDS: AtomicBool = AtomicBool::new(false);

/// Lets this process and this user's other processes on this host read each other's data in place
/// (`--lend`). Must be called before the first connection, whose pool depends on it.
pub(crate) fn lend() {
    LENDS.store(true, Ordering::Relaxed);
}

/// Whether this process and this user's other processes on this host may read each other's data in
/// place.
pub(crate) fn lends() -> bool {
    LENDS.load(Ordering::Relaxed)
}

fn ring() -> Result<&'static Ring, String> {
    static RING: OnceLock<Result<Ring, String>> = OnceLock::new();
    if FORBIDDEN.load(Ordering::Relaxed) {
        return Err("--no-direct".to_owned());
    }
    let made = || Ring::new(ENTRIES).map_err(|error| format!("no io_uring: {error}"));
    RING.get_or_init(made).as_ref().map_err(Clone::clone)
}

/// Checks whether io_uring is allowed and works. The error is the reason why not.
pub(crate) fn check() -> Result<(), String> {
    ring().map(drop)
}

/// Records why bytes go through the page cache.
pub(crate) fn cached(reason: &str) {
    let mut first = REASON.lock().unwrap_or_else(PoisonError::into_inner);
    first.get_or_insert_with(|| reason.to_owned());
}

/// Records that a piece of a file goes through the page cache because it is short.
pub(crate) fn too_short() {
    SHORT.store(true, Ordering::Relaxed);
}

/// Whether a file is only read, or also written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// A file that is open with O_DIRECT.
#[derive(Debug)]
pub(crate) struct Direct {
    file: Arc<File>,
    ring: &'static Ring,
    /// Whether the file system accepted O_DIRECT but refused a transfer.
    refused: AtomicBool,
}

impl Direct {
    /// Opens `file` a second time, with O_DIRECT. If that is not possible, records the reason and
    /// returns `None`.
    pub(crate) fn open(file: &File, access: Access) -> Option<Direct> {
        let open = || {
            let ring = ring()?;
            let file = Arc::new(open_direct(file, access)?);
            Ok::<_, String>(Direct { file, ring, refused: AtomicBool::new(false) })
        };
        open().inspect_err(|reason| cached(reason)).ok()
    }

    /// Returns whether the error says that the file system refused a transfer because of its
    /// alignment. Records such a refusal.
    fn refuses(&self, error: &io::Error) -> bool {
        let refuses = error.kind() == io::ErrorKind::InvalidInput;
        if refuses {
            self.refused.store(true, Ordering::Relaxed);
            cached(&format!("O_DIRECT refused: {error}"));
        }
        refuses
    }

    /// Begins to read into the empty buffer. `offset` and the buffer's capacity must be multiples
    /// of [`ALIGN`].
    pub(crate) fn read(&self, offset: u64, buf: PinnedBuf) -> Transfer<PinnedBuf> {
        self.ring.read(&self.file, offset, buf)
    }

    /// Waits for a read to end. The buffer then holds the bytes that the kernel has read. Returns
    /// `None` if the data has to be read through the page cache.
    pub(crate) fn read_done(&self, read: Transfer<PinnedBuf>) -> io::Result<Option<PinnedBuf>> {
        match read.wait() {
            (Ok(count), buf) => {
                costs::direct_read(count as u64);
                Ok(Some(buf))
            }
            (Err(error), _) if self.refuses(&error) => Ok(None),
            (Err(error), _) => Err(error),
        }
    }

    /// Returns how many bytes at the start of `bytes` can bypass the page cache when they are
    /// written to `offset`.
    pub(crate) fn writable(&self, offset: u64, bytes: &[u8]) -> usize {
        let len = bytes.len() as u64;
        if len < MIN_LEN || self.refused.load(Ordering::Relaxed) {
            return 0;
        }
        if !offset.is_multiple_of(ALIGN) || !(bytes.as_ptr().addr() as u64).is_multiple_of(ALIGN) {
            cached("the bytes did not land at a multiple of 4096");
            return 0;
        }
        bytes.len() - bytes.len() % ALIGN as usize
    }

    /// Writes `bytes`, which are [writable](Self::writable), to `offset`, and calls `meanwhile`
    /// during the write. Returns the number of written bytes. If this number is less than the
    /// length of `bytes`, the rest has to be written through the page cache.
    pub(crate) fn write(
        &self,
        offset: u64,
        bytes: Bytes,
        meanwhile: impl FnOnce(),
    ) -> io::Result<usize> {
        let mut written = 0;
        let mut transfer = self.ring.write(&self.file, offset, bytes.clone());
        meanwhile();
        loop {
            match transfer.wait().0 {
                Ok(0) => return Ok(written),
                Ok(count) => {
                    written += count;
                    costs::direct_written(count as u64);
                }
                Err(error) if self.refuses(&error) => return Ok(written),
                Err(error) => return Err(error),
            }
            if written == bytes.len() || !(written as u64).is_multiple_of(ALIGN) {
                return Ok(written);
            }
            let rest = bytes.slice(written..);
            transfer = self.ring.write(&self.file, offset + written as u64, rest);
        }
    }
}

/// Opens the file by its descriptor, because its name may by now belong to another file.
#[cfg(target_os = "linux")]
fn open_direct(file: &File, access: Access) -> Result<File, String> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    use rustix::fs::{FsWord, OFlags, fstatfs};

    /// The type of tmpfs in statfs(2).
    const TMPFS_MAGIC: FsWord = 0x0102_1994;
    // Since Linux 6.6 tmpfs accepts O_DIRECT, but it still copies.
    if fstatfs(file).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC) {
        return Err("tmpfs: there is no disk".to_owned());
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = i32::try_from(OFlags::DIRECT.bits()).unwrap_or_default();
    let mut options = File::options();
    options.read(true).write(access == Access::Write).custom_flags(flags);
    options.open(path).map_err(|error| format!("no O_DIRECT: {error}"))
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_: &File, _: Access) -> Result<File, String> {
    Err("O_DIRECT is used on Linux only".to_owned())
}

/// How this process read and wrote the bytes of files, for the final line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Disk {
    /// Bytes read and written with O_DIRECT.
    direct_bytes: u64,
    /// Bytes that went through the page cache.
    cached_bytes: u64,
    /// The first reason for using the page cache.
    reason: Option<String>,
}

impl Disk {
    /// Returns how the bytes counted in `costs` were read and written.
    pub(crate) fn of(costs: &Costs) -> Disk {
        let direct_bytes = costs.direct_read_bytes + costs.direct_written_bytes;
        let cached_bytes = costs.file_read_bytes + costs.file_written_bytes;
        let reason = REASON.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let short = || "files, their ends, and messages of less than 64 KiB".to_owned();
        let reason = reason.or_else(|| SHORT.load(Ordering::Relaxed).then(short));
        Disk { direct_bytes, cached_bytes, reason: reason.filter(|_| cached_bytes > 0) }
    }
}

impl std::fmt::Display for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.direct_bytes + self.cached_bytes;
        if all == 0 {
            return f.write_str("no file read or written");
        }
        write!(f, "{:.1} % by O_DIRECT", self.direct_bytes as f64 * 100.0 / all as f64)?;
        match &self.reason {
            Some(reason) => write!(f, " (page cache: {reason})"),
            None => Ok(()),
        }
    }
}
