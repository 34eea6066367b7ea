//! Protocol to link: posts everything that can go out now, in one batch.
//!
//! | file | what |
//! |---|---|
//! | `in_flight` | SEND slots, staging blocks and WRITEs in flight |
//! | `lend` | bytes that the peer reads where they lie |
//! | `payload` | bodies as the protocol takes them |
//! | `write_window` | how many bytes of WRITEs may be in flight |

pub(super) mod in_flight;
mod lend;
mod payload;
mod truncated;
pub(super) mod write_window;

use bytes::{BufMut, Bytes};
use tonic_rdma_fabric::{AnyLink, Link, LinkError, Posted, Work, WriteSource, turn};
use tonic_rdma_memory::copy_slice;
use tonic_rdma_proto::{Room, Transmit, Write};

use crate::connection::copy_scheduler::Flush;
use crate::connection::send::in_flight::Stage;
use crate::connection::state::ConnectionState;

impl ConnectionState {
    /// Grants the landing memory that the peer wants, then posts what the protocol has to send,
    /// with one doorbell. Where the link copies, the peer sees messages before the copies begin. An
    /// error is kept for the driver, which is woken.
    pub(crate) fn flush(&mut self) {
        let flush = self.copies.full_flush();
        self.run_flush(flush);
    }

    /// As [`flush`](Self::flush), within what the copy scheduler allows.
    pub(crate) fn run_flush(&mut self, flush: Flush) {
        self.grant();
        if let Err(error) = self.post(flush) {
            self.tasks.fail(error);
        }
        // Posting makes room in streams, whose bodies may wait for it.
        self.dispatch();
        self.count();
    }

    /// As [`flush`](Self::flush), for calls. The first call posts its work itself. Calls that
    /// follow before the driver runs leave their work to the driver, which posts it together in
    /// one message. Where the peer shares this processor, it cannot begin with the first message
    /// meanwhile: of several calls all leave their work to the driver.
    ///
    /// Returns false when there was nothing to do: then nothing was counted either.
    pub(crate) fn flush_soon(&mut self) -> bool {
        if !self.conn.wants_flush() {
            return false;
        }
        let first = self.tasks.driver.begins_batch();
        let shared =
            self.streams.io.len() > 1 && self.link.as_ref().is_some_and(Link::shares_processor);
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

    fn post(&mut self, mut flush: Flush) -> Result<(), LinkError> {
        self.copies.flush_begins();
        self.lend()?;
        let Some(link) = self.link.as_mut() else { return Ok(()) };
        let closing = !self.lifecycle.is_open();
        // Messages were posted since the last doorbell.
        let mut messages = false;
        let mut posted = false;
        // Bytes of WRITEs since the last one that reports its completion.
        let mut unreported = 0;
        let short = self.conn.stats().short_sent();
        let longest = link.caps().max_msg;
        if self.send.in_flight.wants_slots(self.conn.pending().streams > 0)
            && let Some(slots) = link.grow_sends(&self.pool)
        {
            self.send.in_flight.resized(slots);
        }
        let must_report = self.send.in_flight.must_report();
        while self.conn.is_due() && link.send_room() > 0 {
            let at = self.send.in_flight.slot();
            let staging = match self.conn.waits_to_stage() {
                true => self.send.in_flight.staging_room(&self.pool),
                false => 0,
            };
            let slot = at
                .and_then(|at| link.block_mut().get_mut(at..at + self.send.in_flight.slot_size()));
            let room = Room {
                write: match self.send.any_memory {
                    true => flush.room(),
                    false => self.send.window.room(self.send.in_flight.writing()),
                },
                staging,
                chunk: self.send.window.chunk().min(longest),
            };
            match (self.conn.poll_transmit(slot, room), at) {
                (Some(Transmit::Send(len)), Some(offset)) => {
                    messages = true;
                    let id = self.send.in_flight.send();
                    // The end of a connection waits for its last message.
                    let report = closing || must_report;
                    if link.queue(id, Work::Send { offset, len }, report)? == Posted::Done {
                        self.send.in_flight.done(id);
                    }
                }
                (Some(Transmit::Write(write)), _) => {
                    let Write { src, pinned, addr, rkey } = write;
                    let as_it_lies = match (pinned, self.send.any_memory) {
                        (true, true) => {
                            // The peer works on these messages while this end copies.
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
                    let report = !self.send.any_memory && unreported >= self.send.window.half();
                    unreported *= usize::from(!report);
                    let (id, source) = match as_it_lies {
                        Some(src) => (self.send.in_flight.write_pinned(src.len()), src),
                        None => {
                            let Some(stage) = self.send.in_flight.stage() else {
                                let what = format!(
                                    "a WRITE of {} bytes without room to stage it",
                                    src.len()
                                );
                                return Err(LinkError::Misuse {
                                    what,
                                    peer: Box::new(link.peer().clone()),
                                });
                            };
                            (
                                self.send.in_flight.write_staged(src.len(), &stage),
                                copy_to_stage(link, stage, &src),
                            )
                        }
                    };
                    let work = Work::Write { src: source, remote_addr: addr, rkey };
                    let queued = link.queue(id, work, report)?;
                    // The peer is not told that bytes have come which may be zeros.
                    truncated::check(&src, link)?;
                    if queued == Posted::Done {
                        self.send.in_flight.done(id);
                        flush.copied(len, link.has_pending_recv());
                    }
                }
                _ if self.send.any_memory && flush.advance() => continue,
                _ => break,
            }
            posted = true;
        }
        self.send.in_flight.return_unused();
        if posted {
            link.ring_doorbell()?;
            if self.send.in_flight.writing() > 0 && self.conn.stats().short_sent() > short {
                self.send.window.shared();
            }
        }
        let (short, waits) = (self.conn.stats().short_sent(), self.conn.waits_to_write());
        self.copies.flushed(&flush, short, waits);
        self.tasks.work += turn::copies(flush.bytes());
        // The driver polls for the answer.
        if posted && !self.copies.has_backlog() && link.is_eager() {
            self.tasks.wake_driver();
        }
        Ok(())
    }
}

fn copy_to_stage(link: &mut AnyLink, stage: Stage, src: &Bytes) -> WriteSource {
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
