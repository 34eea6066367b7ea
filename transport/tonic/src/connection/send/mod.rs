//! Protocol to link: everything that can go out now goes out, in one batch.

pub(in crate::connection) mod copy_scheduler;
pub(in crate::connection) mod in_flight;
pub(in crate::connection) mod recent_lengths;
pub(in crate::connection) mod write_window;

use bytes::{BufMut, Bytes};
use tonic::Status;
use tonic_rdma_fabric::{AnyLink, Link, LinkError, LogThrottle, Posted, Work, WriteSource};
use tonic_rdma_memory::{RegisterError, copy_slice};
use tonic_rdma_proto::{
    CloseCode, GrantMemory, LandingWant, ResetCode, Room, StreamId, Transmit, WantKey, Write,
};

use crate::connection::send::copy_scheduler::CopyScheduler;
use crate::connection::send::in_flight::Stage;
use crate::connection::state::{Inner, Life};
use crate::path::reason::{Reason, ReasonCode};

/// Calls that share a message, at most: the peer works on the first while this side makes the next.
const BATCH: u32 = 8;
/// Streams that are asked for shorter wants while the first waits for landing memory.
const BEHIND: usize = 8;
/// Lines about memory that cannot be registered: a peer decides how often some is wanted.
static UNREGISTERED: LogThrottle = LogThrottle::new();

impl Inner {
    /// Hands out landing memory that is wanted, then posts what the protocol has to send, with one
    /// doorbell; where the link copies, messages are shown to the peer before. An error is kept for
    /// the driver, which is woken.
    pub(in crate::connection) fn flush(&mut self) {
        self.flush_with(CopyScheduler::some());
    }

    /// As [`flush`](Self::flush), but nothing is copied to the peer's memory yet: that is left
    /// [`unfinished`](Self::unfinished).
    pub(in crate::connection) fn flush_messages(&mut self) {
        self.flush_with(CopyScheduler::none());
    }

    fn flush_with(&mut self, copies: CopyScheduler) {
        self.grant();
        if let Err(error) = self.post(copies) {
            self.failed = Some(error);
            self.wake_driver();
        }
        // Posting makes room in streams, whose bodies may wait for it.
        self.dispatch();
        self.count();
    }

    /// As [`flush`](Self::flush), for calls: the first posts its work itself and waits for nobody;
    /// those that come before the driver has looked leave theirs to it, to go out together in one
    /// message. Where the peer has no processor of its own nobody could begin with the first
    /// meanwhile: of several calls all leave theirs. It copies for itself, and not for one that was
    /// there before and is long. False when there was nothing to do: then nothing has been counted,
    /// either.
    pub(in crate::connection) fn flush_soon(&mut self) -> bool {
        if !self.conn.wants_flush() {
            return false;
        }
        let before = self.left;
        self.left = (before + 1) % BATCH;
        let shared =
            self.streams.len() > 1 && self.link.as_ref().is_some_and(Link::shares_processor);
        if before > 0 || shared {
            self.wake_driver();
            self.count();
            return true;
        }
        match self.unfinished {
            true => self.flush_messages(),
            false => self.flush(),
        }
        if self.unfinished {
            self.wake_driver();
        }
        true
    }

    fn post(&mut self, mut copies: CopyScheduler) -> Result<(), LinkError> {
        self.unfinished = false;
        let Some(link) = self.link.as_mut() else { return Ok(()) };
        let closing = self.life != Life::Open;
        // Since the doorbell.
        let mut messages = false;
        let mut posted = false;
        // Of WRITEs since the last that reports its completion.
        let mut unreported = 0;
        let eager = self.conn.stats().eager_sent;
        let longest = link.caps().max_msg;
        while self.conn.is_due() && link.send_room() > 0 {
            let at = self.sends.slot();
            let staging = match self.conn.waits_to_stage() {
                true => self.sends.staging_room(&self.pool),
                false => 0,
            };
            let slot = at.and_then(|at| link.block_mut().get_mut(at..at + self.sends.slot_size()));
            let room = Room {
                write: match self.any_memory {
                    true => copies.room(),
                    false => self.window.room(self.sends.writing()),
                },
                staging,
                chunk: self.window.chunk().min(longest),
            };
            match (self.conn.poll_transmit(slot, room), at) {
                (Some(Transmit::Send(len)), Some(offset)) => {
                    messages = true;
                    let id = self.sends.send();
                    // The last message of a connection is waited for.
                    if link.queue(id, Work::Send { offset, len }, closing)? == Posted::Done {
                        self.sends.done(id);
                    }
                }
                (Some(Transmit::Write(write)), _) => {
                    let Write { src, pinned, addr, rkey } = write;
                    let as_it_lies = match (pinned, self.any_memory) {
                        (true, true) => {
                            // The peer works on what it has meanwhile.
                            if std::mem::take(&mut messages) {
                                link.ring_doorbell()?;
                            }
                            Some(WriteSource::Any(src.clone()))
                        }
                        (true, false) => self.pool.resolve(&src).map(WriteSource::Bytes),
                        (false, _) => None,
                    };
                    let len = src.len();
                    unreported += len;
                    let report = !self.any_memory && unreported >= self.window.half();
                    unreported *= usize::from(!report);
                    let (id, src) = match as_it_lies {
                        Some(src) => (self.sends.write_pinned(src.len()), src),
                        None => {
                            let Some(stage) = self.sends.stage() else {
                                let what = format!(
                                    "a WRITE of {} bytes without room to stage it",
                                    src.len()
                                );
                                return Err(LinkError::Misuse {
                                    what,
                                    peer: Box::new(link.peer().clone()),
                                });
                            };
                            (self.sends.write_staged(src.len(), &stage), copy(link, stage, &src))
                        }
                    };
                    if link.queue(id, Work::Write { src, remote_addr: addr, rkey }, report)?
                        == Posted::Done
                    {
                        self.sends.done(id);
                        copies.copied(len, link.has_pending_recv());
                    }
                }
                _ if self.any_memory && copies.go_on() => continue,
                _ => break,
            }
            posted = true;
        }
        self.sends.put_back();
        if posted {
            link.ring_doorbell()?;
            if self.sends.writing() > 0 && self.conn.stats().eager_sent > eager {
                self.window.shared();
            }
        }
        if copies.has_copied() {
            self.pauses = self.beside_sent.piece(self.conn.stats().eager_sent);
        }
        self.unfinished = copies.is_over() && self.conn.waits_to_write();
        // An answer is worth looking for.
        if posted && !self.unfinished && link.is_eager() {
            self.wake_driver();
        }
        Ok(())
    }

    /// Answers the protocol's wants from this connection's landing account.
    fn grant(&mut self) {
        let waited = std::mem::take(&mut self.landing_waits);
        self.landing_waits = !self.grant_wanted();
        if waited && !self.landing_waits {
            // Others need not make room for what is not wanted any more.
            self.landing.stop_waiting();
        }
    }

    /// False when there is no memory for what is wanted.
    fn grant_wanted(&mut self) -> bool {
        while let Some(want) = self.conn.poll_landing() {
            let parts = self.landing_wait.takes_parts();
            let landed = match self.land(want, if parts { want.min } else { want.want }) {
                // A part may be had where the whole may not.
                Err(_) if !parts && want.min < want.want => self.land(want, want.min),
                landed => landed,
            };
            match landed {
                Ok(Some(len)) => {
                    if len == want.want {
                        self.landing_wait.whole();
                    }
                }
                Ok(None) => {
                    // The driver is woken when some comes free. What stands by unused is worth more
                    // to a stream.
                    if let WantKey::Stream(_) = want.key {
                        self.conn.recall_standing();
                        if !parts && self.landing_wait.short() {
                            self.wake_driver();
                        }
                        if self.grant_behind() {
                            // Not the least of these asked last: the account waits for what the
                            // first wants.
                            continue;
                        }
                    }
                    return false;
                }
                Err(error) => self.cannot_land(want.key, &error),
            }
        }
        true
    }

    /// The first want waits; those behind it may be shorter. True when one was granted.
    fn grant_behind(&mut self) -> bool {
        let mut granted = false;
        for place in 1..=BEHIND {
            let Some(want) = self.conn.landing_behind(place) else { break };
            let Some(want) = want else { continue };
            match self.land(want, want.want) {
                Ok(len) => granted |= len.is_some(),
                Err(error) => self.cannot_land(want.key, &error),
            }
        }
        granted
    }

    /// Grants what is wanted, or at least `min` bytes of it, and gives the length. None: there is
    /// no memory.
    fn land(&mut self, want: LandingWant, min: u32) -> Result<Option<u32>, RegisterError> {
        let Some(buf) = self.landing.alloc(want.want as usize, min as usize)? else {
            return Ok(None);
        };
        if let Some(link) = &mut self.link
            && let Err(error) = link.share(buf.rkey())
        {
            self.failed.get_or_insert(error);
            self.wake_driver();
            return Ok(None);
        }
        let len = want.want.min(u32::try_from(buf.capacity()).unwrap_or(u32::MAX));
        let (addr, rkey) = (buf.addr(), buf.rkey());
        let key = self.granted.insert(buf);
        self.conn.provide_landing(want.key, GrantMemory { key, addr, rkey, len });
        Ok(Some(len))
    }

    fn cannot_land(&mut self, key: WantKey, error: &RegisterError) {
        match key {
            WantKey::Stream(id) => self.refuse_bulk(id, error),
            WantKey::Standing => {
                if let Some(suppressed) = UNREGISTERED.pass() {
                    tracing::warn!(%error, suppressed, "no standing grants: landing memory cannot be registered");
                }
                self.conn.recall_standing();
            }
        }
    }

    /// There is no memory for what a stream wants to send, and waiting would not bring any.
    fn refuse_bulk(&mut self, id: StreamId, error: &RegisterError) {
        if let Err(limit) = self.pool.may_land() {
            // Nor for any other: calls go on where none is needed.
            let text = format!("no landing memory: {limit}");
            self.conn.close(CloseCode::Resources, &text);
            return self.end(Life::Closing(Reason::new(ReasonCode::Memlock, text)));
        }
        if let Some(suppressed) = UNREGISTERED.pass() {
            tracing::warn!(%error, stream = %id, suppressed, "landing memory cannot be registered; the call fails");
        }
        let status =
            Status::resource_exhausted(format!("no memory to receive the message: {error}"));
        self.conn.reset(id, ResetCode::ENHANCE_YOUR_CALM);
        self.fail_stream(id, status);
    }
}

fn copy(link: &mut AnyLink, stage: Stage, src: &Bytes) -> WriteSource {
    match stage {
        Stage::Block(mut block) => {
            block.put_slice(src);
            WriteSource::Buf(block)
        }
        Stage::Slot(offset) => {
            let len = src.len();
            if let Some(slot) = link.block_mut().get_mut(offset..offset + len) {
                copy_slice(src, slot);
            }
            WriteSource::Staged { offset, len }
        }
    }
}
