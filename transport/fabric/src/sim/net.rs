//! The network: devices by address, listeners by address and port, counters.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tokio::sync::mpsc;

use crate::error::Verb;
use crate::sim::connect::Request;
use crate::sim::faults::Faults;
use crate::sim::memory::Table;
use crate::sim::rng::Rng;
use crate::sim::wire::{End, Over, Status};
use crate::sim::{Event, InjectedBug, Observer, SimConfig, SimStats};

/// Connect requests that wait at one listener; more are refused.
pub(super) const BACKLOG: usize = 128;

#[derive(Default)]
struct Directory {
    devices: BTreeMap<IpAddr, Weak<DeviceInner>>,
    listeners: BTreeMap<SocketAddr, mpsc::Sender<Request>>,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) doorbells: AtomicU64,
    pub(super) sends: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) write_bytes: AtomicU64,
    pub(super) completions: AtomicU64,
    pub(super) receiver_not_ready: AtomicU64,
    pub(super) remote_access_errors: AtomicU64,
    pub(super) links: AtomicU64,
}

pub(super) struct NetInner {
    pub(super) config: SimConfig,
    pub(super) counters: Counters,
    directory: Mutex<Directory>,
    ports: AtomicU64,
    draws: AtomicU64,
    iovas: AtomicU64,
    observer: OnceLock<Arc<dyn Observer>>,
    breaches: Mutex<Vec<String>>,
    /// Occasions for the injected_bug so far.
    occasions: AtomicU64,
}

impl fmt::Debug for NetInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Why an address cannot be connected to.
pub(super) enum NoListener {
    NoSuchAddress,
    NobodyListens,
}

impl NetInner {
    pub(super) fn new(config: SimConfig) -> NetInner {
        NetInner {
            config,
            counters: Counters::default(),
            directory: Mutex::default(),
            ports: AtomicU64::new(0),
            draws: AtomicU64::new(0),
            iovas: AtomicU64::new(0),
            observer: OnceLock::new(),
            breaches: Mutex::default(),
            occasions: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_tap(&self, observer: Arc<dyn Observer>) {
        // The first one stays.
        let _ = self.observer.set(observer);
    }

    pub(super) fn tell(&self, event: Event<'_>) {
        if let Some(observer) = self.observer.get() {
            observer.event(event);
        }
    }

    /// A rule was broken.
    pub(super) fn breach(&self, what: impl FnOnce() -> String) {
        if self.config.audit {
            self.breaches.lock().unwrap_or_else(PoisonError::into_inner).push(what());
        }
    }

    pub(super) fn breaches(&self) -> Vec<String> {
        self.breaches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// An occasion to break a promise; whether it is the one.
    pub(super) fn breaks(&self, promise: InjectedBug) -> bool {
        match self.config.injected_bug {
            Some((injected_bug, after)) if injected_bug == promise => {
                self.occasions.fetch_add(1, Relaxed) == after
            }
            _ => false,
        }
    }

    pub(super) fn has_broken(&self) -> bool {
        self.config.injected_bug.is_some_and(|(_, after)| self.occasions.load(Relaxed) > after)
    }

    pub(super) fn draw(&self) -> u64 {
        // Links count from 0: their streams of chance are others.
        Rng::new(self.config.seed, u64::MAX - self.draws.fetch_add(1, Relaxed)).next()
    }

    /// An address for memory that peers write to, drawn from the seed: no peer can tell it from
    /// another.
    pub(super) fn fresh_iova(&self) -> u64 {
        // A stream of chance that neither links nor draws have. No region is as long as the half
        // that is left out.
        let stream = (1 << 63) + self.iovas.fetch_add(1, Relaxed);
        (Rng::new(self.config.seed, stream).next() >> 1) & !4095
    }

    /// A port that was not given out before: 32768 and up.
    pub(super) fn fresh_port(&self) -> u16 {
        (32768 + self.ports.fetch_add(1, Relaxed) % 32768) as u16
    }

    pub(super) fn add_device(&self, device: &Arc<DeviceInner>) {
        self.lock().devices.insert(device.addr, Arc::downgrade(device));
    }

    /// `None`: the address is taken.
    pub(super) fn add_listener(&self, addr: SocketAddr) -> Option<mpsc::Receiver<Request>> {
        let mut directory = self.lock();
        if directory.listeners.get(&addr).is_some_and(|l| !l.is_closed()) {
            return None;
        }
        let (sender, receiver) = mpsc::channel(BACKLOG);
        directory.listeners.insert(addr, sender);
        Some(receiver)
    }

    /// Stops listening at an address; those who wait there are rejected with the receiver's end.
    pub(super) fn remove_listener(&self, addr: SocketAddr) {
        self.lock().listeners.remove(&addr);
    }

    pub(super) fn remove_listeners_at(&self, addr: IpAddr) {
        self.lock().listeners.retain(|at, _| at.ip() != addr);
    }

    pub(super) fn find(
        &self,
        addr: SocketAddr,
    ) -> Result<(Arc<DeviceInner>, mpsc::Sender<Request>), NoListener> {
        let directory = self.lock();
        let device = directory
            .devices
            .get(&addr.ip())
            .and_then(Weak::upgrade)
            .filter(|d| !d.faults.removed());
        let device = device.ok_or(NoListener::NoSuchAddress)?;
        let listener = directory
            .listeners
            .get(&addr)
            .filter(|l| !l.is_closed())
            .ok_or(NoListener::NobodyListens)?;
        Ok((device, listener.clone()))
    }

    pub(super) fn stats(&self) -> SimStats {
        let c = &self.counters;
        SimStats {
            doorbells: c.doorbells.load(Relaxed),
            sends: c.sends.load(Relaxed),
            writes: c.writes.load(Relaxed),
            write_bytes: c.write_bytes.load(Relaxed),
            completions: c.completions.load(Relaxed),
            receiver_not_ready: c.receiver_not_ready.load(Relaxed),
            remote_access_errors: c.remote_access_errors.load(Relaxed),
            links: c.links.load(Relaxed),
        }
    }
}

/// A device: its memory table, its faults, and the ends of its connections.
#[derive(Debug)]
pub(super) struct DeviceInner {
    pub(super) net: Arc<NetInner>,
    pub(super) name: String,
    pub(super) addr: IpAddr,
    pub(super) table: Arc<Table>,
    pub(super) faults: Arc<Faults>,
    ends: Mutex<Vec<Weak<End>>>,
}

impl DeviceInner {
    pub(super) fn new(net: Arc<NetInner>, name: String, addr: IpAddr) -> DeviceInner {
        DeviceInner {
            net,
            name,
            addr,
            table: Arc::default(),
            faults: Arc::default(),
            ends: Mutex::default(),
        }
    }

    fn ends(&self) -> MutexGuard<'_, Vec<Weak<End>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn adopt(&self, end: &Arc<End>) {
        let mut ends = self.ends();
        if ends.len() == ends.capacity() {
            ends.retain(|e| e.strong_count() > 0);
        }
        ends.push(Arc::downgrade(end));
    }

    fn each_end(&self, f: impl Fn(&End)) {
        // The list is copied: waking may drop a link, which must not find the list locked.
        let ends: Vec<_> = self.ends().iter().filter_map(Weak::upgrade).collect();
        ends.iter().for_each(|end| f(end));
    }

    pub(super) fn freeze(&self, on: bool) {
        self.faults.set_frozen(on);
        // Peers of this device hold what they could not deliver to it.
        let devices: Vec<_> = self.net.lock().devices.values().filter_map(Weak::upgrade).collect();
        for device in devices {
            device.each_end(End::nudge);
        }
    }

    pub(super) fn cut(&self) {
        self.each_end(|end| end.end(Over::Failed(Verb::SendOrWrite, Status::RetryExceeded)));
    }

    pub(super) fn remove(&self) {
        self.faults.remove();
        self.net.remove_listeners_at(self.addr);
        self.each_end(|end| end.end(Over::Removed));
    }
}
