//! The errors of a pool.

use std::io;

use crate::stats::Use;

/// The error if a device refuses to register memory, or the kernel refuses to map memory.
///
/// The cause is in the environment, except for EFAULT: the kernel cannot pin the given memory. The
/// text names the call and the error. It also names the remedy for EFAULT and for limits:
/// RLIMIT_MEMLOCK with ENOMEM from a device, RLIMIT_AS with ENOMEM from mmap(2), RLIMIT_NOFILE with
/// EMFILE, RLIMIT_FSIZE with EFBIG, and the host's limit on open files with ENFILE. Other errors
/// come from the kernel, the device or its driver.
#[derive(Debug, thiserror::Error)]
#[error(
    "{what} {len} bytes failed: {source}{hint}",
    what = what(.source, *.unmapped),
    hint = hint(.source, *.unmapped)
)]
pub struct RegisterError {
    len: usize,
    source: io::Error,
    /// True if the kernel did not map the memory.
    unmapped: bool,
}

/// The call that failed. Memory is mapped in three steps, each with its own errors.
fn what(error: &io::Error, unmapped: bool) -> &'static str {
    match error.raw_os_error() {
        _ if !unmapped => "registering",
        Some(libc::EMFILE | libc::ENFILE) => "memfd_create(2) for landing memory of",
        Some(libc::EFBIG | libc::ENOSPC) => "ftruncate(2) of landing memory of",
        _ => "mmap(2) of landing memory of",
    }
}

fn hint(error: &io::Error, unmapped: bool) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) if unmapped => {
            ": the host has no memory, or the process has reached its limit on address space. Raise RLIMIT_AS with \
             `ulimit -v`, or LimitAS= in the systemd unit"
        }
        Some(libc::EMFILE) => {
            ": the process has reached its limit on descriptors. Raise RLIMIT_NOFILE with `ulimit -n`, or LimitNOFILE= \
             in the systemd unit"
        }
        Some(libc::ENFILE) => {
            ": the host has reached its limit on open files. Raise /proc/sys/fs/file-max"
        }
        Some(libc::EFBIG) => {
            ": the file would exceed the process's limit on file sizes. Raise RLIMIT_FSIZE with `ulimit -f`, or \
             LimitFSIZE= in the systemd unit"
        }
        Some(libc::ENOMEM) => {
            ": the process would exceed its limit on pinned memory. Raise RLIMIT_MEMLOCK with `ulimit -l`, \
             LimitMEMLOCK= or `docker run --ulimit memlock=-1`"
        }
        Some(libc::EFAULT) => {
            ": either the memory is not mapped to its end, as with a file that was truncated, or it is a file that is \
             mapped shared and read-only, which Linux before 6.2 does not pin. Map the file private, as \
             `MmapOptions::map_copy_read_only` of memmap2 does, or fill a `LendableBuf`"
        }
        _ => "",
    }
}

impl RegisterError {
    /// Creates the error of an attempt to register `len` bytes that failed with `source`.
    pub fn new(len: usize, source: io::Error) -> Self {
        RegisterError { len, source, unmapped: false }
    }

    /// Creates the error of an attempt to map `len` bytes that failed with `source`.
    pub fn unmapped(len: usize, source: io::Error) -> Self {
        RegisterError { len, source, unmapped: true }
    }

    /// Whether the memory could not be mapped. In this case, no device was asked to register the
    /// memory.
    pub fn is_unmapped(&self) -> bool {
        self.unmapped
    }

    /// The number of bytes that were to be registered or mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether `len` is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the registration would have exceeded the limit on pinned memory (ENOMEM).
    pub(crate) fn is_limit(&self) -> bool {
        !self.unmapped && self.source.raw_os_error() == Some(libc::ENOMEM)
    }

    /// The error of the system call.
    pub fn io(&self) -> &io::Error {
        &self.source
    }
}

/// The reason why a pool cannot be made, or cannot allocate memory.
///
/// | variant | cause |
/// |---|---|
/// | `Memlock`, `File`, `Map`, `Register` | the environment: a process limit, the kernel or the device |
/// | `TooSmall`, `Parts` | the configuration of the pool |
/// | `TooLarge` | the caller, or a pool that is configured too small for it |
/// | `Exhausted` | temporary: all memory is in use, and waiting helps |
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The environment: RLIMIT_MEMLOCK leaves less than the smallest pool, or less than a landing
    /// chunk.
    #[error(
        "needed {needed} bytes of pinned memory, the limit is {limit} bytes, {pinned} of them pinned already; raise it: \
         `ulimit -l {kib}` (KiB), `* - memlock {kib}` in /etc/security/limits.conf, LimitMEMLOCK= in a systemd unit, or \
         `docker run --ulimit memlock=-1`",
        kib = (.needed + .pinned).div_ceil(1024)
    )]
    Memlock {
        /// The number of bytes needed, including the margin for the rest of the process.
        needed: u64,
        /// The soft RLIMIT_MEMLOCK in bytes, which the pool has raised to the hard limit if it
        /// could.
        limit: u64,
        /// The number of bytes that the process has already pinned or locked.
        pinned: u64,
    },
    /// The configuration: the pool is smaller than the smallest pool that works.
    #[error("a pool of {total} bytes is configured, the smallest that works has {min}")]
    TooSmall {
        /// The configured size in bytes.
        total: usize,
        /// The smallest pool in bytes.
        min: usize,
    },
    /// The configuration: the parts leave too little for landing or for connections.
    #[error(
        "of a pool of {total} bytes {send} are configured for sending and {landing} for landing, which leaves {control} \
         for connections; landing and connections need {min} bytes each: configure a larger total or smaller parts"
    )]
    Parts {
        /// The configured size in bytes.
        total: usize,
        /// The number of bytes for sending.
        send: usize,
        /// The number of bytes for landing.
        landing: usize,
        /// The number of bytes left for the control blocks of connections.
        control: usize,
        /// The minimum number of bytes for landing, and for connections.
        min: usize,
    },
    /// The request exceeds the budget, so waiting does not help.
    #[error(
        "{len} bytes asked for, the budget for {usage} memory is {budget} bytes; configure a larger pool"
    )]
    TooLarge {
        /// The number of bytes requested.
        len: usize,
        /// The budget in bytes.
        budget: usize,
        /// The use that the memory was requested for.
        usage: Use,
    },
    /// All memory of the budget is in use at the moment.
    #[error("all {budget} bytes of {usage} memory are in use, {len} more were asked for")]
    Exhausted {
        /// The number of bytes requested.
        len: usize,
        /// The budget in bytes.
        budget: usize,
        /// The use that the memory was requested for.
        usage: Use,
    },
    /// The environment: this process may not create memory files, which landing memory for peers on
    /// this host needs. RLIMIT_FSIZE is too low, or a system call filter forbids memfd_create(2).
    #[error("a memory file of {len} bytes cannot be made: {source}")]
    File {
        /// The size of the file in bytes.
        len: usize,
        /// The error of the system call.
        source: io::Error,
    },
    /// The environment: the kernel did not map memory.
    #[error("mapping {len} bytes failed: {source}")]
    Map {
        /// The number of bytes requested.
        len: usize,
        /// The error of mmap(2).
        source: io::Error,
    },
    /// The environment: the device did not register memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

/// The reason why application memory is not registered.
///
/// | variant | cause |
/// |---|---|
/// | `Memlock`, `Register` | the environment: a process limit, the kernel or the device |
/// | `Overlap` | the caller |
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The environment: RLIMIT_MEMLOCK does not leave enough beyond the memory that the pool may
    /// use.
    #[error(
        "cannot register {len} bytes of application memory: the limit on pinned memory is {limit} bytes, \
         {pinned} of them pinned already, and {reserved} kept for the pool: configure a smaller pool \
         (PoolConfig::total), or lift the limit (`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd \
         unit, `docker run --ulimit memlock=-1`)"
    )]
    Memlock {
        /// The number of bytes that were to be registered.
        len: usize,
        /// RLIMIT_MEMLOCK in bytes.
        limit: u64,
        /// The number of bytes that the process has already pinned or locked.
        pinned: u64,
        /// The number of bytes that the pool may still pin.
        reserved: u64,
    },
    /// The caller: a part of the memory is registered already, or is pool memory, which can be sent
    /// without registration.
    #[error(
        "a part of the {len} bytes that were to be registered {}",
        if *.pool { "is memory of the pool, which is sent as it is" } else { "is registered already, by an earlier call" }
    )]
    Overlap {
        /// The number of bytes that were to be registered.
        len: usize,
        /// True if the part is pool memory, false if it is application memory.
        pool: bool,
    },
    /// The environment: the device did not register the memory.
    #[error(transparent)]
    Register(#[from] RegisterError),
}
