//! rdma_cm: connection-manager ids, and their events.
//!
//! | module | what |
//! |---|---|
//! | `channel` | an event channel of the library, and the library's object for each id |
//! | `hub` | the channel that the ids of a runtime share, and the task that reads it |
//!
//! # How an event finds its id
//!
//! An event names its id by address, and a later id may have the same address. The order of the
//! steps below ensures that the later id gets no event of the earlier id, because rdma_destroy_id
//! waits until all events of the id that were read are acknowledged:
//!
//! | task | steps |
//! |---|---|
//! | reading an event | read it; put it into the queue of its id, if the id has one; acknowledge it |
//! | dropping an id | remove the id's queue; destroy the id |
//!
//! So a task that reads events never waits for a task that drops an id, and an event that was read
//! before its id was destroyed is either in that id's queue or in no queue. A connect request comes
//! with a new id. The new id gets its queue before the next event is read, so its events are never
//! missed.
//!
//! When librdmacm reads certain events of an id, it also moves the id's queue pair to another
//! state. So an id forgets its queue pair before the queue pair is destroyed, while nobody reads
//! events ([`CmId::forget_queue_pair`]). The queue pair is destroyed afterwards, which may take a
//! long time on Soft-iWARP.
//!
//! | state of a hub | events are read by | a wait for an event |
//! |---|---|---|
//! | its reactor runs | the reactor, a task of the runtime | ends with the event |
//! | orphaned: the runtime has ended | any task that polls an id | ends with an error; a link continues to poll |

pub(super) mod channel;
pub(super) mod hub;

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::{fmt, future, io};

use rdma_sys::rdma_cm_event_type as kind;

use crate::link::MAX_PRIVATE_DATA;
use crate::verbs::addr::{CAddr, read};
use crate::verbs::cm::channel::{Channel, RawId, check};
use crate::verbs::cm::hub::{CmEvent, CmRequest, Hub, Subscription};
use crate::verbs::queue_pair::path_mtu::MAX_ANSWER;

/// `RDMA_OPTION_ID`, `RDMA_OPTION_ID_TOS` and `RDMA_OPTION_ID_ACK_TIMEOUT` of rdma_cma.h.
const OPTION_ID: i32 = 0;
const OPTION_ID_TOS: i32 = 0;
const OPTION_ID_ACK_TIMEOUT: i32 = 3;

impl CmEvent {
    /// The status as an error.
    pub(crate) fn error(&self) -> io::Error {
        match self.status {
            0 => io::Error::other(name(self.kind)),
            status => io::Error::from_raw_os_error(status.saturating_abs()),
        }
    }
}

/// The event's name, for messages.
pub(crate) fn name(kind: kind::Type) -> String {
    // SAFETY: rdma_event_str gives a static string for any number.
    unsafe {
        let text = rdma_sys::rdma_event_str(kind);
        if text.is_null() {
            return format!("CM event {kind}");
        }
        std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// A connection-manager id. The id's queue pair, if any, must be destroyed before the id is
/// dropped: see [`Qp`](crate::verbs::queue_pair::Qp).
pub(crate) struct CmId {
    /// `None` if the id has a separate channel. The subscription is dropped before the id is
    /// destroyed.
    events: Option<Subscription>,
    id: RawId,
}

impl fmt::Debug for CmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmId")
            .field("local", &self.local())
            .field("remote", &self.remote())
            .finish()
    }
}

impl From<CmRequest> for CmId {
    fn from(request: CmRequest) -> CmId {
        CmId { events: Some(request.events), id: request.id }
    }
}

impl CmId {
    /// Creates an id on the channel of the current runtime.
    pub(crate) fn new() -> io::Result<CmId> {
        let hub = Hub::current()?;
        let id = RawId::new(hub.channel())?;
        Ok(CmId { events: Some(hub.subscribe(&id)), id })
    }

    /// Creates an id on a channel that is not the runtime's. Nobody waits for the id's events.
    pub(crate) fn apart(channel: &Arc<Channel>) -> io::Result<CmId> {
        Ok(CmId { events: None, id: RawId::new(channel)? })
    }

    /// Moves the id to a new channel that no other id uses.
    pub(crate) fn set_apart(&mut self) -> io::Result<()> {
        let channel = Channel::new()?;
        self.events = None;
        self.id.migrate(channel)
    }

    /// Polls for the next event. The task is woken when an event arrives.
    pub(crate) fn poll_event(&self, cx: &mut Context<'_>) -> Poll<io::Result<CmEvent>> {
        match &self.events {
            Some(events) => events.poll(cx),
            None => Poll::Pending,
        }
    }

    /// Waits for the next event. Cancel safe.
    ///
    /// # Errors
    /// The channel fails, or the runtime that the id was made in has ended.
    pub(crate) async fn next_event(&self) -> io::Result<CmEvent> {
        future::poll_fn(|cx| self.poll_next_event(cx)).await
    }

    /// Like [`poll_event`](Self::poll_event), for callers that wait for nothing else.
    ///
    /// # Errors
    /// The errors of [`next_event`](Self::next_event).
    pub(crate) fn poll_next_event(&self, cx: &mut Context<'_>) -> Poll<io::Result<CmEvent>> {
        match self.poll_event(cx) {
            Poll::Pending if self.events.as_ref().is_none_or(Subscription::is_orphaned) => {
                Poll::Ready(Err(io::Error::other("nobody waits for events of the id any more")))
            }
            polled => polled,
        }
    }

    /// The descriptor of the id's event channel. The descriptor is valid until the id leaves that
    /// channel.
    pub(crate) fn channel_fd(&self) -> RawFd {
        self.id.channel().as_raw_fd()
    }

    /// Takes the next event of an id with a separate channel, and returns the event's kind.
    pub(crate) fn own_event(&self) -> io::Result<Option<kind::Type>> {
        match self.events {
            Some(_) => Ok(None),
            None => self.id.channel().next(|event| event.kind),
        }
    }

    /// Makes the library forget the id's queue pair, which is about to be destroyed. Otherwise,
    /// reading an event of the id could modify the queue pair.
    pub(crate) fn forget_queue_pair(&self) {
        let _paused = self.events.as_ref().map(Subscription::pause);
        // SAFETY: the id is alive, and besides this only the reading of events uses the field.
        unsafe { (*self.as_ptr()).qp = ptr::null_mut() };
    }

    pub(crate) fn as_ptr(&self) -> *mut rdma_sys::rdma_cm_id {
        self.id.as_ptr()
    }

    /// The device that the id is bound to, if any.
    pub(crate) fn verbs(&self) -> Option<NonNull<rdma_sys::ibv_context>> {
        // SAFETY: the id is alive.
        NonNull::new(unsafe { (*self.as_ptr()).verbs })
    }

    /// The port that the id is bound to, counted from 1, or 0 if the id is not bound.
    pub(crate) fn port(&self) -> u8 {
        // SAFETY: the id is alive.
        unsafe { (*self.as_ptr()).port_num }
    }

    pub(crate) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the id is alive; the union is large enough for any address, and zero when unset.
        unsafe { read(&raw const (*self.as_ptr()).route.addr.src.src_addr) }
    }

    pub(crate) fn remote(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { read(&raw const (*self.as_ptr()).route.addr.dst.dst_addr) }
    }

    pub(crate) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        let mut addr = CAddr::new(addr);
        // SAFETY: the id is alive, the address is only read.
        check(unsafe { rdma_sys::rdma_bind_addr(self.as_ptr(), addr.as_mut_ptr()) })
    }

    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_listen(self.as_ptr(), backlog) })
    }

    pub(crate) fn resolve_addr(&self, to: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let mut to = CAddr::new(to);
        // SAFETY: the id is alive, the address is only read, and no source address is given.
        check(unsafe {
            rdma_sys::rdma_resolve_addr(self.as_ptr(), ptr::null_mut(), to.as_mut_ptr(), timeout_ms)
        })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_resolve_route(self.as_ptr(), timeout_ms) })
    }

    /// Sets the time until an unacknowledged packet is sent again: 4.096 us x 2^`exponent`.
    pub(crate) fn set_ack_timeout(&self, exponent: u8) -> io::Result<()> {
        self.set_option(OPTION_ID_ACK_TIMEOUT, exponent)
    }

    /// Sets the type of service of the packets. Call this function before the route is resolved or
    /// the request is accepted.
    pub(crate) fn set_type_of_service(&self, tos: u8) -> io::Result<()> {
        self.set_option(OPTION_ID_TOS, tos)
    }

    fn set_option(&self, name: i32, mut value: u8) -> io::Result<()> {
        // SAFETY: the id is alive; the option is one byte, and only read.
        check(unsafe {
            rdma_sys::rdma_set_option(self.as_ptr(), OPTION_ID, name, (&raw mut value).cast(), 1)
        })
    }

    /// Sends the connect request. On Soft-iWARP the call blocks while TCP connects. `number` is the
    /// queue pair's number. librdmacm uses `number` only if it did not create the queue pair.
    pub(crate) fn connect(&self, private_data: &[u8], retries: u8, number: u32) -> io::Result<()> {
        let mut param = conn_param(private_data, retries, number);
        // SAFETY: the id is alive; the parameters and the private data they point to outlive the
        // call.
        check(unsafe { rdma_sys::rdma_connect(self.as_ptr(), &mut param) })
    }

    /// Accepts the connect request. `number` has the same meaning as for
    /// [`connect`](Self::connect).
    pub(crate) fn accept(&self, private_data: &[u8], retries: u8, number: u32) -> io::Result<()> {
        let mut param = conn_param(private_data, retries, number);
        // SAFETY: as above.
        check(unsafe { rdma_sys::rdma_accept(self.as_ptr(), &mut param) })
    }

    /// Tells the peer that the queue pair, which the library does not know, is ready.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_establish(self.as_ptr()) })
    }

    /// Returns the attributes that move a queue pair to `state`, and the mask of the attributes to
    /// set. The library does not know this queue pair.
    pub(crate) fn attributes(&self, state: u32) -> io::Result<(rdma_sys::ibv_qp_attr, i32)> {
        // SAFETY: all zeros is valid for the attributes.
        let mut attr: rdma_sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask = 0;
        attr.qp_state = state;
        // SAFETY: the id is alive, and the call writes into the other two arguments.
        check(unsafe { rdma_sys::rdma_init_qp_attr(self.as_ptr(), &mut attr, &mut mask) })?;
        // For RoCE the kernel sets private bits in the mask, which ibv_modify_qp refuses.
        // ucma_modify_qp_rtr of librdmacm also clears these bits.
        Ok((attr, mask & !0xe0_0000))
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = private_data.len().min(MAX_PRIVATE_DATA);
        // SAFETY: the id is alive and the data is only read.
        check(unsafe {
            rdma_sys::rdma_reject(self.as_ptr(), private_data.as_ptr().cast(), len as u8)
        })
    }

    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { rdma_sys::rdma_disconnect(self.as_ptr()) })
    }
}

/// Parameters with finite retries (R2): with the value 7, rxe and other drivers retry for ever.
fn conn_param(private_data: &[u8], retries: u8, number: u32) -> rdma_sys::rdma_conn_param {
    rdma_sys::rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len().min(MAX_ANSWER) as u8,
        // One READ at a time suffices, for a probe over iWARP. Some devices refuse 0.
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: 1,
        retry_count: retries.clamp(1, 6),
        rnr_retry_count: 6,
        srq: 0,
        qp_num: number,
    }
}
