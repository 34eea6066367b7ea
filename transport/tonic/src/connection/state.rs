//! The state of a connection, behind one lock.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tokio::sync::{Notify, watch};
use tonic::Status;
use tonic_rdma_fabric::{AnyLink, Clock, Link, LinkError, PeerInfo};
use tonic_rdma_memory::{Forked, Owned, Pool};
use tonic_rdma_proto::{CloseCode, Config, Connection, Liveness, PeerSettings, Side, StreamId};

use crate::codec::Methods;
use crate::connection::call::stream_io::Streams;
use crate::connection::config::ConnectionConfig;
use crate::connection::copy_scheduler::CopyScheduler;
use crate::connection::receive::landing::LandingMemory;
use crate::connection::send::in_flight::InFlight;
use crate::connection::send::write_window::WriteWindow;
use crate::connection::tasks::Tasks;
use crate::connection::usage::Usage;
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// One connection, shared by its driver and its calls.
pub(crate) struct Shared {
    state: Owned<Mutex<ConnectionState>>,
    /// Notified when a stream has ended: there may be room for another.
    pub(crate) stream_room: Arc<Notify>,
    pub(crate) closed: watch::Sender<Option<Reason>>,
    pub(crate) peer: PeerInfo,
    /// Messages up to this many bytes, with their header, fit a control slot.
    pub(crate) eager_limit: usize,
    pub(crate) methods: Arc<Methods>,
    pub(crate) calls: Arc<Counters>,
}

/// Life of a connection.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Life {
    Open,
    /// Ended by this side after an error: one CLOSE frame is on its way.
    Closing(Reason),
    /// The queue pair is gone.
    Dead(Reason),
}

/// What the lock protects. Each room has a struct of its own in it; a method that spans several
/// rooms is one of this struct, in the room that it belongs to.
pub(crate) struct ConnectionState {
    pub(crate) peer: PeerInfo,
    pub(crate) life: Life,
    /// Why calls that follow take another path, while those in flight go on here.
    pub(crate) leaving: Option<Reason>,
    /// Tells the channel of the end, and of `leaving`.
    pub(crate) closed: watch::Sender<Option<Reason>>,
    /// The protocol.
    pub(crate) conn: Connection,
    /// None when the queue pair has been destroyed.
    pub(crate) link: Option<AnyLink>,
    pub(crate) pool: Pool,
    /// The time of messages: that of the runtime's connections.
    pub(crate) clock: Clock,
    /// Leases of the peer of which nothing is read any longer.
    pub(crate) returned: Vec<u32>,
    pub(crate) send: SendQueue,
    pub(crate) copies: CopyScheduler,
    pub(crate) landing: LandingMemory,
    pub(crate) streams: Streams,
    pub(crate) usage: Usage,
    pub(crate) tasks: Tasks,
}

/// Work on its way to the link.
pub(crate) struct SendQueue {
    pub(crate) in_flight: InFlight,
    /// How many bytes of WRITEs may be in flight.
    pub(crate) window: WriteWindow,
    /// The link copies from any memory while work is queued.
    pub(crate) any_memory: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(
        side: Side,
        link: AnyLink,
        pool: Pool,
        peer: PeerSettings,
        options: &ConnectionConfig,
        counters: Arc<Counters>,
        methods: Arc<Methods>,
    ) -> Arc<Self> {
        // tokio's clock, which tests can stop.
        let now = tokio::time::Instant::now().into_std();
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
        Arc::new(Shared {
            stream_room: Arc::default(),
            closed: closed.clone(),
            peer: link.peer().clone(),
            eager_limit: conn.eager_limit(),
            methods,
            calls: counters.clone(),
            state: Owned::new(Mutex::new(ConnectionState {
                peer: link.peer().clone(),
                conn,
                life: Life::Open,
                leaving: None,
                closed,
                send: SendQueue {
                    in_flight: InFlight::new(&options.link, options.staging.0, options.staging.1),
                    window: WriteWindow::default(),
                    any_memory: link.caps().any_memory,
                },
                copies: CopyScheduler::new(),
                landing: LandingMemory::new(
                    &pool,
                    options.landing.min(link.caps().max_landing),
                    options.copy_on_delivery,
                ),
                clock: Clock::default(),
                pool,
                returned: Vec::new(),
                streams: Streams::default(),
                usage: Usage::new(side, link.peer(), counters),
                tasks: Tasks::default(),
                link: Some(link),
            })),
        })
    }

    /// Whether this process has made the connection. If not, its parent has: a child of fork(2)
    /// takes no lock of it, and drops nothing of it (R23).
    #[inline]
    pub(crate) fn is_own(&self) -> bool {
        self.state.is_own()
    }

    /// The state. Tasks that were made ready are woken when the guard is dropped, after the lock.
    pub(crate) fn lock(&self) -> Guard<'_> {
        Guard { state: Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// The lock, held. Wakes tasks after it is released.
pub(crate) struct Guard<'a> {
    state: Option<MutexGuard<'a, ConnectionState>>,
}

impl std::ops::Deref for Guard<'_> {
    type Target = ConnectionState;
    #[inline]
    fn deref(&self) -> &ConnectionState {
        match &self.state {
            Some(state) => state,
            None => emptied(),
        }
    }
}

impl std::ops::DerefMut for Guard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ConnectionState {
        match &mut self.state {
            Some(state) => state,
            None => emptied(),
        }
    }
}

/// The status of a call whose connection has ended for this reason (R7).
pub(crate) fn ended(reason: &Reason) -> Status {
    let how = match reason.code() {
        ReasonCode::GoAway => "closed",
        _ => "lost",
    };
    Status::unavailable(format!("connection {how}: {reason}"))
}

/// The status of a call whose connection belongs to a parent of this process.
#[cold]
pub(crate) fn inherited() -> Status {
    Status::unavailable(Forked("the connection").to_string())
}

#[cold]
fn emptied() -> ! {
    unreachable!("the guard is emptied in drop only")
}

impl Drop for Guard<'_> {
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

impl ConnectionState {
    /// Why calls cannot go on; `None` while they can.
    pub(crate) fn end_reason(&self) -> Option<&Reason> {
        match &self.life {
            Life::Open => None,
            Life::Closing(reason) | Life::Dead(reason) => Some(reason),
        }
    }

    /// The status of a call whose connection has ended (R7).
    pub(crate) fn end_status(&self) -> Option<Status> {
        self.end_reason().map(ended)
    }

    /// Has calls that follow take another path for this reason, at either end. Those in flight go
    /// on here. The first reason stays.
    pub(crate) fn leave(&mut self, reason: Reason) {
        if self.leaving.is_some() || self.life != Life::Open {
            return;
        }
        self.conn.go_away(CloseCode::Resources, &reason.to_string());
        self.closed.send_replace(Some(reason.clone()));
        self.leaving = Some(reason);
        self.tasks.wake_driver();
    }

    /// Why no new calls are taken.
    pub(crate) fn why_no_calls(&self) -> Reason {
        let going = "the server takes no new calls on this connection";
        let leaving = self.leaving.clone();
        leaving.unwrap_or_else(|| Reason::from_peer(ReasonCode::GoAway, going))
    }

    /// Begins the end of the connection: every stream fails, once, and the driver tears it down.
    pub(crate) fn end(&mut self, life: Life) {
        if matches!(self.life, Life::Dead(_))
            || (self.life != Life::Open && matches!(life, Life::Closing(_)))
        {
            return;
        }
        // The end in good order that follows is not what the channel is to be told.
        self.life = match (life, &self.leaving) {
            (Life::Closing(reason), Some(why)) if reason.code() == ReasonCode::GoAway => {
                Life::Closing(why.clone())
            }
            (Life::Dead(reason), Some(why)) if reason.code() == ReasonCode::GoAway => {
                Life::Dead(why.clone())
            }
            (life, _) => life,
        };
        // In the order of their ids, so that a simulated run can be repeated.
        let mut streams: Vec<_> = self.streams.io.iter_mut().collect();
        streams.sort_unstable_by_key(|(id, _)| **id);
        for (_, io) in streams {
            self.tasks.wake(io.recv_waker.take());
            self.tasks.wake(io.send_waker.take());
        }
        self.tasks.wake_driver();
    }

    /// Whether the caller of a stream that was just opened still waits.
    pub(crate) fn wants_answer(&self, id: StreamId) -> bool {
        self.end_reason().is_none() && self.streams.io.get(&id).is_some_and(|io| io.fault.is_none())
    }

    /// The queue pair goes first, then the memory that it could write to (R9).
    pub(crate) fn destroy(&mut self) {
        self.count();
        self.link = None;
        self.send.in_flight.return_unused();
        self.landing.release();
        self.pool.trim_now();
        self.record();
        self.usage.close();
    }

    pub(crate) fn lost(&self, error: &LinkError) -> Reason {
        Reason::new(ReasonCode::LinkLost, format!("{error} ({})", self.peer))
    }

    /// Adds what moved since the last time to the channel's counters.
    pub(crate) fn count(&mut self) {
        self.usage.count(self.conn.stats());
        // The driver, which records metrics, has ended.
        if self.link.is_none() {
            self.record();
        }
    }

    /// Records metrics of what moved since the last time.
    pub(crate) fn record(&mut self) {
        self.usage.record(self.conn.stats());
    }
}
