//! Files on their way out: read in chunks on a thread of their own, a bounded distance ahead of the network.

use crate::digest::Digest;
use bytes::{Bytes, BytesMut};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use tokio::sync::mpsc;

/// Chunks read ahead of the network; one more is being read.
const READ_AHEAD: usize = 4;

/// What a source yields: chunks, none of them empty, and at the end what they amount to.
#[derive(Debug)]
pub(crate) enum Piece {
    /// The next bytes.
    Chunk(Bytes),
    /// There is no more; the whole was this.
    End(Digest),
}

/// A file to read from.
pub(crate) struct Source {
    /// The open file, at its beginning.
    pub(crate) file: File,
    /// Bytes, where known: a small file gets a small buffer.
    pub(crate) size: Option<u64>,
    /// False for a pipe or a terminal, whose reads may never return: such a thread is not waited for.
    pub(crate) regular: bool,
}

impl Source {
    /// Begins to read, `chunk` bytes at a time. Needs a tokio runtime. The thread ends when the receiver is dropped.
    pub(crate) fn start(self, chunk: usize) -> mpsc::Receiver<io::Result<Piece>> {
        let (pieces, receiver) = mpsc::channel(READ_AHEAD);
        let regular = self.regular;
        let failed = pieces.clone();
        let work = move || {
            if let Err(error) = self.read(chunk, &pieces) {
                // A receiver that is gone does not want to know.
                let _ = pieces.blocking_send(Err(error));
            }
        };
        if regular {
            tokio::task::spawn_blocking(work);
        } else if let Err(error) = std::thread::Builder::new().name("source".into()).spawn(work) {
            let _ = failed.try_send(Err(error));
        }
        receiver
    }

    fn read(mut self, chunk: usize, pieces: &mpsc::Sender<io::Result<Piece>>) -> io::Result<()> {
        let mut digest = Digest::default();
        let mut buffers = Buffers::default();
        loop {
            // What is left, and one byte more so that the end is seen by reading past it.
            let left = self.size.map_or(u64::MAX, |size| size.saturating_sub(digest.size)).saturating_add(1);
            let want = usize::try_from(left).map_or(chunk, |left| left.min(chunk));
            let mut buffer = buffers.take(want);
            let filled = fill(&mut self.file, &mut buffer)?;
            let bytes = buffers.lend(buffer).split_to(filled);
            let end = bytes.is_empty();
            digest.add(&bytes);
            let piece = if end { Piece::End(digest) } else { Piece::Chunk(bytes) };
            if pieces.blocking_send(Ok(piece)).is_err() || end {
                return Ok(());
            }
        }
    }
}

/// Buffers that come back when their bytes have gone out: fresh ones of this size would each be mapped, faulted in page
/// by page, and unmapped again.
#[derive(Default)]
struct Buffers {
    /// Oldest first.
    lent: VecDeque<Bytes>,
}

/// Buffers remembered at most: those that wait, and some that the transport has.
const LENT: usize = READ_AHEAD + 4;

impl Buffers {
    /// A buffer of `size` bytes, whatever they are.
    fn take(&mut self, size: usize) -> BytesMut {
        match self.lent.pop_front().map(Bytes::try_into_mut) {
            Some(Ok(mut back)) if back.len() >= size => {
                back.truncate(size);
                return back;
            }
            // Still out: it is asked for again later.
            Some(Err(out)) if self.lent.len() < LENT => self.lent.push_front(out),
            _ => {}
        }
        BytesMut::zeroed(size)
    }

    /// The bytes of a buffer, to be sent and dropped.
    fn lend(&mut self, buffer: BytesMut) -> Bytes {
        let bytes = buffer.freeze();
        self.lent.push_back(bytes.clone());
        bytes
    }
}

/// Fills `buffer` as far as the reader has something; returns how far.
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
    use super::*;
    use std::io::Write;

    async fn chunks(content: &[u8], size: Option<u64>, chunk: usize) -> (Vec<usize>, Vec<u8>, Digest) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        let source = Source { file: file.reopen().unwrap(), size, regular: true };
        let mut pieces = source.start(chunk);
        let (mut sizes, mut bytes) = (Vec::new(), Vec::new());
        loop {
            match pieces.recv().await.unwrap().unwrap() {
                Piece::Chunk(chunk) => {
                    sizes.push(chunk.len());
                    bytes.extend_from_slice(&chunk);
                }
                Piece::End(digest) => return (sizes, bytes, digest),
            }
        }
    }

    #[tokio::test]
    async fn cuts_a_file_into_chunks() {
        let content: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        for size in [None, Some(10_000), Some(9_000), Some(20_000)] {
            let (sizes, bytes, digest) = chunks(&content, size, 4096).await;
            assert_eq!(bytes, content);
            assert_eq!(digest.size, 10_000);
            assert_eq!(digest.crc32c, crc32c::crc32c(&content));
            assert!(sizes.iter().all(|&size| size <= 4096 && size > 0));
        }
        assert_eq!(chunks(&content, None, 4096).await.0, [4096, 4096, 1808]);
        assert_eq!(chunks(b"", Some(0), 4096).await, (vec![], vec![], Digest::default()));
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
        // What is never given back is forgotten in the end.
        let kept: Vec<_> = (0..100)
            .map(|_| {
                let buffer = buffers.take(10);
                buffers.lend(buffer)
            })
            .collect();
        assert!(buffers.lent.len() <= LENT + 2 && kept.len() == 100);
    }

    #[tokio::test]
    async fn a_read_error_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source { file: File::open(dir.path()).unwrap(), size: None, regular: true };
        let error = source.start(4096).recv().await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }
}
