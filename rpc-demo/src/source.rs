//! Reads outgoing files in chunks on a separate thread, a bounded number of chunks ahead of the
//! network.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;
use tonic_rdma::codec::SEGMENT;
use tonic_rdma::{PinnedBuf, Pool};

use crate::costs;
use crate::digest::Digest;
use crate::disk::{self, Access, Direct};
use crate::ranges::{RANGE_MAX, Ranges};

/// Maximum number of chunks that wait for the network, in addition to those being read. With
/// O_DIRECT, it is also the maximum number of reads in flight.
const READ_AHEAD: usize = 2;

/// A piece of the data that is read. The last piece has the digest of all data, and may be empty.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The next bytes. Empty only in the last piece.
    pub(crate) data: Bytes,
    /// The digest of all data, in the last piece only.
    pub(crate) end: Option<Digest>,
}

/// Which part of a file to read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    /// The whole file from the start, with the file's size if known. A small file gets a small
    /// buffer. One byte more than the size is requested, to detect that the file has grown.
    Whole(Option<u64>),
    /// `length` bytes from `offset`, or up to the end of the file.
    Range { offset: u64, length: u64 },
    /// Everything from the current position of a pipe or a terminal. A read from a pipe or a
    /// terminal may block for ever, so the thread is detached.
    Stream,
}

/// Starts a thread that reads `chunk` bytes at a time, into pool memory if there is a pool. Needs a
/// tokio runtime. The thread ends when the receiver is dropped.
pub(crate) fn start(
    file: Arc<File>,
    extent: Extent,
    chunk: usize,
    pool: Option<Pool>,
) -> mpsc::Receiver<io::Result<Piece>> {
    let (pieces, receiver) = mpsc::channel(READ_AHEAD);
    let failed = pieces.clone();
    let buffers = Buffers::new(pool);
    let work = move || {
        if let Err(error) = read(&file, extent, chunk, buffers, &pieces) {
            // The receiver may have been dropped.
            let _ = pieces.blocking_send(Err(error));
        }
    };
    if !matches!(extent, Extent::Stream) {
        tokio::task::spawn_blocking(work);
    } else if let Err(error) = thread::Builder::new().name("source".into()).spawn(work) {
        let _ = failed.try_send(Err(error));
    }
    receiver
}

fn read(
    file: &File,
    extent: Extent,
    chunk: usize,
    mut buffers: Buffers,
    pieces: &mpsc::Sender<io::Result<Piece>>,
) -> io::Result<()> {
    let mut digest = Digest::default();
    let (offset, limit) = match extent {
        Extent::Whole(size) => (0, size.map_or(u64::MAX, |size| size.saturating_add(1))),
        Extent::Range { offset, length } => (offset, length),
        Extent::Stream => (0, u64::MAX),
    };
    if let Some((direct, chunk)) = directly(file, extent, chunk, &buffers)
        && read_directly(&direct, file, extent, chunk, &mut buffers, &mut digest, pieces)?
            == AfterReads::Nothing
    {
        return Ok(());
    }
    loop {
        // At least one byte beyond the known size is requested, because only a read past the end
        // detects the end.
        let left = limit.saturating_sub(digest.size);
        let left = if matches!(extent, Extent::Range { .. }) { left } else { left.max(1) };
        let want = usize::try_from(left).map_or(chunk, |left| left.min(chunk));
        let at = offset + digest.size;
        let data = match extent {
            Extent::Stream => buffers.read(want, &mut &*file, &mut digest)?,
            _ => buffers.read(want, &mut At { file, at }, &mut digest)?,
        };
        // The end of a range is known. The end of a file is detected by reading past it.
        let end =
            data.is_empty() || (matches!(extent, Extent::Range { .. }) && digest.size == limit);
        let piece = Piece { data, end: end.then_some(digest) };
        if pieces.blocking_send(Ok(piece)).is_err() || end {
            return Ok(());
        }
    }
}

/// The next step after reads that bypassed the page cache.
#[derive(PartialEq, Eq)]
enum AfterReads {
    /// The receiver has everything, or was dropped.
    Nothing,
    /// The rest is read through the page cache.
    Rest,
}

/// Opens the file with O_DIRECT and chooses the length of chunks, if reads of `extent` into pool
/// memory can bypass the page cache.
fn directly(
    file: &File,
    extent: Extent,
    chunk: usize,
    buffers: &Buffers,
) -> Option<(Direct, usize)> {
    let (offset, length) = match extent {
        Extent::Whole(size) => (0, size.unwrap_or_default()),
        Extent::Range { offset, length } => (offset, length),
        Extent::Stream => (0, 0),
    };
    let chunk = chunk - chunk % disk::ALIGN as usize;
    if buffers.pool.is_none() {
        disk::cached("over TCP there is no memory of a device");
    } else if matches!(extent, Extent::Stream | Extent::Whole(None)) {
        disk::cached("pipes");
    } else if length.min(chunk as u64) < disk::MIN_LEN {
        disk::too_short();
    } else if !offset.is_multiple_of(disk::ALIGN) {
        disk::cached("a range does not begin at a multiple of 4096");
    } else {
        return Direct::open(file, Access::Read).map(|direct| (direct, chunk));
    }
    None
}

/// Reads up to the known size, bypassing the page cache. Each chunk is checksummed while the disk
/// reads the next chunk.
fn read_directly(
    direct: &Direct,
    file: &File,
    extent: Extent,
    chunk: usize,
    buffers: &mut Buffers,
    digest: &mut Digest,
    pieces: &mpsc::Sender<io::Result<Piece>>,
) -> io::Result<AfterReads> {
    let (offset, length, is_range) = match extent {
        Extent::Range { offset, length } => (offset, length, true),
        Extent::Whole(size) => (0, size.unwrap_or_default(), false),
        Extent::Stream => (0, 0, false),
    };
    let mut ahead = VecDeque::new();
    let mut begun = 0;
    while digest.size < length {
        while ahead.len() < READ_AHEAD && begun < length {
            let want = usize::try_from(length - begun).map_or(chunk, |left| left.min(chunk));
            let size = want.next_multiple_of(disk::ALIGN as usize);
            let buffer =
                if ahead.is_empty() { buffers.pinned(size) } else { buffers.pinned_now(size) };
            let Some(buffer) = buffer else { break };
            ahead.push_back((want, direct.read(offset + begun, buffer)));
            begun += want as u64;
        }
        let at = offset + digest.size;
        let (want, data) = match ahead.pop_front() {
            Some((want, read)) => {
                let Some(mut buffer) = direct.read_done(read)? else { return Ok(AfterReads::Rest) };
                // The last block may contain more bytes than the file had when its size was
                // determined.
                buffer.truncate(want);
                let had = buffer.len();
                if had < want {
                    // The file is shorter now, or the read was interrupted.
                    let left = (want - had) as u64;
                    buffer.fill_from(&mut At { file, at: at + had as u64 }.take(left))?;
                    costs::read(buffer.len() - had);
                }
                digest.add(&buffer);
                (want, buffer.freeze())
            }
            None => {
                // The pool has no memory at the moment.
                disk::cached("the pool had no memory");
                let left = usize::try_from(length - begun).map_or(chunk, |left| left.min(chunk));
                begun += left as u64;
                (left, buffers.read_plain(left, &mut At { file, at }, digest)?)
            }
        };
        let is_short = data.len() < want;
        let end = (is_range && digest.size == length).then_some(*digest);
        if (!data.is_empty() || end.is_some())
            && (pieces.blocking_send(Ok(Piece { data, end })).is_err() || end.is_some())
        {
            return Ok(AfterReads::Nothing);
        }
        if is_short {
            break;
        }
    }
    Ok(AfterReads::Rest)
}

/// Reads at its own position in a file that is shared with other readers.
struct At<'a> {
    file: &'a File,
    at: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Reads a small file at once: `size` bytes, and one more to detect growth. Blocks.
pub(crate) fn read_small(
    file: &File,
    size: u64,
    pool: Option<Pool>,
) -> io::Result<(Bytes, Digest)> {
    let want = usize::try_from(size).unwrap_or(usize::MAX).saturating_add(1);
    let mut digest = Digest::default();
    let bytes = Buffers::new(pool).read(want, &mut At { file, at: 0 }, &mut digest)?;
    Ok((bytes, digest))
}

/// Passes the index and the digest of each range of a file to `emit`, in order, until `emit`
/// breaks. A range that extends beyond the end of the file covers only existing bytes. Blocks.
pub(crate) fn checksums(
    file: &File,
    ranges: &Ranges,
    mut emit: impl FnMut(usize, Digest) -> ControlFlow<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; BLOCK];
    for index in 0..ranges.count() {
        let digest = range_digest(file, ranges, index, &mut buffer)?;
        if emit(index, digest).is_break() {
            break;
        }
    }
    Ok(())
}

/// The digest of one range of a file. Blocks.
pub(crate) fn range_digest(
    file: &File,
    ranges: &Ranges,
    index: usize,
    buffer: &mut [u8],
) -> io::Result<Digest> {
    let (offset, length) = ranges.get(index).unwrap_or_default();
    let mut digest = Digest::default();
    while digest.size < length {
        let left = usize::try_from(length - digest.size).unwrap_or(usize::MAX);
        let most = left.min(buffer.len());
        let Some(room) = buffer.get_mut(..most) else { break };
        let filled = fill(&mut At { file, at: offset + digest.size }, room)?;
        costs::read(filled);
        if filled == 0 {
            break;
        }
        digest.add(room.get(..filled).unwrap_or_default());
    }
    Ok(digest)
}

/// The digest of a whole file. Blocks.
pub(crate) fn whole_digest(file: &File) -> io::Result<Digest> {
    let size = file.metadata()?.len();
    let mut digest = Digest::default();
    checksums(file, &Ranges::near(size, RANGE_MAX), |_, range| {
        digest = digest.then(range);
        ControlFlow::Continue(())
    })?;
    Ok(digest)
}

/// Number of bytes to read, checksum and write at a time. A block is small enough to stay in the
/// processor's cache between these steps.
pub(crate) const BLOCK: usize = 128 << 10;

/// Allocates buffers to read into.
///
/// Data in a connection's pool is sent without a copy. Pool memory is limited, and a transfer that
/// holds pool memory may have to wait for its turn at the server. So an allocation waits only
/// briefly and then uses ordinary memory.
///
/// Ordinary buffers are reused once their bytes have been sent, because each new buffer of this
/// size would be mapped, page-faulted and unmapped.
#[derive(Default)]
struct Buffers {
    pool: Option<Pool>,
    /// Buffers handed out, oldest first.
    lent: VecDeque<Bytes>,
}

/// Maximum time to wait for pool memory.
const ALLOC_TIMEOUT: Duration = Duration::from_millis(50);

/// Maximum number of buffers to remember: the buffers in the queue, and some that the transport
/// holds.
const MAX_LENT: usize = READ_AHEAD + 4;

impl Buffers {
    fn new(pool: Option<Pool>) -> Buffers {
        Buffers { pool, lent: VecDeque::new() }
    }

    /// Allocates pool memory, if the pool has memory within [`ALLOC_TIMEOUT`].
    fn pinned(&self, size: usize) -> Option<PinnedBuf> {
        // Shorter payloads are sent inside their message.
        let pool = self.pool.as_ref().filter(|_| size >= SEGMENT)?;
        match pool.try_alloc(size) {
            Ok(pinned) => Some(pinned),
            // A request that can never succeed fails at once.
            Err(_) => wait(pool.alloc(size), ALLOC_TIMEOUT)?.ok(),
        }
    }

    /// Allocates pool memory, if the pool has memory now.
    fn pinned_now(&self, size: usize) -> Option<PinnedBuf> {
        self.pool.as_ref().and_then(|pool| pool.try_alloc(size).ok())
    }

    /// Reads up to `want` bytes, as many as the reader returns, and adds them to `digest` block by
    /// block.
    fn read(
        &mut self,
        want: usize,
        reader: &mut impl Read,
        digest: &mut Digest,
    ) -> io::Result<Bytes> {
        if let Some(mut pinned) = self.pinned(want) {
            let mut filled = 0;
            loop {
                let block = pinned.fill_from(&mut reader.take(BLOCK as u64))?;
                digest.add(pinned.get(filled..).unwrap_or_default());
                filled += block;
                if block < BLOCK {
                    break;
                }
            }
            costs::read(filled);
            return Ok(pinned.freeze());
        }
        self.read_plain(want, reader, digest)
    }

    /// Like `read`, but into ordinary memory.
    fn read_plain(
        &mut self,
        want: usize,
        reader: &mut impl Read,
        digest: &mut Digest,
    ) -> io::Result<Bytes> {
        let mut buffer = self.take(want);
        let mut filled = 0;
        for room in buffer.chunks_mut(BLOCK) {
            let block = fill(reader, room)?;
            digest.add(room.get(..block).unwrap_or_default());
            filled += block;
            if block < room.len() {
                break;
            }
        }
        costs::read(filled);
        Ok(self.lend(buffer).split_to(filled))
    }

    /// Takes a buffer of `size` bytes with unspecified contents.
    fn take(&mut self, size: usize) -> BytesMut {
        match self.lent.pop_front().map(Bytes::try_into_mut) {
            Some(Ok(mut back)) if back.len() >= size => {
                back.truncate(size);
                return back;
            }
            // The buffer is still in use, so it is tried again later.
            Some(Err(out)) if self.lent.len() < MAX_LENT => self.lent.push_front(out),
            _ => {}
        }
        BytesMut::zeroed(size)
    }

    /// Freezes a buffer to be sent, and remembers it for reuse.
    fn lend(&mut self, buffer: BytesMut) -> Bytes {
        let bytes = buffer.freeze();
        self.lent.push_back(bytes.clone());
        bytes
    }
}

/// Blocks this thread on a future for at most `limit`. This function does not use the runtime,
/// because a runtime that shuts down waits for this thread.
fn wait<T>(future: impl Future<Output = T>, limit: Duration) -> Option<T> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    let until = Instant::now() + limit;
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(value);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

/// Fills `buffer` until it is full or the reader is at its end, and returns the number of bytes.
pub(crate) fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(room) = buffer.get_mut(filled..).filter(|room| !room.is_empty()) {
        match reader.read(room) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    async fn chunks(content: &[u8], extent: Extent, chunk: usize) -> (Vec<usize>, Vec<u8>, Digest) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let mut pieces = start(Arc::new(file.reopen().unwrap()), extent, chunk, None);
        let (mut sizes, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let Piece { data, end } = pieces.recv().await.unwrap().unwrap();
            if !data.is_empty() {
                sizes.push(data.len());
                bytes.extend_from_slice(&data);
            }
            if let Some(digest) = end {
                return (sizes, bytes, digest);
            }
        }
    }

    #[tokio::test]
    async fn cuts_a_file_into_chunks() {
        let content: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        let extents = [None, Some(10_000), Some(9_000), Some(20_000)].map(Extent::Whole);
        for extent in extents.into_iter().chain([Extent::Stream]) {
            let (sizes, bytes, digest) = chunks(&content, extent, 4096).await;
            assert_eq!(bytes, content, "{extent:?}");
            assert_eq!(digest, Digest::of(&content));
            assert!(sizes.iter().all(|&size| size <= 4096 && size > 0));
        }
        assert_eq!(chunks(&content, Extent::Whole(None), 4096).await.0, [4096, 4096, 1808]);
        assert_eq!(
            chunks(b"", Extent::Whole(Some(0)), 4096).await,
            (vec![], vec![], Digest::default())
        );
    }

    #[tokio::test]
    async fn chunks_of_many_blocks_are_read_and_checked_whole() {
        let content: Vec<u8> = (0..5 * BLOCK as u32 + 1).map(|n| (n >> 3) as u8).collect();
        for extent in
            [Extent::Whole(None), Extent::Whole(Some(content.len() as u64)), Extent::Stream]
        {
            for chunk in [2 * BLOCK, 3 * BLOCK - 1, content.len(), content.len() + 1] {
                let (_, bytes, digest) = chunks(&content, extent, chunk).await;
                assert!(bytes == content, "{extent:?} {chunk}");
                assert_eq!(digest, Digest::of(&content));
            }
        }
    }

    #[tokio::test]
    async fn reads_a_range_and_nothing_beside_it() {
        let content: Vec<u8> = (0..10_000u32).map(|n| (n >> 3) as u8).collect();
        for (offset, length, end) in
            [(0, 10_000, 10_000), (5, 4096, 4101), (9_000, 9_000, 10_000), (1, 0, 1)]
        {
            let extent = Extent::Range { offset, length };
            let (_, bytes, digest) = chunks(&content, extent, 4096).await;
            assert_eq!(bytes, &content[offset as usize..end]);
            assert_eq!(digest, Digest::of(&bytes));
        }
        let beyond = chunks(&content, Extent::Range { offset: 20_000, length: 1 }, 4096).await;
        assert_eq!(beyond.2, Digest::default());
    }

    #[test]
    fn checksums_of_ranges_amount_to_that_of_the_whole() {
        let content: Vec<u8> = (0..300_000u32).map(|n| (n >> 7) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        let ranges = Ranges::new(300_000, 64 << 10).unwrap();
        let mut found = Vec::new();
        checksums(&file, &ranges, |index, digest| {
            assert_eq!(index, found.len());
            found.push(digest);
            ControlFlow::Continue(())
        })
        .unwrap();
        let expected: Vec<_> = content.chunks(64 << 10).map(Digest::of).collect();
        assert_eq!(found, expected);
        assert_eq!(whole_digest(&file).unwrap(), Digest::of(&content));
        // A file that is shorter than its ranges.
        file.set_len(70_000).unwrap();
        let mut buffer = [0; 1000];
        assert_eq!(range_digest(&file, &ranges, 1, &mut buffer).unwrap().size, 70_000 - (64 << 10));
        assert_eq!(range_digest(&file, &ranges, 2, &mut buffer).unwrap(), Digest::default());
        assert_eq!(read_small(&file, 70_000, None).unwrap().1, Digest::of(&content[..70_000]));
    }

    #[test]
    fn buffers_come_back_when_nobody_reads_them() {
        let mut buffers = Buffers::default();
        let first = buffers.take(1000);
        let at = first.as_ptr();
        let sent = buffers.lend(first).split_to(500);
        let other = buffers.take(1000);
        assert_ne!(other.as_ptr(), at, "given out twice");
        drop(buffers.lend(other));
        drop(sent);
        let again = buffers.take(600);
        assert_eq!((again.as_ptr(), again.len()), (at, 600));
        // Buffers that are never returned are forgotten eventually.
        let kept: Vec<_> = (0..100)
            .map(|_| {
                let buffer = buffers.take(10);
                buffers.lend(buffer)
            })
            .collect();
        assert!(buffers.lent.len() <= MAX_LENT + 2 && kept.len() == 100);
    }

    #[test]
    fn waits_for_what_comes_and_not_for_ever() {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let other = thread::spawn(move || sender.send(7));
        assert_eq!(wait(receiver, Duration::from_secs(60)), Some(Ok(7)));
        other.join().unwrap().unwrap();
        assert_eq!(wait(std::future::pending::<()>(), Duration::from_millis(1)), None);
    }

    #[tokio::test]
    async fn a_read_error_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let file = Arc::new(File::open(dir.path()).unwrap());
        let error = start(file, Extent::Whole(None), 4096, None).recv().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }
}
