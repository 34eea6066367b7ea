//! Events and gates that synchronise a test with its handlers, without sleeps.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::sync::{Notify, Semaphore};

/// The probe of another process whose handlers take part in this case.
pub trait RemoteProbe: fmt::Debug + Send + Sync {
    /// Opens a gate in the other process.
    fn open(&self, gate: &str);

    /// Returns once this process has received every event that happened in the other process before
    /// the call.
    fn sync(&self);
}

/// Counts named events and controls named gates. Clones share both.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    events: Mutex<HashMap<String, u64>>,
    changed: Notify,
    gates: Mutex<HashMap<String, Arc<Semaphore>>>,
    /// Processes with handlers that report here and pass the same gates.
    remotes: Mutex<Vec<Arc<dyn RemoteProbe>>>,
    sink: OnceLock<EventSink>,
}

/// Receives each event as one line when it happens.
pub(crate) struct EventSink(pub(crate) fn(String));

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventSink")
    }
}

impl Probe {
    /// Counts one `event`.
    pub fn report(&self, event: impl Into<String>) {
        let event = event.into();
        if let Some(EventSink(write)) = self.inner.sink.get() {
            write(format!("event {event}"));
        }
        *self.inner.events.lock().unwrap().entry(event).or_default() += 1;
        self.inner.changed.notify_waiters();
    }

    /// A probe that also passes each event to `write`, as one line.
    pub(crate) fn with_sink(write: fn(String)) -> Self {
        let probe = Self::default();
        let _ = probe.inner.sink.set(EventSink(write));
        probe
    }

    /// Opens the gates of `remote` together with those of this probe, including those already open.
    pub fn attach(&self, remote: Arc<dyn RemoteProbe>) {
        self.inner.remotes.lock().unwrap().push(Arc::clone(&remote));
        let gates = self.inner.gates.lock().unwrap();
        gates.iter().filter(|(_, gate)| gate.is_closed()).for_each(|(name, _)| remote.open(name));
    }

    /// How many times `event` has happened.
    pub fn count(&self, event: &str) -> u64 {
        // Wait for events of other processes that are still in flight.
        let remotes = self.inner.remotes.lock().unwrap().clone();
        remotes.iter().for_each(|remote| remote.sync());
        self.known(event)
    }

    fn known(&self, event: &str) -> u64 {
        self.inner.events.lock().unwrap().get(event).copied().unwrap_or(0)
    }

    /// All events with their counts, for the report of a case that hangs.
    pub fn events(&self) -> Vec<String> {
        let events = self.inner.events.lock().unwrap();
        let mut lines: Vec<_> = events.iter().map(|(e, n)| format!("{e} x{n}")).collect();
        lines.sort();
        lines
    }

    /// Waits until `event` has happened once.
    pub async fn seen(&self, event: &str) {
        self.seen_times(event, 1).await;
    }

    /// Waits until `event` has happened `times` times.
    pub async fn seen_times(&self, event: &str, times: u64) {
        loop {
            let changed = self.inner.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.known(event) >= times {
                return;
            }
            changed.await;
        }
    }

    fn gate(&self, name: &str) -> Arc<Semaphore> {
        let mut gates = self.inner.gates.lock().unwrap();
        let gate = gates.entry(name.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(0)));
        Arc::clone(gate)
    }

    /// Opens a gate for all current and future waiters.
    pub fn open(&self, name: &str) {
        self.gate(name).close();
        self.inner.remotes.lock().unwrap().iter().for_each(|remote| remote.open(name));
    }

    /// Reports `gate:NAME` and waits until the gate is open.
    pub async fn pass(&self, name: &str) {
        let gate = self.gate(name);
        self.report(format!("gate:{name}"));
        // The error means that the semaphore is closed, that is, the gate is open.
        let _ = gate.acquire().await;
    }

    /// A guard that reports `dropped:ID` when it is dropped, unless [`Guard::finish`] was called
    /// first.
    pub fn guard(&self, id: &str) -> Guard {
        Guard { probe: self.clone(), id: id.to_owned(), finished: false }
    }
}

/// Reports how its owner ended: `finished:ID` or `dropped:ID`, and `ended:ID` for both.
#[derive(Debug)]
pub struct Guard {
    probe: Probe,
    id: String,
    finished: bool,
}

impl Guard {
    /// Marks the call as finished.
    pub fn finish(&mut self) {
        self.finished = true;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let how = if self.finished { "finished" } else { "dropped" };
        self.probe.report(format!("{how}:{}", self.id));
        self.probe.report(format!("ended:{}", self.id));
    }
}
