//! Eventfds: what an end waits for, and how it wakes its peer.
//!
//! The owner of an eventfd never reads it: every write to it is an edge, and tokio waits for edges.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::Context;

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::ready_fd::ReadyFd;
use crate::shm::socket::seqpacket::Socket;
use crate::shm::socket::wire::Message;

/// The eventfd that the peer writes to in order to wake this end.
#[derive(Debug)]
pub(crate) struct EventFd(ReadyFd);

impl EventFd {
    /// Creates one. Must be called within a tokio runtime.
    #[inline]
    pub(crate) fn new() -> io::Result<EventFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(EventFd(ReadyFd::new(fd)))
    }

    /// The descriptor to send to the peer.
    #[inline]
    pub(crate) fn fd(&self) -> impl AsFd {
        self.0.get_ref()
    }

    /// From now on the task is woken when the peer writes. Earlier writes are forgotten.
    #[inline]
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.0.listen(cx)
    }
}

/// How the peer is woken.
#[derive(Debug)]
pub(crate) enum PeerWaker {
    /// By its eventfd.
    Event(OwnedFd),
    /// By a message on the socket. A write to an eventfd that a stranger shares can block for ever:
    /// the stranger can fill the counter and clear O_NONBLOCK at any time. So the eventfd is for
    /// peers that could stop this process anyway (`same_user`).
    Message,
}

impl PeerWaker {
    /// Takes the eventfd that the peer sent, which is the last of `fds`. `same_user`: the peer
    /// could stop this process anyway. May block: the descriptor can be of any file. Dropping the
    /// result does not block, as closing an eventfd never does.
    ///
    /// # Errors
    /// The descriptor is missing, is no eventfd, or would block.
    #[inline]
    pub(crate) fn new(fds: &mut Vec<OwnedFd>, same_user: bool) -> io::Result<PeerWaker> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "no eventfd");
        let fd = fds.last().ok_or_else(missing)?;
        let blocks = !rustix::fs::fcntl_getfl(fd)?.contains(rustix::fs::OFlags::NONBLOCK);
        // The name of its link in /proc tells the kind of file. Without /proc it is not used.
        let name = rustix::fs::readlinkat(rustix::fs::CWD, link_of(fd), Vec::new()).ok();
        let other = name.as_ref().is_some_and(|name| name.as_bytes() != b"anon_inode:[eventfd]");
        if blocks || other {
            let what = "the peer's second descriptor is no eventfd, or would block";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let event = if same_user && name.is_some() { fds.pop() } else { None };
        Ok(event.map_or(PeerWaker::Message, PeerWaker::Event))
    }

    /// Wakes the peer. Fails only when the peer has left the last 2^64 wake-ups, or a full socket,
    /// unread. It is awake then, so the failure is ignored.
    #[inline]
    pub(crate) fn wake(&self, socket: &Socket) {
        let _ = match self {
            PeerWaker::Event(fd) => {
                rustix::io::write(fd, &1_u64.to_ne_bytes()).map(drop).map_err(io::Error::from)
            }
            PeerWaker::Message => socket.send(&Message::Wake.encode(), &[]),
        };
    }
}

fn link_of(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(flags: EventfdFlags) -> OwnedFd {
        eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn only_event_fds_of_the_same_user_are_written_to() {
        let mut fds = vec![event(EventfdFlags::NONBLOCK)];
        assert!(matches!(PeerWaker::new(&mut fds, false), Ok(PeerWaker::Message)));
        assert_eq!(fds.len(), 1, "it is left to be closed");
        assert!(matches!(PeerWaker::new(&mut fds, true), Ok(PeerWaker::Event(_))));
        assert!(PeerWaker::new(&mut fds, true).is_err(), "there is none");
        assert!(
            PeerWaker::new(&mut vec![event(EventfdFlags::empty())], true).is_err(),
            "it would block"
        );
        let (pipe, _end) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
        assert!(PeerWaker::new(&mut vec![pipe.into()], true).is_err());
    }
}
