//! RLIMIT_FSIZE, which applies to memory files, and system calls that signals interrupt.
//!
//! The kernel sends SIGXFSZ to a thread that makes a file longer than the limit, and the signal's
//! default action ends the process. So the limit is checked first. The limit may be lowered between
//! the check and the call, so the call runs with the signal blocked in its thread. If the call
//! raises the signal, the thread then takes the pending signal. The program's handlers and masks
//! stay as they are.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// The error for a memory file that exceeds the limit.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "a memory file of {len} bytes exceeds RLIMIT_FSIZE ({limit} bytes), which counts memory files as well; raise it: \
     `ulimit -f unlimited`, LimitFSIZE=infinity in a systemd unit, or `docker run --ulimit fsize=-1`"
)]
struct TooLong {
    len: usize,
    limit: u64,
}

/// The maximum length of a file that this process may make, or `None` without a limit.
pub(crate) fn longest_file() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: limit is a valid rlimit for getrlimit to fill. A failure leaves it unlimited, and the
    // call that makes the file decides (R17).
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    let is_limited = limit.rlim_cur != libc::RLIM_INFINITY;
    is_limited.then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Checks that this process may make a file of `len` bytes.
///
/// # Errors
/// `FileTooLarge`, with the limit and how to raise it.
pub(super) fn check(len: usize) -> io::Result<()> {
    match longest_file() {
        Some(limit) if limit < len => Err(too_long(len, limit)),
        _ => Ok(()),
    }
}

fn too_long(len: usize, limit: usize) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, TooLong { len, limit: limit as u64 })
}

/// Runs `call`, which makes a file up to `len` bytes long. `call` returns -1 and sets errno if it
/// fails.
///
/// # Errors
/// `FileTooLarge`, with the limit and how to raise it. Otherwise the errors of the call.
pub(super) fn grow(len: usize, call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    let blocked = Blocked::new()?;
    let grown = retry(call);
    let is_too_long = grown.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EFBIG));
    blocked.end(is_too_long);
    match grown {
        Err(error) if is_too_long => {
            Err(longest_file().map_or(error, |limit| too_long(len, limit)))
        }
        grown => grown,
    }
}

/// Repeats `call` until no signal interrupts it. `call` returns -1 and sets errno if it fails.
///
/// # Errors
/// The errors of `call` except EINTR.
pub(crate) fn retry(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    loop {
        if call() >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Keeps SIGXFSZ blocked in this thread until [`end`](Self::end).
struct Blocked {
    before: libc::sigset_t,
    /// Whether the signal was pending before. Such a signal belongs to the program.
    was_pending: bool,
}

impl Blocked {
    fn new() -> io::Result<Blocked> {
        let signal = signal_set();
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are valid, and `before` is for the call to fill (R17).
        let failed =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &signal, before.as_mut_ptr()) };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        // SAFETY: the call has succeeded, so it has filled the set.
        let before = unsafe { before.assume_init() };
        let mut pending = MaybeUninit::uninit();
        // SAFETY: the set is for the call to fill, and is read only if it has.
        let was_pending = unsafe {
            libc::sigpending(pending.as_mut_ptr()) == 0
                && libc::sigismember(pending.as_ptr(), libc::SIGXFSZ) == 1
        };
        Ok(Blocked { before, was_pending })
    }

    /// Takes the pending signal if the call `has_raised` it, and restores the mask.
    fn end(self, has_raised: bool) {
        if has_raised && !self.was_pending {
            let (signal, now) = (signal_set(), libc::timespec { tv_sec: 0, tv_nsec: 0 });
            // If the program ignores the signal, nothing is pending.
            // SAFETY: the set and the time are valid, and no information is asked for (R17).
            let _ = retry(|| unsafe { libc::sigtimedwait(&signal, null_mut(), &now) });
        }
        // SAFETY: the set is the one that pthread_sigmask has filled (R17).
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, null_mut()) };
    }
}

/// A set that contains only SIGXFSZ.
fn signal_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset fills the set, to which sigaddset adds a valid signal (R17).
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGXFSZ);
        set.assume_init()
    }
}
