//! The processes of this host with which memory may be shared.

use std::io;

use crate::proc_file;

/// Which processes of this host memory may be shared with, by the effective user they run as
/// (SO_PEERCRED, unix(7)).
///
/// Checked by the accepting side and by the connecting side.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ShmAccess {
    /// Those of this process's effective user, and of root. The default.
    #[default]
    SameUser,
    /// Those of these users, by number, and of root.
    Users(Vec<u32>),
    /// All.
    Any,
}

impl ShmAccess {
    /// Whether memory may be shared with a process of user `uid`, where this process runs as `own`.
    pub fn allows(&self, uid: u32, own: u32) -> bool {
        match self {
            ShmAccess::Any => true,
            _ if uid == 0 => true,
            ShmAccess::SameUser => uid == own,
            ShmAccess::Users(users) => users.contains(&uid),
        }
    }
}

/// To which processes of this host memory for sending is lent: each maps what is for its
/// connection, read-only, and reads messages where the sender has them.
///
/// It sees what the sender writes to buffers of that connection at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Lending {
    /// To none: every message is copied once. The default.
    #[default]
    Off,
    /// To those of this process's effective user in its PID namespace, as the handshake confirms
    /// them (pidfd_open(2)). They could read its memory in other ways (ptrace(2)), unless the
    /// system forbids that. Others of this user, as in another container of a pod, get copies.
    SameUser,
    /// Like [`SameUser`](Self::SameUser), and lets a message be lent on, once: a proxy that has
    /// this as well passes on what it was lent without a copy. Both the sender and the proxy have
    /// to say so, as the last reader maps whole files: **it sees everything that the sender lends
    /// to the proxy**, whether the proxy sends it on or not.
    SameUserOnward,
    /// To this process, of whatever user. All others get copies, also when it has ended. For memory
    /// that holds nothing but what is meant for that process. Needs Linux 6.5 for a process of
    /// another user.
    OneProcess(HostProcess),
}

/// A process of this host, told by its number and by when it started. A later process that gets the
/// same number is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostProcess {
    pub(crate) pid: u32,
    /// When it started, in clock ticks since the system did.
    pub(crate) start: u64,
}

impl HostProcess {
    /// The process that has this number in the PID namespace of this process now. Sure to be the
    /// one that was meant if that cannot have ended since its number was learnt, such as a child
    /// that was not waited for.
    ///
    /// # Errors
    /// `NotFound`: there is no such process, or /proc does not show it.
    pub fn by_pid(pid: u32) -> io::Result<HostProcess> {
        let unknown = || {
            let what = format!("/proc shows no process {pid} (it has ended, or hidepid is set)");
            io::Error::new(io::ErrorKind::NotFound, what)
        };
        start_of(pid).map(|start| HostProcess { pid, start }).ok_or_else(unknown)
    }

    /// The process of a pidfd (pidfd_open(2)), which is the same one whatever ends and begins
    /// while this is called.
    ///
    /// # Errors
    /// Those of [`by_pid`](Self::by_pid). `InvalidInput`: the descriptor is no pidfd.
    #[cfg(target_os = "linux")]
    pub fn by_pidfd(pidfd: impl std::os::fd::AsFd) -> io::Result<HostProcess> {
        use std::os::fd::AsRawFd as _;
        let fd = pidfd.as_fd().as_raw_fd();
        let number = || -> io::Result<u32> {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
            let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"));
            let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "this is no pidfd");
            // -1: it has ended. 0: it has no number here.
            Ok(pid.ok_or_else(invalid)?.trim().parse().unwrap_or(0))
        };
        let process = HostProcess::by_pid(number()?)?;
        // It had the number before and has it afterwards, so its start was read.
        match number()? == process.pid {
            true => Ok(process),
            false => Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended")),
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

/// Field 22 of /proc/pid/stat (proc(5)). The second is the name, in parentheses, which may hold
/// anything.
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
