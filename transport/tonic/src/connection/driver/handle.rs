//! The handle through which calls wake the driver's task, and the list of the other tasks to wake.

use std::task::{Context, Waker};

use smallvec::SmallVec;
use tonic_rdma_fabric::LinkError;

/// Between two turns of the driver, the first call and each [`BATCH`]th call after it flush their
/// own work, so that the peer works on these calls' messages while this side makes the next
/// messages.
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

    /// Records that a call wakes the driver. Returns the driver's waker, unless the driver was
    /// already woken.
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

/// The tasks to wake once the lock is released, the driver's handle, and the work done under the
/// lock.
#[derive(Debug, Default)]
pub(crate) struct ReadyTasks {
    pub(crate) driver: DriverHandle,
    /// Tasks that were made ready, to be woken after the lock is released.
    ready: SmallVec<[Waker; 4]>,
    /// Counts operations while the lock is held. A task's turn is charged for these operations
    /// (R20).
    pub(crate) work: usize,
}

impl ReadyTasks {
    /// Wakes a task once the lock is released.
    #[inline]
    pub(crate) fn wake(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.ready.push(waker);
        }
    }

    #[inline]
    pub(crate) fn wake_driver(&mut self) {
        let driver = self.driver.call();
        self.wake(driver);
    }

    /// Keeps a link error for the driver, which ends the connection.
    pub(crate) fn fail(&mut self, error: LinkError) {
        self.driver.fail(error);
        self.wake_driver();
    }

    /// Whether no task was made ready since the lock was taken.
    #[inline]
    pub(crate) fn none_ready(&self) -> bool {
        self.ready.is_empty()
    }

    /// Takes the task that was made ready last.
    #[inline]
    pub(crate) fn pop_ready(&mut self) -> Option<Waker> {
        self.ready.pop()
    }

    /// Takes all tasks that were made ready, in the order in which they were made ready.
    #[inline]
    pub(crate) fn take_ready(&mut self) -> SmallVec<[Waker; 4]> {
        std::mem::take(&mut self.ready)
    }
}
