//! The eventfd of two processes: both wait for it, and wake each other with it.
//!
//! One of them makes it and the other takes it. A write to an eventfd wakes those that wait to read
//! it, and nobody else; a read wakes those that wait to write. The kernel tells the two apart, and
//! tokio waits for edges, so neither end wakes itself:
//!
//! | end | waits until it is | wakes its peer by |
//! |---|---|---|
//! | Maker | readable | a read, which takes 1 from the counter |
//! | Taker | writable | a write, which adds 1 |
//!
//! When the kernel reports that it is ready, it checks that once more, so a wake-up is lost if the
//! counter has come to a limit by then. It begins at [`START`], and honest ends never take it to
//! either limit. A peer that does delays what its own connections are woken for. One that has the
//! kernel move the counter beyond what can be written (AIO, io_uring) leaves an error behind, which
//! tokio takes for an end that stays: the channel then ends.
//!
//! A read or write of an eventfd that a stranger shares can block for ever: the stranger can move
//! the counter and clear O_NONBLOCK at any time. So the eventfd is for peers that could stop this
//! process anyway (`same_user`). Others are woken by a message on the socket.

use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::task::{Context, Poll};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::task::unconstrained;

/// Wake-ups that one end may have sent more than the other: with one in each nanosecond it takes
/// them a century.
const START: u64 = 1 << 62;
/// Earlier wake-ups that are forgotten when an end listens. There is one, or a few while others
/// come.
const MAX_ROUNDS: usize = 16;

/// Which end of it a process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Maker,
    Taker,
}

/// The eventfd, as one end has it.
#[derive(Debug)]
pub(crate) struct EventFd {
    fd: AsyncFd<OwnedFd>,
    end: End,
}

impl EventFd {
    /// Makes one. Must be called within a tokio runtime.
    #[inline]
    pub(crate) fn make() -> io::Result<EventFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let fd = eventfd(0, flags)?;
        rustix::io::write(&fd, &START.to_ne_bytes())?;
        EventFd::new(fd, End::Maker)
    }

    /// Takes what the peer has made and [`check`] has found usable. Must be called within a tokio
    /// runtime.
    #[inline]
    pub(crate) fn take(fd: OwnedFd) -> io::Result<EventFd> {
        EventFd::new(fd, End::Taker)
    }

    fn new(fd: OwnedFd, end: End) -> io::Result<EventFd> {
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let fd = unsafe { AsyncFd::register_with_interest(fd, end.waits_for()) }?;
        Ok(EventFd { fd, end })
    }

    /// The descriptor to send to the peer.
    #[inline]
    pub(crate) fn fd(&self) -> impl AsFd {
        self.fd.get_ref()
    }

    /// Which end this is.
    pub(crate) fn end(&self) -> End {
        self.end
    }

    /// From now on the waker is woken when the peer wakes this end; one waker at a time. Earlier
    /// wake-ups are forgotten.
    ///
    /// # Errors
    /// The runtime ends. `InvalidData`: the peer has broken it, and no end is woken by it again.
    pub(crate) fn arm(&self, cx: &mut Context<'_>) -> io::Result<()> {
        for _ in 0..MAX_ROUNDS {
            let mut ready = match self.poll(cx) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => return Ok(()),
            };
            // An error counts as closed, which cannot be cleared.
            let state = ready.ready();
            if state.is_read_closed() || state.is_write_closed() {
                break;
            }
            ready.clear_ready();
        }
        let what = "the peer has moved the counter of an eventfd beyond its limit";
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<AsyncFdReadyGuard<'_, OwnedFd>>> {
        // A task without any budget left would have the waker woken at once, and that would poll
        // again.
        let ready = poll_fn(|cx| match self.end {
            End::Maker => self.fd.poll_read_ready(cx),
            End::Taker => self.fd.poll_write_ready(cx),
        });
        pin!(unconstrained(ready)).poll(cx)
    }

    /// Wakes the peer.
    ///
    /// # Errors
    /// The peer has moved the counter to a limit, and is not woken.
    pub(crate) fn wake(&self) -> io::Result<()> {
        let fd = self.fd.get_ref();
        let add = |n: u64| rustix::io::write(fd, &n.to_ne_bytes());
        let mut counter = [0; 8];
        match self.end {
            End::Taker => add(1)?,
            End::Maker => match rustix::io::read(fd, &mut counter) {
                Err(Errno::AGAIN) => {
                    add(START)?;
                    rustix::io::read(fd, &mut counter)?
                }
                read => read?,
            },
        };
        Ok(())
    }
}

impl End {
    /// The other one.
    pub(crate) fn other(self) -> End {
        match self {
            End::Maker => End::Taker,
            End::Taker => End::Maker,
        }
    }

    fn waits_for(self) -> Interest {
        match self {
            End::Maker => Interest::READABLE,
            End::Taker => Interest::WRITABLE,
        }
    }
}

/// Checks an eventfd that the peer sent. May block: the descriptor can be of any file. Returns
/// whether it is known to be an eventfd; without /proc it is not, and is not to be used.
///
/// # Errors
/// It is none, or would block.
pub(crate) fn check(fd: &OwnedFd) -> io::Result<bool> {
    let blocks = !rustix::fs::fcntl_getfl(fd)?.contains(rustix::fs::OFlags::NONBLOCK);
    // The name of its link in /proc tells the kind of file.
    let name = rustix::fs::readlinkat(rustix::fs::CWD, link_of(fd), Vec::new()).ok();
    let other = name.as_ref().is_some_and(|name| name.as_bytes() != b"anon_inode:[eventfd]");
    if blocks || other {
        let what = "the peer's second descriptor is no eventfd, or would block";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(name.is_some())
}

fn link_of(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use super::*;

    fn event(flags: EventfdFlags) -> OwnedFd {
        eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn only_event_fds_that_do_not_block_are_taken() {
        assert!(check(&event(EventfdFlags::NONBLOCK)).unwrap());
        assert!(check(&event(EventfdFlags::empty())).is_err(), "it would block");
        let (pipe, _end) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
        assert!(check(&pipe.into()).is_err());
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Two ends, and the number of times that each was woken.
    struct Pair {
        ends: [EventFd; 2],
        woken: [Arc<Count>; 2],
    }

    impl Pair {
        fn of(made: EventFd) -> Pair {
            let taken = made.fd.get_ref().try_clone().unwrap();
            Pair { ends: [made, EventFd::take(taken).unwrap()], woken: Default::default() }
        }

        fn listen(&self, end: usize) {
            let waker = Waker::from(self.woken[end].clone());
            self.ends[end].arm(&mut Context::from_waker(&waker)).unwrap();
        }

        fn woken(&self) -> [usize; 2] {
            self.woken.each_ref().map(|count| count.0.load(Ordering::SeqCst))
        }
    }

    /// As long as the reactor needs to report what there is.
    async fn turns() {
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn each_end_wakes_the_other_and_never_itself() {
        let pair = Pair::of(EventFd::make().unwrap());
        let mut expected = [0; 2];
        // Either end is ready when it is made.
        turns().await;
        for round in 0..50 {
            pair.listen(0);
            pair.listen(1);
            turns().await;
            assert_eq!(pair.woken(), expected, "{round}: nobody has woken anybody");
            // One end, the other, both; some of them more often.
            let ends = [&[0, 0, 0][..], &[1], &[0, 1], &[1, 1]][round % 4];
            for end in ends {
                pair.ends[*end].wake().unwrap();
            }
            turns().await;
            for end in 0..2 {
                expected[1 - end] += usize::from(ends.contains(&end));
            }
            assert_eq!(pair.woken(), expected, "{round}");
        }
    }

    /// What has happened to the descriptor is an error for tokio, which nothing clears.
    #[tokio::test]
    async fn one_that_is_broken_is_not_waited_for() {
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK).unwrap();
        let end = EventFd::new(writer.into(), End::Taker).unwrap();
        drop(reader);
        turns().await;
        let cx = &mut Context::from_waker(Waker::noop());
        assert_eq!(end.arm(cx).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn the_counter_begins_far_from_its_limits() {
        let made = EventFd::make().unwrap();
        let at = made.fd.get_ref().as_raw_fd();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{at}")).unwrap();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).unwrap();
        let count = u64::from_str_radix(count.trim(), 16).unwrap();
        assert!(count.min(u64::MAX - count) >= 1 << 62, "{count}");
    }

    /// A peer may make an eventfd of another kind, and move its counter.
    #[tokio::test]
    async fn a_counter_at_its_limit_hurts_its_owner_only() {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let plain = EventFd::new(eventfd(0, flags).unwrap(), End::Maker).unwrap();
        let pair = Pair::of(plain);
        turns().await;
        for round in 1..4 {
            pair.listen(1);
            pair.ends[0].wake().unwrap();
            turns().await;
            assert_eq!(pair.woken()[1], round, "an empty counter is filled first");
        }
        rustix::io::write(pair.ends[0].fd.get_ref(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(pair.ends[1].wake().is_err(), "it neither blocks nor wakes");
    }
}
