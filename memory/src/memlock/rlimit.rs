//! RLIMIT_MEMLOCK of this process (getrlimit(2)), and its status (proc(5)).

use std::{fs, io};

/// The soft and the hard limit; `None` means unlimited.
pub(super) fn get() -> io::Result<(Option<u64>, Option<u64>)> {
    let limit = getrlimit()?;
    Ok((finite(limit.rlim_cur), finite(limit.rlim_max)))
}

/// Raises the soft limit to the hard limit. A limit that cannot be raised stays as it is.
pub(super) fn raise() -> io::Result<()> {
    let mut limit = getrlimit()?;
    if limit.rlim_cur != limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: limit is a valid rlimit; setrlimit reads it only.
        if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "RLIMIT_MEMLOCK stays at its soft limit");
        }
    }
    Ok(())
}

/// The text of /proc/self/status.
pub(super) fn status() -> io::Result<String> {
    fs::read_to_string("/proc/self/status")
}

/// The name of this process's user namespace, or an empty string if the kernel gives none.
pub(super) fn user_namespace() -> String {
    let name = fs::read_link("/proc/self/ns/user").unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn getrlimit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: limit is a valid rlimit for getrlimit to fill.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } {
        0 => Ok(limit),
        _ => Err(io::Error::last_os_error()),
    }
}

fn finite(limit: libc::rlim_t) -> Option<u64> {
    (limit != libc::RLIM_INFINITY).then_some(limit)
}
