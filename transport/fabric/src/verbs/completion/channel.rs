//! Completion channels: the descriptor that announces the completions of several queues.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::verbs::context::DeviceContext;
use crate::verbs::discovery::is_inherited;

/// A completion channel. The descriptor of the channel does not block.
pub(super) struct CompChannel {
    channel: NonNull<rdma_sys::ibv_comp_channel>,
    /// Keeps the context open.
    _device: Arc<DeviceContext>,
}

// SAFETY: libibverbs is thread-safe; a channel is a file descriptor and a count under a lock.
unsafe impl Send for CompChannel {}
// SAFETY: as above.
unsafe impl Sync for CompChannel {}

/// An event that was taken and must be acknowledged, because destroying its queue waits for the
/// acknowledgement.
pub(super) struct CqEvent {
    cq: NonNull<rdma_sys::ibv_cq>,
    /// The key with which the queue was made.
    pub(super) key: usize,
}

impl CqEvent {
    /// Acknowledges an event whose queue is being destroyed. A live queue counts and acknowledges
    /// its events itself.
    pub(super) fn ack(self) {
        // SAFETY: destroying the queue waits in libibverbs for this event to be acknowledged, so
        // the queue still exists.
        unsafe { rdma_sys::ibv_ack_cq_events(self.cq.as_ptr(), 1) };
    }
}

impl CompChannel {
    pub(super) fn new(device: &Arc<DeviceContext>) -> io::Result<CompChannel> {
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

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::ibv_comp_channel {
        self.channel.as_ptr()
    }

    /// Takes one event, if an event is queued.
    pub(super) fn next(&self) -> io::Result<Option<CqEvent>> {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        loop {
            // SAFETY: the channel is alive; on success both are set.
            let ret =
                unsafe { rdma_sys::ibv_get_cq_event(self.channel.as_ptr(), &mut cq, &mut context) };
            if ret == 0 {
                let event = NonNull::new(cq).map(|cq| CqEvent { cq, key: context.addr() });
                return Ok(event);
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(None),
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
        if is_inherited() {
            return;
        }
        // SAFETY: its queues are destroyed: each keeps the channel until then.
        match unsafe { rdma_sys::ibv_destroy_comp_channel(self.channel.as_ptr()) } {
            0 => {}
            errno => tonic_rdma_memory::throttled!(
                warn,
                errno,
                "ibv_destroy_comp_channel failed; it is leaked"
            ),
        }
    }
}
