//! Memory that changes under its reader, for tests and fuzz targets. Available with the feature
//! `test-util` only; not part of the stable interface.

#[cfg(all(target_os = "linux", not(miri)))]
pub mod process;

use std::io;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, Bytes};

use crate::buf::PinnedBuf;
use crate::error::RegisterError;
use crate::region::mapping::Mapping;
use crate::region::page::{HugePages, page};
use crate::registrar::{HeapRegistrar, LendScope, Memory, Registrar, Registration};

/// A registrar without a device, whose pools may lend memory.
#[derive(Debug)]
pub struct LendingRegistrar {
    heap: HeapRegistrar,
    scope: LendScope,
}

impl LendingRegistrar {
    /// Makes a registrar that lends this memory.
    pub fn new(scope: LendScope) -> Self {
        LendingRegistrar { heap: HeapRegistrar::default(), scope }
    }
}

// SAFETY: the keys belong to no device, so they never work.
unsafe impl Registrar for LendingRegistrar {
    fn pins(&self) -> bool {
        false
    }

    fn lend_scope(&self) -> LendScope {
        self.scope
    }

    unsafe fn register(&self, memory: Memory) -> Result<Box<dyn Registration>, RegisterError> {
        assert!(memory.file.is_some() || memory.access != crate::Access::Lend);
        // SAFETY: the caller's promise.
        unsafe { self.heap.register(memory) }
    }
}

/// A pool buffer to which its owner goes on writing after sending it, which no owner may do.
#[derive(Clone, Debug)]
pub struct ChangingBuf(Arc<PinnedBuf>);

/// The sent part of a buffer.
struct Sent(Arc<PinnedBuf>);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl ChangingBuf {
    /// Takes a buffer that is filled.
    pub fn new(buf: PinnedBuf) -> Self {
        ChangingBuf(Arc::new(buf))
    }

    /// All bytes, which may be lent but not read in this process.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(Sent(self.0.clone()))
    }

    /// Writes a byte.
    ///
    /// # Panics
    /// If the buffer has no filled byte at `at`.
    pub fn write(&self, at: usize, byte: u8) {
        assert!(at < self.0.len());
        let byte_at =
            std::ptr::with_exposed_provenance_mut::<AtomicU8>(self.0.addr() as usize + at);
        // SAFETY: the byte lies in the filled part of the buffer, which lives as long as self. The
        // byte is written through atomics only; the readers have a mapping of their own.
        unsafe { &*byte_at }.store(byte, Ordering::Relaxed);
    }
}

/// A file that is mapped twice: once for a reader, as [`Bytes`], and once for a writer, like a
/// landing chunk that a peer has mapped.
#[derive(Clone, Debug)]
pub struct SharedArena(Arc<Mappings>);

#[derive(Debug)]
struct Mappings {
    reader: Mapping,
    writer: Mapping,
    /// The number of times that a parser has read.
    looks: AtomicUsize,
    /// Writes to make at the next reads, the last one first.
    planned: Mutex<Vec<(usize, u8)>>,
}

/// The reader's view of the file.
struct View(Arc<Mappings>);

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        let reader = &self.0.reader;
        // SAFETY: the mapping is `len` bytes long, zeroed when it was made, and lives as long as
        // this value. The memory is meant to change while it is read; this process writes to it
        // through another mapping only.
        unsafe { std::slice::from_raw_parts(reader.ptr().as_ptr(), reader.len()) }
    }
}

impl SharedArena {
    /// Makes an arena of at least `len` zero bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// The errors of memfd_create(2) and mmap(2).
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(page());
        let (reader, file) = Mapping::shared(len, HugePages::Off)?;
        let writer = Mapping::again(len, &file)?;
        Ok(SharedArena(Arc::new(Mappings {
            reader,
            writer,
            looks: AtomicUsize::new(0),
            planned: Mutex::default(),
        })))
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.0.writer.len()
    }

    /// Always false: an arena has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes, as the reader sees them.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(View(self.0.clone()))
    }

    /// Whether `bytes` lies in the reader's mapping.
    pub fn contains(&self, bytes: &[u8]) -> bool {
        let reader = &self.0.reader;
        let start = reader.ptr().addr().get();
        bytes.as_ptr_range().start.addr() >= start
            && bytes.as_ptr_range().end.addr() <= start + reader.len()
    }

    /// Writes through the writer's mapping. Bytes beyond the end are dropped.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        for (word, byte) in self.words().iter().skip(at).zip(bytes) {
            word.store(*byte, Ordering::Relaxed);
        }
    }

    /// Plans writes: the last one is made, and removed, whenever a parser reads.
    pub fn plan(&self, writes: Vec<(usize, u8)>) {
        *self.0.planned.lock().unwrap_or_else(PoisonError::into_inner) = writes;
    }

    /// The number of times that a parser has read.
    pub fn looks(&self) -> usize {
        self.0.looks.load(Ordering::Relaxed)
    }

    /// Records that a parser reads `chunk`, and makes the next planned write.
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
        // and is accessed through these atomics only.
        unsafe {
            std::slice::from_raw_parts(writer.ptr().as_ptr().cast::<AtomicU8>(), writer.len())
        }
    }
}

/// A [`Buf`] for a parser of bytes that landed in an arena. Panics if the buffer under test exposes
/// a byte of the arena itself.
#[derive(Debug)]
pub struct Watched<'a, B> {
    /// The buffer under test.
    pub buf: &'a mut B,
    /// The arena in which the bytes landed.
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
