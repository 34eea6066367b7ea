//! What can be wrong with a pool or a request to it.

use std::io;

use crate::stats::Use;

/// A device refused to register memory.
#[derive(Debug, thiserror::Error)]
#[error("registering {len} bytes failed: {source}{hint}", hint = hint(.source))]
pub struct RegisterError {
    len: usize,
    source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (more would be pinned than RLIMIT_MEMLOCK allows: raise it with `ulimit -l`, LimitMEMLOCK= or \
             `docker run --ulimit memlock=-1`)"
        }
        _ => "",
    }
}

impl RegisterError {
    /// An attempt to register `len` bytes failed with `source`.
    pub fn new(len: usize, source: io::Error) -> Self {
        RegisterError { len, source }
    }

    /// Bytes that were to be registered.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was to be registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether more would have been pinned than the process may.
    pub(crate) fn is_limit(&self) -> bool {
        self.source.raw_os_error() == Some(libc::ENOMEM)
    }

    /// The error of the system call.
    pub fn io(&self) -> &io::Error {
        &self.source
    }
}

/// Why a pool cannot be made, or cannot give memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// RLIMIT_MEMLOCK leaves less than the smallest pool.
    #[error(
        "needed {needed} bytes of pinned memory, the limit is {limit} bytes, {pinned} of them pinned already; raise it: \
         `ulimit -l {kib}` (KiB), `* - memlock {kib}` in /etc/security/limits.conf, LimitMEMLOCK= in a systemd unit, or \
         `docker run --ulimit memlock=-1`",
        kib = (.needed + .pinned).div_ceil(1024)
    )]
    Memlock {
        /// Bytes that the smallest pool needs, the process's own margin included.
        needed: u64,
        /// The limit (RLIMIT_MEMLOCK, the hard one: the soft one has been raised to it) in bytes.
        limit: u64,
        /// Bytes that the process has pinned or locked already.
        pinned: u64,
    },
    /// The configured pool is smaller than the smallest that works.
    #[error("a pool of {total} bytes is configured, the smallest that works has {min}")]
    TooSmall {
        /// Bytes configured.
        total: usize,
        /// The smallest pool in bytes.
        min: usize,
    },
    /// The configured parts leave too little for landing or for connections.
    #[error(
        "of a pool of {total} bytes {send} are configured for sending and {landing} for landing, which leaves {control} \
         for connections; landing and connections need {min} bytes each: configure a larger total or smaller parts"
    )]
    Parts {
        /// Bytes configured.
        total: usize,
        /// Bytes for sending.
        send: usize,
        /// Bytes for landing.
        landing: usize,
        /// Bytes that are left for the control blocks of connections.
        control: usize,
        /// The least for landing, and for connections, in bytes.
        min: usize,
    },
    /// The request is larger than the budget: it can never be met.
    #[error(
        "{len} bytes asked for, the budget for {usage} memory is {budget} bytes; configure a larger pool"
    )]
    TooLarge {
        /// Bytes asked for.
        len: usize,
        /// The budget in bytes.
        budget: usize,
        /// For what.
        usage: Use,
    },
    /// All memory of the budget is in use.
    #[error("all {budget} bytes of {usage} memory are in use, {len} more were asked for")]
    Exhausted {
        /// Bytes asked for.
        len: usize,
        /// The budget in bytes.
        budget: usize,
        /// For what.
        usage: Use,
    },
    /// The kernel gave no memory.
    #[error("mapping {len} bytes failed: {source}")]
    Map {
        /// Bytes asked for.
        len: usize,
        /// The error of mmap(2).
        source: io::Error,
    },
    /// The device did not register it.
    #[error(transparent)]
    Register(#[from] RegisterError),
}
