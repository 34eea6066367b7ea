//! Whether a peer could stop this process anyway.
//!
//! One that could is woken by a write to its eventfd, which it can make block at any time: by
//! taking O_NONBLOCK away and filling the counter. It could as well send SIGSTOP. That takes the
//! same user and the same PID namespace: a process of another namespace cannot name this one, also
//! where this one sees it, as it sees those of its child namespaces.
//!
//! SO_PEERCRED tells the number of a process that may have ended since, and another process may
//! have its number now. So the number counts only as long as a pidfd of the peer (SO_PEERPIDFD,
//! Linux 6.5) says that the peer lives. Where that cannot be had, the peer is none of them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::shm::socket::seqpacket::Socket;
use crate::shm::user::{is_overflow_user, own_user};

/// Where the architecture has the number of most.
const PEER_PIDFD: Option<libc::c_int> = match cfg!(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64",
    target_arch = "loongarch64"
)) {
    true => Some(77),
    false => None,
};

/// A process, told from earlier ones of its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: u32,
    /// When it started, in clock ticks since the system did.
    pub(super) start: u64,
}

/// The process that made the other end of the socket, if it runs as the user of this process, in
/// its PID namespace.
pub(super) fn same_user(socket: &Socket) -> Option<Process> {
    let peer = socket.peer();
    if peer.uid != own_user() || is_overflow_user(peer.uid) || peer.pid == 0 {
        return None;
    }
    let process = pidfd(socket.fd())?;
    let same = in_this_namespace("self", std::process::id())
        && in_this_namespace(&peer.pid.to_string(), peer.pid);
    let start = start_of(peer.pid)?;
    (same && lives(&process)).then_some(Process { pid: peer.pid, start })
}

/// The process that made the other end of the socket, of whatever user.
pub(super) fn process(socket: &Socket) -> Option<Process> {
    let (pid, pidfd) = (socket.peer().pid, pidfd(socket.fd())?);
    let start = start_of(pid)?;
    (pid != 0 && lives(&pidfd)).then_some(Process { pid, start })
}

/// Field 22 of its /proc/pid/stat (proc(5)). The second is its name, in parentheses, which may hold
/// anything.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Whether `pid` is the only number of this process, in the namespace of /proc and those below it.
/// Its status can be read by all, and reading it waits for nobody.
fn in_this_namespace(process: &str, pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    pids.is_some_and(|pids| pids.split_whitespace().eq([pid.to_string().as_str()]))
}

fn pidfd(socket: &OwnedFd) -> Option<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, value) = (socket.as_raw_fd(), (&raw mut fd).cast());
    // SAFETY: the descriptor is open; the call writes at most `len` bytes to `fd`, of which any are
    // valid (R17).
    let result =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, PEER_PIDFD?, value, &raw mut len) };
    // SAFETY: the descriptor was just made, and is owned by nobody else (R17).
    (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A pidfd can be read when its process has ended.
fn lives(process: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&Timespec::default()))
        .is_ok_and(|ended| ended == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_by_its_start() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let (own, later) = (start_of(std::process::id()).unwrap(), start_of(child.id()).unwrap());
        assert!(0 < own && own <= later, "{own}, {later}");
        assert_eq!(start_of(0), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_number_says_whose_namespace_it_is() {
        let own = std::process::id();
        assert!(in_this_namespace("self", own) && in_this_namespace(&own.to_string(), own));
        assert!(!in_this_namespace("self", own + 1) && !in_this_namespace("no process", own));
    }
}
