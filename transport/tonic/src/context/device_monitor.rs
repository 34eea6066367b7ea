//! Looks out for RDMA devices, ports and addresses that come and go, so that what had to be given
//! up is tried again when it can be had, and not some time later.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic_rdma_fabric::{HostSnapshot, Timer};

use crate::context::{Context, Inner};
use crate::path::Path;

/// Between two looks, which cost some system calls.
const INTERVAL: Duration = Duration::from_secs(1);

/// The task that looks, from when the first RDMA path is asked for until the context is gone.
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

impl Context {
    /// What changes on this host from now on that concerns the path.
    pub(crate) fn changes(&self, path: Path) -> Changes {
        Changes(match path {
            Path::Verbs => {
                self.watch_devices();
                Some(self.0.device_monitor.changes.subscribe())
            }
            _ => None,
        })
    }

    /// Starts the task, unless it runs. One that ended with its runtime is replaced.
    pub(super) fn watch_devices(&self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut task = self.0.device_monitor.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(runtime.spawn(look(Arc::downgrade(&self.0))));
        }
    }
}

async fn look(inner: Weak<Inner>) {
    let (mut last, mut timer) = (HostSnapshot::now(), Timer::new());
    loop {
        timer.wait(INTERVAL).await;
        let Some(inner) = inner.upgrade() else { return };
        let context = Context(inner);
        let gone = context.forget_removed().await;
        let now = HostSnapshot::now();
        if gone || now != last {
            tracing::debug!("RDMA devices, ports or addresses have changed");
            context.0.device_monitor.changes.send_modify(|changes| *changes += 1);
        }
        last = now;
    }
}

/// Tells of changes on this host that may bring a path back, or end one.
#[derive(Debug)]
pub(crate) struct Changes(Option<watch::Receiver<u64>>);

impl Changes {
    /// What has happened so far is known.
    pub(crate) fn seen(&mut self) {
        if let Some(changes) = &mut self.0 {
            changes.mark_unchanged();
        }
    }

    /// Resolves when something has changed that is not known; never for paths that no change
    /// concerns. Cancel safe.
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
