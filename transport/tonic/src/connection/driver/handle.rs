//! The handle through which calls wake the driver's task.

use std::task::{Context, Waker};

use tonic_rdma_fabric::LinkError;

/// Between two turns of the driver, each [`BATCH`]th call flushes its own work, so that the peer
/// works on this call's message while this side makes the next message.
const BATCH: u32 = 8;

/// The part of the driver's state that calls use, protected by the connection's lock.
#[derive(Debug, Default)]
pub(crate) struct DriverHandle {
    waker: Option<Waker>,
    /// Whether the driver was woken and has not run since.
    called: bool,
    /// Number of calls since the driver last ran, modulo [`BATCH`].
    calls: u32,
    /// An error that occurred outside the driver.
    error: Option<LinkError>,
    /// Whether the connection has become quiet and the driver has not noticed yet.
    became_quiet: bool,
}

impl DriverHandle {
    /// Records that the driver runs. Returns true if the driver's waker has changed.
    #[inline]
    pub(crate) fn runs(&mut self, cx: &Context<'_>) -> bool {
        self.called = false;
        self.calls = 0;
        let is_new = self.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker()));
        if is_new {
            self.waker = Some(cx.waker().clone());
        }
        is_new
    }

    /// Calls the driver. Returns the waker to wake, unless the driver was already called.
    #[inline]
    pub(crate) fn call(&mut self) -> Option<Waker> {
        match std::mem::replace(&mut self.called, true) {
            true => None,
            false => self.waker.clone(),
        }
    }

    #[inline]
    pub(crate) fn is_called(&self) -> bool {
        self.called
    }

    /// Counts a call that is about to flush. Returns true if the call is the first of its batch,
    /// and should therefore flush its own work.
    #[inline]
    pub(crate) fn begins_batch(&mut self) -> bool {
        let before = self.calls;
        self.calls = (before + 1) % BATCH;
        before == 0
    }

    /// Keeps an error for the driver, which then ends the connection.
    #[inline]
    pub(crate) fn fail(&mut self, error: LinkError) {
        self.error.get_or_insert(error);
    }

    #[inline]
    pub(crate) fn take_error(&mut self) -> Option<LinkError> {
        self.error.take()
    }

    /// Records that the connection has become quiet.
    pub(crate) fn quiet(&mut self) {
        self.became_quiet = true;
    }

    /// Whether the connection has become quiet since this method was last called.
    #[inline]
    pub(crate) fn take_quiet(&mut self) -> bool {
        std::mem::take(&mut self.became_quiet)
    }
}
