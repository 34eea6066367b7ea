//! The amount of memory that the process may pin.
//!
//! The kernel counts the pinned pages of a process and refuses registrations beyond RLIMIT_MEMLOCK
//! (getrlimit(2)). Most distributions, containers and systemd set this limit to 8 MiB. CAP_IPC_LOCK
//! lifts the limit, except on Soft-iWARP, which applies it to every process. The kernel requires
//! the capability in the initial user namespace (`capable` in the kernel's `ib_umem_get`), so the
//! capability of a rootless container does not count.

use std::io;

/// Limits and use of pinned memory in this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memlock {
    /// The soft limit, or `None` for no limit.
    pub soft: Option<u64>,
    /// The hard limit, up to which the soft limit may be raised. `None` means that there is no
    /// limit.
    pub hard: Option<u64>,
    /// The number of bytes that the process has pinned or locked (the larger of VmPin and VmLck in
    /// proc(5)).
    pub pinned: u64,
    /// Whether the process has CAP_IPC_LOCK in the initial user namespace, which lifts the limit.
    pub cap_ipc_lock: bool,
}

/// Number of CAP_IPC_LOCK in capabilities(7).
const CAP_IPC_LOCK: u32 = 14;

impl Memlock {
    /// Reads the limits and the use of this process.
    ///
    /// # Errors
    /// getrlimit(2) fails, or /proc/self/status cannot be read.
    pub fn read() -> io::Result<Self> {
        let (soft, hard) = rlimit::get()?;
        let status = rlimit::status()?;
        Ok(Memlock {
            soft,
            hard,
            pinned: field(&status, "VmPin:").max(field(&status, "VmLck:")),
            cap_ipc_lock: has_ipc_lock(&status) && is_initial(&rlimit::user_namespace()),
        })
    }

    /// Raises the soft limit to the hard limit, which needs no privilege, and reads both limits.
    ///
    /// # Errors
    /// The errors of [`Memlock::read`]. A limit that cannot be raised stays as it is, and the
    /// function returns no error for it.
    pub fn raise() -> io::Result<Self> {
        rlimit::raise()?;
        Self::read()
    }

    /// The number of bytes that may still be pinned, or `None` if there is no limit.
    /// `ignores_ipc_lock` says whether the device applies the limit even to processes with
    /// CAP_IPC_LOCK.
    pub fn available(&self, ignores_ipc_lock: bool) -> Option<u64> {
        if self.cap_ipc_lock && !ignores_ipc_lock {
            return None;
        }
        self.soft.map(|soft| soft.saturating_sub(self.pinned))
    }
}

/// A field of /proc/self/status in bytes, or 0 if the field is missing.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

fn has_ipc_lock(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1)
}

/// Whether `user_namespace` is the name of the initial user namespace, whose number is the kernel's
/// PROC_USER_INIT_INO. A kernel that gives no name has no other user namespace.
fn is_initial(user_namespace: &str) -> bool {
    user_namespace.is_empty() || user_namespace == "user:[4026531837]"
}

/// RLIMIT_MEMLOCK of this process (getrlimit(2)), and the process's status (proc(5)).
#[cfg(target_os = "linux")]
mod rlimit {
    use std::{fs, io};

    /// The soft and the hard limit. `None` means that there is no limit.
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
}

/// The functions for systems other than Linux, where no memory is pinned and no limit applies.
#[cfg(not(target_os = "linux"))]
mod rlimit {
    use std::io;

    /// Returns no soft and no hard limit.
    pub(super) fn get() -> io::Result<(Option<u64>, Option<u64>)> {
        Ok((None, None))
    }

    /// Does nothing, because there is no limit.
    pub(super) fn raise() -> io::Result<()> {
        Ok(())
    }

    /// Returns an empty name, because there are no namespaces.
    pub(super) fn user_namespace() -> String {
        String::new()
    }

    /// Returns an empty status.
    pub(super) fn status() -> io::Result<String> {
        Ok(String::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str =
        "Name:\tx\nVmLck:\t      12 kB\nVmPin:\t     100 kB\nCapEff:\t0000000000004000\n";

    #[test]
    fn fields_of_status_are_parsed() {
        assert_eq!(field(STATUS, "VmPin:"), 100 * 1024);
        assert_eq!(field(STATUS, "VmNothing:"), 0);
        assert!(has_ipc_lock(STATUS));
        assert!(!has_ipc_lock("CapEff:\t0000000000000000\n"));
        assert!(!has_ipc_lock(""));
    }

    #[test]
    fn a_capability_counts_in_the_initial_namespace() {
        assert!(is_initial("user:[4026531837]") && is_initial(""));
        assert!(!is_initial("user:[4026532198]"));
    }

    #[test]
    fn available_is_the_limit_less_what_is_pinned() {
        let m = Memlock { soft: Some(1000), hard: Some(2000), pinned: 300, cap_ipc_lock: false };
        assert_eq!(m.available(false), Some(700));
        assert_eq!(Memlock { pinned: 5000, ..m }.available(false), Some(0));
        assert_eq!(Memlock { soft: None, ..m }.available(false), None);
        let root = Memlock { cap_ipc_lock: true, ..m };
        assert_eq!(root.available(false), None);
        assert_eq!(root.available(true), Some(700));
    }

    #[test]
    fn the_limit_of_this_process_can_be_read_and_raised() {
        let raised = Memlock::raise().unwrap();
        assert_eq!(raised.soft, raised.hard);
        assert_eq!(Memlock::read().unwrap().hard, raised.hard);
    }
}
