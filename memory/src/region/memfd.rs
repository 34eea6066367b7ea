//! Memory that can be shared with another process: anonymous files that can neither shrink nor
//! grow.
//!
//! A process that maps a file receives SIGBUS when it accesses a part that another process has
//! truncated. So a process may map a peer's file only if the file's seals guarantee that nobody can
//! truncate the file (fcntl(2), F_ADD_SEALS). Such a file does not appear in /dev/shm, and ceases
//! to exist with its last descriptor and mapping.
//!
//! Pages are allocated in pieces. On some kernels any signal ends fallocate(2), which then gives
//! back its pages, so a single call for all pages would never succeed under a profiler's signals.
//! After each interruption the pieces are half as long, down to a single page, which is allocated
//! in one step.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::file_limit::{self, retry};
use super::page::{HUGE_PAGE, page};
use crate::process::PerProcess;

/// Creates a file of `len` zero bytes that can neither shrink nor grow, nor be sealed further.
/// `name` is only shown to users, for example in /proc/PID/maps.
///
/// # Errors
/// `FileTooLarge` if RLIMIT_FSIZE does not allow that length. Otherwise the errors of
/// memfd_create(2), ftruncate(2) and fcntl(2).
pub fn sealed(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    file_limit::check(len)?;
    let file = create(name)?;
    let (fd, size) = (file.as_raw_fd(), size(len)?);
    // SAFETY: the descriptor is open.
    file_limit::grow(len, || unsafe { libc::ftruncate(fd, size) })?;
    seal(&file, 0)?;
    Ok(file)
}

/// Checks that this process may create a memory file of `len` bytes. After the first success, later
/// calls check only RLIMIT_FSIZE.
///
/// # Errors
/// `FileTooLarge` if RLIMIT_FSIZE does not allow that length. Otherwise the errors of
/// memfd_create(2), such as EPERM if a system call filter forbids this call.
pub fn may_make(len: usize) -> io::Result<()> {
    static CREATED: PerProcess<bool> = PerProcess::new(|| false);
    file_limit::check(len)?;
    if CREATED.get().is_none() {
        create(c"tonic-rdma-probe")?;
        CREATED.get_or_insert(true);
    }
    Ok(())
}

/// Creates a file of `len` zero bytes, with all pages allocated. The caller then maps the file, and
/// seals it with [`seal_for_readers`].
///
/// # Errors
/// `FileTooLarge` if RLIMIT_FSIZE does not allow that length. Otherwise the errors of
/// memfd_create(2) and fallocate(2).
pub(crate) fn allocated(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    file_limit::check(len)?;
    let file = create(name)?;
    file_limit::grow(len, || allocate(file.as_raw_fd(), len))?;
    Ok(file)
}

/// Allocates all pages of the first `len` bytes of a file, piece by piece. Returns -1 and sets
/// errno like fallocate(2).
fn allocate(fd: RawFd, len: usize) -> libc::c_int {
    let (mut at, mut step) = (0, HUGE_PAGE);
    while at < len {
        let piece = step.min(len - at);
        let (Ok(offset), Ok(size)) = (size(at), size(piece)) else {
            // SAFETY: sets the errno of this thread (R17).
            unsafe { *libc::__errno_location() = libc::EFBIG };
            return -1;
        };
        // SAFETY: the descriptor is open; the arguments are numbers.
        match unsafe { libc::fallocate(fd, 0, offset, size) } {
            0 => at += piece,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {
                step = (step / 2).max(page());
            }
            failed => return failed,
        }
    }
    0
}

/// Seals a file so that its size and its pages are fixed, and only existing mappings can write to
/// it. A process that gets the descriptor can neither write nor punch holes: F_SEAL_FUTURE_WRITE
/// also forbids FALLOC_FL_PUNCH_HOLE (fallocate(2)).
///
/// # Errors
/// The errors of fcntl(2), such as EINVAL before Linux 5.1, where the seal does not exist.
pub(crate) fn seal_for_readers(file: &OwnedFd) -> io::Result<()> {
    seal(file, F_SEAL_FUTURE_WRITE)
}

/// The length in bytes of a memory file of ordinary pages.
///
/// # Errors
/// `InvalidInput` for any other file, and for a file whose contents are not sealed and cannot be
/// sealed. Otherwise the errors of fstat(2) and of [`has_ordinary_pages`].
pub(crate) fn len_of_ordinary_pages(file: &OwnedFd) -> io::Result<u64> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open; the argument is a number.
    let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
    if seals < 0 {
        return wrong("no memory file (memfd_create(2)): it cannot be sealed");
    }
    if !has_ordinary_pages(file.as_fd())? {
        return wrong("a memory file of huge pages, which readers do not map");
    }
    // A file that was created without MFD_ALLOW_SEALING has this seal.
    if seals & libc::F_SEAL_SEAL != 0 && seals & CONTENTS != CONTENTS {
        return wrong("a memory file that can be changed and not be sealed (MFD_ALLOW_SEALING)");
    }
    Ok(u64::try_from(stat(fd)?.st_size).unwrap_or(0))
}

/// Whether a sealable file has ordinary pages. Memory files of huge pages are in a separate file
/// system.
///
/// # Errors
/// The errors of fstat(2) and memfd_create(2), which are used if a system call filter forbids
/// fstatfs(2).
pub fn has_ordinary_pages(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: all zeros are a valid statfs, and the call writes to it only.
    let kind = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        retry(|| libc::fstatfs(file.as_raw_fd(), &raw mut stat)).map(|()| stat.f_type)
    };
    match kind {
        Ok(kind) => Ok(kind as u64 == TMPFS),
        // All memory files of ordinary pages are in the same file system.
        Err(_) => {
            let ordinary = create(c"tonic-rdma-probe")?;
            Ok(stat(file.as_raw_fd())?.st_dev == stat(ordinary.as_raw_fd())?.st_dev)
        }
    }
}

fn stat(fd: RawFd) -> io::Result<libc::stat> {
    // SAFETY: all zeros are a valid stat, and the call writes to it only.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    retry(|| unsafe { libc::fstat(fd, &raw mut stat) })?;
    Ok(stat)
}

/// Allocates all pages of a file of `len` bytes, and seals it so that its size, its pages and its
/// contents are fixed.
///
/// # Errors
/// `InvalidInput` if the file is mapped for writing, or has another length when it is sealed.
/// Otherwise the errors of fallocate(2) and fcntl(2).
pub(crate) fn seal_contents(file: &OwnedFd, len: usize) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // A file that was sealed before may also lack pages.
    file_limit::grow(len, || allocate(fd, len))?;
    // SAFETY: the descriptor is open; the argument is a number.
    if unsafe { libc::fcntl(fd, libc::F_GET_SEALS) } & CONTENTS != CONTENTS {
        add_contents(fd)?;
    }
    // The file's length is fixed now, but another process may have changed the length earlier.
    match len_of_ordinary_pages(file)? {
        sealed if sealed == len as u64 => Ok(()),
        sealed => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a memory file of {len} bytes that another process has made {sealed}"),
        )),
    }
}

fn add_contents(fd: RawFd) -> io::Result<()> {
    // SAFETY: the descriptor is open; the argument is a number.
    match retry(|| unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, CONTENTS) }) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a memory file that is mapped for writing (EBUSY): unmap it first",
        )),
        sealed => sealed,
    }
}

/// The seals of a file that nobody can change.
const CONTENTS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;

/// The number of the file system of memory files, from linux/magic.h. Huge pages have another file
/// system.
const TMPFS: u64 = 0x0102_1994;

/// The value from linux/fcntl.h.
const F_SEAL_FUTURE_WRITE: libc::c_int = 0x0010;

fn size(len: usize) -> io::Result<libc::off_t> {
    libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn seal(file: &OwnedFd, more: libc::c_int) -> io::Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL | more;
    // SAFETY: the descriptor is open; the argument is a number.
    retry(|| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

fn create(name: &CStr) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Some hosts allow only non-executable files. Kernels before 6.3 do not know the flag for such
    // files.
    for flags in [flags | libc::MFD_NOEXEC_SEAL, flags] {
        let mut fd = -1;
        let created = retry(|| {
            // SAFETY: the name ends with a zero byte.
            fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
            fd
        });
        match created {
            // SAFETY: the descriptor has just been created, and nothing else owns it.
            Ok(()) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(result: libc::c_int) -> Option<i32> {
        if result < 0 { std::io::Error::last_os_error().raw_os_error() } else { None }
    }

    #[test]
    fn readers_cannot_write_and_nobody_can_punch_holes() {
        let file = allocated(c"test", 8192).unwrap();
        let map = |prot| {
            let fd = file.as_raw_fd();
            // SAFETY: a new mapping, which is not touched.
            let at =
                unsafe { libc::mmap(std::ptr::null_mut(), 8192, prot, libc::MAP_SHARED, fd, 0) };
            (at != libc::MAP_FAILED).then_some(at)
        };
        let writable = map(libc::PROT_READ | libc::PROT_WRITE).unwrap();
        seal_for_readers(&file).unwrap();
        assert!(map(libc::PROT_READ | libc::PROT_WRITE).is_none());
        assert!(map(libc::PROT_READ).is_some());
        // SAFETY: the range is the mapping, and the arguments are numbers.
        unsafe {
            let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let punched = libc::fallocate(file.as_raw_fd(), punch, 0, 8192);
            assert_eq!(errno(punched), Some(libc::EPERM));
            assert_eq!(errno(libc::madvise(writable, 8192, libc::MADV_REMOVE)), Some(libc::EPERM));
            writable.cast::<u8>().write(1);
        }
    }

    #[test]
    fn sealed_files_keep_their_size() {
        let file = sealed(c"test", 8192).unwrap();
        let fd = file.as_raw_fd();
        // SAFETY: the descriptor is open, the arguments are numbers.
        unsafe {
            assert_eq!(errno(libc::ftruncate(fd, 4096)), Some(libc::EPERM));
            assert_eq!(errno(libc::ftruncate(fd, 12288)), Some(libc::EPERM));
            assert_eq!(
                errno(libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE)),
                Some(libc::EPERM)
            );
        }
    }
}
