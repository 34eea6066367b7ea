//! The parts of a connection behind one lock, and the operations that need several of them.

use std::sync::Arc;

use tokio::sync::watch;
use tonic_rdma_fabric::{AnyLink, Link};
use tonic_rdma_memory::Pool;
use tonic_rdma_proto::{Connection, StreamId};

use crate::connection::call::streams::Streams;
use crate::connection::config::ConnectionConfig;
use crate::connection::copy_scheduler::{CopyScheduler, Flush};
use crate::connection::driver::handle::ReadyTasks;
use crate::connection::lifecycle::{Life, Lifecycle};
use crate::connection::receive::LandingMemory;
use crate::connection::receive::grant::Granter;
use crate::connection::send::link_io::LinkIo;
use crate::connection::usage::Usage;
use crate::path::reason::Reason;
use crate::telemetry::stats::Counters;

/// The state that the lock protects. Each part has its own methods, which get other parts as
/// arguments. Operations that need several parts are methods of this struct.
pub(crate) struct ConnectionState {
    pub(crate) lifecycle: Lifecycle,
    pub(crate) conn: Connection,
    pub(crate) link: LinkIo,
    pub(crate) copies: CopyScheduler,
    pub(crate) landing: LandingMemory,
    pub(crate) streams: Streams,
    pub(crate) usage: Usage,
    pub(crate) tasks: ReadyTasks,
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
            copies: CopyScheduler::new(),
            landing: LandingMemory::new(
                &pool,
                options.landing.min(link.caps().max_landing),
                options.copy_on_delivery,
            ),
            streams: Streams::default(),
            usage: Usage::new(conn.side(), link.peer(), counters),
            tasks: ReadyTasks::default(),
            conn,
            link: LinkIo::new(link, pool, options),
        }
    }

    /// Begins the end of the connection. Wakes the tasks of all streams, whose calls then fail, and
    /// the driver, which tears the connection down.
    pub(crate) fn end(&mut self, life: Life) {
        if !self.lifecycle.end(life) {
            return;
        }
        self.streams.wake_all(&mut self.tasks);
        self.tasks.wake_driver();
    }

    /// Why the connection takes no new calls. `None` while the connection takes new calls.
    pub(crate) fn why_no_calls(&self) -> Option<Reason> {
        let going = || (!self.conn.takes_streams()).then(|| self.lifecycle.why_no_calls());
        self.lifecycle.end_reason().cloned().or_else(going)
    }

    /// Whether the caller of a stream that was just opened still waits.
    pub(crate) fn wants_answer(&self, id: StreamId) -> bool {
        self.lifecycle.is_open() && self.streams.io.get(&id).is_some_and(|io| io.fault.is_none())
    }

    /// Destroys the queue pair, then frees the memory that the peer could write to (R9).
    pub(crate) fn destroy(&mut self) {
        self.count();
        self.link.destroy();
        self.landing.release();
        self.link.pool.trim_now();
        self.record();
        self.usage.close();
    }

    /// Grants the landing memory that the peer wants, then posts the protocol's messages and
    /// WRITEs. If the link copies, the peer sees messages before the copies begin. An error is kept
    /// for the driver, which is woken.
    pub(crate) fn flush(&mut self) {
        let flush = self.copies.full_flush();
        self.run_flush(flush);
    }

    /// Grants the landing memory that the protocol wants. A connection with only small calls wants
    /// no memory.
    #[inline]
    fn grant(&mut self) {
        if !(self.conn.may_want_memory() || self.landing.waits()) {
            return;
        }
        let ConnectionState { landing, conn, link, streams, lifecycle, tasks, .. } = self;
        Granter { landing, conn, link, streams, lifecycle, tasks }.grant();
    }

    /// Counts one run of the driver's task as a grace turn. After the last grace turn, the expired
    /// delays of landing memory take effect.
    #[inline]
    pub(crate) fn grace_turn(&mut self) {
        let ConnectionState { landing, conn, streams, usage, tasks, .. } = self;
        if landing.grace_turn(conn, streams, &mut usage.copied, tasks) {
            self.flush();
        }
    }

    /// Records that a reader begins to wait for data of a stream. The stream may then get memory
    /// that was held back because all streams together have a lot of unread data.
    #[inline]
    pub(crate) fn reader_waits(&mut self, id: StreamId) {
        if self.conn.waits_for_readers() {
            self.conn.reader_waits(id);
            self.flush_soon();
        }
    }

    /// Like [`flush`](Self::flush), but within the limits of the given flush.
    fn run_flush(&mut self, flush: Flush) {
        self.grant();
        let closing = !self.lifecycle.is_open();
        let ConnectionState { link, conn, copies, tasks, .. } = self;
        if let Err(error) = link.post(conn, copies, tasks, flush, closing) {
            tasks.fail(error);
        }
        // Pass on the events, because posting makes room in streams, and bodies may wait for room.
        if self.conn.has_events() {
            self.dispatch();
        }
        self.count();
    }

    /// Like [`flush`](Self::flush), but for calls. After each run of the driver, the first call and
    /// every eighth call after it post their work themselves. The other calls leave their work to
    /// the driver, which posts all of it together. An early post lets the peer begin with the first
    /// message. A peer that shares this processor could not begin before the other calls have run.
    /// With such a peer and several calls in flight, all calls leave their work to the driver.
    ///
    /// If there is nothing to flush, returns false without updating the counters.
    pub(crate) fn flush_soon(&mut self) -> bool {
        if !self.conn.wants_flush() {
            return false;
        }
        let first = self.tasks.driver.begins_batch();
        let shared =
            self.streams.io.len() > 1 && self.link.get().is_some_and(Link::shares_processor);
        if !first || shared {
            self.tasks.wake_driver();
            self.count();
            return true;
        }
        let flush = self.copies.call_flush();
        self.run_flush(flush);
        if self.copies.has_backlog() {
            self.tasks.wake_driver();
        }
        true
    }

    /// Returns memory that other connections wait for, and flushes the protocol's messages.
    #[inline]
    pub(crate) fn transmit(&mut self) {
        self.landing.enforce_share(&mut self.conn);
        let woke = !(self.tasks.none_ready() && self.streams.opened.is_empty());
        let flush = self.copies.driver_flush(woke);
        let waits = self.landing.waits() || self.conn.has_postponed_lends();
        if self.conn.is_due() || waits {
            self.run_flush(flush);
        }
    }

    /// Updates the counters of the channel or the server with the changes since the last update.
    pub(crate) fn count(&mut self) {
        self.usage.count(&self.conn);
        // Record metrics here, because the driver no longer records them once the link is gone.
        if self.link.get().is_none() {
            self.record();
        }
    }

    /// Records the changes since the last report as metrics.
    pub(crate) fn record(&mut self) {
        self.usage.record(self.conn.stats());
    }
}
