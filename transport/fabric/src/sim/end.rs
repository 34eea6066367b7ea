//! The part of a link that the peer's link also uses: its posted RECVs, its arrivals, and how it
//! ended.
//!
//! The sender delivers a message by copying it into the receiver's posted slot, under the lock of
//! the receiver's [`SimEnd`]. The receiver closes its end under the same lock, so the memory of
//! every slot in the list is alive.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use crate::error::Verb;
use crate::link_config::Takes;
use crate::sim::loans::Loans;
use crate::sim::observer::EndId;
use crate::sim::state::DeviceState;

/// Completion statuses that the simulation reports, with the numbers and texts of `enum
/// ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    LocalLength,
    LocalProtection,
    Flushed,
    RemoteInvalidRequest,
    RemoteAccess,
    RetryExceeded,
    ReceiverNotReady,
    SentFirst,
}

impl Status {
    pub(super) fn code(self) -> u32 {
        match self {
            Status::LocalLength => 1,
            Status::LocalProtection => 4,
            Status::Flushed => 5,
            Status::RemoteInvalidRequest => 9,
            Status::RemoteAccess => 10,
            Status::RetryExceeded => 12,
            Status::ReceiverNotReady => 13,
            Status::SentFirst => 21,
        }
    }

    pub(super) fn words(self) -> &'static str {
        match self {
            Status::LocalLength => "local length error",
            Status::LocalProtection => "local protection error",
            Status::Flushed => "Work Request Flushed Error",
            Status::RemoteInvalidRequest => "remote invalid request error",
            Status::RemoteAccess => "remote access error",
            Status::RetryExceeded => "transport retry counter exceeded",
            Status::ReceiverNotReady => "RNR retry counter exceeded",
            Status::SentFirst => {
                "general error: the accepting side sent first, which iWARP does not allow"
            }
        }
    }
}

/// The way in which a connection ended, as one end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndReason {
    /// The peer closed the connection or died.
    Disconnected,
    /// This end closed the connection.
    Closed,
    /// The device is gone.
    Removed,
    /// Work failed.
    Failed(Verb, Status),
}

struct Posted {
    slot: u32,
    ptr: NonNull<u8>,
    bytes: u32,
}

// SAFETY: the pointer is used only under the lock of the end that holds it, while the end's memory
// is alive.
unsafe impl Send for Posted {}

#[derive(Default)]
struct EndState {
    /// RECVs, in the order in which they are filled. The list is empty once the link is dropped.
    posted: VecDeque<Posted>,
    arrived: VecDeque<(u32, u32)>,
    /// Whether a message has arrived since the end was created.
    has_received: bool,
    end_reason: Option<EndReason>,
    waker: Option<Waker>,
}

/// One end.
pub(super) struct SimEnd {
    pub(super) id: EndId,
    pub(super) device: Arc<DeviceState>,
    /// The memory that this end has lent to the other end.
    pub(super) loans: Loans,
    /// The memory that this end accepts from the other end.
    pub(super) takes: Takes,
    state: Mutex<EndState>,
}

impl std::fmt::Debug for SimEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimEnd").field("device", &self.device.name).finish_non_exhaustive()
    }
}

impl SimEnd {
    pub(super) fn new(id: EndId, device: Arc<DeviceState>, takes: Takes) -> Arc<SimEnd> {
        Arc::new(SimEnd { id, device, loans: Loans::default(), takes, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, EndState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a RECV.
    ///
    /// # Safety
    /// `ptr` is writable for `bytes` bytes and touched by nobody else until the slot has
    /// arrived or [`close`](SimEnd::close) has returned.
    pub(super) unsafe fn post(&self, slot: u32, ptr: NonNull<u8>, bytes: u32) {
        self.lock().posted.push_back(Posted { slot, ptr, bytes });
    }

    /// Closes this end. Afterwards the peer writes nothing into the slots of this end.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.posted.clear();
        state.end_reason.get_or_insert(EndReason::Closed);
        state.waker = None;
    }

    /// Delivers a message to this end, and wakes the owner if `wake_up` is set.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes, and nobody writes there during the call.
    pub(super) unsafe fn deliver(
        &self,
        src: NonNull<u8>,
        len: usize,
        wake_up: bool,
    ) -> Result<(), Status> {
        let mut state = self.lock();
        if state.end_reason.is_some() {
            return Err(Status::RetryExceeded);
        }
        let Some(Posted { slot, ptr, bytes }) = state.posted.pop_front() else {
            return Err(Status::ReceiverNotReady);
        };
        if len > bytes as usize {
            state.end_reason = Some(EndReason::Failed(Verb::Recv, Status::LocalLength));
            wake(state);
            return Err(Status::RemoteInvalidRequest);
        }
        // SAFETY: the slot is posted, hence alive and untouched by its owner while the lock is
        // held, and len fits it. The source is in another link's SEND slots, so the ranges do not
        // overlap.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), ptr.as_ptr(), len) };
        state.arrived.push_back((slot, len as u32));
        state.has_received = true;
        if wake_up {
            wake(state);
        }
        Ok(())
    }

    /// Ends the connection at this end, unless it has already ended.
    pub(super) fn end(&self, reason: EndReason) {
        let mut state = self.lock();
        if state.end_reason.is_none() {
            state.end_reason = Some(reason);
            wake(state);
        }
    }

    pub(super) fn end_reason(&self) -> Option<EndReason> {
        self.lock().end_reason
    }

    pub(super) fn has_received(&self) -> bool {
        self.lock().has_received
    }

    /// Takes up to `budget` arrivals and registers the waker. Also returns the reason why the
    /// connection has ended at this end, if it has ended.
    pub(super) fn arrivals(
        &self,
        waker: &Waker,
        budget: usize,
    ) -> (Vec<(u32, u32)>, Option<EndReason>) {
        let mut state = self.lock();
        let count = budget.min(state.arrived.len());
        match &mut state.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        (state.arrived.drain(..count).collect(), state.end_reason)
    }

    /// Wakes the owner, so that it polls.
    pub(super) fn wake(&self) {
        wake(self.lock());
    }
}

/// Wakes the owner after the lock is released.
fn wake(mut state: MutexGuard<'_, EndState>) {
    let waker = state.waker.take();
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
}
