//! Waking and being woken.
//!
//! A bell is an eventfd. Its owner never reads it: every write to it is an edge, and edges are what
//! tokio waits for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::Context;

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::ready_fd::ReadyFd;
use crate::shm::socket::seqpacket::Socket;
use crate::shm::socket::wire::Message;

/// The bell that the peer rings.
#[derive(Debug)]
pub(crate) struct EventFd(ReadyFd);

impl EventFd {
    /// A new one. Within a tokio runtime.
    pub(crate) fn new() -> io::Result<EventFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(EventFd(ReadyFd::new(fd)))
    }

    /// For the peer.
    pub(crate) fn fd(&self) -> impl AsFd {
        self.0.get_ref()
    }

    /// From now on the task is woken when it is rung. That it was rung before is forgotten.
    pub(crate) fn listen(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        self.0.listen(cx)
    }
}

/// How the peer is woken.
#[derive(Debug)]
pub(crate) enum PeerWaker {
    /// By its eventfd.
    Event(OwnedFd),
    /// By a message on the socket. A write to a descriptor that a stranger has too can block for
    /// ever: it can fill the counter and take O_NONBLOCK away at any time. So the eventfd is for
    /// peers that could stop this process anyway (`kin`).
    Message,
}

impl PeerWaker {
    /// For the eventfd that the peer sent; `kin`: the peer could stop this process anyway. May
    /// block: the descriptor can be anything. What is kept of it cannot: closing an eventfd waits
    /// for nothing.
    ///
    /// # Errors
    /// It is no eventfd, or would block.
    pub(crate) fn new(fds: &mut Vec<OwnedFd>, kin: bool) -> io::Result<PeerWaker> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "no bell");
        let fd = fds.last().ok_or_else(missing)?;
        let blocks = !rustix::fs::fcntl_getfl(fd)?.contains(rustix::fs::OFlags::NONBLOCK);
        // Its kind shows in its link name. Without /proc it is not known, and not used.
        let name = rustix::fs::readlinkat(rustix::fs::CWD, link_of(fd), Vec::new()).ok();
        let other = name.as_ref().is_some_and(|name| name.as_bytes() != b"anon_inode:[eventfd]");
        if blocks || other {
            let what = "the peer's bell is no eventfd, or would block";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let event = if kin && name.is_some() { fds.pop() } else { None };
        Ok(event.map_or(PeerWaker::Message, PeerWaker::Event))
    }

    /// Wakes the peer. Fails when it has not heard the last 2^64 rings, or a socket full of
    /// messages: its own affair, and it is awake then.
    pub(crate) fn ring(&self, socket: &Socket) {
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
    fn only_events_of_kin_are_written_to() {
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
