//! Application memory that is mapped from a file. If another process truncates the file, a thread
//! that reads a page beyond the file's end gets SIGBUS, which ends the process.
//!
//! | the pages | what a read finds |
//! |---|---|
//! | in the file | the file |
//! | beyond its end, in a guarded range | zeros: the handler maps a page of zeros there, and marks the range as truncated until its guard is dropped |
//! | beyond its end, in any other range | the previous handler runs, or the process ends |
//!
//! The handler is installed with the first guarded range, and never for memory without a file. Code
//! that copies such memory checks [`is_truncated`] afterwards. The check is one load while nothing
//! is truncated.

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::process::PerProcess;
use crate::region::page::page;

/// A range in the table. An entry's memory is never released, because a handler may be reading the
/// entry. An entry whose range is no longer guarded is reused.
struct MappedRange {
    /// This number is odd while the range changes, so that the handler never uses parts of two
    /// ranges.
    version: AtomicU64,
    /// 0 if the entry is free.
    start: AtomicUsize,
    end: AtomicUsize,
    truncated: AtomicBool,
    next: AtomicPtr<MappedRange>,
}

/// The newest entry.
static TABLE: AtomicPtr<MappedRange> = AtomicPtr::new(null_mut());
/// The lock for changes of the table.
static CHANGES: PerProcess<Mutex<()>> = PerProcess::new(Mutex::default);
/// The number of guarded ranges that have been found truncated and still exist.
static TRUNCATED: AtomicUsize = AtomicUsize::new(0);
/// The action for SIGBUS that was installed before this module's handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
/// The page size, for the handler.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// Guards memory that is mapped from a file. While this value is alive, truncating the file does
/// not end the process. Drop this value before the memory is unmapped.
#[derive(Debug)]
pub struct MappedFile(&'static MappedRange);

impl std::fmt::Debug for MappedRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappedRange").field("truncated", &self.truncated).finish_non_exhaustive()
    }
}

impl MappedFile {
    /// Guards memory if it is mapped from a file. Returns `None` for other memory.
    ///
    /// # Errors
    /// sigaction(2) fails.
    pub fn guard(memory: &[u8]) -> io::Result<Option<MappedFile>> {
        let start = memory.as_ptr().addr();
        let end = start + memory.len();
        if memory.is_empty() || !is_of_a_file(start, end) {
            return Ok(None);
        }
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        install()?;
        let free = entries().find(|entry| entry.start.load(Relaxed) == 0);
        let entry: &'static MappedRange = match free {
            Some(entry) => entry,
            None => Box::leak(Box::new(MappedRange {
                version: AtomicU64::new(0),
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                truncated: AtomicBool::new(false),
                next: AtomicPtr::new(TABLE.load(Relaxed)),
            })),
        };
        entry.set(start, end);
        if free.is_none() {
            TABLE.store(std::ptr::from_ref(entry).cast_mut(), Release);
        }
        Ok(Some(MappedFile(entry)))
    }

    /// Whether pages of the memory have been found to lie beyond the end of the file.
    pub fn is_truncated(&self) -> bool {
        self.0.truncated.load(Relaxed)
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.set(0, 0);
        if self.0.truncated.swap(false, SeqCst) {
            TRUNCATED.fetch_sub(1, SeqCst);
        }
    }
}

impl MappedRange {
    fn set(&self, start: usize, end: usize) {
        self.version.fetch_add(1, SeqCst);
        self.start.store(start, SeqCst);
        self.end.store(end, SeqCst);
        self.version.fetch_add(1, SeqCst);
    }

    /// The guarded range. `None` if the entry is free, and while the range changes. No code reads
    /// guarded memory while its entry changes.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(SeqCst);
        let range = (self.start.load(SeqCst), self.end.load(SeqCst));
        (version.is_multiple_of(2) && range.0 > 0 && self.version.load(SeqCst) == version)
            .then_some(range)
    }
}

fn entries() -> impl Iterator<Item = &'static MappedRange> {
    let at = |entry: &AtomicPtr<MappedRange>| {
        // SAFETY: entries are leaked, and so live for ever; an entry is complete when it is
        // published (Acquire and Release).
        unsafe { entry.load(Acquire).as_ref() }
    };
    std::iter::successors(at(&TABLE), move |entry| at(&entry.next))
}

/// Whether these bytes lie in guarded memory that was found truncated. Call this function after
/// reading the bytes. If the result is true, zeros may have been read instead of the bytes.
#[inline]
pub fn is_truncated(bytes: &[u8]) -> bool {
    is_any_truncated() && lies_in(bytes, |entry| entry.truncated.load(SeqCst))
}

/// Whether these bytes lie in guarded memory. Code that cannot check [`is_truncated`] after it has
/// read the bytes should get a copy.
#[inline]
pub fn is_guarded(bytes: &[u8]) -> bool {
    !TABLE.load(Relaxed).is_null() && lies_in(bytes, |_| true)
}

/// Whether any guarded memory has been found truncated and still exists.
#[inline]
pub fn is_any_truncated() -> bool {
    // Keeps the load of the count after the reads of the bytes.
    fence(Acquire);
    TRUNCATED.load(Relaxed) > 0
}

/// The error for bytes that must not be sent because [`is_truncated`] is true.
pub fn truncated() -> io::Error {
    io::Error::other(
        "registered memory is mapped from a file that was truncated: register it again, and keep \
         the file as long as it is mapped, or register a copy",
    )
}

#[cold]
fn lies_in(bytes: &[u8], counts: impl Fn(&MappedRange) -> bool) -> bool {
    let start = bytes.as_ptr().addr();
    let end = start + bytes.len();
    entries().any(|entry| {
        counts(entry) && entry.range().is_some_and(|(from, to)| start < to && from < end)
    })
}

/// Whether a part of the range is mapped from a file, according to proc(5). Returns true if the
/// list of mappings cannot be read.
fn is_of_a_file(start: usize, end: usize) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return true };
    maps.lines().any(|line| {
        // The fields of a line are address, perms, offset, dev, inode and path.
        let mut fields = line.split_ascii_whitespace();
        let range = fields.next().and_then(|range| range.split_once('-'));
        let (from, to) = range.unwrap_or_default();
        let hex = |text| usize::from_str_radix(text, 16).unwrap_or_default();
        hex(from) < end && start < hex(to) && fields.nth(3).is_some_and(|inode| inode != "0")
    })
}

/// Installs the handler once. The caller holds the table's lock.
fn install() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    PAGE.store(page(), SeqCst);
    // SAFETY: all fields of a sigaction may be zero.
    let (mut before, mut ours): (libc::sigaction, libc::sigaction) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // The handler must know the current action before it can run. SAFETY: sigaction fills `before`,
    // and installs nothing.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let _ = BEFORE.set(before);
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    ours.sa_sigaction = handler as usize;
    // The handler runs on the alternate stack, like the handler of the standard library.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for, and makes async-signal-safe
    // calls only (signal-safety(7)); mmap(2) is a plain system call.
    match unsafe { libc::sigaction(libc::SIGBUS, &ours, null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo, and the address of a fault for SIGBUS. errno is
    // this thread's.
    let (addr, is_fault, errno) = unsafe {
        ((*info).si_addr().addr(), (*info).si_code == libc::BUS_ADRERR, *libc::__errno_location())
    };
    if is_fault && mend(addr) {
        // SAFETY: errno is this thread's; the interrupted code finds errno unchanged.
        unsafe { *libc::__errno_location() = errno };
        return;
    }
    pass_on(signal, info, context);
}

/// Maps zeros at the page of a faulting address, if the address lies in a guarded range. Returns
/// whether zeros were mapped.
fn mend(addr: usize) -> bool {
    let lies_in = |entry: &&MappedRange| {
        let page = PAGE.load(SeqCst);
        entry.range().is_some_and(|(start, end)| {
            (start - start % page..end.next_multiple_of(page)).contains(&addr)
        })
    };
    let Some(entry) = entries().find(lies_in) else { return false };
    let page = PAGE.load(SeqCst);
    // The range is counted and marked before zeros are mapped, so that code that reads the zeros
    // finds the count and the mark.
    TRUNCATED.fetch_add(1, SeqCst);
    if entry.truncated.swap(true, SeqCst) {
        TRUNCATED.fetch_sub(1, SeqCst);
    }
    let at = std::ptr::without_provenance_mut::<libc::c_void>(addr - addr % page);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the page belongs to a file mapping that a reader holds (`MappedFile`). The file ends
    // before this page, so the page has no content. The new page replaces this page until the owner
    // unmaps the whole mapping.
    let mapped = unsafe { libc::mmap(at, page, protection, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// Calls the previous handler, or lets the signal end the process.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    let handler = before.sa_sigaction;
    // SAFETY: the handler is called as sigaction(2) had installed it: with three arguments if it
    // has SA_SIGINFO, otherwise with one. Without a handler the default is installed, which ends
    // the process when the instruction faults again.
    unsafe {
        if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
            libc::signal(signal, libc::SIG_DFL);
        } else if before.sa_flags & libc::SA_SIGINFO != 0 {
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(handler);
            call(signal, info, context);
        } else {
            let call: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
            call(signal);
        }
    }
}
