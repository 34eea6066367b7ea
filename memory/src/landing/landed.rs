//! Landed bytes, which the peer that wrote them may still write to.
//!
//! A peer keeps its key, or its mapping, after DONE. So what landed is never parsed where it lies:
//! a value that was checked could be another when it is used. [`Landed`] shows no bytes; it is cut
//! up by lengths alone, and read in three ways:
//!
//! | way | by | who may use it |
//! |---|---|---|
//! | copied out | [`Landed::copy_to`], [`Landed::append_to`], [`Landed::to_private`] | everybody: the copy is private |
//! | read through private windows | [`Landed::reader`] | parsers |
//! | lent | [`Landed::lend`], [`Buf::copy_to_bytes`] of the reader | the application, for `bytes` fields |

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{Ordering, compiler_fence};

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::copy::copy;

/// Bytes of the first window, and of the first behind a field that was lent or skipped: tags,
/// lengths and short fields.
const FIRST: usize = 64;
/// Bytes of the longest window. Windows double while a message is read on without a gap.
const LONGEST: usize = 4096;

/// Copies `len` bytes that somebody else may write to meanwhile.
///
/// Each byte of the copy is one that was there at some time; those of one copy may be of different
/// times.
///
/// # Safety
/// `src` is valid for reads of `len` bytes, `dst` for writes, and they do not overlap. No other
/// thread of this process writes to `src` meanwhile.
#[inline]
unsafe fn fetch(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: as the caller says. What another process or a device writes meanwhile is not seen by
    // the compiler; nothing is concluded from `src` (R4).
    unsafe { copy(src, dst, len) };
    // The compiler must take `src` to have changed: it may not read there again in place of the
    // copy.
    compiler_fence(Ordering::SeqCst);
}

/// Landed bytes. Dropping the last part of them, and of what was lent of them, gives the memory
/// back.
///
/// ```
/// use bytes::{Buf, Bytes};
/// use tonic_rdma_memory::{Landed, Window};
///
/// let landed = Landed::from(Bytes::from_static(b"head, and a long field"));
/// let mut window = Window::new();
/// let mut reader = landed.reader(&mut window);
/// assert_eq!(reader.get_u8(), b'h'); // of a private copy
/// reader.advance(5);
/// assert_eq!(reader.copy_to_bytes(16), "and a long field"); // where it landed
/// ```
#[derive(Clone, Default)]
pub struct Landed(Bytes);

impl Landed {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the first `len` bytes off.
    ///
    /// # Panics
    /// There are fewer.
    pub fn split_to(&mut self, len: usize) -> Landed {
        Landed(self.0.split_to(len))
    }

    /// Leaves the first `len` bytes behind.
    ///
    /// # Panics
    /// There are fewer.
    pub fn advance(&mut self, len: usize) {
        self.0.advance(len);
    }

    /// Copies the first bytes to `dst`, which they fill.
    ///
    /// # Panics
    /// There are fewer.
    pub fn copy_to(&self, dst: &mut [u8]) {
        assert!(dst.len() <= self.len(), "{} bytes of {} landed ones", dst.len(), self.len());
        // SAFETY: as checked; `dst` is borrowed exclusively, and landed bytes are written by nobody
        // of this process (R8).
        unsafe { fetch(self.0.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }

    /// Copies all of it to the end of `dst`.
    pub fn append_to(&self, dst: &mut BytesMut) {
        let len = self.len();
        dst.reserve(len);
        // SAFETY: `len` bytes are reserved behind the last of `dst`, which is borrowed exclusively,
        // and filled before they count; landed bytes are written by nobody of this process (R8).
        unsafe {
            fetch(self.0.as_ptr(), dst.chunk_mut().as_mut_ptr(), len);
            dst.advance_mut(len);
        }
    }

    /// A copy out of the peer's reach.
    pub fn to_private(&self) -> Bytes {
        let mut copy = BytesMut::with_capacity(self.len());
        self.append_to(&mut copy);
        copy.freeze()
    }

    /// The memory itself, **which the peer may still write to**: for the application, which has
    /// been told so, and never for code that checks and then uses.
    pub fn lend(self) -> Bytes {
        self.0
    }

    /// Reads from the beginning to the end, through `window`.
    pub fn reader(self, window: &mut Window) -> LandedReader<'_> {
        let mut reader = LandedReader { memory: self.0, at: 0, filled: 0, window };
        reader.fill(FIRST);
        reader
    }
}

/// Of memory that a peer may write to, or might: to treat more than need be as landed costs little.
impl From<Bytes> for Landed {
    fn from(bytes: Bytes) -> Self {
        Landed(bytes)
    }
}

impl fmt::Debug for Landed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landed").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Where a [`LandedReader`] copies to: 4 KiB for the stack, which are not initialized before they
/// are needed.
pub struct Window([MaybeUninit<u8>; LONGEST]);

impl Window {
    /// An empty one.
    #[inline]
    pub fn new() -> Self {
        Window([MaybeUninit::uninit(); LONGEST])
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

/// A [`Buf`] for parsers: [`chunk`](Buf::chunk) shows private copies, of each byte one;
/// [`copy_to_bytes`](Buf::copy_to_bytes) lends the memory that the bytes landed in, and
/// [`advance`](Buf::advance) past a window skips it without copying.
///
/// Windows follow each other. One is copied when the window before is used up, so what stands
/// behind a field of `bytes` is not read before the field is passed.
#[derive(Debug)]
pub struct LandedReader<'a> {
    /// What landed, from the beginning of the window on.
    memory: Bytes,
    /// Bytes of the window that have been read.
    at: usize,
    /// Bytes of the window that are initialized; not all are read, unless nothing is left.
    filled: usize,
    window: &'a mut Window,
}

impl LandedReader<'_> {
    /// Makes a window of up to `len` bytes at the beginning of the memory.
    fn fill(&mut self, len: usize) {
        let len = len.min(self.memory.len()).min(LONGEST);
        // SAFETY: `len` bytes lie in the memory and in the window, which is borrowed exclusively;
        // landed bytes are written by nobody of this process (R8).
        unsafe { fetch(self.memory.as_ptr(), self.window.0.as_mut_ptr().cast(), len) };
        (self.at, self.filled) = (0, len);
    }

    /// Leaves the window, of which `left` bytes are unread, for where `count` bytes have been read
    /// or skipped.
    #[inline(never)]
    fn leave(&mut self, left: usize, count: usize) {
        assert!(count <= self.remaining(), "advanced {count} bytes past {} left", self.remaining());
        let next = if count == left { self.filled * 2 } else { FIRST };
        self.memory.advance(self.at + count);
        self.fill(next);
    }
}

impl Buf for LandedReader<'_> {
    #[inline]
    fn remaining(&self) -> usize {
        self.memory.len() - self.at
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        // SAFETY: `fill` has initialized the first `filled` bytes of the window, and `at` is no
        // more than that.
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
            self.leave(left, count);
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
        let bytes = self.memory.split_to(len);
        self.fill(FIRST);
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
    fn windows_grow_while_a_message_is_read_on_and_start_again_behind_a_gap() {
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

    /// A peer that writes whenever the reader has looked: what was shown stays, what is lent is the
    /// memory.
    #[test]
    fn what_a_window_shows_does_not_change_and_what_is_lent_is_not_copied() {
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
        let arena = SharedArena::new(4096).unwrap();
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
        assert_eq!((head.len(), landed.len()), (4, 4092));
        assert_eq!(head.lend(), "....");
    }

    #[test]
    #[should_panic(expected = "advanced 5 bytes past 4 left")]
    fn nothing_is_read_past_the_end() {
        Landed::from(Bytes::from_static(b"four")).reader(&mut Window::new()).advance(5);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Advance(usize),
        Lend(usize),
        Copy(usize),
    }

    proptest! {
        /// As a reader of the same bytes in one piece.
        #[test]
        fn any_steps_read_the_same_bytes(
            len in 0..30_000usize,
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
            let mut reader = Landed::from(Bytes::from(all.clone())).reader(&mut window);
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
