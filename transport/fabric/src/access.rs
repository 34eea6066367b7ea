//! Decides with which processes on this host memory may be shared.

use std::io;

use crate::proc_file;

/// The processes on this host with which memory may be shared, by their effective user
/// (SO_PEERCRED, unix(7)).
///
/// Both the accepting and the connecting side check this.
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

/// The processes on this host to which send memory is lent. Each maps the memory of its connection
/// read-only, and reads messages where the sender has them.
///
/// Such a process can at any time see what the sender writes to buffers of that connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Lending {
    /// No process: every message is copied once. The default.
    #[default]
    Off,
    /// Processes of this process's effective user in its PID namespace, which the handshake
    /// confirms (pidfd_open(2)). They could read its memory in other ways (ptrace(2)), unless the
    /// system forbids that. Other processes of this user, for example in another container of a
    /// pod, get copies.
    SameUser,
    /// Like [`SameUser`](Self::SameUser), and also lets a message be lent on, once: a proxy with
    /// this setting passes on lent bytes without a copy. Both the sender and the proxy must choose
    /// this, because the last reader maps whole files: **it sees everything that the sender lends
    /// to the proxy**, whether the proxy sends it on or not.
    SameUserOnward,
    /// This process, whatever its user. All others get copies, even after it has ended. Use this
    /// for memory that holds only data meant for that process. Needs Linux 6.5 for a process of
    /// another user.
    OneProcess(HostProcess),
}

/// A process on this host, identified by its number and its start time. A later process with the
/// same number is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostProcess {
    pub(crate) pid: u32,
    /// Its start time, in clock ticks since the system started.
    pub(crate) start: u64,
}

impl HostProcess {
    /// Returns the process that now has this number in this process's PID namespace. It is
    /// certainly the intended one only if that cannot have ended since its number was learnt, for
    /// example because it is a child that was not waited for.
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

    /// Returns the process of a pidfd (pidfd_open(2)). It is always the intended one, even if
    /// processes end and begin during the call.
    ///
    /// # Errors
    /// Those of [`by_pid`](Self::by_pid), and `InvalidInput` if the descriptor is no pidfd.
    #[cfg(target_os = "linux")]
    pub fn by_pidfd(pidfd: impl std::os::fd::AsFd) -> io::Result<HostProcess> {
        use std::os::fd::AsRawFd as _;
        let fd = pidfd.as_fd().as_raw_fd();
        let number = || -> io::Result<u32> {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
            let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "this is no pidfd");
            // -1 means that the process has ended, 0 that it has no number here.
            Ok(pid.ok_or_else(invalid)?.trim().parse().unwrap_or(0))
        };
        let process = HostProcess::by_pid(number()?)?;
        // The process had this number before and after the start time was read, so that is its own.
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

/// Reads field 22 of /proc/pid/stat (proc(5)). Field 2 is the name in parentheses, which may
/// contain anything.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    let stat = proc_file::read(&format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
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
