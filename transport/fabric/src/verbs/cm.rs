//! rdma_cm: event channels, ids and events, each freed by its owner's drop.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{fmt, io};

use rdma_sys::rdma_cm_event_type as kind;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::link::MAX_PRIVATE_DATA;
use crate::verbs::addr::{CAddr, read};

/// `RDMA_OPTION_ID` and `RDMA_OPTION_ID_ACK_TIMEOUT` of rdma_cma.h.
const OPTION_ID: i32 = 0;
const OPTION_ID_ACK_TIMEOUT: i32 = 3;

/// Turns the `-1 and errno` of librdmacm into a result.
fn check(ret: i32) -> io::Result<()> {
    match ret {
        0 => Ok(()),
        // The library passes on what write() gave, so anything else but -1 is an errno, of either
        // sign.
        -1 => Err(io::Error::last_os_error()),
        errno => Err(io::Error::from_raw_os_error(errno.abs())),
    }
}

/// An event channel. Its file descriptor does not block.
pub(super) struct Channel(NonNull<rdma_sys::rdma_event_channel>);

// SAFETY: librdmacm is thread-safe; a channel is a file descriptor.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Channel").field(&self.as_raw_fd()).finish()
    }
}

impl Channel {
    pub(super) fn new() -> io::Result<Arc<Channel>> {
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

    /// The next event, already acknowledged; `None` when there is none now.
    ///
    /// Acknowledging at once means that destroying an id never waits for an event to be
    /// acknowledged.
    pub(super) fn next(self: &Arc<Channel>) -> io::Result<Option<Event>> {
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
        let (kind, status, id, private_data) = unsafe {
            let event = &*event;
            let conn = &event.param.conn;
            let data = match conn.private_data.cast::<u8>() {
                data if data.is_null() => Vec::new(),
                data => std::slice::from_raw_parts(data, conn.private_data_len as usize).to_vec(),
            };
            (event.event, event.status, event.id, data)
        };
        let request = match kind {
            kind::RDMA_CM_EVENT_CONNECT_REQUEST => {
                NonNull::new(id).map(|id| CmId { id, channel: self.clone() })
            }
            _ => None,
        };
        // SAFETY: the event came from rdma_get_cm_event, is acknowledged once, and not used
        // afterwards.
        unsafe { rdma_sys::rdma_ack_cm_event(event) };
        Ok(Some(Event { kind, status, private_data, request }))
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
        // SAFETY: every id on the channel holds an Arc of it, so none is left.
        unsafe { rdma_sys::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// A channel under tokio.
pub(super) type Events = AsyncFd<Arc<Channel>>;

/// Registers a channel with the current runtime.
pub(super) fn events(channel: Arc<Channel>) -> io::Result<Events> {
    // SAFETY: the descriptor belongs to the channel, which the AsyncFd keeps alive and which never
    // replaces it.
    Ok(unsafe { AsyncFd::register_with_interest(channel, Interest::READABLE) }?)
}

/// Waits for the next event. Cancel safe.
pub(super) async fn next_event(events: &Events) -> io::Result<Event> {
    loop {
        let mut guard = events.readable().await?;
        match guard.get_inner().next()? {
            Some(event) => return Ok(event),
            None => guard.clear_ready(),
        }
    }
}

/// An event, taken out of the library.
#[derive(Debug)]
pub(super) struct Event {
    /// `RDMA_CM_EVENT_...`
    pub(super) kind: kind::Type,
    /// A negative errno, or a reject reason.
    pub(super) status: i32,
    /// As the event has it: on InfiniBand and RoCE padded with zeros.
    pub(super) private_data: Vec<u8>,
    /// The new id of a connect request.
    pub(super) request: Option<CmId>,
}

impl Event {
    /// The status as an error.
    pub(super) fn error(&self) -> io::Error {
        match self.status {
            0 => io::Error::other(name(self.kind)),
            status => io::Error::from_raw_os_error(status.saturating_abs()),
        }
    }
}

/// The event's name, for messages.
pub(super) fn name(kind: kind::Type) -> String {
    // SAFETY: rdma_event_str gives a static string for any number.
    unsafe {
        let text = rdma_sys::rdma_event_str(kind);
        if text.is_null() {
            return format!("CM event {kind}");
        }
        std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// A connection-manager id. Its queue pair, if it had one, is gone before this drops: see
/// [`Qp`](crate::verbs::queue_pair::qp::Qp).
pub(super) struct CmId {
    id: NonNull<rdma_sys::rdma_cm_id>,
    channel: Arc<Channel>,
}

// SAFETY: librdmacm is thread-safe; the id is used by one owner at a time.
unsafe impl Send for CmId {}
// SAFETY: methods of &self only read fields that change under &mut self or in calls that have
// returned.
unsafe impl Sync for CmId {}

impl fmt::Debug for CmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmId")
            .field("local", &self.local())
            .field("remote", &self.remote())
            .finish()
    }
}

impl CmId {
    pub(super) fn new(channel: &Arc<Channel>) -> io::Result<CmId> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel is alive and is kept by the id.
        check(unsafe {
            rdma_sys::rdma_create_id(
                channel.0.as_ptr(),
                &mut id,
                ptr::null_mut(),
                rdma_sys::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let id = NonNull::new(id).ok_or_else(|| io::Error::other("rdma_create_id gave no id"))?;
        Ok(CmId { id, channel: channel.clone() })
    }

    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    pub(super) fn as_ptr(&self) -> *mut rdma_sys::rdma_cm_id {
        self.id.as_ptr()
    }

    /// The device that the id is bound to, if it is.
    pub(super) fn verbs(&self) -> Option<NonNull<rdma_sys::ibv_context>> {
        // SAFETY: the id is alive.
        NonNull::new(unsafe { self.id.as_ref().verbs })
    }

    /// The port that the id is bound to, from 1; 0 when it is not bound.
    pub(super) fn port(&self) -> u8 {
        // SAFETY: the id is alive.
        unsafe { self.id.as_ref().port_num }
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the id is alive; the union is large enough for any address, and zero when unset.
        unsafe { read(&raw const (*self.as_ptr()).route.addr.src_addr_union.src_addr) }
    }

    pub(super) fn remote(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { read(&raw const (*self.as_ptr()).route.addr.dst_addr_union.dst_addr) }
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        let mut addr = CAddr::new(addr);
        // SAFETY: the id is alive, the address is only read.
        check(unsafe { rdma_sys::rdma_bind_addr(self.as_ptr(), addr.as_mut_ptr()) })
    }

    pub(super) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_listen(self.as_ptr(), backlog) })
    }

    pub(super) fn resolve_addr(&self, to: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let mut to = CAddr::new(to);
        // SAFETY: the id is alive, the address is only read, and no source address is given.
        check(unsafe {
            rdma_sys::rdma_resolve_addr(self.as_ptr(), ptr::null_mut(), to.as_mut_ptr(), timeout_ms)
        })
    }

    pub(super) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_resolve_route(self.as_ptr(), timeout_ms) })
    }

    /// Time until an unacknowledged packet is sent again: 4.096 us x 2^`exponent`.
    pub(super) fn set_ack_timeout(&self, exponent: u8) -> io::Result<()> {
        let mut value = exponent;
        // SAFETY: the option is one byte, and only read.
        check(unsafe {
            rdma_sys::rdma_set_option(
                self.as_ptr(),
                OPTION_ID,
                OPTION_ID_ACK_TIMEOUT,
                (&raw mut value).cast(),
                1,
            )
        })
    }

    /// Sends the connect request. On Soft-iWARP this blocks while TCP connects.
    pub(super) fn connect(&self, private_data: &[u8]) -> io::Result<()> {
        let mut param = conn_param(private_data);
        // SAFETY: the id is alive; the parameters and the private data they point to outlive the
        // call.
        check(unsafe { rdma_sys::rdma_connect(self.as_ptr(), &mut param) })
    }

    pub(super) fn accept(&self, private_data: &[u8]) -> io::Result<()> {
        let mut param = conn_param(private_data);
        // SAFETY: as above.
        check(unsafe { rdma_sys::rdma_accept(self.as_ptr(), &mut param) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = private_data.len().min(MAX_PRIVATE_DATA);
        // SAFETY: the id is alive and the data is only read.
        check(unsafe {
            rdma_sys::rdma_reject(self.as_ptr(), private_data.as_ptr().cast(), len as u8)
        })
    }

    pub(super) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_disconnect(self.as_ptr()) })
    }

    /// Moves the id to a channel of its own. Its events are acknowledged as they are read, so this
    /// does not wait.
    pub(super) fn migrate(&mut self, channel: Arc<Channel>) -> io::Result<()> {
        // SAFETY: id and channel are alive; the old channel is let go after the call.
        check(unsafe { rdma_sys::rdma_migrate_id(self.as_ptr(), channel.0.as_ptr()) })?;
        self.channel = channel;
        Ok(())
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: the id is alive, its queue pair is destroyed, its events are acknowledged; not
        // used afterwards.
        if let Err(error) = check(unsafe { rdma_sys::rdma_destroy_id(self.as_ptr()) }) {
            tracing::warn!(%error, "rdma_destroy_id failed; the id is leaked");
        }
    }
}

/// Finite retries (R2): with 7, rxe and others try for ever.
fn conn_param(private_data: &[u8]) -> rdma_sys::rdma_conn_param {
    rdma_sys::rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len().min(MAX_PRIVATE_DATA) as u8,
        // No READs and no atomics are used; some devices refuse 0.
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: 1,
        retry_count: 6,
        rnr_retry_count: 6,
        srq: 0,
        qp_num: 0,
    }
}
