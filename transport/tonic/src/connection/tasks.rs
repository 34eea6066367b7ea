//! The tasks that a connection wakes, and the work charged to them.

use std::task::Waker;

use smallvec::SmallVec;
use tonic_rdma_fabric::LinkError;

use crate::connection::driver::handle::DriverHandle;

/// The tasks to wake, the driver, and the work done under the lock.
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

    /// Takes all tasks that were made ready, in their order.
    #[inline]
    pub(crate) fn take_ready(&mut self) -> SmallVec<[Waker; 4]> {
        std::mem::take(&mut self.ready)
    }
}
