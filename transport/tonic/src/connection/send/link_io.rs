//! The link of a connection, and its work in flight.

use std::task::Context;
use std::time::Instant;

use bytes::{BufMut, Bytes};
use tonic_rdma_fabric::{AnyLink, Clock, Link, LinkError, Posted, Timer, Work, WriteSource, turn};
use tonic_rdma_memory::{Pool, copy_slice};
use tonic_rdma_proto::{Connection, Room, Stats, Transmit, Write};

use crate::connection::config::ConnectionConfig;
use crate::connection::copy_scheduler::{CopyScheduler, Flush};
use crate::connection::driver::handle::ReadyTasks;
use crate::connection::frame_trace::FrameTrace;
use crate::connection::send::in_flight::{InFlight, StagingSpot};
use crate::connection::send::write_window::WriteWindow;

/// A link and its resources, without state that belongs to streams or outlives the link.
pub(crate) struct LinkIo {
    /// `None` once the connection has ended.
    pub(super) link: Option<AnyLink>,
    pub(crate) pool: Pool,
    in_flight: InFlight,
    /// How many bytes of WRITEs may be in flight.
    window: WriteWindow,
    /// Whether the source of a WRITE may be any memory, because the link copies the source when the
    /// WRITE is queued.
    pub(super) any_memory: bool,
    /// The clock for the times of messages, shared by the runtime's connections.
    clock: Clock,
    /// The peer's leases that no reader uses any more.
    returned: Vec<u32>,
    pub(crate) trace: FrameTrace,
}

impl LinkIo {
    pub(crate) fn new(link: AnyLink, pool: Pool, options: &ConnectionConfig) -> Self {
        let (blocks, block_size) = options.staging;
        LinkIo {
            pool,
            in_flight: InFlight::new(&options.link, blocks, block_size),
            window: WriteWindow::default(),
            any_memory: link.caps().any_memory,
            clock: Clock::default(),
            returned: Vec::new(),
            trace: FrameTrace::new(),
            link: Some(link),
        }
    }

    /// The link. `None` once the connection has ended.
    #[inline]
    pub(crate) fn get(&self) -> Option<&AnyLink> {
        self.link.as_ref()
    }

    /// Like [`get`](Self::get), but mutable.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> Option<&mut AnyLink> {
        self.link.as_mut()
    }

    /// Takes the link of a connection that has ended.
    pub(crate) fn take(&mut self) -> Option<AnyLink> {
        self.link.take()
    }

    /// Destroys the queue pair, and returns unused memory to the pool.
    pub(crate) fn destroy(&mut self) {
        self.link = None;
        self.in_flight.return_unused();
    }

    /// Returns the connection's timer. From now on, the timer's clock gives the times of messages.
    pub(crate) fn timer(&mut self) -> Timer {
        let timer = self.link.as_ref().map(Link::timer).unwrap_or_default();
        self.clock = timer.clock();
        timer
    }

    /// The time of a message that is received now.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Whether nothing is in flight.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_idle()
    }

    /// Bytes of WRITEs in flight.
    #[inline]
    pub(crate) fn writing(&self) -> usize {
        self.in_flight.writing()
    }

    /// Records that work `id` and all work before it have completed.
    #[inline]
    pub(crate) fn sent(&mut self, id: u64) {
        self.in_flight.done(id);
    }

    /// Adjusts the window after completions were handled. `before` is the number of bytes of WRITEs
    /// in flight before these completions. `waits` says whether payload waits to be written.
    #[inline]
    pub(crate) fn completed(&mut self, before: usize, waits: impl FnOnce() -> bool) {
        self.return_sends();
        let left = self.in_flight.writing();
        if left < before {
            let now = || tokio::time::Instant::now().into_std();
            self.window.completed(before - left, left, waits(), now);
        }
    }

    /// Posts further RECVs in pool memory, and returns their number.
    pub(crate) fn grow_recvs(&mut self) -> Result<u32, LinkError> {
        self.link.as_mut().map_or(Ok(0), |link| link.grow(&self.pool))
    }

    /// Prepares to return the memory of the SEND slots that only a busy connection needs, after the
    /// connection has been at rest for a while. Returns true if a message must be sent whose
    /// completion covers earlier work.
    pub(crate) fn rest(&mut self) -> bool {
        self.in_flight.rest()
    }

    /// Returns the memory of SEND slots that are not needed, if nothing is in flight.
    #[inline]
    pub(crate) fn return_sends(&mut self) {
        if self.in_flight.spares_slots()
            && let Some(slots) = self.link.as_mut().and_then(Link::shrink_sends)
        {
            self.in_flight.resized(slots);
        }
    }

    /// Counts the uses of memory that must be returned later: landing memory, staging, and the
    /// extra RECVs and SEND slots of a busy connection, if their number changes.
    pub(crate) fn memory_used(&self, stats: &Stats) -> u64 {
        let calls = if self.any_memory { 0 } else { stats.streams };
        stats.writes + stats.grants_given + calls
    }

    /// Returns the leases that no reader uses any more. The driver is woken when later leases can
    /// be returned.
    #[inline]
    pub(crate) fn return_leases(&mut self, cx: &Context<'_>, conn: &mut Connection) {
        let Some(link) = &mut self.link else { return };
        link.take_returned(cx.waker(), &mut self.returned);
        if self.returned.is_empty() {
            return;
        }
        for lease in self.returned.drain(..) {
            conn.return_lease(lease);
        }
    }

    /// Posts the protocol's messages and WRITEs within the limits of `flush`, and rings the
    /// doorbell. `closing` says that the connection is closing. Each SEND then reports its
    /// completion, because the connection ends only after its last message has been sent.
    pub(crate) fn post(
        &mut self,
        conn: &mut Connection,
        copies: &mut CopyScheduler,
        tasks: &mut ReadyTasks,
        mut flush: Flush,
        closing: bool,
    ) -> Result<(), LinkError> {
        copies.flush_begins();
        if conn.waits_to_lend() {
            self.lend(conn)?;
        }
        let Some(link) = self.link.as_mut() else { return Ok(()) };
        // Whether messages have been posted since the last doorbell.
        let mut messages = false;
        let mut posted = false;
        // Bytes of WRITEs since the last WRITE that reports its completion.
        let mut unreported = 0;
        let short = conn.stats().short_sent();
        let longest = link.caps().max_msg;
        if self.in_flight.wants_slots(conn.pending().streams > 0)
            && let Some(slots) = link.grow_sends(&self.pool)
        {
            self.in_flight.resized(slots);
        }
        let must_report = self.in_flight.must_report();
        while conn.is_due() && link.send_room() > 0 {
            let at = self.in_flight.slot();
            let staging = match conn.waits_to_stage() {
                true => self.in_flight.staging_room(&self.pool),
                false => 0,
            };
            let slot =
                at.and_then(|at| link.block_mut().get_mut(at..at + self.in_flight.slot_size()));
            let room = Room {
                write: match self.any_memory {
                    true => flush.room(),
                    false => self.window.room(self.in_flight.writing()),
                },
                staging,
                chunk: self.window.chunk().min(longest),
            };
            match (conn.poll_transmit(slot, room), at) {
                (Some(Transmit::Send(len)), Some(offset)) => {
                    messages = true;
                    if FrameTrace::is_on() {
                        let message = link.block_mut().get(offset..offset + len);
                        self.trace.sent(message.unwrap_or_default());
                    }
                    let id = self.in_flight.send();
                    let report = closing || must_report;
                    if link.queue(id, Work::Send { offset, len }, report)? == Posted::Done {
                        self.in_flight.done(id);
                    }
                }
                (Some(Transmit::Write(write)), _) => {
                    if FrameTrace::is_on() {
                        self.trace.wrote(&write);
                    }
                    let Write { src, pinned, addr, rkey } = write;
                    let len = src.len();
                    let as_it_lies = match (pinned, self.any_memory) {
                        (true, true) => {
                            // Ring the doorbell now, so that the peer works on the posted messages
                            // while this end copies.
                            if std::mem::take(&mut messages) {
                                link.ring_doorbell()?;
                            }
                            Ok(WriteSource::Any(src))
                        }
                        (true, false) => self.pool.resolve(&src).map(WriteSource::Bytes).ok_or(src),
                        (false, _) => Err(src),
                    };
                    unreported += len;
                    let report = !self.any_memory && unreported >= self.window.half();
                    unreported *= usize::from(!report);
                    let (id, source) = match as_it_lies {
                        Ok(src) => (self.in_flight.write_pinned(len), src),
                        Err(src) => {
                            let Some(stage) = self.in_flight.stage() else {
                                let what =
                                    format!("a WRITE of {len} bytes without room to stage it");
                                return Err(LinkError::Misuse {
                                    what,
                                    peer: Box::new(link.peer().clone()),
                                });
                            };
                            let id = self.in_flight.write_staged(len, &stage);
                            (id, copy_to_stage(link, stage, &src))
                        }
                    };
                    let work = Work::Write { src: source, remote_addr: addr, rkey };
                    if link.queue(id, work, report)? == Posted::Done {
                        self.in_flight.done(id);
                        flush.copied(len, link.has_pending_recv());
                    }
                }
                _ if self.any_memory && flush.advance() => continue,
                _ => break,
            }
            posted = true;
        }
        self.in_flight.return_unused();
        if posted {
            link.ring_doorbell()?;
            if self.in_flight.writing() > 0 && conn.stats().short_sent() > short {
                self.window.shared();
            }
        }
        let (short, waits) = (conn.stats().short_sent(), conn.waits_to_write());
        copies.flushed(&flush, short, waits);
        tasks.work += turn::copies(flush.bytes());
        // Wake the driver, so that it polls for the answer. The driver also lends the bytes of
        // streams that began because the posted messages ended other streams.
        if posted && (!copies.has_backlog() && link.is_eager() || conn.has_queued_lends()) {
            tasks.wake_driver();
        }
        Ok(())
    }
}

fn copy_to_stage(link: &mut AnyLink, stage: StagingSpot, src: &Bytes) -> WriteSource {
    match stage {
        StagingSpot::Block(mut block) => {
            block.put_slice(src);
            WriteSource::Buf(block)
        }
        StagingSpot::Slot(offset) => {
            let len = src.len();
            if let Some(slot) = link.block_mut().get_mut(offset..offset + len) {
                copy_slice(src, slot);
            }
            WriteSource::Staged { offset, len }
        }
    }
}
