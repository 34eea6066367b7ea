//! The output of a connection: control frames, and the streams that have something to send.

use std::collections::VecDeque;

use super::alignment::LINE;
use super::control::Control;
use super::send_half::{OutputItem, SendState};
use super::stream::Stream;
use super::streams::Streams;
use super::transfers::{PeerGrant, PendingDone};
use super::types::{Room, Stats, Write};
use super::write_order::WriteOrder;
use crate::headers::table::Sent;

/// When a stream has this many bytes queued, the driver should wait before it queues more.
const HIGH_WATER_MARK: usize = 1 << 20;
/// When all streams together have this many bytes queued, each stream may have only
/// [`QUEUED_FLOOR`]. Without this limit, a peer that reads nothing could fill the queues of all the
/// streams that it may open.
const QUEUED_TOTAL: usize = 16 << 20;
/// Bytes that a stream may always have queued.
const QUEUED_FLOOR: usize = 64 << 10;
/// Minimum bytes of a WRITE that is split off a longer WRITE.
const MIN_WRITE: usize = 16 * 1024;

/// The output that waits to be sent.
#[derive(Debug)]
pub(super) struct OutputQueue {
    pub(super) control: Control,
    /// The header table for sending, which the peer mirrors.
    pub(super) fields: Sent,
    /// Streams with a frame to send.
    streams: VecDeque<usize>,
    /// Streams with a WRITE to hand out.
    writes: WriteOrder,
    /// Body bytes in the output of all streams, without those of streams that wait for the peer to
    /// allow one more stream.
    queued: usize,
    /// Whether the last work handed out was a WRITE. SENDs and WRITEs alternate, so that neither
    /// starves the other.
    pub(super) wrote_last: bool,
    /// Whether output has waited for a credit since the last message was sent.
    waited_for_credit: bool,
}

/// A WRITE that has been taken from a stream.
pub(super) struct TakenWrite {
    pub(super) key: usize,
    pub(super) write: Write,
    /// Whether the driver waits for room on the stream, and the stream has room again.
    pub(super) has_room: bool,
    /// Whether this is the last WRITE of its transfer.
    pub(super) is_last: bool,
}

impl OutputQueue {
    pub(super) fn new() -> Self {
        OutputQueue {
            control: Control::default(),
            fields: Sent::default(),
            streams: VecDeque::new(),
            writes: WriteOrder::default(),
            queued: 0,
            wrote_last: true,
            waited_for_credit: false,
        }
    }

    /// Whether any frame or payload waits to be sent. Credits that are to be returned do not count.
    pub(super) fn has_output(&self) -> bool {
        self.has_writes() || self.has_frames()
    }

    /// Whether anything waits to be sent in a message.
    pub(super) fn has_frames(&self) -> bool {
        !self.control.is_empty() || !self.streams.is_empty()
    }

    /// Whether any payload waits to be written.
    pub(super) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Whether payload that has to be staged waits to be written.
    pub(super) fn has_staged(&self) -> bool {
        self.writes.has_staged()
    }

    /// Records that output waits for a credit. Returns whether output has already waited since the
    /// last message.
    pub(super) fn wait_for_credit(&mut self) -> bool {
        std::mem::replace(&mut self.waited_for_credit, true)
    }

    /// Returns whether output has waited for a credit, and resets this state.
    pub(super) fn take_waited(&mut self) -> bool {
        std::mem::take(&mut self.waited_for_credit)
    }

    /// Queues the stream, which has a frame to send.
    #[inline]
    pub(super) fn mark_send(&mut self, key: usize, stream: &mut Stream) {
        if !stream.queues.send {
            stream.queues.send = true;
            self.streams.push_back(key);
        }
    }

    /// Queues a stream that has waited for the peer to allow one more stream.
    pub(super) fn admit(&mut self, key: usize, stream: &mut Stream) {
        stream.queues.waits = false;
        self.queued += stream.send.queued;
        self.streams.push_back(key);
    }

    /// Sends the rest of a stream's body by DATA, because there is no memory to write it to.
    pub(super) fn send_data_from_now_on(&mut self, key: usize, stream: &mut Stream) {
        if matches!(stream.send.state, SendState::Open | SendState::Ending) {
            stream.send.sends_data = true;
            stream.transfers.requests.clear();
            self.mark_send(key, stream);
        }
    }

    /// Takes the next stream with a frame to send.
    #[inline]
    pub(super) fn take_stream(&mut self, streams: &mut Streams) -> Option<usize> {
        let key = self.streams.pop_front()?;
        streams[key].queues.send = false;
        Some(key)
    }

    /// Puts back a stream whose frame had no room in the message.
    pub(super) fn put_back(&mut self, key: usize, stream: &mut Stream, is_known: bool) {
        if is_known {
            self.mark_send(key, stream);
        } else {
            // Ids must reach the peer in order, so a stream that the peer does not know keeps its
            // place.
            stream.queues.send = true;
            self.streams.push_front(key);
        }
    }

    /// Queues the stream if it has a WRITE to hand out.
    #[inline]
    pub(super) fn mark_write(&mut self, key: usize, stream: &mut Stream) {
        if !stream.queues.write
            && let Some(pinned) = stream.can_write()
        {
            stream.queues.write = true;
            let finish = match (stream.transfers.urgent, stream.send.out.front_mut()) {
                (0, Some(OutputItem::Bulk(bulk))) => {
                    *bulk.finish.get_or_insert(self.writes.finish(bulk.len))
                }
                // Write first, because the peer has recalled the memory.
                _ => 0,
            };
            self.writes.push(key, pinned, finish);
        }
    }

    /// Moves a stream to the front of the streams that wait to write.
    pub(super) fn write_first(&mut self, key: usize, stream: &mut Stream) {
        if std::mem::take(&mut stream.queues.write) {
            self.writes.remove(key);
        }
        self.mark_write(key, stream);
    }

    /// Returns when a transfer of `len` bytes would end if it can be written from now on, by the
    /// virtual clock of [`WriteOrder`].
    pub(super) fn finish(&self, len: u64) -> u64 {
        self.writes.finish(len)
    }

    /// Removes a stream from its queues.
    #[inline]
    pub(super) fn remove(&mut self, key: usize, stream: &Stream) {
        if stream.queues.send && !stream.queues.waits {
            self.streams.retain(|k| *k != key);
        }
        if stream.queues.write {
            self.writes.remove(key);
        }
    }

    /// Records that body bytes have been queued on a stream.
    #[inline]
    pub(super) fn add(&mut self, stream: &mut Stream, len: usize) {
        stream.send.queued += len;
        if !stream.queues.waits {
            self.queued += len;
        }
    }

    /// Records that body bytes of a stream have been dropped with its output.
    pub(super) fn dropped(&mut self, len: usize) {
        self.queued -= len;
    }

    /// Records that body bytes of a stream have been handed out. Returns whether the driver waits
    /// for room on the stream, and the stream has room again.
    #[inline]
    pub(super) fn sent(&mut self, stream: &mut Stream, len: usize) -> bool {
        self.queued -= len;
        stream.send.queued -= len;
        if stream.send.full && stream.send.queued < self.high_water_mark() {
            stream.send.full = false;
            return stream.send.state.accepts();
        }
        false
    }

    /// Whether more output may be queued on a stream without waiting.
    pub(super) fn has_room(&self, stream: &mut Stream) -> bool {
        stream.send.full = stream.send.queued >= self.high_water_mark();
        !stream.send.full
    }

    /// Returns the number of queued bytes at which a stream has no more room.
    fn high_water_mark(&self) -> usize {
        if self.queued < QUEUED_TOTAL { HIGH_WATER_MARK } else { QUEUED_FLOOR }
    }

    /// Takes the next WRITE for which `room` is sufficient. `chunk` is the maximum length of the
    /// WRITE.
    pub(super) fn take_write(
        &mut self,
        streams: &mut Streams,
        room: Room,
        chunk: usize,
    ) -> Option<TakenWrite> {
        let turns = self.writes.turns();
        turns.into_iter().find_map(|queue| self.take_write_from(queue, streams, room, chunk))
    }

    fn take_write_from(
        &mut self,
        queue: usize,
        streams: &mut Streams,
        room: Room,
        chunk: usize,
    ) -> Option<TakenWrite> {
        while let Some(key) = self.writes.first(queue) {
            let stream = &mut streams[key];
            if stream.can_write().is_some() {
                return self.write(queue, key, stream, room, chunk);
            }
            // Skip the stream, because its output has been dropped.
            self.writes.pop(queue);
            stream.queues.write = false;
        }
        None
    }

    fn write(
        &mut self,
        queue: usize,
        key: usize,
        stream: &mut Stream,
        room: Room,
        chunk: usize,
    ) -> Option<TakenWrite> {
        let Some(OutputItem::Bulk(bulk)) = stream.send.out.front_mut() else { return None };
        let grant = bulk.grants.front_mut()?;
        let (front, pinned) = bulk.payload.front()?;
        let wanted = front.min((grant.len - grant.used) as usize).min(chunk);
        let allowed = if pinned { room.write } else { room.write.min(room.staging) };
        let least = if pinned { MIN_WRITE } else { MIN_WRITE.min(room.staging.max(1)) };
        let len = wanted.min(allowed);
        if len < wanted.min(least) {
            return None;
        }
        let src = bulk.payload.take(len);
        let write =
            Write { src, pinned, addr: grant.addr + u64::from(grant.used), rkey: grant.rkey };
        grant.used += len as u32;
        let is_last = bulk.payload.is_empty();
        let ends_grant = is_last || grant.used == grant.len;
        if ends_grant {
            let PeerGrant { id, used: len, begin, .. } = *grant;
            let done = PendingDone { grant: id, len, begin, end: is_last && bulk.end };
            stream.transfers.dones.push_back(done);
            stream.transfers.urgent -= u32::from(grant.recalled);
            bulk.grants.pop_front();
            if is_last {
                stream.send.out.pop_front();
            }
            self.mark_send(key, stream);
        }
        let has_room = self.sent(stream, len);
        self.writes.wrote(queue, len);
        if ends_grant || stream.can_write() != Some(pinned) {
            self.writes.pop(queue);
            stream.queues.write = false;
            if !is_last {
                self.mark_write(key, stream);
            }
        }
        Some(TakenWrite { key, write, has_room, is_last })
    }

    #[cfg(test)]
    pub(super) fn queued(&self) -> usize {
        self.queued
    }
}

impl Stats {
    /// Counts a WRITE that is handed out.
    pub(super) fn count_write(&mut self, write: &Write) {
        let len = write.src.len();
        if write.pinned && len >= Stats::LONG_WRITE {
            let in_phase = (write.src.as_ptr() as u64 ^ write.addr).is_multiple_of(LINE.into());
            self.long_writes += 1;
            self.long_writes_in_phase += u64::from(in_phase);
        }
        self.writes += 1;
        self.write_sent += len as u64;
    }
}
