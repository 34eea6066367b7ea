//! Event channels of rdma_cm, and the library's object for each id.

use crate::verbs::discovery::is_inherited;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{fmt, io};

use rdma_sys::rdma_cm_event_type as kind;

/// Turns the `-1 and errno` of librdmacm into a result.
pub(super) fn check(ret: i32) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        // The library passes on the result of write(), so any value other than -1 is an errno, of
        // either sign.
        -1 => Err(io::Error::last_os_error()),
        errno => Err(io::Error::from_raw_os_error(errno.abs())),
    }
}

/// An event channel. The file descriptor of the channel does not block.
pub(crate) struct Channel(NonNull<rdma_sys::rdma_event_channel>);

// SAFETY: librdmacm is thread-safe; a channel is a file descriptor.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Channel").field(&self.as_raw_fd()).finish()
    }
}

/// A copy of the library's event.
#[derive(Debug)]
pub(crate) struct RawEvent {
    /// The address of the event's id. For a connect request, the address of the listening id.
    pub(super) id: usize,
    /// `RDMA_CM_EVENT_...`
    pub(crate) kind: kind::Type,
    /// A negative errno, or a reject reason.
    pub(super) status: i32,
    /// Private data of the event. InfiniBand and RoCE pad this data with zeros.
    pub(super) private_data: Vec<u8>,
    /// The new id of a connect request.
    pub(super) request: Option<RawId>,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Arc<Channel>> {
        // SAFETY: gives a channel or null; freed in Drop.
        let channel = unsafe { rdma_sys::rdma_create_event_channel() };
        let channel = Channel(NonNull::new(channel).ok_or_else(io::Error::last_os_error)?);
        // SAFETY: fcntl on a descriptor that the channel owns.
        let ret = unsafe {
            let flags = libc::fcntl(channel.as_raw_fd(), libc::F_GETFL);
            if flags < 0 {
                flags
            } else {
                libc::fcntl(channel.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)
            }
        };
        if ret < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Arc::new(channel))
    }

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::rdma_event_channel {
        self.0.as_ptr()
    }

    /// Hands the next event to `deliver`, and acknowledges the event when `deliver` returns. The
    /// event's id is not destroyed before the acknowledgement. Returns `None` if no event is
    /// waiting.
    pub(crate) fn next<T>(
        self: &Arc<Channel>,
        deliver: impl FnOnce(RawEvent) -> T,
    ) -> io::Result<Option<T>> {
        let mut event = ptr::null_mut();
        loop {
            // SAFETY: the channel is alive; on success `event` is set.
            let result = unsafe { rdma_sys::rdma_get_cm_event(self.0.as_ptr(), &mut event) };
            match check(result) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // SAFETY: the event is valid until it is acknowledged below. The union's `conn` is what
        // rdma_cm fills for connected ids; private data, if any, lies inside the event.
        let (kind, status, id, listener, private_data) = unsafe {
            let event = &*event;
            let conn = &event.param.conn;
            let data = match conn.private_data.cast::<u8>() {
                data if data.is_null() => Vec::new(),
                data => std::slice::from_raw_parts(data, conn.private_data_len as usize).to_vec(),
            };
            (event.event, event.status, event.id, event.listen_id, data)
        };
        let (id, request) = match kind {
            kind::RDMA_CM_EVENT_CONNECT_REQUEST => {
                let new = NonNull::new(id).map(|id| RawId { id, channel: self.clone() });
                (listener, new)
            }
            _ => (id, None),
        };
        let delivered = deliver(RawEvent { id: id.addr(), kind, status, private_data, request });
        // SAFETY: the event came from rdma_get_cm_event, is acknowledged once, and not used
        // afterwards.
        unsafe { rdma_sys::rdma_ack_cm_event(event) };
        Ok(Some(delivered))
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel is alive.
        unsafe { self.0.as_ref().fd }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        // SAFETY: every id on the channel holds an Arc of it, so none is left.
        unsafe { rdma_sys::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// The library's object for an id. The id's queue pair, if any, must be destroyed before the object
/// is dropped.
pub(crate) struct RawId {
    id: NonNull<rdma_sys::rdma_cm_id>,
    channel: Arc<Channel>,
}

// SAFETY: librdmacm is thread-safe; the id is used by one owner at a time.
unsafe impl Send for RawId {}
// SAFETY: methods of &self give pointers only.
unsafe impl Sync for RawId {}

impl fmt::Debug for RawId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RawId").field(&self.id).finish()
    }
}

impl RawId {
    pub(super) fn new(channel: &Arc<Channel>) -> io::Result<RawId> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel is alive and is kept by the id.
        check(unsafe {
            rdma_sys::rdma_create_id(
                channel.as_ptr(),
                &mut id,
                ptr::null_mut(),
                rdma_sys::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let id = NonNull::new(id).ok_or_else(|| io::Error::other("rdma_create_id gave no id"))?;
        Ok(RawId { id, channel: channel.clone() })
    }

    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::rdma_cm_id {
        self.id.as_ptr()
    }

    /// Moves the id to another channel. The library waits until all of the id's events that were
    /// read are acknowledged.
    pub(super) fn migrate(&mut self, channel: Arc<Channel>) -> io::Result<()> {
        // SAFETY: id and channel are alive; the old channel is let go after the call.
        check(unsafe { rdma_sys::rdma_migrate_id(self.as_ptr(), channel.as_ptr()) })?;
        self.channel = channel;
        Ok(())
    }
}

impl Drop for RawId {
    fn drop(&mut self) {
        if is_inherited() {
            return;
        }
        // SAFETY: the id is alive, its queue pair is destroyed, and a reader of one of its events
        // acknowledges the event without waiting for this call. The id is not used afterwards.
        if let Err(error) = check(unsafe { rdma_sys::rdma_destroy_id(self.as_ptr()) }) {
            tonic_rdma_memory::throttled!(warn, %error, "rdma_destroy_id failed; the id is leaked");
        }
    }
}
