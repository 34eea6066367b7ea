//! Memory that changes under its reader, for tests and fuzz targets. Only there with the feature
//! `test-util`; not part of the stable interface.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, Bytes};

use crate::region::mapping::Mapping;
use crate::region::page::{HugePages, page};

/// A file that is mapped twice: once for whoever reads it as [`Bytes`], and once for the stranger
/// who writes to it, as a peer does that has a landing chunk mapped.
#[derive(Clone, Debug)]
pub struct SharedArena(Arc<Both>);

#[derive(Debug)]
struct Both {
    reader: Mapping,
    writer: Mapping,
    looks: AtomicUsize,
    /// What is written at the next looks, the last first.
    planned: Mutex<Vec<(usize, u8)>>,
}

/// The reader's view.
struct View(Arc<Both>);

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        let reader = &self.0.reader;
        // SAFETY: the mapping is `len` bytes long, zeroed when it was made, and lives as long as
        // this value. That it changes meanwhile is what it is for; this process writes to it by
        // another mapping only.
        unsafe { std::slice::from_raw_parts(reader.ptr().as_ptr(), reader.len()) }
    }
}

impl SharedArena {
    /// Zeros, at least `len` of them, to whole pages.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(page());
        let (reader, file) = Mapping::shared(len, HugePages::Off)?;
        let writer = Mapping::again(len, &file)?;
        Ok(SharedArena(Arc::new(Both {
            reader,
            writer,
            looks: AtomicUsize::new(0),
            planned: Mutex::default(),
        })))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.writer.len()
    }

    /// Never: it has a page at least.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it, as its reader sees it.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(View(self.0.clone()))
    }

    /// Whether all of `bytes` lies in the reader's mapping.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        let reader = &self.0.reader;
        let start = reader.ptr().addr().get();
        bytes.as_ptr_range().start.addr() >= start
            && bytes.as_ptr_range().end.addr() <= start + reader.len()
    }

    /// The stranger's writing. What does not fit is left out.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        for (word, byte) in self.words().iter().skip(at).zip(bytes) {
            word.store(*byte, Ordering::Relaxed);
        }
    }

    /// The stranger writes one of these, the last first, whenever a parser has looked.
    pub fn plan(&self, writes: Vec<(usize, u8)>) {
        *self.0.planned.lock().unwrap_or_else(PoisonError::into_inner) = writes;
    }

    /// How often a parser has looked.
    pub fn looks(&self) -> usize {
        self.0.looks.load(Ordering::Relaxed)
    }

    /// A parser looks at `chunk`.
    fn look(&self, chunk: &[u8]) {
        self.0.looks.fetch_add(1, Ordering::Relaxed);
        assert!(
            chunk.is_empty() || !self.contains(chunk),
            "a parser has seen memory that a peer can write to"
        );
        let next = self.0.planned.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some((at, byte)) = next {
            self.write(at, &[byte]);
        }
    }

    fn words(&self) -> &[AtomicU8] {
        let writer = &self.0.writer;
        // SAFETY: the mapping is `len` bytes long, zeroed when it was made, lives as long as self,
        // and is reached through these atomics only.
        unsafe {
            std::slice::from_raw_parts(writer.ptr().as_ptr().cast::<AtomicU8>(), writer.len())
        }
    }
}

/// What a parser is given that reads what landed in an arena. Panics when it is shown a byte of the
/// arena itself.
#[derive(Debug)]
pub struct Watched<'a, B> {
    /// What it reads.
    pub buf: &'a mut B,
    /// What that landed in.
    pub arena: &'a SharedArena,
}

impl<B: Buf> Buf for Watched<'_, B> {
    fn remaining(&self) -> usize {
        self.buf.remaining()
    }

    fn chunk(&self) -> &[u8] {
        let chunk = self.buf.chunk();
        self.arena.look(chunk);
        chunk
    }

    fn advance(&mut self, count: usize) {
        self.buf.advance(count);
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        self.buf.copy_to_bytes(len)
    }
}
