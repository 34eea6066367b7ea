//! Waking and being woken.
//!
//! A bell is an eventfd. Its owner never reads it: every write to it is an edge, and edges are what tokio waits for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The bell that the peer rings.
#[derive(Debug)]
pub(super) struct Bell(AsyncFd<OwnedFd>);

impl Bell {
    /// A new one. Within a tokio runtime.
    pub(super) fn new() -> io::Result<Bell> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(Bell(fd))
    }

    /// For the peer.
    pub(super) fn fd(&self) -> impl AsFd {
        self.0.get_ref()
    }

    /// Ready when it has been rung since the last time; otherwise the task is woken when it is.
    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.0.poll_read_ready(cx) {
            Poll::Ready(Ok(mut guard)) => {
                guard.clear_ready();
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// The peer's bell, as it gave it: any descriptor. What happens when it is none is the peer's loss.
#[derive(Debug)]
pub(super) struct Rope(OwnedFd);

impl Rope {
    /// Takes what the peer sent, and keeps writes to it from blocking.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Rope> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        // Only an eventfd takes eight bytes as one wake-up; its kind shows in its link name.
        let name = rustix::fs::readlinkat(rustix::fs::CWD, link_of(&fd), Vec::new())?;
        if name.as_bytes() != b"anon_inode:[eventfd]" || !flags.contains(rustix::fs::OFlags::NONBLOCK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's bell is no eventfd, or would block",
            ));
        }
        Ok(Rope(fd))
    }

    /// Wakes the peer. A bell that has been rung 2^64 times without having been heard is the peer's own affair.
    pub(super) fn ring(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

fn link_of(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
