//! The members of a network: devices with their addresses, listeners with their addresses and
//! ports, the connect requests to them, and the ends of links.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{mpsc, oneshot};

use crate::error::Verb;
use crate::sim::end::{EndReason, SimEnd, Status};
use crate::sim::state::DeviceState;

/// Maximum number of connect requests that wait at one listener. Further requests are refused.
const BACKLOG: usize = 128;

#[derive(Default)]
struct Tables {
    devices: BTreeMap<IpAddr, Weak<DeviceState>>,
    listeners: BTreeMap<SocketAddr, mpsc::Sender<SimConnectRequest>>,
    /// The ends, in the order in which they were created.
    ends: Vec<Weak<SimEnd>>,
}

/// The directory of one network.
#[derive(Default)]
pub(super) struct Directory(Mutex<Tables>);

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory").finish_non_exhaustive()
    }
}

/// The reason why no connection to an address is possible.
pub(super) enum NoListener {
    NoSuchAddress,
    NobodyListens,
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device. If another device has its address, the new device takes the address over.
    pub(super) fn add_device(&self, device: &Arc<DeviceState>) {
        self.lock().devices.insert(device.addr, Arc::downgrade(device));
    }

    /// Adds a listener, and returns the receiver of its connect requests. `None` if the address is
    /// taken.
    pub(super) fn add_listener(
        &self,
        addr: SocketAddr,
    ) -> Option<mpsc::Receiver<SimConnectRequest>> {
        let mut tables = self.lock();
        if tables.listeners.get(&addr).is_some_and(|l| !l.is_closed()) {
            return None;
        }
        let (sender, receiver) = mpsc::channel(BACKLOG);
        tables.listeners.insert(addr, sender);
        Some(receiver)
    }

    /// Stops listening at an address. Requests that wait there are rejected when the receiver is
    /// dropped.
    pub(super) fn remove_listener(&self, addr: SocketAddr) {
        self.lock().listeners.remove(&addr);
    }

    /// The device and the listener at an address.
    pub(super) fn find(
        &self,
        addr: SocketAddr,
    ) -> Result<(Arc<DeviceState>, mpsc::Sender<SimConnectRequest>), NoListener> {
        let tables = self.lock();
        let device =
            tables.devices.get(&addr.ip()).and_then(Weak::upgrade).filter(|d| !d.faults.removed());
        let device = device.ok_or(NoListener::NoSuchAddress)?;
        let listener = tables
            .listeners
            .get(&addr)
            .filter(|l| !l.is_closed())
            .ok_or(NoListener::NobodyListens)?;
        Ok((device, listener.clone()))
    }

    pub(super) fn add_end(&self, end: &Arc<SimEnd>) {
        let ends = &mut self.lock().ends;
        if ends.len() == ends.capacity() {
            ends.retain(|e| e.strong_count() > 0);
        }
        ends.push(Arc::downgrade(end));
    }

    fn each_end(&self, device: &Arc<DeviceState>, f: impl Fn(&SimEnd)) {
        // The list is copied, because waking a task may drop a link, and the list must not be
        // locked then.
        let ends: Vec<_> = self.lock().ends.iter().filter_map(Weak::upgrade).collect();
        ends.iter().filter(|end| Arc::ptr_eq(&end.device, device)).for_each(|end| f(end));
    }

    /// Stops or restarts all traffic of a device.
    pub(super) fn freeze(&self, device: &DeviceState, on: bool) {
        device.faults.set_frozen(on);
        // Peers of this device hold work that they could not deliver to this device.
        let devices: Vec<_> = self.lock().devices.values().filter_map(Weak::upgrade).collect();
        for device in devices {
            self.each_end(&device, SimEnd::wake);
        }
    }

    /// Pauses or resumes all use of links by the process of a device.
    pub(super) fn pause(&self, device: &Arc<DeviceState>, on: bool) {
        device.faults.set_paused(on);
        self.each_end(device, SimEnd::wake);
    }

    /// Ends all links of a device with the status `RetryExceeded`.
    pub(super) fn cut(&self, device: &Arc<DeviceState>) {
        self.each_end(device, |end| {
            end.end(EndReason::Failed(Verb::SendOrWrite, Status::RetryExceeded))
        });
    }

    /// Removes a device: its listeners and links end.
    pub(super) fn remove(&self, device: &Arc<DeviceState>) {
        device.faults.remove();
        self.lock().listeners.retain(|at, _| at.ip() != device.addr);
        self.each_end(device, |end| end.end(EndReason::Removed));
    }
}

/// A client's request to a listener.
#[derive(Debug)]
pub(super) struct SimConnectRequest {
    pub(super) private_data: Vec<u8>,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) end: Arc<SimEnd>,
    /// Sends the answer. If this sender is dropped, the request counts as rejected.
    pub(super) answer: oneshot::Sender<Answer>,
}

/// The answer of the accepting side.
#[derive(Debug)]
pub(super) enum Answer {
    Accepted { end: Arc<SimEnd>, private_data: Vec<u8>, established: oneshot::Sender<()> },
    Rejected { private_data: Vec<u8> },
}
