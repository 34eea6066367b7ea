//! Two eventfds that two processes share. Each end waits for one eventfd, and wakes its peer
//! through the other.
//!
//! An end wakes its peer by reading the eventfd that the peer waits for. The read takes 1 from the
//! counter, and wakes only an end that waits until the eventfd is writable:
//!
//! | eventfd | waits until it is writable | reads it |
//! |---|---|---|
//! | the maker's | maker | taker |
//! | the taker's | taker | maker |
//!
//! The read is preadv2(2) with RWF_NOWAIT at offset -1. This read never blocks, even if the peer
//! changes the eventfd's counter and flags. The kernel refuses this flag for writes. So neither end
//! writes to an eventfd that its peer has.
//!
//! One process makes both eventfds, with counters that begin at [`START`], which honest ends never
//! use up. A peer that empties the counter of its own eventfd is not woken. A peer that fills the
//! counter of this end's eventfd delays only wake-ups for its own connections, because the kernel
//! then does not report that the eventfd is writable. A peer that makes the kernel move the counter
//! beyond its maximum (AIO, io_uring) causes an error that tokio treats as permanent, and the
//! channel ends.
//!
//! Linux before 5.8 and gVisor do not support this read for eventfds. On such systems, the ends
//! wake each other by messages on the socket ([`is_supported`]).

use std::future::Future;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::task::{Context, Poll};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::task::unconstrained;
use tonic_rdma_memory::PerProcess;

/// Number of wake-ups for one end. With one wake-up every nanosecond, this number lasts for more
/// than a century.
const START: u64 = 1 << 62;
/// Maximum number of earlier wake-ups that are forgotten when an end listens. Usually one wake-up
/// is forgotten, or a few that arrived at the same time.
const MAX_ROUNDS: usize = 16;

/// Says whether the process at an end made the eventfds or took them over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelEnd {
    Maker,
    Taker,
}

/// Both eventfds at one end.
#[derive(Debug)]
pub(crate) struct EventFds {
    /// Wakes this end.
    own: AsyncFd<OwnedFd>,
    /// Wakes the peer.
    peers: OwnedFd,
    end: ChannelEnd,
}

impl EventFds {
    /// Makes both eventfds. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Unsupported` if this kernel has no non-blocking read of an eventfd.
    #[inline]
    pub(crate) fn make() -> io::Result<EventFds> {
        EventFds::new([filled()?, filled()?], ChannelEnd::Maker)
    }

    /// Takes eventfds that the peer has made and [`check`] has found usable. The peer waits for the
    /// first eventfd. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Unsupported` if this kernel has no non-blocking read of an eventfd.
    #[inline]
    pub(crate) fn take([peers, own]: [OwnedFd; 2]) -> io::Result<EventFds> {
        EventFds::new([own, peers], ChannelEnd::Taker)
    }

    fn new([own, peers]: [OwnedFd; 2], end: ChannelEnd) -> io::Result<EventFds> {
        if !is_supported() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one (R17).
        let own = unsafe { AsyncFd::register_with_interest(own, Interest::WRITABLE) }?;
        Ok(EventFds { own, peers, end })
    }

    /// The descriptors to send to the peer. This end waits for the first descriptor.
    #[inline]
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.own.get_ref().as_fd(), self.peers.as_fd()]
    }

    pub(crate) fn end(&self) -> ChannelEnd {
        self.end
    }

    /// Sets the waker that is woken when the peer wakes this end. There is one waker at a time.
    /// Earlier wake-ups are forgotten.
    ///
    /// # Errors
    /// The runtime ends. `InvalidData` if the peer has broken the eventfd, which then wakes no end
    /// again.
    pub(crate) fn arm(&self, cx: &mut Context<'_>) -> io::Result<()> {
        for _ in 0..MAX_ROUNDS {
            let mut ready = match self.poll(cx) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => return Ok(()),
            };
            // tokio reports an error as a closed write half, which `clear_ready` cannot clear.
            if ready.ready().is_write_closed() {
                break;
            }
            ready.clear_ready();
        }
        let what = "the peer has moved the counter of an eventfd beyond its limit";
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<AsyncFdReadyGuard<'_, OwnedFd>>> {
        // Poll without a budget: in a task whose budget is spent, tokio would wake the waker at
        // once, and again at each poll.
        let ready = std::future::poll_fn(|cx| self.own.poll_write_ready(cx));
        pin!(unconstrained(ready)).poll(cx)
    }

    /// Wakes the peer. Never blocks.
    ///
    /// # Errors
    /// The peer has emptied the counter, so the peer is not woken.
    pub(crate) fn wake(&self) -> io::Result<()> {
        Ok(take_one(&self.peers)?)
    }
}

impl ChannelEnd {
    /// The opposite end, which the other process has.
    pub(crate) fn other(self) -> ChannelEnd {
        match self {
            ChannelEnd::Maker => ChannelEnd::Taker,
            ChannelEnd::Taker => ChannelEnd::Maker,
        }
    }
}

/// Makes an eventfd whose counter begins at [`START`].
fn filled() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
    let fd = eventfd(0, flags)?;
    // The eventfd is new, so the write does not block.
    rustix::io::write(&fd, &START.to_ne_bytes())?;
    Ok(fd)
}

/// Takes 1 from the counter, or fails at once if the counter is 0.
#[inline]
fn take_one(fd: &OwnedFd) -> Result<(), Errno> {
    let (mut counter, no_offset) = ([0; 8], u64::MAX);
    preadv2(fd, &mut [IoSliceMut::new(&mut counter)], no_offset, ReadWriteFlags::NOWAIT).map(drop)
}

/// Whether this kernel can read an eventfd without blocking. If no descriptor is free for the test,
/// returns false, and the next call tests again.
pub(crate) fn is_supported() -> bool {
    static SUPPORTED: PerProcess<bool> = PerProcess::new(|| false);
    let tried = || filled().ok().map(|fd| take_one(&fd).is_ok());
    SUPPORTED.get().copied().or_else(tried).is_some_and(|is| *SUPPORTED.get_or_insert(is))
}

/// Checks an eventfd that the peer sent. May block, because the descriptor may refer to any file.
/// Returns true if the descriptor is certainly an eventfd. Without /proc the kind of file is
/// unknown, and the descriptor must not be used.
///
/// # Errors
/// The descriptor is no eventfd.
pub(crate) fn check(fd: &OwnedFd) -> io::Result<bool> {
    // The name of the descriptor's link in /proc shows the kind of file.
    let name = rustix::fs::readlinkat(rustix::fs::CWD, link_of(fd), Vec::new()).ok();
    if name.as_ref().is_some_and(|name| name.as_bytes() != b"anon_inode:[eventfd]") {
        let what = "the peer's second or third descriptor is no eventfd";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(name.is_some())
}

fn link_of(fd: &OwnedFd) -> String {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// The connecting end's name for a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChannelName {
    /// The number that the maker gave the channel.
    pub(crate) number: u64,
    /// The runtime of the connecting end.
    pub(crate) runtime: u64,
    /// The end of the channel that the connecting process has.
    pub(crate) end: ChannelEnd,
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    #[test]
    fn only_event_fds_are_taken() {
        assert!(check(&filled().unwrap()).unwrap());
        assert!(check(&eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap(), "nobody waits for it");
        let (pipe, _end) = std::io::pipe().unwrap();
        assert!(check(&pipe.into()).is_err());
    }

    /// The tests of this file need a non-blocking read of an eventfd, so they fail on a kernel
    /// without it.
    #[test]
    fn this_kernel_reads_an_eventfd_without_blocking() {
        assert!(is_supported(), "Linux 5.8 has it");
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
        ends: [EventFds; 2],
        woken: [Arc<Count>; 2],
    }

    impl Pair {
        fn of(made: EventFds) -> Pair {
            let fds = made.fds().map(|fd| fd.try_clone_to_owned().unwrap());
            Pair { ends: [made, EventFds::take(fds).unwrap()], woken: Default::default() }
        }

        fn listen(&self, end: usize) {
            let waker = Waker::from(self.woken[end].clone());
            self.ends[end].arm(&mut Context::from_waker(&waker)).unwrap();
        }

        fn woken(&self) -> [usize; 2] {
            self.woken.each_ref().map(|count| count.0.load(Ordering::SeqCst))
        }
    }

    /// Yields for as long as the reactor needs to report an event.
    async fn turns() {
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn each_end_wakes_the_other_and_never_itself() {
        let pair = Pair::of(EventFds::make().unwrap());
        let mut expected = [0; 2];
        // Both ends are ready when they are made.
        turns().await;
        for round in 0..50 {
            pair.listen(0);
            pair.listen(1);
            turns().await;
            assert_eq!(pair.woken(), expected, "{round}: nobody has woken anybody");
            // Wakes one end, the other, or both, sometimes repeatedly.
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

    /// tokio reports the state of the descriptor as an error that nothing clears.
    #[tokio::test]
    async fn one_that_is_broken_is_not_waited_for() {
        let (reader, writer) = std::io::pipe().unwrap();
        fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        let end = EventFds::new([writer.into(), filled().unwrap()], ChannelEnd::Taker).unwrap();
        drop(reader);
        turns().await;
        let cx = &mut Context::from_waker(Waker::noop());
        assert_eq!(end.arm(cx).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn the_counters_begin_far_from_their_limits() {
        for fd in EventFds::make().unwrap().fds() {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
            let info = info.unwrap();
            let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).unwrap();
            let count = u64::from_str_radix(count.trim(), 16).unwrap();
            assert!(count.min(u64::MAX - count) >= 1 << 62, "{count}");
        }
    }

    /// A peer may make eventfds of another kind, move their counters, and make them blocking.
    #[tokio::test]
    async fn no_counter_has_an_end_wait() {
        let plain = |count| eventfd(count, EventfdFlags::CLOEXEC).unwrap();
        let pair = Pair::of(EventFds::new([plain(0), plain(3)], ChannelEnd::Maker).unwrap());
        turns().await;
        pair.listen(1);
        pair.ends[0].wake().unwrap();
        turns().await;
        assert_eq!(pair.woken(), [0, 1]);
        let again = pair.ends[0].wake().unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock, "the whole counter was taken");
        for fd in pair.ends[0].fds() {
            rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        }
        pair.listen(1);
        turns().await;
        assert_eq!(pair.woken(), [0, 1], "a write wakes nobody");
        pair.ends[0].wake().unwrap();
        turns().await;
        assert_eq!(pair.woken(), [0, 2]);
    }
}
