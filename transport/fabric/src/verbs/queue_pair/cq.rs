//! Completion queues, and the channel that announces their completions.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{fmt, io};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::ready_fd::ReadyFd;
use crate::verbs::context::DeviceContext;

/// Completions taken from the queue at once.
pub(crate) const BATCH: usize = 32;

/// Events acknowledged at once: acknowledging takes a lock in libibverbs.
const ACK_BATCH: u32 = 64;

/// A completion channel.
struct CompChannel {
    channel: NonNull<rdma_sys::ibv_comp_channel>,
    /// Keeps the context.
    _device: Arc<DeviceContext>,
}

// SAFETY: libibverbs is thread-safe; a channel is a file descriptor and a count under a lock.
unsafe impl Send for CompChannel {}
// SAFETY: as above.
unsafe impl Sync for CompChannel {}

impl CompChannel {
    fn new(device: &Arc<DeviceContext>) -> io::Result<CompChannel> {
        // SAFETY: the context is open.
        let channel = unsafe { rdma_sys::ibv_create_comp_channel(device.context().as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
        let channel = CompChannel { channel, _device: device.clone() };
        // SAFETY: fcntl on a descriptor that the channel owns.
        let ret = unsafe {
            let flags = libc::fcntl(channel.as_raw_fd(), libc::F_GETFL);
            if flags < 0 {
                flags
            } else {
                libc::fcntl(channel.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)
            }
        };
        if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(channel) }
    }

    /// Takes one event, if there is one.
    fn next(&self) -> io::Result<bool> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        loop {
            // SAFETY: the channel is alive; its only queue is the one it was made with.
            if unsafe { rdma_sys::ibv_get_cq_event(self.channel.as_ptr(), &mut cq, &mut context) }
                == 0
            {
                return Ok(true);
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(false),
                io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            }
        }
    }
}

impl AsRawFd for CompChannel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel is alive.
        unsafe { self.channel.as_ref().fd }
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queue is destroyed: `Cq` drops that first.
        match unsafe { rdma_sys::ibv_destroy_comp_channel(self.channel.as_ptr()) } {
            0 => {}
            errno => tracing::warn!(errno, "ibv_destroy_comp_channel failed; it is leaked"),
        }
    }
}

/// Which completions make an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Armed {
    /// None.
    Not,
    /// Those of received messages, and errors (IBV_SEND_SOLICITED, ibv_req_notify_cq(3)).
    Solicited,
    /// All.
    All,
}

/// A completion queue with a channel of its own.
pub(crate) struct Cq {
    cq: NonNull<rdma_sys::ibv_cq>,
    /// Events taken and not acknowledged. Destroying the queue waits until all are.
    unacked: u32,
    /// What the next event announces.
    armed: Armed,
    /// Armed for more since the last event was taken, so that there may be two events.
    armed_twice: bool,
    /// Dropped after Drop has destroyed the queue.
    channel: ReadyFd<CompChannel>,
}

// SAFETY: libibverbs is thread-safe, and the queue is polled through &mut self only.
unsafe impl Send for Cq {}
// SAFETY: &Cq gives nothing but the pointer's value.
unsafe impl Sync for Cq {}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("armed", &self.armed).finish_non_exhaustive()
    }
}

impl Cq {
    /// A queue for `depth` completions, armed.
    pub(crate) fn new(device: &Arc<DeviceContext>, depth: u32) -> io::Result<Cq> {
        // SAFETY: the descriptor belongs to the channel, which the AsyncFd owns and which never
        // replaces it.
        let channel = unsafe {
            AsyncFd::register_with_interest(CompChannel::new(device)?, Interest::READABLE)
        }?;
        let channel = ReadyFd::new(channel);
        // SAFETY: context and channel are alive, and outlive the queue.
        let cq = unsafe {
            rdma_sys::ibv_create_cq(
                device.context().as_ptr(),
                depth.min(i32::MAX as u32) as i32,
                ptr::null_mut(),
                channel.get_ref().channel.as_ptr(),
                0,
            )
        };
        let cq = NonNull::new(cq).ok_or_else(io::Error::last_os_error)?;
        let mut cq = Cq { cq, unacked: 0, armed: Armed::Not, armed_twice: false, channel };
        cq.arm(Armed::All)?;
        Ok(cq)
    }

    pub(crate) fn as_ptr(&self) -> *mut rdma_sys::ibv_cq {
        self.cq.as_ptr()
    }

    /// Takes up to [`BATCH`] completions and hands them to `each`. Gives their number.
    pub(crate) fn take(&mut self, mut each: impl FnMut(&rdma_sys::ibv_wc)) -> io::Result<usize> {
        let mut wcs = [const { MaybeUninit::<rdma_sys::ibv_wc>::uninit() }; BATCH];
        // SAFETY: the queue is alive, and there is room for BATCH completions.
        let n = unsafe {
            rdma_sys::ibv_poll_cq(self.cq.as_ptr(), BATCH as i32, wcs.as_mut_ptr().cast())
        };
        let n = usize::try_from(n).map_err(|_| io::Error::from_raw_os_error(n.saturating_abs()))?;
        for wc in wcs.iter().take(n) {
            // SAFETY: ibv_poll_cq has written the first n.
            each(unsafe { wc.assume_init_ref() });
        }
        Ok(n)
    }

    fn arm(&mut self, what: Armed) -> io::Result<()> {
        let solicited_only = i32::from(what == Armed::Solicited);
        // SAFETY: the queue is alive.
        match unsafe { rdma_sys::ibv_req_notify_cq(self.cq.as_ptr(), solicited_only) } {
            0 => {
                self.armed_twice |= self.armed != Armed::Not;
                self.armed = what;
                Ok(())
            }
            errno => Err(io::Error::from_raw_os_error(errno.saturating_abs())),
        }
    }

    /// Arms the queue for all completions, if it is armed for less. Called before work is posted
    /// whose completion is awaited.
    pub(crate) fn announce_all(&mut self) -> io::Result<()> {
        if self.armed == Armed::Solicited { self.arm(Armed::All) } else { Ok(()) }
    }

    /// Drains the channel, arms the queue for `what` if it is armed for less, and leaves the waker.
    /// `Ready`: the queue was armed just now, so the caller polls it once more. `Pending`: it was
    /// armed before, and no event has come since.
    ///
    /// An armed queue makes one event and is not armed any more. So when one event has been taken,
    /// the channel is empty until the queue is armed again, and readiness may be cleared without
    /// asking the kernel; unless it was armed twice.
    pub(crate) fn poll_armed(&mut self, cx: &mut Context<'_>, what: Armed) -> Poll<io::Result<()>> {
        loop {
            match self.channel.poll(cx) {
                Poll::Pending => break,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(mut guard)) => {
                    while guard.get_inner().next()? {
                        self.unacked += 1;
                        self.armed = Armed::Not;
                        if !self.armed_twice {
                            break;
                        }
                    }
                    self.armed_twice = false;
                    guard.clear_ready();
                }
            }
        }
        if self.unacked >= ACK_BATCH {
            self.ack();
        }
        if self.armed >= what {
            return Poll::Pending;
        }
        Poll::Ready(self.arm(what))
    }

    fn ack(&mut self) {
        // SAFETY: `unacked` events of this queue were taken and not acknowledged.
        unsafe { rdma_sys::ibv_ack_cq_events(self.cq.as_ptr(), self.unacked) };
        self.unacked = 0;
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.ack();
        // SAFETY: its queue pair is destroyed: `Qp` drops that first.
        match unsafe { rdma_sys::ibv_destroy_cq(self.cq.as_ptr()) } {
            0 => {}
            errno => tracing::warn!(errno, "ibv_destroy_cq failed; it is leaked"),
        }
    }
}
