//! A connection behind its lock, shared by its driver and its calls.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tokio::sync::watch;
use tokio::time::Instant;
use tonic_rdma_fabric::{AnyLink, Link, PeerInfo};
use tonic_rdma_memory::{Owned, Pool};
use tonic_rdma_proto::{Config, Connection, Liveness, PeerSettings, Side};

use crate::codec::Methods;
use crate::connection::config::ConnectionConfig;
use crate::connection::state::ConnectionState;
use crate::connection::usage::{self, ConnectionInfo, ConnectionUsage};
use crate::path::Path;
use crate::path::reason::Reason;
use crate::telemetry::stats::Counters;

/// One connection, shared by its driver and its calls.
pub(crate) struct SharedConnection {
    state: Owned<Mutex<ConnectionState>>,
    pub(crate) closed: watch::Sender<Option<Reason>>,
    pub(crate) peer: PeerInfo,
    /// Maximum length in bytes of a piece that is sent eagerly, in control messages.
    pub(crate) eager_limit: usize,
    pub(crate) methods: Arc<Methods>,
    pub(crate) calls: Arc<Counters>,
    /// Distinguishes the connection from all others of this process.
    pub(crate) id: u64,
    /// When the connection was established.
    since: Instant,
    /// Bytes of memory that the connection has for control messages while it is at rest.
    control_memory: usize,
}

impl fmt::Debug for SharedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedConnection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl SharedConnection {
    pub(crate) fn new(
        side: Side,
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: &ConnectionConfig,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> Arc<Self> {
        // Use tokio's clock, because tests can stop it.
        let since = Instant::now();
        let now = since.into_std();
        let liveness = match link.caps().tells_end {
            true => Liveness::Told,
            false => Liveness::Asked(link.caps().probe_limit),
        };
        let config = Config { liveness, ..options.proto.clone() };
        let conn = match side {
            Side::Client => Connection::client(config, peer, now),
            Side::Server => Connection::server(config, peer, now),
        };
        let closed = watch::Sender::new(None);
        let control_memory = match Path::of(link.peer()) {
            Path::Shm => options.link.block_bytes(),
            _ => options.link.control_bytes(),
        };
        Arc::new(SharedConnection {
            closed: closed.clone(),
            peer: link.peer().clone(),
            eager_limit: conn.eager_limit(),
            methods,
            calls: counters.clone(),
            id: usage::next_id(),
            since,
            control_memory,
            state: Owned::new(Mutex::new(ConnectionState::new(
                link, conn, pool, closed, options, counters,
            ))),
        })
    }

    /// Whether this process made the connection. A child of fork(2) takes no locks of a parent's
    /// connection and drops no part of that connection (R23).
    #[inline]
    pub(crate) fn is_own(&self) -> bool {
        self.state.is_own()
    }

    /// A snapshot of the connection. `None` if the connection belongs to a parent process. Holds
    /// the lock while some numbers are read.
    pub(crate) fn info(&self) -> Option<ConnectionInfo> {
        if !self.is_own() {
            return None;
        }
        let state = self.lock();
        let (stats, credits) = (state.conn.stats(), state.conn.credits());
        let usage = ConnectionUsage {
            calls_in_flight: state.streams.io.len(),
            calls: stats.streams,
            bytes_sent: stats.eager_sent + stats.write_sent + stats.lent,
            bytes_received: stats.eager_received + stats.write_received + stats.borrowed,
            credits: credits.own,
            peer_credits: credits.peer,
            credit_waits: stats.credit_waits,
            control_memory: self.control_memory,
            landing_memory: state.landing.leased(),
            granted: state.landing.granted(),
        };
        let reason = state.why_no_calls();
        drop(state);
        let path = Path::of(&self.peer);
        Some(ConnectionInfo {
            id: self.id,
            age: self.since.elapsed(),
            path,
            device: (path != Path::Shm).then(|| self.peer.device.clone()),
            local_addr: self.peer.local.ip(),
            remote_addr: self.peer.remote.ip(),
            peer_pid: Path::process(&self.peer),
            asked: true,
            reason,
            usage: Some(usage),
        })
    }

    /// Locks the state. When the guard is dropped, it releases the lock and then wakes the tasks
    /// that were made ready.
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        StateGuard { state: Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// Holds the lock. Dropping the guard releases the lock, and then wakes tasks.
pub(crate) struct StateGuard<'a> {
    state: Option<MutexGuard<'a, ConnectionState>>,
}

impl std::ops::Deref for StateGuard<'_> {
    type Target = ConnectionState;
    #[inline]
    fn deref(&self) -> &ConnectionState {
        match &self.state {
            Some(state) => state,
            None => emptied(),
        }
    }
}

impl std::ops::DerefMut for StateGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ConnectionState {
        match &mut self.state {
            Some(state) => state,
            None => emptied(),
        }
    }
}

#[cold]
fn emptied() -> ! {
    unreachable!("the guard is emptied in drop only")
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        if self.tasks.none_ready() {
            return;
        }
        if let Some(mut state) = self.state.take() {
            let Some(first) = state.tasks.pop_ready() else { return };
            if state.tasks.none_ready() {
                drop(state);
                return first.wake();
            }
            let others = state.tasks.take_ready();
            drop(state);
            others.into_iter().for_each(Waker::wake);
            first.wake();
        }
    }
}
