//! The driver's side of memory: wants and grants of landing memory, named memory, and leases.

use std::time::Instant;

use bytes::Bytes;

use super::answer_clock::AnswerClock;
use super::connection::Connection;
use super::types::{Event, GrantMemory, LandingWant, NamedWant, WantKey};
use crate::frame::Frame;
use crate::ids::StreamId;
use crate::payload::LentPlace;

impl Connection {
    /// Returns the landing memory that is wanted now. The driver answers with
    /// [`Connection::provide_landing`]; if the driver has no memory, it calls this function again
    /// when memory comes free. The same want is returned until it is answered.
    ///
    /// `awaited` tells whether a reader waits for the stream. A stream that wants more than is left
    /// of [`unread_total`](crate::Config::unread_total) is skipped until a reader waits for it
    /// ([`reader_waits`](Self::reader_waits)), or until other streams have been read.
    pub fn poll_landing(&mut self, awaited: impl Fn(StreamId) -> bool) -> Option<LandingWant> {
        self.is_live().then(|| self.landing.poll(&mut self.streams, awaited))?
    }

    /// Returns the want of the stream at `place` in the queue for landing memory, counting from 0.
    /// Call this function when there is no memory for the first stream, because another stream may
    /// want less. The outer `None` means that there is no such stream. The inner `None` means that
    /// the stream no longer wants memory, or wants more than is left of
    /// [`unread_total`](crate::Config::unread_total).
    pub fn landing_behind(&self, place: usize) -> Option<Option<LandingWant>> {
        self.landing.behind(place, &self.streams)
    }

    /// Whether streams that nobody reads wait for memory. If so, call
    /// [`reader_waits`](Self::reader_waits) when a reader begins to wait.
    #[inline]
    pub fn waits_for_readers(&self) -> bool {
        self.landing.has_parked()
    }

    /// Tells the connection that a reader begins to wait for the stream.
    pub fn reader_waits(&mut self, id: StreamId) {
        if let Some((key, stream)) = self.streams.find(id)
            && stream.queues.parked
        {
            self.landing.queue(key, stream);
        }
    }

    /// Grants memory of at least `min` bytes for a want of [`Connection::poll_landing`]. Memory
    /// that is too short, or no longer wanted, comes back as [`Event::Returned`].
    pub fn provide_landing(&mut self, key: WantKey, memory: GrantMemory) {
        let control = &mut self.output.control;
        let is_taken =
            self.life.is_live() && self.landing.provide(key, memory, &mut self.streams, control);
        self.provided(memory, is_taken);
    }

    fn provided(&mut self, memory: GrantMemory, is_taken: bool) {
        if is_taken {
            self.timers.heartbeat.rouse();
            self.stats.grants_given += 1;
        } else {
            self.events.push_back(Event::Returned { memory: memory.key });
        }
    }

    /// Whether the peer has sent nothing by WRITE for
    /// [`idle_recall`](crate::Config::idle_recall), so that idle landing memory may be returned.
    pub fn lands_nothing(&self, now: Instant) -> bool {
        self.landing.grants.is_idle(now)
    }

    /// Recalls all standing grants, because the peer has sent no bulk for long or memory is short
    /// elsewhere. Standing grants are given again when the peer sends bulk.
    pub fn recall_standing(&mut self) {
        self.landing.grants.recall_standing(&mut self.streams, &mut self.output.control);
    }

    /// Whether the peer is given standing grants, because it sends bulk.
    pub fn gives_standing(&self) -> bool {
        self.landing.grants.gives_standing()
    }

    /// Limits the standing grants that are given from now on to `bytes` together, in addition to
    /// the limits of the [`Config`](crate::Config).
    pub fn limit_standing(&mut self, bytes: u64) {
        self.landing.grants.limit_standing(bytes);
    }

    /// Gives no further standing grants until the limit is set again, because there is no memory
    /// for them.
    pub fn pause_standing(&mut self) {
        self.landing.grants.limit_standing(0);
    }

    /// Recalls the standing grants beyond the [limit](Self::limit_standing).
    pub fn recall_excess_standing(&mut self) {
        self.landing.grants.recall_excess_standing(&mut self.streams, &mut self.output.control);
    }

    /// Recalls the grants whose memory is wanted elsewhere, and all other grants of their streams.
    /// A stream continues when there is memory for it again. Each grant comes back as
    /// [`Event::Landed`] or [`Event::Returned`]. If the peer keeps a recalled grant for about four
    /// seconds, the connection ends, unless [`memory_is_unwanted`](Self::memory_is_unwanted) is
    /// called before.
    ///
    /// `wanted` tells whether the memory with a key ([`GrantMemory::key`])
    /// is wanted elsewhere.
    pub fn recall_grants(&mut self, wanted: impl Fn(usize) -> bool) {
        let control = &mut self.output.control;
        self.landing.grants.recall_wanted(wanted, &mut self.streams, control);
        self.landing.clock.start();
    }

    /// Tells the connection that nobody else wants the memory of its grants any more: see
    /// [`recall_grants`](Connection::recall_grants).
    pub fn memory_is_unwanted(&mut self) {
        self.landing.clock = AnswerClock::Idle;
    }

    /// Makes the peer send the rest of a stream's body by DATA, because this side has no landing
    /// memory for it and waiting does not help. Does nothing for unknown streams.
    pub fn decline_landing(&mut self, id: StreamId) {
        let Some((_, stream)) = self.streams.find(id) else { return };
        if stream.landing.decline() {
            self.output.control.push(Frame::Decline { stream: id.0, own: false });
        }
    }

    /// Tells the connection that this side cannot write to the peer's memory with this key. The
    /// driver must call this function before a GRANT with the key is received. Bodies that are
    /// granted this memory are sent by DATA, until [`forget_unwritable`](Self::forget_unwritable).
    pub fn cannot_write(&mut self, rkey: u32) {
        self.peer_grants.set_unwritable(rkey);
    }

    /// Tells the connection that the peer has taken back the memory with this key.
    pub fn forget_unwritable(&mut self, rkey: u32) {
        self.peer_grants.forget_unwritable(rkey);
    }

    /// Names memory for the large messages that this side receives on a stream. Call this function
    /// right after [`open`](Self::open) (client only), because the header block tells the peer that
    /// this side names memory. For servers see [`decide_naming`](Self::decide_naming).
    pub fn name_memory(&mut self, id: StreamId) {
        if let Some((_, stream)) = self.streams.find(id) {
            stream.recv.names = true;
        }
    }

    /// Decides whether this side names memory for the large messages that it receives on a stream.
    /// A server with [`Config::names_requests`](crate::Config::names_requests) calls this once for
    /// each stream that was opened.
    pub fn decide_naming(&mut self, id: StreamId, names: bool) {
        if let Some((key, stream)) = self.streams.find(id) {
            (stream.recv.names, stream.recv.undecided) = (names, false);
            self.landing.queue(key, stream);
        }
    }

    /// The length of the field in the next message that the peer wants to write on a stream, if the
    /// peer has stated one.
    pub fn next_field(&self, id: StreamId) -> Option<u32> {
        let stream = &self.streams[self.streams.key(id.0)?];
        Some(stream.landing.requests.front()?.request.field?.len)
    }

    /// Returns the next want of named memory. Each want is returned once. The driver answers with
    /// [`Connection::provide_named`] or [`Connection::refuse_named`], at any time.
    pub fn poll_named(&mut self) -> Option<NamedWant> {
        self.is_live().then(|| self.landing.poll_named(&mut self.streams))?
    }

    /// Grants memory for a want of [`Connection::poll_named`], from the stated offset in the field
    /// on. If the memory is too long, only a part of the memory is granted. If the memory is too
    /// short, the rest of the field is wanted next. Memory that is no longer wanted, or shorter
    /// than a grant may be, comes back as [`Event::Returned`]. After
    /// [`recall_grants`](Self::recall_grants), memory for the same bytes may be wanted again.
    pub fn provide_named(&mut self, id: StreamId, memory: GrantMemory) {
        let control = &mut self.output.control;
        let is_taken = self.life.is_live()
            && self.landing.provide_named(id, memory, &mut self.streams, control);
        self.provided(memory, is_taken);
    }

    /// Refuses a want of [`Connection::poll_named`]. The rest of the message lands in landing
    /// memory.
    pub fn refuse_named(&mut self, id: StreamId) {
        self.landing.refuse_named(id, &mut self.streams);
    }

    /// Returns the next bytes that may be lent. The driver answers with
    /// [`provide_lent`](Self::provide_lent) or [`postpone_lend`](Self::postpone_lend) before it
    /// calls this again.
    pub fn poll_lend(&mut self) -> Option<(StreamId, Bytes)> {
        self.leases.poll(&self.streams)
    }

    /// Postpones the bytes that [`poll_lend`](Self::poll_lend) has returned until
    /// [`retry_lends`](Self::retry_lends). The stream of these bytes waits with them. Other streams
    /// continue.
    pub fn postpone_lend(&mut self) {
        self.leases.postpone();
    }

    /// Whether any bytes are postponed. If so, the caller must call
    /// [`retry_lends`](Self::retry_lends) later.
    pub fn has_postponed_lends(&self) -> bool {
        self.leases.has_postponed()
    }

    /// Makes [`poll_lend`](Self::poll_lend) return the postponed bytes again, before all others.
    pub fn retry_lends(&mut self) {
        self.leases.retry();
    }

    /// Lends the bytes that [`poll_lend`](Self::poll_lend) has returned, or lets them be sent in
    /// another way if `place` is `None`. Lending requires [`may_lend`](Self::may_lend). Lent bytes
    /// must not change until [`Event::LeaseEnded`] with the number of the lease, or the end of the
    /// connection.
    pub fn provide_lent(&mut self, id: StreamId, place: Option<LentPlace>) {
        self.leases.decide(place.is_some());
        let found = self.streams.find(id);
        let found = found.and_then(|(key, s)| Some((s.send.undecided()?.0, key, s)));
        match (found, place) {
            (Some((at, key, stream)), _) => {
                stream.send.decide_lend(at, place, &self.terms);
                if place.is_none() {
                    self.peer_grants.prepare(key, stream, &mut self.output);
                }
                self.output.mark_send(key, stream);
            }
            (None, Some(LentPlace { lease, .. })) => self.lease_ended(lease),
            (None, None) => {}
        }
    }

    /// Whether this side may lend more bytes: the connection is neither closing nor closed, and
    /// fewer than `MAX_LEASES` of this side's leases are open.
    pub fn may_lend(&self) -> bool {
        self.is_live() && self.leases.may_lend()
    }

    /// Ends a lease that no LENT has announced to the peer.
    pub(super) fn lease_ended(&mut self, lease: u32) {
        self.leases.ended();
        self.events.push_back(Event::LeaseEnded { lease });
    }

    /// Returns a lease of [`Event::Lent`], because nobody reads the bytes any longer. Does nothing
    /// if the lease has already been returned.
    pub fn return_lease(&mut self, lease: u32) {
        if self.leases.give_back(lease) {
            self.output.control.push(Frame::Return { lease });
        }
    }

    /// The numbers of leases that have not ended: this side's and the peer's.
    pub fn leases(&self) -> (usize, usize) {
        self.leases.counts()
    }

    /// The bytes that all streams hold.
    #[cfg(test)]
    pub(super) fn held(&self) -> u64 {
        self.landing.unread.held(&self.streams)
    }
}
