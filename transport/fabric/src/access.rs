//! Decides which processes on this host may share memory with this process.

use std::fs::File;
use std::io::{self, Read as _};

/// The processes on this host with which memory may be shared. The effective user of a process
/// decides (SO_PEERCRED, unix(7)).
///
/// Both the accepting and the connecting side check the peer's user.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShmAccess {
    /// Processes of this process's effective user, and of root. The default.
    #[default]
    SameUser,
    /// Processes of these users, by number, and of root.
    Users(Vec<u32>),
    /// All processes.
    Any,
}

impl ShmAccess {
    /// Whether memory may be shared with a process of user `uid`, if this process runs as `own`.
    pub fn allows(&self, uid: u32, own: u32) -> bool {
        match self {
            ShmAccess::Any => true,
            _ if uid == 0 => true,
            ShmAccess::SameUser => uid == own,
            ShmAccess::Users(users) => users.contains(&uid),
        }
    }
}

/// The memory that is lent to processes on this host, and the processes to which it is lent. Such a
/// process maps the memory read-only, and reads messages in the sender's memory.
///
/// | | send memory of the connection's pool | memory registered for lending | lent to |
/// |---|---|---|---|
/// | [`Off`](Self::Off) | no | no | no process |
/// | [`SameUserRegistered`](Self::SameUserRegistered) | no | yes | processes of the same user |
/// | [`SameUser`](Self::SameUser) | yes | yes | the same |
/// | [`SameUserOnward`](Self::SameUserOnward) | yes | yes | the same, and processes to which these lend |
/// | [`OneProcess`](Self::OneProcess) | yes | yes | one process |
///
/// At any time, a process to which the pool's memory is lent can see everything that the sender
/// writes to buffers of their connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Lending {
    /// No process: every message is copied once. The default.
    #[default]
    Off,
    /// Processes of this process's effective user in its PID namespace, which the handshake
    /// confirms (pidfd_open(2)). Such processes could read this process's memory in other ways
    /// (ptrace(2)), unless the system forbids that. Other processes of this user, for example in
    /// another container of a pod, get copies.
    SameUser,
    /// Like [`SameUser`](Self::SameUser), but only memory that the application has registered for
    /// lending is lent. No process sees any of the pool's send memory: messages in this memory are
    /// copied.
    SameUserRegistered,
    /// Like [`SameUser`](Self::SameUser), but lent bytes may be lent once more: a proxy with this
    /// setting passes on lent bytes without a copy. Both the sender and the proxy must choose this
    /// setting, because the last reader maps whole files. **The last reader sees everything that
    /// the sender lends to the proxy**, even bytes that the proxy does not send on.
    SameUserOnward,
    /// The given process, regardless of its user. All other processes get copies, even after the
    /// given process has ended. Use this setting for memory that holds only data for that process.
    /// Needs Linux 6.5 for a process of another user.
    OneProcess(HostProcess),
}

/// A process on this host, identified by its number and its start time. A later process with the
/// same number is a different process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostProcess {
    pub(crate) pid: u32,
    /// The start time of the process, in clock ticks since the system started.
    pub(crate) start: u64,
}

impl HostProcess {
    /// Returns the process that now has this number in this process's PID namespace. If the
    /// intended process may have ended since the caller learnt its number, the result may be
    /// another process. A child keeps its number until its parent has waited for it.
    ///
    /// # Errors
    /// `NotFound` if there is no such process, or /proc does not show it.
    pub fn by_pid(pid: u32) -> io::Result<HostProcess> {
        let unknown = || {
            let what = format!("/proc shows no process {pid} (it has ended, or hidepid is set)");
            io::Error::new(io::ErrorKind::NotFound, what)
        };
        start_of(pid).map(|start| HostProcess { pid, start }).ok_or_else(unknown)
    }

    /// Returns the process of a pidfd (pidfd_open(2)). The result is always the intended process,
    /// even if processes end and begin during the call.
    ///
    /// # Errors
    /// The errors of [`by_pid`](Self::by_pid), and `InvalidInput` if the descriptor is no pidfd.
    #[cfg(target_os = "linux")]
    pub fn by_pidfd(pidfd: impl std::os::fd::AsFd) -> io::Result<HostProcess> {
        use std::os::fd::AsRawFd as _;
        let fd = pidfd.as_fd().as_raw_fd();
        let number = || -> io::Result<u32> {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
            let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "this is no pidfd");
            // -1 means that the process has ended. 0 means that the process has no number in this
            // namespace.
            Ok(pid.ok_or_else(invalid)?.trim().parse().unwrap_or(0))
        };
        let process = HostProcess::by_pid(number()?)?;
        // The process had this number before and after the start time was read, so the start time
        // belongs to this process.
        match number()? == process.pid {
            true => Ok(process),
            false => Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended")),
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

/// Reads the start time of a process: field 22 of /proc/pid/stat (proc(5)). Field 2 is the
/// program's name in parentheses, which may itself contain spaces and parentheses.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    let stat = read_proc(&format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Initial capacity in bytes, more than the length of the files that are read for each connection.
/// These files report no length, so `fs::read_to_string` would begin with 32 bytes.
const PROC_CAPACITY: usize = 4096;

/// Reads a file of /proc, usually with two read(2) calls.
pub(crate) fn read_proc(path: &str) -> io::Result<String> {
    let mut text = String::with_capacity(PROC_CAPACITY);
    File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(all(target_os = "linux", feature = "shm"))]
    #[test]
    fn a_process_is_named_by_its_number_or_its_pidfd() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let named = HostProcess::by_pid(child.id()).unwrap();
        assert_eq!(HostProcess::by_pidfd(&pidfd).unwrap(), named);
        assert_ne!(HostProcess::by_pid(std::process::id()).unwrap(), named);
        child.kill().unwrap();
        child.wait().unwrap();
        for gone in [HostProcess::by_pid(child.id()), HostProcess::by_pidfd(&pidfd)] {
            assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = HostProcess::by_pidfd(&file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }

    #[test]
    fn root_and_the_named_may() {
        for (access, uid, may) in [
            (ShmAccess::SameUser, 1000, true),
            (ShmAccess::SameUser, 0, true),
            (ShmAccess::SameUser, 1001, false),
            (ShmAccess::Users(vec![7]), 7, true),
            (ShmAccess::Users(vec![7]), 0, true),
            (ShmAccess::Users(vec![7]), 1000, false),
            (ShmAccess::Any, 1001, true),
        ] {
            assert_eq!(access.allows(uid, 1000), may, "{access:?} {uid}");
        }
    }
}
