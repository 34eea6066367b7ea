//! The state of a connection, behind one lock.

use std::sync::Arc;

use tokio::sync::watch;
use tonic_rdma_fabric::{AnyLink, Clock, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::call::stream_io::Streams;
use crate::connection::config::ConnectionConfig;
use crate::connection::copy_scheduler::CopyScheduler;
use crate::connection::lifecycle::{Life, Lifecycle};
use crate::connection::receive::landing::LandingMemory;
use crate::connection::send::in_flight::InFlight;
use crate::connection::send::write_window::WriteWindow;
use crate::connection::tasks::Tasks;
use crate::connection::usage::Usage;
use crate::path::reason::Reason;
use crate::telemetry::stats::Counters;

/// What the lock protects. Each room has a struct of its own in it; a method that spans several
/// rooms is one of this struct, in the room that it belongs to.
pub(crate) struct ConnectionState {
    pub(crate) lifecycle: Lifecycle,
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

impl ConnectionState {
    pub(crate) fn new(
        link: AnyLink,
        conn: Connection,
        pool: Pool,
        closed: watch::Sender<Option<Reason>>,
        options: &ConnectionConfig,
        counters: Arc<Counters>,
    ) -> Self {
        ConnectionState {
            lifecycle: Lifecycle::new(link.peer().clone(), closed),
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
            usage: Usage::new(conn.side(), link.peer(), counters),
            tasks: Tasks::default(),
            conn,
            link: Some(link),
        }
    }

    /// Begins the end of the connection: every stream fails, once, and the driver tears it down.
    pub(crate) fn end(&mut self, life: Life) {
        if !self.lifecycle.end(life) {
            return;
        }
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
        self.lifecycle.is_open() && self.streams.io.get(&id).is_some_and(|io| io.fault.is_none())
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
