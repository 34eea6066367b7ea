//! Checks whether a peer could stop and read this process by other means (ptrace(2)).
//!
//! A peer that passes the check gets a wake-up channel with this process (`wakeup::channels`). The
//! peer may fill the channel's page with bits, so that a task of this process keeps running. This
//! adds no danger, because the peer could also occupy the processor with a loop. A peer that passes
//! the check also receives lent memory if the program lends to the peer's user (`lend::Permit`),
//! because the peer could read all of this process's memory by other means. The check requires the
//! same user and the same PID namespace. A process in a child namespace cannot name this process by
//! a number, although this process can name that process.
//!
//! SO_PEERCRED gives a process id. That process may have ended, and another process may have the id
//! now. So the id counts only while the peer's pidfd says that the peer lives. On Linux 6.5 and
//! later the socket gives the pidfd (SO_PEERPIDFD). On older kernels this process opens the pidfd
//! by the id (pidfd_open(2), Linux 5.3). This pidfd counts if the kernel reports (SCM_CREDENTIALS)
//! that a message sent later comes from that id. The sender of that message has had the id since
//! the pidfd was opened, and is the peer. If neither way is available, the peer counts as a
//! stranger.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tonic_rdma_memory::PerProcess;

use crate::access::{HostProcess, read_proc, start_of};
use crate::shm::socket::Socket;

/// Whether /proc belongs to this process's own PID namespace, not to one above it. The value never
/// changes.
static ONE_NUMBER: PerProcess<bool> =
    PerProcess::new(|| in_this_namespace("self", std::process::id()));

/// SO_PEERPIDFD, on architectures that use the common number for this option.
const PEER_PIDFD: Option<libc::c_int> = match cfg!(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64",
    target_arch = "loongarch64"
)) {
    true => Some(77),
    false => None,
};

/// The process that made the other end of the socket, if it runs as this process's user. Only its
/// number identifies the process so far.
#[derive(Debug)]
pub(super) struct Candidate {
    pid: u32,
    pidfd: OwnedFd,
    /// Whether the next message must come from the process with this number.
    must_send: bool,
}

/// A process that could stop and read this process by other means.
#[derive(Debug)]
pub(super) struct ConfirmedPeer {
    pub(super) process: HostProcess,
    /// Says whether the process lives.
    pub(super) pidfd: OwnedFd,
}

impl Candidate {
    /// Creates a candidate. If the sender of a message has to be checked, the socket reports
    /// senders from now on.
    pub(super) fn of(socket: &mut Socket) -> Option<Candidate> {
        Self::by(socket, pidfd(socket.fd()))
    }

    /// Creates a candidate. `of_socket` is the result of SO_PEERPIDFD.
    fn by(socket: &mut Socket, of_socket: Option<OwnedFd>) -> Option<Candidate> {
        let peer = socket.peer();
        if peer.uid != own_user() || is_overflow_user(peer.uid) || peer.pid == 0 {
            return None;
        }
        if let Some(pidfd) = of_socket {
            return Some(Candidate { pid: peer.pid, pidfd, must_send: false });
        }
        let pidfd = pidfd_of(peer.pid)?;
        socket.tell_senders(true).ok()?;
        // A message that has already arrived proves nothing, because it may have been sent before
        // the pidfd was opened.
        (!is_readable(socket.fd())).then_some(Candidate { pid: peer.pid, pidfd, must_send: true })
    }

    /// Returns the peer if it lives, is in this process's PID namespace and, if that has to be
    /// checked, is the sender of the message. `sender` is the sender of a message that was sent
    /// since the candidate was created. `known` returns the living process with this id, if it was
    /// confirmed before.
    pub(super) fn confirm(
        self,
        sender: Option<u32>,
        known: impl FnOnce(u32) -> Option<HostProcess>,
    ) -> Option<ConfirmedPeer> {
        let Candidate { pid, pidfd, must_send } = self;
        if must_send && sender != Some(pid) {
            return None;
        }
        let read = || {
            let same = *ONE_NUMBER && in_this_namespace(&pid.to_string(), pid);
            same.then(|| Some(HostProcess { pid, start: start_of(pid)? }))?
        };
        // A process that was confirmed before need not be read again, because its PID namespace and
        // its start time never change.
        let process = known(pid).or_else(read)?;
        lives(&pidfd).then_some(ConfirmedPeer { process, pidfd })
    }
}

/// The process that made the other end of the socket, regardless of its user.
pub(super) fn process(socket: &Socket) -> Option<HostProcess> {
    let (pid, pidfd) = (socket.peer().pid, pidfd(socket.fd())?);
    let start = start_of(pid)?;
    (pid != 0 && lives(&pidfd)).then_some(HostProcess { pid, start })
}

/// Opens a pidfd of the process that has this id now.
fn pidfd_of(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Whether the process still exists and still has its number.
pub(super) fn still_lives(process: HostProcess) -> bool {
    // If the pidfd's process lives, it has had the number since the pidfd was opened.
    pidfd_of(process.pid)
        .is_some_and(|pidfd| start_of(process.pid) == Some(process.start) && lives(&pidfd))
}

/// Whether `pid` is the only number of the process in the namespace of /proc and the namespaces
/// below. Any process can read the status file, and reading it does not block.
fn in_this_namespace(process: &str, pid: u32) -> bool {
    let status = read_proc(&format!("/proc/{process}/status")).unwrap_or_default();
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

/// Whether the process lives. A pidfd becomes readable when its process ends.
pub(super) fn lives(process: &OwnedFd) -> bool {
    !is_readable(process)
}

/// Whether the descriptor is readable. The result is also true if poll(2) fails.
fn is_readable(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    // A signal interrupts even a poll that does not wait.
    !retry_on_intr(|| poll(&mut fds, Some(&Timespec::default()))).is_ok_and(|n| n == 0)
}

/// The user that this process runs as.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether a number may stand for several users. In a user namespace, all users that the namespace
/// does not map have the same number, by default 65534.
pub(super) fn is_overflow_user(uid: u32) -> bool {
    /// The kernel's number for such users. The number is read once, because each connection needs
    /// it several times.
    static OVERFLOW_UID: PerProcess<String> =
        PerProcess::new(|| read_proc("/proc/sys/kernel/overflowuid").unwrap_or_default());
    stands_for_any(uid, &OVERFLOW_UID, || read_proc("/proc/self/uid_map").unwrap_or_default())
}

/// Like [`is_overflow_user`], but takes the contents of the kernel's files. The contents of a file
/// that cannot be read are empty.
fn stands_for_any(uid: u32, overflow_uid: &str, uid_map: impl FnOnce() -> String) -> bool {
    if uid != overflow_uid.trim().parse().unwrap_or(65534) {
        return false;
    }
    // Each user has its own number only if the namespace maps all users.
    !uid_map().split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::shm::socket::ListenSocket;

    #[test]
    fn a_process_is_told_by_its_start() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let (own, later) = (start_of(std::process::id()).unwrap(), start_of(child.id()).unwrap());
        assert!(0 < own && own <= later, "{own}, {later}");
        assert_eq!(start_of(0), None);
        child.wait().unwrap();
    }

    fn process(candidate: Candidate, sender: Option<u32>) -> Option<HostProcess> {
        candidate.confirm(sender, |_| None).map(|peer| peer.process)
    }

    async fn pair() -> (Socket, Socket) {
        let addr = crate::addr::ShmAddr::unique();
        let listening = ListenSocket::bind(&addr).unwrap();
        let one = Socket::connect(&addr).unwrap();
        (one, listening.accept().await.unwrap())
    }

    /// Covers kernels that give no pidfd for a socket's peer.
    #[tokio::test]
    async fn a_peer_shows_by_sending_that_its_number_is_still_its_own() {
        let own = std::process::id();
        let (one, mut other) = pair().await;
        other.admit();
        let file = std::fs::File::open("/dev/null").unwrap();
        let early = Candidate::by(&mut other, None).unwrap();
        one.send(b"x", &[file.as_fd()]).unwrap();
        assert!(other.next().await.unwrap().unwrap().has_fds);
        let sender = other.take_fds(|taken| Ok(taken.sender)).await.unwrap();
        let start = start_of(own).unwrap();
        assert_eq!(process(early, sender), Some(HostProcess { pid: own, start }));
        for wrong in [None, Some(own + 1), Some(0)] {
            let candidate = Candidate::by(&mut other, None).unwrap();
            assert_eq!(process(candidate, wrong), None, "{wrong:?}");
        }
        one.send(b"early", &[]).unwrap();
        assert!(Candidate::by(&mut other, None).is_none(), "it may be of one who has ended");
    }

    /// A process that sends with another id is not the peer, and the id of an ended process belongs
    /// to nobody.
    #[test]
    fn a_number_counts_while_its_process_lives() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let candidate = || Candidate { pid, pidfd: pidfd_of(pid).unwrap(), must_send: true };
        let (lives, ends, foreign) = (candidate(), candidate(), candidate());
        let number = Some(child.id());
        let lives = process(lives, number).unwrap();
        assert_eq!(process(foreign, Some(std::process::id())), None);
        assert!(still_lives(lives));
        assert!(!still_lives(HostProcess { start: lives.start + 1, ..lives }), "a later one");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process(ends, number), None);
        assert!(!still_lives(lives));
    }

    #[test]
    fn a_number_says_whose_namespace_it_is() {
        let own = std::process::id();
        assert!(in_this_namespace("self", own) && in_this_namespace(&own.to_string(), own));
        assert!(!in_this_namespace("self", own + 1) && !in_this_namespace("no process", own));
    }

    #[test]
    fn users_from_outside_of_a_namespace_look_alike() {
        let all = || "         0          0 4294967295\n".to_owned();
        let container = || "         0       1000          1\n".to_owned();
        for (uid, overflow_uid, uid_map, any) in [
            (65534, "65534\n", &container as &dyn Fn() -> String, true),
            (65534, "65534\n", &all, false),
            (1000, "65534\n", &container, false),
            (7, "7\n", &container, true),
            (65534, "7\n", &container, false),
            // If the kernel does not say, a namespace is assumed.
            (65534, "", &String::new, true),
            (0, "", &String::new, false),
        ] {
            let is = stands_for_any(uid, overflow_uid, uid_map);
            assert_eq!(is, any, "{uid} where {overflow_uid:?} stands for others");
        }
    }
}
