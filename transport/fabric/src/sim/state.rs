//! The shared state of a simulated network, and of each of its devices.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::sim::config::{InjectedBug, Rng, SimConfig, SimStats};
use crate::sim::faults::Faults;
use crate::sim::memory::RegionTable;
use crate::sim::observer::{Event, Observer};

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) doorbells: AtomicU64,
    pub(super) sends: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) write_bytes: AtomicU64,
    pub(super) leases: AtomicU64,
    pub(super) lent_on: AtomicU64,
    pub(super) completions: AtomicU64,
    pub(super) receiver_not_ready: AtomicU64,
    pub(super) remote_access_errors: AtomicU64,
    pub(super) links: AtomicU64,
}

/// The state of a simulated network: its settings, what it counts, the counters from which ports,
/// random draws and addresses are made, its observer, and the rules that were broken on it.
pub(super) struct NetState {
    pub(super) config: SimConfig,
    pub(super) counters: Counters,
    ports: AtomicU64,
    draws: AtomicU64,
    iovas: AtomicU64,
    observer: OnceLock<Arc<dyn Observer>>,
    breaches: Mutex<Vec<String>>,
    /// Number of occasions so far on which the bug could have been injected.
    occasions: AtomicU64,
}

impl fmt::Debug for NetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").field("config", &self.config).finish_non_exhaustive()
    }
}

impl NetState {
    pub(super) fn new(config: SimConfig) -> NetState {
        NetState {
            config,
            counters: Counters::default(),
            ports: AtomicU64::new(0),
            draws: AtomicU64::new(0),
            iovas: AtomicU64::new(0),
            observer: OnceLock::new(),
            breaches: Mutex::default(),
            occasions: AtomicU64::new(0),
        }
    }

    pub(super) fn set_observer(&self, observer: Arc<dyn Observer>) {
        // Ignore an error, because the first observer stays.
        let _ = self.observer.set(observer);
    }

    pub(super) fn emit(&self, event: Event<'_>) {
        if let Some(observer) = self.observer.get() {
            observer.event(event);
        }
    }

    /// Records that a rule was broken.
    pub(super) fn breach(&self, what: impl FnOnce() -> String) {
        if self.config.audit {
            self.breaches.lock().unwrap_or_else(PoisonError::into_inner).push(what());
        }
    }

    pub(super) fn breaches(&self) -> Vec<String> {
        self.breaches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts an occasion to inject a bug. Returns whether to inject the bug now.
    pub(super) fn injects(&self, promise: InjectedBug) -> bool {
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
        // The random streams of links are numbered from 0 upwards. This number counts down from the
        // maximum, so the streams differ.
        Rng::new(self.config.seed, u64::MAX - self.draws.fetch_add(1, Relaxed)).next()
    }

    /// Draws an address from the seed, for memory that peers write to. Peers cannot guess this
    /// address.
    pub(super) fn fresh_iova(&self) -> u64 {
        // Neither links nor draws use this random stream. Addresses lie in the lower half of the
        // address space. No region is longer than the upper half, so no region wraps around.
        let stream = (1 << 63) + self.iovas.fetch_add(1, Relaxed);
        (Rng::new(self.config.seed, stream).next() >> 1) & !4095
    }

    /// Returns the next port from 32768 to 65535. Ports repeat after 32,768 calls.
    pub(super) fn fresh_port(&self) -> u16 {
        (32768 + self.ports.fetch_add(1, Relaxed) % 32768) as u16
    }

    pub(super) fn stats(&self) -> SimStats {
        let c = &self.counters;
        SimStats {
            doorbells: c.doorbells.load(Relaxed),
            sends: c.sends.load(Relaxed),
            writes: c.writes.load(Relaxed),
            write_bytes: c.write_bytes.load(Relaxed),
            leases: c.leases.load(Relaxed),
            lent_on: c.lent_on.load(Relaxed),
            completions: c.completions.load(Relaxed),
            receiver_not_ready: c.receiver_not_ready.load(Relaxed),
            remote_access_errors: c.remote_access_errors.load(Relaxed),
            links: c.links.load(Relaxed),
        }
    }
}

/// A device: its memory table and its faults.
#[derive(Debug)]
pub(super) struct DeviceState {
    pub(super) net: Arc<NetState>,
    pub(super) name: String,
    pub(super) addr: IpAddr,
    pub(super) table: RegionTable,
    pub(super) faults: Faults,
    /// Keys of memory that peers have lent, and that may be lent on.
    borrowed: Mutex<HashSet<u32>>,
}

impl DeviceState {
    pub(super) fn new(net: Arc<NetState>, name: String, addr: IpAddr) -> DeviceState {
        let (table, faults) = (RegionTable::default(), Faults::default());
        DeviceState { net, name, addr, table, faults, borrowed: Mutex::default() }
    }

    pub(super) fn borrowed(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.borrowed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
