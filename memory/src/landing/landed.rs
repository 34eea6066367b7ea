//! Landed bytes, which the peer that wrote them can still change.
//!
//! A peer keeps its key, or its mapping, after DONE. A value could therefore change between its
//! check and its use, so landed bytes are never parsed in place. [`Landed`] does not expose the
//! bytes. Landed bytes can be split at any length, and can be read in three ways:
//!
//! | way | by | who may use it |
//! |---|---|---|
//! | copy | [`Landed::copy_to`], [`Landed::append_to`], [`Landed::to_private`] | any code, because the copy is private |
//! | read through private windows | [`Landed::reader`] | parsers |
//! | lend | [`Landed::lend`], [`Buf::copy_to_bytes`] of the reader | the application, for `bytes` fields |

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{Ordering, compiler_fence};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::held::Origin;
use crate::copy::copy;

/// The size in bytes of the first window, and of the first window after a field that was lent or
/// skipped. This size is enough for tags, lengths and short fields.
const MIN_WINDOW: usize = 64;
/// The length of the longest window in bytes. Windows double in length while a message is read
/// without a gap.
const MAX_WINDOW: usize = 4096;

/// Copies `len` bytes to which another process or a device may write during the call.
///
/// Each byte of the copy had this value in memory at some time during the call, but that time may
/// differ between bytes.
///
/// # Safety
/// `src` is valid for reads of `len` bytes, `dst` for writes, and they do not overlap. No other
/// thread of this process writes to `src` during the call.
#[inline]
unsafe fn fetch(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's contract. The compiler does not see what another process or a device
    // writes in the meantime; no code relies on the contents of `src` (R4).
    unsafe { copy(src, dst, len) };
    // The fence makes the compiler assume that `src` has changed, so it cannot read `src` again
    // instead of the copy.
    compiler_fence(Ordering::SeqCst);
}

/// Landed bytes. The memory returns to its chunk when the last part of the landed bytes, and the
/// last `Bytes` lent from them, are dropped.
///
/// ```
/// use bytes::{Buf, Bytes};
/// use tonic_rdma_memory::{Landed, Window};
///
/// let landed = Landed::from(Bytes::from_static(b"head, and a long field"));
/// let mut window = Window::new();
/// let mut reader = landed.reader(&mut window);
/// assert_eq!(reader.get_u8(), b'h'); // from a private copy
/// reader.advance(5);
/// assert_eq!(reader.copy_to_bytes(16), "and a long field"); // the landing memory itself
/// ```
#[derive(Clone, Default)]
pub struct Landed {
    bytes: Bytes,
    /// The piece of landing memory. `None` if there are no bytes, or if the bytes lie outside
    /// landing memory.
    origin: Option<Origin>,
}

impl Landed {
    pub(super) fn new(bytes: Bytes, origin: Origin) -> Self {
        Landed { bytes, origin: Some(origin) }
    }

    /// Whether the bytes lie in the landing memory of a pool.
    pub fn is_in_pool(&self) -> bool {
        self.origin.is_some()
    }

    /// Counts the bytes' piece as held by the application, and returns whether the application may
    /// hold it. The transport calls this function before it hands the bytes to the application, or
    /// hands over a reader that the application may stop reading. Held memory is not available for
    /// landing until the application drops it. If the answer is false, the application should get a
    /// [copy](Self::to_private), and the piece should be dropped.
    ///
    /// The application may hold three quarters of the bytes that its connection may lease now, and
    /// three quarters of the pool's landing budget. The first bound does not apply to the only
    /// piece that a connection's application holds. The application may not hold a piece if the
    /// connection would then have no room for the next piece, or if the pool would have no room for
    /// another connection. Bytes outside landing memory may always be held.
    pub fn hold(&self) -> bool {
        self.origin.as_ref().is_none_or(Origin::hold)
    }

    /// Returns the memory itself. Callers use only its address and its length.
    pub(crate) fn memory(&self) -> &[u8] {
        &self.bytes
    }

    /// Releases the piece, and so its memory, when no bytes are left.
    fn forget_if_empty(&mut self) {
        if self.bytes.is_empty() {
            *self = Landed::default();
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Splits off and returns the first `len` bytes.
    ///
    /// # Panics
    /// If there are fewer than `len` bytes.
    pub fn split_to(&mut self, len: usize) -> Landed {
        let bytes = self.bytes.split_to(len);
        let origin = if bytes.is_empty() { None } else { self.origin.clone() };
        self.forget_if_empty();
        Landed { bytes, origin }
    }

    /// Drops the first `len` bytes.
    ///
    /// # Panics
    /// If there are fewer than `len` bytes.
    pub fn advance(&mut self, len: usize) {
        self.bytes.advance(len);
        self.forget_if_empty();
    }

    /// Fills `dst` with a copy of the first bytes.
    ///
    /// # Panics
    /// If `dst` is longer than the landed bytes.
    pub fn copy_to(&self, dst: &mut [u8]) {
        assert!(dst.len() <= self.len(), "{} bytes of {} landed ones", dst.len(), self.len());
        // SAFETY: the length has been checked; `dst` is borrowed exclusively, and no thread of this
        // process writes to landed bytes (R8).
        unsafe { fetch(self.bytes.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }

    /// Appends a copy of all bytes to `dst`.
    pub fn append_to(&self, dst: &mut BytesMut) {
        self.append_first(self.len(), dst);
    }

    /// Appends a copy of the first `len` bytes, or of all bytes if there are fewer than `len`.
    fn append_first(&self, len: usize, dst: &mut BytesMut) {
        let len = len.min(self.len());
        dst.reserve(len);
        // SAFETY: the source has at least `len` bytes, and `reserve` made room for `len` bytes in
        // `dst`. `dst` is borrowed exclusively, and its length grows only after the bytes are
        // written. No thread of this process writes to landed bytes (R8).
        unsafe {
            fetch(self.bytes.as_ptr(), dst.chunk_mut().as_mut_ptr(), len);
            dst.advance_mut(len);
        }
    }

    /// Removes the first `len` bytes, and appends a copy of them to `dst`.
    ///
    /// # Panics
    /// If there are fewer than `len` bytes.
    pub fn move_to(&mut self, len: usize, dst: &mut BytesMut) {
        assert!(len <= self.len(), "{len} bytes of {} landed ones", self.len());
        self.append_first(len, dst);
        self.advance(len);
    }

    /// Copies all bytes to the heap, where the peer cannot change them.
    pub fn to_private(&self) -> Bytes {
        let mut copy = BytesMut::with_capacity(self.len());
        self.append_to(&mut copy);
        copy.freeze()
    }

    /// Returns the landing memory itself, **to which the peer may still write**. Only the
    /// application may use this memory, and the documentation warns applications that peers may
    /// change it. Code that checks a value before it uses the value must not use this memory.
    pub fn lend(self) -> Bytes {
        self.bytes
    }

    /// Returns a reader that reads all bytes in order through `window`.
    pub fn reader(self, window: &mut Window) -> LandedReader<'_> {
        let rest = Vec::new().into_iter();
        let mut reader =
            LandedReader { memory: self.bytes, at: 0, filled: 0, window, rest, rest_len: 0 };
        reader.fill(MIN_WINDOW);
        reader
    }

    /// Returns a reader that reads several parts as one message. The reader copies a field that
    /// spans parts.
    pub fn reader_of(parts: Vec<Landed>, window: &mut Window) -> LandedReader<'_> {
        let rest_len = parts.iter().map(Landed::len).sum();
        let rest = parts.into_iter();
        let mut reader =
            LandedReader { memory: Bytes::new(), at: 0, filled: 0, window, rest, rest_len };
        reader.fill(MIN_WINDOW);
        reader
    }
}

/// Wraps bytes that a peer may be able to write to. Treating other bytes as landed is safe and
/// costs little.
impl From<Bytes> for Landed {
    fn from(bytes: Bytes) -> Self {
        Landed { bytes, origin: None }
    }
}

impl fmt::Debug for Landed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landed").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// The buffer of a [`LandedReader`]. The buffer has 4 KiB, is meant for the stack, and is
/// initialized only as far as needed.
pub struct Window([MaybeUninit<u8>; MAX_WINDOW]);

impl Window {
    /// Returns an empty window.
    #[inline]
    pub fn new() -> Self {
        Window([MaybeUninit::uninit(); MAX_WINDOW])
    }
}

impl Default for Window {
    fn default() -> Self {
        Window::new()
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Window")
    }
}

/// A [`Buf`] for parsers. [`chunk`](Buf::chunk) shows private copies, and each byte is copied to a
/// window at most once. [`copy_to_bytes`](Buf::copy_to_bytes) lends the memory in which the bytes
/// landed, and [`advance`](Buf::advance) beyond the window skips bytes without copying them.
///
/// A window is filled only when the previous window is used up, so the bytes after a long field of
/// type `bytes` are copied only after that field has been passed.
///
/// In a message [of several parts](Landed::reader_of), no window spans two parts.
#[derive(Debug)]
pub struct LandedReader<'a> {
    /// The bytes of the current part, from the start of the window on.
    memory: Bytes,
    /// The number of window bytes that have been read.
    at: usize,
    /// The number of window bytes that are initialized. This number exceeds `at`, unless no bytes
    /// are left.
    filled: usize,
    window: &'a mut Window,
    /// The parts after `memory`. `rest_len` is the total number of their bytes.
    rest: std::vec::IntoIter<Landed>,
    rest_len: usize,
}

impl LandedReader<'_> {
    /// Advances to the next part if the current part is used up.
    fn next_part(&mut self) {
        while self.memory.is_empty()
            && let Some(next) = self.rest.next()
        {
            self.rest_len -= next.len();
            self.memory = next.bytes;
        }
    }

    /// Copies up to `len` bytes from the beginning of the memory to the window.
    fn fill(&mut self, len: usize) {
        self.next_part();
        let len = len.min(self.memory.len()).min(MAX_WINDOW);
        // SAFETY: both the memory and the window have `len` bytes; the window is borrowed
        // exclusively, and no thread of this process writes to landed bytes (R8).
        unsafe { fetch(self.memory.as_ptr(), self.window.0.as_mut_ptr().cast(), len) };
        (self.at, self.filled) = (0, len);
    }

    /// Moves to the window that begins `count` bytes after the first unread byte. `left` is the
    /// number of unread bytes in the current window, at most `count`.
    #[inline(never)]
    fn next_window(&mut self, left: usize, count: usize) {
        assert!(count <= self.remaining(), "advanced {count} bytes past {} left", self.remaining());
        let next = if count == left { self.filled * 2 } else { MIN_WINDOW };
        let mut skipped = self.at + count;
        while skipped > self.memory.len() {
            skipped -= self.memory.len();
            self.memory.clear();
            self.next_part();
        }
        self.memory.advance(skipped);
        self.fill(next);
    }

    /// Copies a field that spans parts.
    #[cold]
    fn join(&mut self, len: usize) -> Bytes {
        let mut joined = BytesMut::with_capacity(len);
        while joined.len() < len {
            self.next_part();
            let part = self.memory.split_to((len - joined.len()).min(self.memory.len()));
            Landed::from(part).append_to(&mut joined);
        }
        joined.freeze()
    }
}

impl Buf for LandedReader<'_> {
    #[inline]
    fn remaining(&self) -> usize {
        self.memory.len() - self.at + self.rest_len
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        // SAFETY: `fill` has initialized the first `filled` bytes of the window, and `at` is at
        // most `filled`.
        unsafe {
            let start = self.window.0.as_ptr().cast::<u8>().add(self.at);
            std::slice::from_raw_parts(start, self.filled - self.at)
        }
    }

    #[inline]
    fn advance(&mut self, count: usize) {
        let left = self.filled - self.at;
        if count < left {
            self.at += count;
        } else {
            self.next_window(left, count);
        }
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        assert!(len <= self.remaining(), "{len} bytes of {} left", self.remaining());
        if len < self.filled - self.at {
            let bytes = self.memory.slice(self.at..self.at + len);
            self.at += len;
            return bytes;
        }
        self.memory.advance(self.at);
        let bytes = match len <= self.memory.len() {
            true => self.memory.split_to(len),
            false => self.join(len),
        };
        self.fill(MIN_WINDOW);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::test_util::SharedArena;

    fn numbered(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n % 251) as u8).collect()
    }

    #[test]
    fn windows_double_while_read_in_sequence_and_restart_after_a_gap() {
        let all = numbered(20_000);
        let mut window = Window::new();
        let mut reader = Landed::from(Bytes::from(all.clone())).reader(&mut window);
        let next = |reader: &mut LandedReader<'_>| {
            let len = reader.chunk().len();
            reader.advance(len);
            len
        };
        for len in [64, 128, 256, 512, 1024, 2048, 4096, 4096] {
            assert_eq!(next(&mut reader), len);
        }
        reader.advance(5000);
        assert_eq!(next(&mut reader), 64);
        assert_eq!(next(&mut reader), 128);
        let at = all.len() - reader.remaining();
        assert_eq!(reader.copy_to_bytes(1000), all[at..at + 1000]);
        assert_eq!(reader.chunk(), &all[at + 1000..at + 1064]);
    }

    /// The peer writes whenever the reader has read. A window does not change, but lent memory
    /// does.
    #[test]
    fn windows_are_private_copies_and_lent_bytes_are_the_memory() {
        let arena = SharedArena::new(16 << 10).unwrap();
        arena.write(0, &numbered(16 << 10));
        let mut window = Window::new();
        let mut reader = Landed::from(arena.bytes()).reader(&mut window);
        let shown = reader.chunk().to_vec();
        arena.write(0, &[0xff; 64]);
        assert_eq!(reader.chunk(), shown, "a window shows what was copied");
        assert!(!arena.contains(reader.chunk()));
        reader.advance(3);
        let field = reader.copy_to_bytes(10_000);
        assert!(arena.contains(&field));
        assert_eq!(field[..61], [0xff; 61], "what is lent is the memory itself");
        assert_eq!(reader.chunk(), &numbered(16 << 10)[10_003..][..64]);
        arena.write(10_003, &[0; 64]);
        assert_eq!(reader.get_u8(), (10_003 % 251) as u8);
    }

    #[test]
    fn copies_are_private() {
        const LEN: usize = 64 << 10;
        let arena = SharedArena::new(LEN).unwrap();
        arena.write(0, b"abcd");
        let mut landed = Landed::from(arena.bytes());
        let mut four = [0; 4];
        landed.copy_to(&mut four);
        let mut appended = BytesMut::from(&b"x"[..]);
        let head = landed.split_to(4);
        head.append_to(&mut appended);
        let private = head.to_private();
        arena.write(0, b"....");
        assert_eq!((&four, &appended[..], &private[..]), (b"abcd", &b"xabcd"[..], &b"abcd"[..]));
        assert!(!arena.contains(&private));
        assert_eq!((head.len(), landed.len()), (4, LEN - 4));
        assert_eq!(head.lend(), "....");
    }

    #[test]
    #[should_panic(expected = "advanced 5 bytes past 4 left")]
    fn advancing_past_the_end_panics() {
        Landed::from(Bytes::from_static(b"four")).reader(&mut Window::new()).advance(5);
    }

    #[test]
    fn a_field_that_is_a_part_is_lent_and_one_that_spans_parts_is_copied() {
        let arena = SharedArena::new(16 << 10).unwrap();
        arena.write(0, &numbered(16 << 10));
        let mut all = Landed::from(arena.bytes());
        let parts = vec![all.split_to(20), all.split_to(9000), Landed::default(), all];
        let mut window = Window::new();
        let mut reader = Landed::reader_of(parts.clone(), &mut window);
        assert_eq!((reader.remaining(), reader.chunk().len()), (16 << 10, 20));
        reader.advance(20);
        let field = reader.copy_to_bytes(9000);
        assert!(arena.contains(&field));
        assert_eq!(reader.chunk()[0], (9020 % 251) as u8);
        let mut reader = Landed::reader_of(parts, &mut window);
        reader.advance(19);
        let field = reader.copy_to_bytes(9002);
        assert!(!arena.contains(&field));
        assert_eq!(field, numbered(9021)[19..]);
        assert_eq!(reader.remaining(), (16 << 10) - 9021);
        reader.advance(reader.remaining());
        assert!(!reader.has_remaining() && reader.chunk().is_empty());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Advance(usize),
        Lend(usize),
        Copy(usize),
    }

    proptest! {
        /// The reader gives the same bytes as a plain slice.
        #[test]
        fn any_sequence_of_steps_reads_the_same_bytes(
            len in 0..30_000usize,
            cuts in prop::collection::vec(prop_oneof![0..100usize, 0..9000usize], 0..5),
            steps in prop::collection::vec(
                prop_oneof![0..200usize, 0..9000usize].prop_flat_map(|n| prop_oneof![
                    Just(Step::Advance(n)), Just(Step::Lend(n)), Just(Step::Copy(n)),
                ]),
                0..60,
            ),
        ) {
            let all = numbered(len);
            let mut plain = &all[..];
            let mut window = Window::new();
            let mut whole = Landed::from(Bytes::from(all.clone()));
            let mut reader = match cuts.is_empty() {
                true => whole.reader(&mut window),
                false => {
                    let mut parts: Vec<Landed> =
                        cuts.iter().map(|cut| whole.split_to(*cut.min(&whole.len()))).collect();
                    parts.push(whole);
                    Landed::reader_of(parts, &mut window)
                }
            };
            for step in steps {
                let most = plain.len();
                match step {
                    Step::Advance(n) => {
                        let n = n.min(most);
                        plain.advance(n);
                        reader.advance(n);
                    }
                    Step::Lend(n) => {
                        let n = n.min(most);
                        prop_assert_eq!(plain.copy_to_bytes(n), reader.copy_to_bytes(n));
                    }
                    Step::Copy(n) => {
                        let (mut a, mut b) = (vec![0; n.min(most)], vec![0; n.min(most)]);
                        plain.copy_to_slice(&mut a);
                        reader.copy_to_slice(&mut b);
                        prop_assert_eq!(a, b);
                    }
                }
                prop_assert_eq!(plain.len(), reader.remaining());
                prop_assert!(plain.starts_with(reader.chunk()));
                prop_assert_eq!(reader.chunk().is_empty(), plain.is_empty());
            }
        }
    }
}
