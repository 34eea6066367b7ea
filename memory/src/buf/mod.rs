//! Pinned memory: buffers that the application fills, and bytes that are sent.
//!
//! | file | what |
//! |---|---|
//! | `alloc` | [`Alloc`]: waiting for send memory |
//! | `segments` | [`SegmentBuf`]: encoding without copying large fields |

mod alloc;
mod segments;

pub use self::alloc::Alloc;
pub(crate) use self::alloc::try_alloc;
pub use self::segments::{Segment, SegmentBuf};

use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes};

use crate::arena::SlotRef;
use crate::copy::copy;
use crate::ledger::{Found, KeepAlive, Keys};

/// A uniquely owned buffer in registered memory. The application fills the buffer,
/// [freezes](PinnedBuf::freeze) it and sends it without a copy.
///
/// The buffer starts empty, grows up to its [`capacity`](PinnedBuf::capacity) as it is filled, and
/// never moves. Fill it through [`BufMut`] (for example with tokio's `read_buf`),
/// [`fill_from`](PinnedBuf::fill_from) or [`resize_zeroed`](PinnedBuf::resize_zeroed). The buffer
/// stays valid after the pool is dropped.
///
/// ```
/// use bytes::BufMut;
/// use std::sync::Arc;
/// use tonic_rdma_memory::{HeapRegistrar, Pool, PoolConfig};
///
/// let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default()))?;
/// let mut buf = pool.try_alloc(100)?;
/// buf.put_slice(b"payload");
/// let bytes = buf.freeze();
/// assert!(pool.resolve(&bytes.slice(1..3)).is_some());
/// # Ok::<(), tonic_rdma_memory::PoolError>(())
/// ```
#[derive(Debug)]
pub struct PinnedBuf {
    slot: SlotRef,
    /// The requested length in bytes.
    capacity: usize,
    /// The number of bytes that are filled, and therefore initialized.
    len: usize,
}

impl PinnedBuf {
    pub(crate) fn new(slot: SlotRef, capacity: usize) -> Self {
        debug_assert!(capacity <= slot.len());
        PinnedBuf { slot, capacity, len: 0 }
    }

    /// The maximum number of bytes, which is the requested length.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The number of bytes filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no byte has been filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the number of bytes filled to 0.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Shortens the buffer to `len` bytes. A buffer of at most `len` bytes does not change.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Resizes the filled part to `len` bytes, at most to the capacity. New bytes are zeros.
    pub fn resize_zeroed(&mut self, len: usize) {
        let len = len.min(self.capacity);
        if len > self.len {
            // SAFETY: self.len..len lies within the slot, which this value owns (R8).
            unsafe { self.slot.ptr().add(self.len).write_bytes(0, len - self.len) };
        }
        self.len = len;
    }

    /// Returns the filled part for reading and writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the first `len` bytes are initialized and owned by this value alone (R8).
        unsafe { std::slice::from_raw_parts_mut(self.slot.ptr().as_ptr(), self.len) }
    }

    /// Reads until the buffer is full or the reader is at its end, and returns the number of bytes
    /// read. The reader gets memory with old contents, and must report correctly how many bytes it
    /// has filled. For a tokio reader, use its `read_buf`, which takes any [`BufMut`]:
    ///
    /// ```
    /// use bytes::BufMut;
    /// use tokio::io::{AsyncRead, AsyncReadExt};
    /// use tonic_rdma_memory::{PinnedBuf, Pool};
    ///
    /// /// Up to `len` bytes of a reader, in memory that can be sent as it is.
    /// async fn read(pool: &Pool, reader: &mut (impl AsyncRead + Unpin), len: usize) -> std::io::Result<PinnedBuf> {
    ///     let mut buf = pool.alloc(len).await.map_err(std::io::Error::other)?;
    ///     while buf.has_remaining_mut() && reader.read_buf(&mut buf).await? > 0 {}
    ///     Ok(buf)
    /// }
    /// # use std::sync::Arc;
    /// # use tonic_rdma_memory::{HeapRegistrar, PoolConfig};
    /// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
    /// # let pool = Pool::new(PoolConfig::default(), Arc::new(HeapRegistrar::default())).map_err(std::io::Error::other)?;
    /// # assert_eq!(&read(&pool, &mut &b"payload"[..], 4).await?[..], b"payl");
    /// # std::io::Result::Ok(())
    /// # })?;
    /// # std::io::Result::Ok(())
    /// ```
    ///
    /// # Errors
    /// The errors of the reader, except `Interrupted`. Bytes read before the error stay in the
    /// buffer.
    pub fn fill_from(&mut self, reader: &mut impl Read) -> io::Result<usize> {
        let start = self.len;
        let mut filled = start;
        let result = loop {
            let rest = self.unfilled(filled);
            if rest.is_empty() {
                break Ok(());
            }
            match reader.read(rest) {
                Ok(0) => break Ok(()),
                Ok(n) => filled += n.min(rest.len()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.len = filled;
        result.map(|()| filled - start)
    }

    /// The part of the capacity after the first `from` bytes, with its old contents.
    fn unfilled(&mut self, from: usize) -> &mut [u8] {
        let len = self.capacity.saturating_sub(from);
        // SAFETY: from .. from + len lies within the slot, which this value owns (R8). All of it is
        // initialized: a slot is part of a mapping, which is zeroed when it is made (`Mapping`),
        // and nothing makes memory uninitialized again.
        unsafe {
            std::slice::from_raw_parts_mut(self.slot.ptr().as_ptr().add(self.capacity - len), len)
        }
    }

    /// The local key of the memory.
    pub fn lkey(&self) -> u32 {
        self.slot.lkey()
    }

    /// The address of the first byte.
    pub fn addr(&self) -> u64 {
        self.slot.ptr().addr().get() as u64
    }

    /// The index of the memory among the buffers that are registered with an io_uring ring.
    #[cfg(all(feature = "io-uring", target_os = "linux"))]
    pub(crate) fn fixed(
        &self,
        buffers: &std::sync::Arc<crate::disk::fixed::FixedBuffers>,
    ) -> Option<u16> {
        self.slot.fixed(buffers)
    }

    /// Returns the filled part as [`Bytes`]. The memory returns to the pool when the last clone or
    /// slice of the bytes is dropped.
    pub fn freeze(self) -> Bytes {
        if self.is_empty() { Bytes::new() } else { Bytes::from_owner(self) }
    }
}

impl AsRef<[u8]> for PinnedBuf {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the first `len` bytes are initialized and owned by this value alone (R8).
        unsafe { std::slice::from_raw_parts(self.slot.ptr().as_ptr(), self.len) }
    }
}

impl Deref for PinnedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

impl DerefMut for PinnedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

// SAFETY: chunk_mut gives the unfilled rest of an owned slot, and advance_mut never exceeds the
// capacity (R8).
unsafe impl BufMut for PinnedBuf {
    fn remaining_mut(&self) -> usize {
        self.capacity - self.len
    }

    unsafe fn advance_mut(&mut self, count: usize) {
        assert!(
            count <= self.remaining_mut(),
            "advanced {count} bytes past {} left",
            self.remaining_mut()
        );
        self.len += count;
    }

    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let rest = self.remaining_mut();
        // SAFETY: len..capacity lies within the slot, which this value owns (R8). The range is
        // treated as uninitialized.
        let slice = unsafe {
            let start = self.slot.ptr().as_ptr().add(self.len).cast::<MaybeUninit<u8>>();
            std::slice::from_raw_parts_mut(start, rest)
        };
        UninitSlice::uninit(slice)
    }

    fn put<B: Buf>(&mut self, mut src: B) {
        while src.has_remaining() {
            let len = src.chunk().len();
            self.put_slice(src.chunk());
            src.advance(len);
        }
    }

    fn put_slice(&mut self, src: &[u8]) {
        let len = src.len();
        assert!(len <= self.remaining_mut(), "{len} bytes into {} left", self.remaining_mut());
        // SAFETY: the rest of the slot has room, as checked above, and this value owns it (R8), so
        // no borrowed bytes overlap it.
        unsafe {
            copy(src.as_ptr(), self.chunk_mut().as_mut_ptr(), len);
            self.advance_mut(len);
        }
    }
}

/// Bytes in registered memory, with the key under which the device reads them. The value keeps the
/// memory alive and registered.
#[derive(Clone, Debug)]
pub struct PinnedBytes {
    /// Keeps memory outside the pool registered. This field is dropped before the bytes, because
    /// the bytes keep another pool's memory mapped.
    keep_alive: Option<KeepAlive>,
    bytes: Bytes,
    lkey: u32,
    iova: u64,
    lend_key: Option<u32>,
    for_peer: Option<NonZeroU32>,
}

impl PinnedBytes {
    pub(crate) fn new(bytes: Bytes, found: Found) -> Self {
        let Found { keys: Keys { lkey, iova, lend_key, for_peer }, keep_alive } = found;
        PinnedBytes { bytes, lkey, iova, lend_key, for_peer, keep_alive }
    }

    /// The local key of the memory.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key under which the memory can be lent to peers, or `None` if it cannot be lent.
    pub fn lend_key(&self) -> Option<u32> {
        self.lend_key
    }

    /// The virtual address of the first byte.
    pub fn addr(&self) -> u64 {
        self.bytes.as_ptr().addr() as u64
    }

    /// The address by which work requests refer to the first byte, with the [local
    /// key](PinnedBytes::lkey). For landed bytes this address may differ from
    /// [`addr`](PinnedBytes::addr).
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns a part of the bytes.
    ///
    /// # Panics
    /// If the range reaches past the end.
    pub fn slice(&self, range: impl std::ops::RangeBounds<usize>) -> Self {
        let bytes = self.bytes.slice(range);
        // An empty slice may point anywhere, because no code reads it.
        let by = bytes.as_ptr().addr().wrapping_sub(self.bytes.as_ptr().addr()) as u64;
        let (iova, keep_alive) = (self.iova.wrapping_add(by), self.keep_alive.clone());
        PinnedBytes { bytes, iova, keep_alive, ..*self }
    }

    /// Whether the bytes may be lent to `peer`. Memory that serves one peer may be lent to that
    /// peer only.
    pub(crate) fn may_be_lent_to(&self, peer: Option<NonZeroU32>) -> bool {
        self.for_peer.is_none() || self.for_peer == peer
    }

    /// True if the bytes lie outside the pool: in application memory, in memory lent by a peer, or
    /// in another pool's send memory.
    pub(crate) fn is_registered(&self) -> bool {
        self.keep_alive.is_some()
    }

    /// Returns the bytes. The returned bytes do not keep application memory registered.
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the bytes without the key. The returned bytes keep the memory registered.
    pub fn into_registered(self) -> Bytes {
        if self.keep_alive.is_some() { Bytes::from_owner(self) } else { self.bytes }
    }

    /// Returns the bytes without the key. The returned bytes do not keep application memory
    /// registered.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

impl AsRef<[u8]> for PinnedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
