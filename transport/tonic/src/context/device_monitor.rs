//! Watches for RDMA devices, ports and addresses that appear or disappear. After a change, a path
//! is tried again as soon as it may be available, and a removed device is released. The kernel
//! reports most changes ([`HostWatch`]). An idle process also takes a snapshot of the host every
//! [`QUIET`].

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic_rdma_fabric::{Fabric, HostSnapshot, HostWatch, PeerInfo, Timer, off_worker};

use crate::executor::boxed;
use crate::path::from_error;
use crate::path::reason::Reason;

/// Time between two snapshots of the host while the host changes, or if the kernel does not report
/// changes. A snapshot costs several system calls.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two snapshots while no change is reported. The kernel never reports changes of
/// RLIMIT_MEMLOCK.
const QUIET: Duration = Duration::from_secs(30);

/// The task that compares snapshots of the host. The task runs from the first request for an RDMA
/// path until the context is dropped.
#[derive(Default)]
pub(super) struct DeviceMonitor {
    /// The state of the host after the last change.
    changes: watch::Sender<Arc<HostSnapshot>>,
    in_use: AddressesInUse,
    task: Mutex<Option<JoinHandle<()>>>,
    /// The host watch, which is created with the task. `None` if the system does not allow a host
    /// watch.
    watch: OnceLock<Option<HostWatch>>,
}

/// Addresses of this host that connections or listeners use. Such an address may move to another
/// device.
#[derive(Clone, Debug, Default)]
struct AddressesInUse(Arc<Mutex<BTreeSet<IpAddr>>>);

impl AddressesInUse {
    fn add(&self, addr: IpAddr) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(addr);
    }

    /// Takes a snapshot by reading files and asking the kernel, in a time that grows with the
    /// number of devices. Returns `None` if no thread is available or the runtime shuts down.
    async fn snapshot(&self) -> Option<HostSnapshot> {
        let in_use = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        off_worker(move || HostSnapshot::now(&in_use)).await.ok()
    }
}

impl Drop for DeviceMonitor {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl DeviceMonitor {
    pub(super) fn subscribe(&self) -> Changes {
        Changes(Some((self.changes.subscribe(), self.in_use.clone())))
    }

    /// The state of the host after the last change.
    pub(super) fn seen(&self) -> Arc<HostSnapshot> {
        self.changes.borrow().clone()
    }

    /// Watches for a move of this listener's address to another device.
    pub(super) fn listens(&self, addr: IpAddr) {
        self.in_use.add(addr);
    }

    /// Wakes the task when the kernel waits for a device to be closed.
    pub(super) fn watch_removal(&self, fabric: &Fabric) {
        if let Some(watch) = self.watch()
            && let Err(error) = fabric.tell_removal(watch)
        {
            tracing::debug!(%error, device = fabric.name(), "the removal will be noticed late");
        }
    }

    fn watch(&self) -> Option<&HostWatch> {
        self.watch.get_or_init(|| HostWatch::new().inspect_err(untold).ok()).as_ref()
    }

    /// Starts the task if the task is not running. A task that ended with its runtime is replaced.
    ///
    /// `forget_removed` releases devices that were removed, and returns whether it found any. If
    /// the context is gone, `forget_removed` returns `None`, and the task ends.
    pub(super) fn start<F, Fut>(&self, forget_removed: F)
    where
        F: Fn() -> Fut + Send + 'static,
        Fut: Future<Output = Option<bool>> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(runtime.spawn(boxed(monitor(
                (self.changes.clone(), self.in_use.clone()),
                self.watch().cloned(),
                forget_removed,
            ))));
        }
    }
}

fn untold(error: &io::Error) {
    tracing::debug!(%error, "the kernel does not report changes: the host is checked every second");
}

async fn monitor<F, Fut>(
    (changes, in_use): (watch::Sender<Arc<HostSnapshot>>, AddressesInUse),
    watch: Option<HostWatch>,
    forget_removed: F,
) where
    F: Fn() -> Fut,
    Fut: Future<Output = Option<bool>>,
{
    let mut timer = Timer::new();
    let mut last = loop {
        match in_use.snapshot().await {
            Some(first) => break first,
            None => timer.wait(INTERVAL).await,
        }
    };
    let mut events = watch.and_then(|watch| watch.events().inspect_err(untold).ok());
    let mut removed = false;
    // Whether no change is under way. The state of the host may change only after the kernel has
    // reported the change.
    let mut settled = true;
    loop {
        let mut told = false;
        match &mut events {
            Some(next) if settled => tokio::select! {
                event = next.next() => match event {
                    Ok(()) => told = true,
                    Err(error) => {
                        untold(&error);
                        events = None;
                    }
                },
                () = timer.wait(QUIET) => {}
            },
            _ => timer.wait(INTERVAL).await,
        }
        let Some(more_removed) = forget_removed().await else { return };
        removed |= more_removed;
        let Some(now) = in_use.snapshot().await else {
            settled = false;
            continue;
        };
        if removed || now != last {
            tracing::debug!("RDMA devices, ports or addresses have changed");
            changes.send_replace(Arc::new(now.clone()));
        }
        settled = !told && !removed && now == last;
        last = now;
        removed = false;
    }
}

/// Changes on this host that may restore or end a path. The default value never reports a change.
#[derive(Debug, Default)]
pub(crate) struct Changes(Option<(watch::Receiver<Arc<HostSnapshot>>, AddressesInUse)>);

impl Changes {
    /// Marks all changes so far as seen.
    pub(crate) fn seen(&mut self) {
        if let Some((changes, _)) = &mut self.0 {
            changes.mark_unchanged();
        }
    }

    /// Waits for an unseen change. Never returns for a path that no change affects.
    ///
    /// Cancel safe.
    pub(crate) async fn next(&mut self) {
        if let Some((changes, _)) = &mut self.0
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }

    /// Marks all changes so far as seen, and returns the reason if the connection cannot reach its
    /// peer now.
    pub(crate) fn obstacle(&mut self, connection: &PeerInfo) -> Option<Reason> {
        let (changes, in_use) = self.0.as_mut()?;
        let host = changes.borrow_and_update().clone();
        let local = connection.local.ip().filter(|_| connection.provider == "verbs")?.ip();
        in_use.add(local);
        host.obstacle(&connection.device, local).map(from_error::fabric)
    }
}

impl fmt::Debug for DeviceMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMonitor").finish_non_exhaustive()
    }
}
