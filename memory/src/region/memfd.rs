//! Memory that can be shared with another process: anonymous files that can neither shrink nor
//! grow.
//!
//! A process that maps a file receives SIGBUS when it accesses a part that another process has
//! truncated. So a process may map a file of a peer only if the file cannot be truncated, which its
//! seals guarantee (fcntl(2), F_ADD_SEALS). Such a file does not appear in /dev/shm, and ceases to
//! exist with its last descriptor and mapping.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Creates a file of `len` zero bytes that can neither shrink nor grow, nor be sealed further.
/// `name` appears in /proc/PID/maps only.
///
/// # Errors
/// Those of memfd_create(2), ftruncate(2) and fcntl(2).
pub fn sealed(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    let file = create(name)?;
    // SAFETY: the descriptor is open.
    check(unsafe { libc::ftruncate(file.as_raw_fd(), size(len)?) })?;
    seal(&file, 0)?;
    Ok(file)
}

/// Creates a file of `len` zero bytes that has all of its pages, to be mapped by its maker and then
/// sealed with [`seal_for_readers`].
///
/// # Errors
/// Those of memfd_create(2) and fallocate(2).
pub(crate) fn allocated(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    let file = create(name)?;
    // SAFETY: the descriptor is open; the arguments are numbers.
    check(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, size(len)?) })?;
    Ok(file)
}

/// Seals a file so that it keeps its size and its pages, and that nobody can write to it but
/// through mappings that there are: neither those who get its descriptor, nor by punching holes
/// (fallocate(2), whose FALLOC_FL_PUNCH_HOLE F_SEAL_FUTURE_WRITE forbids).
///
/// # Errors
/// Those of fcntl(2); EINVAL before Linux 5.1, which does not know the seal.
pub(crate) fn seal_for_readers(file: &OwnedFd) -> io::Result<()> {
    seal(file, F_SEAL_FUTURE_WRITE)
}

/// The length in bytes of a memory file of ordinary pages.
///
/// # Errors
/// `InvalidInput` for any other file, and one that cannot be sealed; those of fstat(2) and
/// fstatfs(2).
pub(crate) fn len_of_ordinary_pages(file: &OwnedFd) -> io::Result<u64> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open; the argument is a number.
    let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
    if seals < 0 {
        return wrong("no memory file (memfd_create(2)): it cannot be sealed");
    }
    // SAFETY: all zeros are a valid statfs, and the call writes to it only.
    let kind = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        check(libc::fstatfs(fd, &raw mut stat))?;
        stat.f_type
    };
    if kind as u64 != TMPFS {
        return wrong("a memory file of huge pages, which readers do not map");
    }
    // A file that is made without MFD_ALLOW_SEALING has this one.
    if seals & libc::F_SEAL_SEAL != 0 && seals & CONTENTS != CONTENTS {
        return wrong("a memory file that can be changed and not be sealed (MFD_ALLOW_SEALING)");
    }
    // SAFETY: all zeros are a valid stat, and the call writes to it only.
    let size = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstat(fd, &raw mut stat))?;
        stat.st_size
    };
    Ok(u64::try_from(size).unwrap_or(0))
}

/// Gives a file of `len` bytes all of its pages, and seals it so that it keeps its size, its pages
/// and its contents.
///
/// # Errors
/// `InvalidInput` if it is mapped for writing, or has another length when it is sealed; those of
/// fallocate(2) and fcntl(2).
pub(crate) fn seal_contents(file: &OwnedFd, len: usize) -> io::Result<()> {
    let fd = file.as_raw_fd();
    // A file that was sealed before may lack pages, too.
    // SAFETY: the descriptor is open; the arguments are numbers.
    check(unsafe { libc::fallocate(fd, 0, 0, size(len)?) })?;
    // SAFETY: the descriptor is open; the argument is a number.
    if unsafe { libc::fcntl(fd, libc::F_GET_SEALS) } & CONTENTS != CONTENTS {
        add_contents(fd)?;
    }
    // From here on it keeps its length, which somebody may have changed until now.
    match len_of_ordinary_pages(file)? {
        sealed if sealed == len as u64 => Ok(()),
        sealed => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a memory file of {len} bytes that somebody made {sealed} meanwhile"),
        )),
    }
}

fn add_contents(fd: RawFd) -> io::Result<()> {
    // SAFETY: the descriptor is open; the argument is a number.
    match check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, CONTENTS) }) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a memory file that is mapped for writing (EBUSY): unmap it first",
        )),
        sealed => sealed,
    }
}

/// The seals of a file that nobody can change.
const CONTENTS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;

/// The file system of memory files, as linux/magic.h has it. Huge pages have one of their own.
const TMPFS: u64 = 0x0102_1994;

/// linux/fcntl.h.
const F_SEAL_FUTURE_WRITE: libc::c_int = 0x0010;

fn size(len: usize) -> io::Result<libc::off_t> {
    libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn seal(file: &OwnedFd, more: libc::c_int) -> io::Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL | more;
    // SAFETY: the descriptor is open; the argument is a number.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

fn create(name: &CStr) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Some hosts allow only non-executable files; kernels before 6.3 do not know that flag.
    for flags in [flags | libc::MFD_NOEXEC_SEAL, flags] {
        // SAFETY: the name ends with a zero byte.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        match check(fd) {
            // SAFETY: the descriptor has just been created, and nothing else owns it.
            Ok(()) => return Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINVAL))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(result: libc::c_int) -> Option<i32> {
        check(result).err().and_then(|e| e.raw_os_error())
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
