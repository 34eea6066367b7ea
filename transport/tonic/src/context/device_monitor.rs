//! Watches for RDMA devices, ports and addresses that come and go, so that a path is tried again
//! as soon as it may be available, and not some time later.

use std::fmt;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic_rdma_fabric::{HostSnapshot, Timer};

/// Time between two snapshots of the host; each costs some system calls.
const INTERVAL: Duration = Duration::from_secs(1);

/// The task that compares snapshots of the host, from the first request for an RDMA path until the
/// context is gone.
#[derive(Default)]
pub(super) struct DeviceMonitor {
    /// Counts changes.
    changes: watch::Sender<u64>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for DeviceMonitor {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl DeviceMonitor {
    /// Changes from now on.
    pub(super) fn subscribe(&self) -> Changes {
        Changes(Some(self.changes.subscribe()))
    }

    /// Starts the task, unless it runs. One that ended with its runtime is replaced.
    ///
    /// `forget_removed` lets go of devices that were removed. It returns whether there were any,
    /// or `None` when the context is gone; then the task ends.
    pub(super) fn start<F, Fut>(&self, forget_removed: F)
    where
        F: Fn() -> Fut + Send + 'static,
        Fut: Future<Output = Option<bool>> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(runtime.spawn(monitor(self.changes.clone(), forget_removed)));
        }
    }
}

async fn monitor<F, Fut>(changes: watch::Sender<u64>, forget_removed: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = Option<bool>>,
{
    let (mut last, mut timer) = (HostSnapshot::now(), Timer::new());
    loop {
        timer.wait(INTERVAL).await;
        let Some(removed) = forget_removed().await else { return };
        let now = HostSnapshot::now();
        if removed || now != last {
            tracing::debug!("RDMA devices, ports or addresses have changed");
            changes.send_modify(|changes| *changes += 1);
        }
        last = now;
    }
}

/// Changes on this host that may bring a path back, or end one. The default never has any.
#[derive(Debug, Default)]
pub(crate) struct Changes(Option<watch::Receiver<u64>>);

impl Changes {
    /// Marks all changes so far as seen.
    pub(crate) fn seen(&mut self) {
        if let Some(changes) = &mut self.0 {
            changes.mark_unchanged();
        }
    }

    /// Resolves when something has changed that was not seen; never for paths that no change
    /// concerns.
    ///
    /// Cancel safe.
    pub(crate) async fn next(&mut self) {
        if let Some(changes) = &mut self.0
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl fmt::Debug for DeviceMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMonitor").finish_non_exhaustive()
    }
}
