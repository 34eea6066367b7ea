//! Asynchronous events of a device, which are not completions of work.
//!
//! | event | goes to |
//! |---|---|
//! | a completion queue has failed | its links, which end |
//! | the device has failed | all links of the device, which end, and the watches of the host |
//! | a port went up or down, or its LID, GIDs, P_Keys or subnet manager have changed | the watches of the host |
//! | any other, such as the first message on a queue pair, which a peer causes | nobody |

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll};

use rdma_sys::ibv_event_type as event_type;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::turn;
use crate::verbs::context::DeviceContext;

/// The asynchronous events of a device in one runtime. Each event is delivered to only one of the
/// runtimes.
pub(super) struct AsyncEvents {
    /// A duplicate of the context's descriptor, because that descriptor can be registered only
    /// once.
    fd: AsyncFd<OwnedFd>,
    device: Arc<DeviceContext>,
}

impl AsyncEvents {
    pub(super) fn new(device: &Arc<DeviceContext>) -> io::Result<AsyncEvents> {
        // SAFETY: the context is open, and its descriptor with it.
        let fd = unsafe { BorrowedFd::borrow_raw(device.context().as_ref().async_fd) };
        let fd = fd.try_clone_to_owned()?;
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        // SAFETY: an OwnedFd owns its descriptor and always gives the same one.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        Ok(AsyncEvents { fd, device: device.clone() })
    }

    /// Takes all events, or as many as the task's turn allows, and registers the waker (R20). A
    /// peer can cause events, for instance by its first message on a queue pair. `find` returns a
    /// completion queue by its address. The queues that have failed are added to `failed`. These
    /// queues must not be dropped before the call returns, because destroying a queue waits until
    /// the queue's event is acknowledged. Returns true if the device has failed as a whole.
    ///
    /// # Errors
    /// The device or the runtime fails.
    pub(super) fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        mut find: impl FnMut(usize) -> Option<T>,
        failed: &mut Vec<T>,
    ) -> io::Result<bool> {
        let mut is_fatal = false;
        loop {
            let Poll::Ready(ready) = self.fd.poll_read_ready(cx) else { return Ok(is_fatal) };
            let mut guard = ready?;
            loop {
                if turn::charge(cx, &mut 1).is_pending() {
                    return Ok(is_fatal);
                }
                if !self.next(&mut find, failed, &mut is_fatal)? {
                    break;
                }
            }
            guard.clear_ready();
        }
    }

    /// Takes one event. Returns false if no event is queued.
    fn next<T>(
        &self,
        find: &mut impl FnMut(usize) -> Option<T>,
        failed: &mut Vec<T>,
        is_fatal: &mut bool,
    ) -> io::Result<bool> {
        let mut event = MaybeUninit::<rdma_sys::ibv_async_event>::uninit();
        let context = self.device.context().as_ptr();
        // SAFETY: the context is open, and there is room for an event.
        if unsafe { rdma_sys::ibv_get_async_event(context, event.as_mut_ptr()) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(false),
                io::ErrorKind::Interrupted => Ok(true),
                _ => Err(error),
            };
        }
        let at = event.as_mut_ptr();
        // SAFETY: the call has written the event.
        let kind = unsafe { (*at).event_type };
        if kind == event_type::IBV_EVENT_CQ_ERR {
            // SAFETY: an event of this kind names a completion queue, which is not destroyed before
            // the event is acknowledged.
            failed.extend(find(unsafe { (&raw const (*at).element.cq).read() }.addr()));
        } else {
            *is_fatal |= kind == event_type::IBV_EVENT_DEVICE_FATAL;
            if changes_host(kind) {
                self.device.tell_change();
            }
            tracing::debug!(device = self.device.name, kind, "asynchronous event");
        }
        // SAFETY: taken above and acknowledged once. Destroying the object that the event names
        // waits for the acknowledgement.
        unsafe { rdma_sys::ibv_ack_async_event(at) };
        Ok(true)
    }
}

/// Whether an event of this kind means that the contents of a host snapshot may have changed.
fn changes_host(kind: std::ffi::c_uint) -> bool {
    use event_type::*;
    matches!(
        kind,
        IBV_EVENT_DEVICE_FATAL
            | IBV_EVENT_PORT_ACTIVE
            | IBV_EVENT_PORT_ERR
            | IBV_EVENT_LID_CHANGE
            | IBV_EVENT_PKEY_CHANGE
            | IBV_EVENT_SM_CHANGE
            | IBV_EVENT_CLIENT_REREGISTER
            | IBV_EVENT_GID_CHANGE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of verbs.h. A peer can cause COMM_EST (4), which must not wake the
    /// watches.
    #[test]
    fn events_of_ports_and_of_the_device_change_the_host() {
        let changing: Vec<_> = (0..=19).filter(|kind| changes_host(*kind)).collect();
        assert_eq!(changing, [8, 9, 10, 11, 12, 13, 17, 18]);
    }
}
