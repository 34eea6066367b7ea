//! Tells which process made a value. A child of fork(2) is a different process from its parent
//! (R23).
//!
//! A child has copies of its parent's memory, but none of its threads. A lock is in the state in
//! which another thread left it, and handles of devices, sockets and pages still belong to the
//! parent. So a static is a [`PerProcess`], which starts from scratch in a child and does not look
//! at the parent's value. A value that a child must not drop is [`Owned`].
//!
//! | the generation is | on | next |
//! |---|---|---|
//! | none | it is read | a number in a separate page, which the kernel wipes in children (MADV_WIPEONFORK) |
//! | a number | it is read | the number |
//! | wiped: this is a child | it is read | the next number |
//!
//! If the kernel does not wipe pages (Linux before 4.14, other systems), the generation is the
//! process id, which is read each time.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicPtr, AtomicU32};

/// The word that replaces the page if the kernel does not wipe pages. The value of this word stays
/// 0.
static NO_PAGE: AtomicU32 = AtomicU32::new(0);

#[cfg(all(target_os = "linux", not(miri)))]
mod generation {
    use std::ptr::null_mut;
    use std::sync::atomic::Ordering::{AcqRel, Acquire};
    use std::sync::atomic::{AtomicPtr, AtomicU32};

    use super::NO_PAGE;
    use crate::region::page::page;

    /// The page that is wiped in children. The pointer is null until the page is mapped.
    static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());

    /// The word that holds the generation.
    #[inline]
    pub(super) fn word() -> &'static AtomicU32 {
        // SAFETY: what PAGE points to is a static, or a page that is never unmapped (R23).
        unsafe { PAGE.load(Acquire).as_ref() }.unwrap_or_else(first)
    }

    #[cold]
    fn first() -> &'static AtomicU32 {
        let len = page();
        let page = map(len).unwrap_or(std::ptr::from_ref(&NO_PAGE).cast_mut());
        match PAGE.compare_exchange(null_mut(), page, AcqRel, Acquire) {
            Err(_) if !std::ptr::eq(page, &NO_PAGE) => {
                // SAFETY: mapped just now by this call, and nobody else knows it (R8).
                unsafe { libc::munmap(page.cast(), len) };
            }
            _ => {}
        }
        word()
    }

    /// Maps a page that the kernel zeroes in children. Returns `None` if the kernel cannot do this.
    fn map(len: usize) -> Option<*mut AtomicU32> {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping affects no existing one (R8).
        let page = unsafe { libc::mmap(null_mut(), len, prot, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the range is the new mapping, and nobody has a reference to it (R8).
        if unsafe { libc::madvise(page, len, libc::MADV_WIPEONFORK) } != 0 {
            // SAFETY: as above.
            unsafe { libc::munmap(page, len) };
            return None;
        }
        Some(page.cast())
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod generation {
    pub(super) fn word() -> &'static std::sync::atomic::AtomicU32 {
        &super::NO_PAGE
    }
}

/// The last generation that was assigned.
static LAST: AtomicU32 = AtomicU32::new(0);

/// Identifies a process, as distinct from its parent and its children.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Holds this generation as long as the running process is this process, unless the word is
    /// [`NO_PAGE`], which stays 0.
    word: &'static AtomicU32,
    generation: u32,
}

impl Process {
    /// The running process.
    #[inline]
    pub fn current() -> Process {
        let word = generation::word();
        match word.load(Relaxed) {
            0 => Process { word, generation: next(word) },
            generation => Process { word, generation },
        }
    }

    /// Whether the running process is this process, and not a child of it.
    #[inline]
    pub fn is_current(self) -> bool {
        // A page that was wiped holds 0, or the number of a child.
        self.word.load(Relaxed) == self.generation || self.is_current_by_id()
    }

    #[cold]
    fn is_current_by_id(self) -> bool {
        std::ptr::eq(self.word, &NO_PAGE) && self.generation == std::process::id()
    }
}

/// Assigns the generation of a process when it is first read. If several threads read it at once,
/// the first thread decides.
#[cold]
fn next(word: &AtomicU32) -> u32 {
    if std::ptr::eq(word, &NO_PAGE) {
        return std::process::id();
    }
    // The number is counted before it is stored in the page, so that no child of this process gets
    // the same number.
    let mine = LAST.fetch_add(1, AcqRel) + 1;
    word.compare_exchange(0, mine, AcqRel, Acquire).map_or_else(|other| other, |_| mine)
}

/// The error for a value that a process has inherited and may not use.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "{0} belongs to the parent of this process, which made it before fork(2): make a new one in the child"
)]
pub struct Forked(pub &'static str);

/// A value that belongs to the process that made it. A child that drops its copy does not drop the
/// value.
#[derive(Debug)]
pub struct Owned<T> {
    process: Process,
    value: ManuallyDrop<T>,
}

impl<T> Owned<T> {
    /// Creates a value that belongs to this process.
    #[inline]
    pub fn new(value: T) -> Self {
        Owned { process: Process::current(), value: ManuallyDrop::new(value) }
    }

    /// Whether this process has made the value.
    #[inline]
    pub fn is_own(&self) -> bool {
        self.process.is_current()
    }
}

impl<T: Clone> Clone for Owned<T> {
    /// Creates another value that belongs to the same process as this one.
    fn clone(&self) -> Self {
        Owned { process: self.process, value: self.value.clone() }
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Owned<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: dropped here only, and not used afterwards (R23).
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A value that each process makes for itself when it first needs the value. No lock is taken:
/// several threads may make a value at the same time, and one of these values is kept. A child
/// leaves its parent's value alone, and does not drop it.
#[derive(Debug)]
pub struct PerProcess<T> {
    value: AtomicPtr<Owned<T>>,
    make: fn() -> T,
}

impl<T> PerProcess<T> {
    /// Creates a static whose value each process makes with `make`.
    pub const fn new(make: fn() -> T) -> Self {
        PerProcess { value: AtomicPtr::new(null_mut()), make }
    }

    /// The value, if this process has made it.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // SAFETY: values that were published are freed in `drop` only, or never (R23).
        let value = unsafe { self.value.load(Acquire).as_ref() }?;
        value.is_own().then_some(&**value)
    }

    /// The value that a parent of this process has made, if this process has made none.
    pub fn inherited(&self) -> Option<&T> {
        // SAFETY: as in `get`.
        let value = unsafe { self.value.load(Acquire).as_ref() }?;
        (!value.is_own()).then_some(&**value)
    }

    /// Sets the value to `value` if this process has made none yet. Returns the value.
    pub fn get_or_insert(&self, value: T) -> &T {
        let made = Box::into_raw(Box::new(Owned::new(value)));
        let mut seen = self.value.load(Acquire);
        loop {
            // SAFETY: as in `get`.
            if let Some(other) = unsafe { seen.as_ref() }
                && other.is_own()
            {
                // SAFETY: made above, and published nowhere.
                drop(unsafe { Box::from_raw(made) });
                return other;
            }
            match self.value.compare_exchange(seen, made, AcqRel, Acquire) {
                // SAFETY: as in `get`. What was there before is the parent's.
                Ok(_) => return unsafe { &*made },
                Err(now) => seen = now,
            }
        }
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        match self.get() {
            Some(value) => value,
            None => self.get_or_insert((self.make)()),
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let value = *self.value.get_mut();
        if self.get().is_some() {
            // SAFETY: published by this process, and `&mut self` shows that nobody uses it (R23).
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

// SAFETY: the value is made and dropped by any thread, and shared by all (R17).
unsafe impl<T: Send + Sync> Send for PerProcess<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;
    #[cfg(all(target_os = "linux", not(miri)))]
    use crate::test_util::process::fork;

    #[cfg(all(target_os = "linux", not(miri)))]
    fn in_child(holds: impl FnOnce() -> bool) -> bool {
        fork(|| assert!(holds())).unwrap().wait().unwrap()
    }

    struct Dropped<'a>(&'a AtomicUsize);
    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn what_is_owned_is_dropped_once() {
        let drops = AtomicUsize::new(0);
        let owned = Owned::new(Dropped(&drops));
        assert!(owned.is_own());
        drop(owned);
        assert_eq!(drops.load(SeqCst), 1);
    }

    #[test]
    fn threads_agree_on_one_value() {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        static VALUE: PerProcess<usize> = PerProcess::new(|| MADE.fetch_add(1, SeqCst));
        let threads: Vec<_> =
            (0..8).map(|_| std::thread::spawn(|| (*VALUE, VALUE.get().copied()))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), (*VALUE, Some(*VALUE)));
        }
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_child_is_another_process_and_drops_nothing_of_its_parents() {
        static COUNT: PerProcess<AtomicUsize> = PerProcess::new(|| AtomicUsize::new(0));
        let drops = AtomicUsize::new(0);
        let (parent, owned) = (Process::current(), Owned::new(Dropped(&drops)));
        COUNT.fetch_add(5, SeqCst);
        assert!(in_child(|| {
            let own = Process::current();
            let begins_anew = COUNT.get().is_none() && COUNT.load(SeqCst) == 0;
            let is_child = !parent.is_current() && own.is_current() && !owned.is_own();
            drop(owned);
            begins_anew && is_child && drops.load(SeqCst) == 0
        }));
        assert!(parent.is_current() && COUNT.load(SeqCst) == 5);
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn generations_do_not_repeat() {
        let parent = Process::current();
        assert!(in_child(|| {
            let child = Process::current();
            // A grandchild whose parent has not read its own number before.
            in_child(|| !parent.is_current() && !child.is_current())
                && in_child(|| in_child(|| !parent.is_current() && !child.is_current()))
        }));
    }
}
