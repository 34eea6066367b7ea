//! Application memory that a message lands in.
//!
//! | who holds | what | so that |
//! |---|---|---|
//! | the application | a [`NamedBuffer`] | it gets its buffer back, by value |
//! | the call | a [`NamedLease`], one call at a time | bytes may be put into the buffer |
//! | the transfer | a [`NamedGrant`], one at a time | a peer may write to a part of it (R8, R9) |
//! | readers | `Bytes`: views of the landed bytes | they read them where they lie |
//!
//! The buffer has one owner at a time:
//!
//! | it is | on | next |
//! |---|---|---|
//! | idle | [`NamedBuffer::claim`] | claimed |
//! | claimed | [`Landing::register_named`](crate::Landing::register_named) | granted: a peer may write to it |
//! | granted | [`NamedGrant::filled`], after DONE | claimed; the bytes are viewed |
//! | granted | drop of the grant, after ABORT or when the queue pair is destroyed (R9) | claimed |
//! | claimed | drop of the last clone of the lease, of which the registration holds one | idle: the owner is woken |
//! | idle, without views | [`NamedBuffer::take`] | taken: the application has it back |
//!
//! A registration ends before its clone of the lease is dropped, so no key works for an idle
//! buffer. A buffer that [keeps its registration](NamedBuffer::keep_registered) is the exception.
//! The registration of such a buffer ends with [`NamedBuffer::close`], or when the buffer is
//! dropped. In both cases the registration ends before the owner is taken or dropped. The buffer
//! counts as claimed while the registration ends.

mod grant;
mod pinned;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

pub use self::grant::{NamedGrant, NamedRegistration};
use self::pinned::Pinned;
use crate::file::OwnedFd;
use crate::landing::Landed;
use crate::region::lendable::LandableBuf;

/// An application buffer in which the longest `bytes` field of a message lands. Cheap to clone.
#[derive(Clone)]
pub struct NamedBuffer(Arc<Buffer>);

struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// The owner, from `Box::into_raw`. `start` borrows the owner exclusively until the owner is
    /// taken.
    owner: NonNull<dyn Any + Send>,
    /// The file of a [`LandableBuf`], which peers on this host can map.
    file: Option<Arc<OwnedFd>>,
    state: Mutex<BufferState>,
}

#[derive(Default)]
struct BufferState {
    /// Whether the buffer is closed, so that no call may claim it any more.
    closed: bool,
    /// Whether a registration lasts until the buffer is closed.
    keeps: bool,
    kept: Option<Arc<Pinned>>,
    claimed: bool,
    granted: bool,
    taken: bool,
    /// The number of bytes at the start that have landed, or were copied there.
    filled: usize,
    /// The number of live views.
    views: usize,
    /// The tasks that wait until no call has the buffer.
    wakers: Vec<Waker>,
}

// SAFETY: the owner is Send, and only the code that takes it or drops the last reference touches
// it. The bytes are written by the holder of the lease or the grant alone, and read through views
// of what has been filled, which is not written again while they live (R8).
unsafe impl Send for Buffer {}
// SAFETY: as above; all shared state is behind the mutex.
unsafe impl Sync for Buffer {}

/// The reason why a buffer cannot be taken back yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InUse {
    /// A call still has the buffer.
    #[error("the call has not ended")]
    Claimed,
    /// Bytes of the message, or clones of these bytes, are still alive.
    #[error("{0} views of the landed bytes are alive: drop the message first")]
    Viewed(usize),
    /// The buffer was taken back earlier.
    #[error("the buffer has come back already")]
    Taken,
}

impl NamedBuffer {
    /// Makes a buffer over the bytes of `owner`, whose `as_mut` is called once. If the owner is a
    /// [`LandableBuf`], peers on this host can map its file once the buffer is [kept
    /// registered](Self::keep_registered).
    pub fn new<T: AsMut<[u8]> + Send + 'static>(owner: T) -> Self {
        let landable = (&owner as &dyn Any).downcast_ref::<LandableBuf>();
        let file = landable.map(|landable| landable.file().clone());
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: `owner` is a live box that nothing else refers to. The exclusive borrow ends when
        // the owner is taken or dropped, and until then the owner is touched only through this
        // borrow.
        let bytes = unsafe { &mut *owner }.as_mut();
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: `Box::into_raw` never returns null.
        let owner: NonNull<dyn Any + Send> = unsafe { NonNull::new_unchecked(owner) };
        NamedBuffer(Arc::new(Buffer { start, len, owner, file, state: Mutex::default() }))
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Claims the buffer for a call. Returns `None` if a call has the buffer, if bytes of an
    /// earlier call are still viewed, or if the buffer is [closed](Self::close).
    pub fn claim(&self) -> Option<NamedLease> {
        let mut state = self.0.state();
        if state.closed || state.claimed || state.taken || state.views > 0 {
            return None;
        }
        state.claimed = true;
        state.filled = 0;
        drop(state);
        Some(NamedLease(Arc::new(Claim(self.0.clone()))))
    }

    /// Keeps the whole buffer registered, with one key, from the first grant on until the buffer is
    /// closed or dropped. A peer that has had a grant can write to the buffer during all that time.
    /// A peer that has mapped a [`LandableBuf`] can write to it for as long as the peer's process
    /// runs.
    pub fn keep_registered(&self) {
        self.0.state().keeps = true;
    }

    /// Prevents calls from claiming the buffer. A kept registration ends now, or when the current
    /// call has ended, on a dedicated thread if the device is slow.
    pub fn close(&self) {
        let mut state = self.0.state();
        state.closed = true;
        if !state.claimed {
            Buffer::end_registration(&self.0, state);
        }
    }

    /// Returns `Ready` when no call has the buffer. When a call ends, all tasks that polled during
    /// the call are woken.
    pub fn poll_idle(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.0.state();
        if !state.claimed {
            return Poll::Ready(());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Returns the owner. This function succeeds only once. If the buffer keeps a registration,
    /// this function closes the buffer and ends the registration first. If a dedicated thread ends
    /// the registration, this call returns [`InUse::Claimed`], and a later call succeeds once the
    /// registration has ended.
    ///
    /// Returns [`InUse`] if the buffer is in use. The owner then stays in the buffer.
    ///
    /// # Panics
    /// If the owner is not a `T`.
    pub fn take<T: Send + 'static>(&self) -> Result<T, InUse> {
        let mut state = self.0.state();
        if state.kept.is_some() && !state.claimed {
            state.closed = true;
            Buffer::end_registration(&self.0, state);
            state = self.0.state();
        }
        match *state {
            BufferState { taken: true, .. } => return Err(InUse::Taken),
            BufferState { claimed: true, .. } => return Err(InUse::Claimed),
            BufferState { views: views @ 1.., .. } => return Err(InUse::Viewed(views)),
            BufferState { .. } => {}
        }
        // SAFETY: `owner` is a live box as long as it is not taken, which is checked under the
        // lock. The buffer is not claimed, so no peer, device or lease refers to the bytes, no
        // registration is kept, and nobody views them.
        let is_owner = unsafe { self.0.owner.as_ref() }.is::<T>();
        assert!(is_owner, "a buffer is taken as the type that it was made of");
        state.taken = true;
        state.closed = true;
        // SAFETY: as above, and it is a `T`; nobody takes or drops it again.
        let owner = unsafe { Box::from_raw(self.0.owner.as_ptr().cast::<T>()) };
        Ok(*owner)
    }
}

impl fmt::Debug for NamedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BufferState { claimed, granted, keeps, filled, views, .. } = *self.0.state();
        f.debug_struct("NamedBuffer")
            .field("len", &self.0.len)
            .field("claimed", &claimed)
            .field("granted", &granted)
            .field("keeps", &keeps)
            .field("filled", &filled)
            .field("views", &views)
            .finish_non_exhaustive()
    }
}

impl Buffer {
    fn state(&self) -> MutexGuard<'_, BufferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the registration that an unclaimed buffer keeps, if any. The buffer counts as claimed
    /// until the registration has ended.
    fn end_registration(buffer: &Arc<Buffer>, mut state: MutexGuard<'_, BufferState>) {
        let Some(kept) = state.kept.take() else { return };
        state.claimed = true;
        drop(state);
        kept.end_before(NamedLease(Arc::new(Claim(buffer.clone()))));
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !state.taken {
            // SAFETY: no lease, grant or view is left, since each holds the buffer; the box has not
            // been taken (R8).
            let owner = unsafe { Box::from_raw(self.owner.as_ptr()) };
            match state.kept.take() {
                Some(kept) => kept.end_before(owner),
                None => drop(owner),
            }
        }
    }
}

/// The right of one call to put bytes into the buffer. Dropping the last clone gives the right up.
#[derive(Clone, Debug)]
pub struct NamedLease(Arc<Claim>);

struct Claim(Arc<Buffer>);

impl NamedLease {
    /// The length of the buffer in bytes.
    pub fn capacity(&self) -> usize {
        self.0.0.len
    }

    /// The file that peers on this host may map in order to write to the buffer. `None` if the
    /// buffer has no such file, or is not to be kept registered.
    fn file(&self) -> Option<&Arc<OwnedFd>> {
        let buffer = &self.0.0;
        buffer.file.as_ref().filter(|_| buffer.state().keeps)
    }

    /// The number of bytes at the start of the buffer that have landed, or were copied there.
    pub fn filled(&self) -> usize {
        self.0.0.state().filled
    }

    /// The range of landed bytes in the buffer, if these bytes are a view of the buffer.
    pub fn range_of(&self, landed: &Landed) -> Option<Range<usize>> {
        let bytes = landed.memory();
        let at = bytes.as_ptr().addr().checked_sub(self.0.0.start.addr().get())?;
        let end = at.checked_add(bytes.len())?;
        (!bytes.is_empty() && end <= self.0.0.len).then_some(at..end)
    }

    /// Returns a view of landed bytes, which may overlap other views. Returns `None` if not all of
    /// these bytes have landed.
    pub fn view(&self, range: Range<usize>) -> Option<Bytes> {
        let buffer = &self.0.0;
        let mut state = buffer.state();
        if range.start > range.end || range.end > state.filled {
            return None;
        }
        state.views += 1;
        drop(state);
        Some(Bytes::from_owner(View { buffer: buffer.clone(), range }))
    }

    /// Fills the start of the buffer with a copy of the parts, one after the other, and returns a
    /// view of the copy. Returns `None` if the parts do not fit, if a peer may write to the buffer,
    /// or if a part of the buffer is viewed.
    pub fn fill(&self, parts: &[Landed]) -> Option<Bytes> {
        let buffer = &self.0.0;
        let len = parts.iter().map(Landed::len).sum();
        let mut state = buffer.state();
        if len > buffer.len || state.granted || state.views > 0 {
            return None;
        }
        // SAFETY: the range lies in the buffer, which is not taken while it is claimed. No grant
        // and no view of it is alive, and none begins while the lock is held (R8). So the parts,
        // which are borrowed, lie elsewhere.
        let mut to = unsafe { std::slice::from_raw_parts_mut(buffer.start.as_ptr(), len) };
        for part in parts {
            let (now, rest) = to.split_at_mut(part.len());
            part.copy_to(now);
            to = rest;
        }
        state.filled = len;
        drop(state);
        self.view(0..len)
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("len", &self.0.len).finish_non_exhaustive()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.claimed = false;
        if state.closed && state.kept.is_some() {
            return Buffer::end_registration(&self.0, state);
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The owner of the bytes of a view.
struct View {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies within the filled part. This process does not write to that part
        // while a view is alive, and the owner is not taken (R4, R8). Until the registration ends,
        // a peer can write to the range, against the protocol. As with all landed memory, such a
        // peer spoils only its own message, and parsers get copies (`Landed`).
        unsafe {
            let start = self.buffer.start.as_ptr().add(self.range.start);
            std::slice::from_raw_parts(start, self.range.len())
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.buffer.state().views -= 1;
    }
}
