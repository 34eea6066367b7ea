//! A connection as a whole: its parts, its streams, its memory and its end.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;

use super::credits::Credits;
use super::landing::Landing;
use super::leases::Leases;
use super::lifecycle::{Life, Lifecycle, clip};
use super::output_queue::OutputQueue;
use super::peer_grants::PeerGrants;
use super::send_half::{QueuedPiece, SendState};
use super::stream::DroppedOutput;
use super::streams::Streams;
use super::timers::Timers;
use super::types::{
    CreditCounts, Event, Flow, GrantMemory, LandingWant, NamedWant, Pending, SendError, Side,
    Stats, Unsent, WantKey,
};
use crate::config::{Config, Terms};
use crate::error::CloseCode;
use crate::frame::Frame;
use crate::headers::table::Received;
use crate::hello::PeerSettings;
use crate::ids::{ResetCode, StreamId};
use crate::payload::{LentPlace, Payload};

/// One side of a connection. See the [crate docs](crate) for how it is driven.
pub struct Connection {
    pub(super) terms: Terms,
    pub(super) life: Life,
    pub(super) credits: Credits,
    pub(super) timers: Timers,
    pub(super) streams: Streams,
    pub(super) output: OutputQueue,
    pub(super) peer_grants: PeerGrants,
    pub(super) landing: Landing,
    pub(super) leases: Leases,
    /// The header table for receiving, which mirrors the peer's.
    pub(super) received_fields: Received,
    pub(super) events: VecDeque<Event>,
    pub(super) stats: Stats,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("life", &self.life)
            .field("credits", &self.credits)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}

impl Connection {
    fn new(side: Side, config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection {
            life: Life::new(side),
            credits: Credits::new(&config, &peer),
            timers: Timers::new(&config, now),
            streams: Streams::new(&config, &peer, now),
            output: OutputQueue::new(),
            peer_grants: PeerGrants::new(side, peer.align),
            landing: Landing::new(side, &config, now),
            leases: Leases::default(),
            received_fields: Received::default(),
            events: VecDeque::new(),
            stats: Stats::default(),
            terms: Terms { own: config, peer },
        }
    }

    /// Creates the connecting side, with the settings of the peer's [`crate::Accept`]. `config`
    /// must have passed [`Config::check`] and be the configuration that the [`crate::Hello`]
    /// stated.
    pub fn client(config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection::new(Side::Client, config, peer, now)
    }

    /// Creates the accepting side, with the settings of the peer's [`crate::Hello`]. `config` must
    /// have passed [`Config::check`] and be the configuration that the [`crate::Accept`] stated.
    pub fn server(config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection::new(Side::Server, config, peer, now)
    }

    /// Which side this is.
    pub fn side(&self) -> Side {
        self.life.side
    }

    /// Maximum length in bytes of a piece that is sent eagerly. Longer pieces are sent by WRITE. An
    /// eager piece that is longer than the next RECV is sent in several messages.
    pub fn eager_limit(&self) -> usize {
        self.terms.eager_limit()
    }

    /// Counters since the start.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Body bytes sent and received by any method, since the connection began.
    #[inline]
    pub fn body_bytes(&self) -> u64 {
        self.stats.body_bytes()
    }

    /// The numbers of streams and grants that are still open.
    pub fn pending(&self) -> Pending {
        Pending {
            streams: self.streams.len(),
            grants: self.landing.grants.len(),
            peer_grants: self.peer_grants.len(),
        }
    }

    /// The credits that both sides have.
    pub fn credits(&self) -> CreditCounts {
        CreditCounts { own: self.credits.available(), peer: self.credits.peer_available() }
    }

    /// Whether new streams may be opened.
    pub fn takes_streams(&self) -> bool {
        self.life.is_open() && self.streams.has_ids()
    }

    /// How many streams the peer allows this side to have open.
    pub fn peer_max_streams(&self) -> u32 {
        self.terms.peer.max_streams
    }

    /// Whether a stream waits until the peer allows one more stream: see [`Connection::open`].
    #[inline]
    pub fn is_waiting(&self, id: StreamId) -> bool {
        self.streams.is_waiting(id.0)
    }

    /// Whether the peer may know of the stream, because the stream's first frame has been handed
    /// out. Also true for streams that have ended.
    pub fn is_transmitted(&self, id: StreamId) -> bool {
        self.streams.is_known(id.0) || self.streams.key(id.0).is_none()
    }

    /// Whether this side awaits a proof or the answer to a keep-alive PING, so that
    /// [`Connection::next_timeout`] may be the deadline for the proof or answer. The state changes
    /// as soon as anything is received.
    pub fn is_asking(&self) -> bool {
        self.timers.is_asking()
    }

    /// Whether nothing is open and only PINGs have been received for a while, so that
    /// [`Connection::next_timeout`] is far away, or `None`. The state changes with the next message
    /// that holds a frame other than PING, and when this side opens something: see
    /// [`Connection::is_roused`].
    pub fn is_resting(&self) -> bool {
        self.timers.heartbeat.is_resting()
    }

    /// Whether this side has opened something while the connection was at rest, so that
    /// [`Connection::handle_timeout`] is due at once. Call this function after
    /// [`Connection::open`].
    pub fn is_roused(&self) -> bool {
        self.timers.heartbeat.is_roused()
    }

    /// Records a proof that the peer's end of the link exists, such as the answer to an
    /// [`Event::Probe`].
    pub fn peer_exists(&mut self, now: Instant) {
        self.timers.heartbeat.received(now);
    }

    /// Returns the next event that the driver has to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Connection::poll_event`] returns anything.
    #[inline]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Opens a stream with a header block (client only). `end` means that no body follows.
    ///
    /// If the peer allows no more streams, the stream waits: nothing of it is sent until other
    /// streams have ended. Streams begin in the order in which they were opened.
    ///
    /// # Errors
    /// [`SendError::GoingAway`], [`SendError::HeadersTooLong`]. On an error the connection is
    /// unchanged.
    pub fn open(&mut self, block: Bytes, end: bool) -> Result<StreamId, SendError> {
        if self.life.side == Side::Server || !self.takes_streams() {
            return Err(SendError::GoingAway);
        }
        check_block(&block, &self.terms.peer)?;
        let (id, key) = self.streams.open().ok_or(SendError::GoingAway)?;
        self.streams[key].send.peer_names = self.peer_grants.names_requests();
        self.timers.heartbeat.rouse();
        self.push_headers(key, block, end);
        Ok(StreamId(id))
    }

    /// Queues a header block: response headers, or trailers with `end`.
    ///
    /// # Errors
    /// [`SendError::Closed`], [`SendError::HeadersTooLong`].
    pub fn send_headers(&mut self, id: StreamId, block: Bytes, end: bool) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        check_block(&block, &self.terms.peer)?;
        self.push_headers(key, block, end);
        Ok(())
    }

    /// Like [`Connection::send_payload`], for a piece in one segment. `pinned` means that the piece
    /// lies in memory that the device can read.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn send_data(
        &mut self,
        id: StreamId,
        bytes: Bytes,
        pinned: bool,
        end: bool,
    ) -> Result<(), SendError> {
        let mut payload = Payload::new();
        payload.push(bytes, pinned);
        self.send_payload(id, payload, end)
    }

    /// Queues a piece of the body. If [`Connection::has_room`] is false, the caller should wait for
    /// [`Event::Writable`] first, but the piece is accepted in any case.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn send_payload(
        &mut self,
        id: StreamId,
        payload: Payload,
        end: bool,
    ) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        if payload.is_empty() && !end {
            return Ok(());
        }
        let stream = &mut self.streams[key];
        self.output.add(stream, payload.len());
        match stream.send.queue_payload(payload, end, &self.terms) {
            QueuedPiece::Bulk if !stream.queues.waits => {
                self.peer_grants.prepare(key, stream, &mut self.output);
            }
            QueuedPiece::Lend if !stream.queues.waits => self.leases.queue(stream),
            QueuedPiece::Eager | QueuedPiece::Bulk | QueuedPiece::Lend => {}
        }
        self.output.mark_send(key, stream);
        Ok(())
    }

    /// Ends this side's half of the stream after the queued output.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn finish(&mut self, id: StreamId) -> Result<(), SendError> {
        self.send_payload(id, Payload::new(), true)
    }

    /// Whether more output may be queued without waiting. False for a closed stream. If an open
    /// stream has no room, [`Event::Writable`] follows once it has room.
    pub fn has_room(&mut self, id: StreamId) -> bool {
        let Ok(key) = self.open_for_sending(id) else { return false };
        self.output.has_room(&mut self.streams[key])
    }

    /// Whether the stream accepts output at all.
    pub fn is_open_for_sending(&self, id: StreamId) -> bool {
        self.open_for_sending(id).is_ok()
    }

    fn open_for_sending(&self, id: StreamId) -> Result<usize, SendError> {
        let key = self.streams.key(id.0).ok_or(SendError::Closed)?;
        if self.is_live() && self.streams[key].send.state.accepts() {
            Ok(key)
        } else {
            Err(SendError::Closed)
        }
    }

    fn push_headers(&mut self, key: usize, block: Bytes, end: bool) {
        let stream = &mut self.streams[key];
        stream.send.queue_headers(block, end);
        self.output.mark_send(key, stream);
    }

    /// Records that the application has read `len` bytes of a stream, accounted as `flow`. The
    /// stream may have ended. Does nothing for unknown streams.
    pub fn consume(&mut self, id: StreamId, len: u32, flow: Flow) {
        match (self.streams.find(id), flow) {
            (Some((key, stream)), Flow::Bulk) => self.landing.consume(key, stream, len),
            (None, Flow::Bulk) => self.landing.unread.read_of_ended(id, len),
            (Some((_, stream)), Flow::Window) => {
                if let Some(increment) = self.landing.unread.read_small(stream, len) {
                    self.output.control.push(Frame::Window { stream: id.0, increment });
                }
            }
            (None, Flow::Window) | (_, Flow::Named | Flow::Lent) => {}
        }
    }

    /// Resets a stream: drops its output, discards bytes that still arrive, and sends RESET. Does
    /// nothing for streams that are unknown or have ended.
    pub fn reset(&mut self, id: StreamId, code: ResetCode) {
        let Some(key) = self.streams.key(id.0) else { return };
        let Some(dropped) = self.streams[key].reset_by_us() else { return };
        self.give_up(dropped);
        if !self.streams.is_known(id.0) {
            // Send no RESET, because the peer does not know the stream.
            self.remove(key);
            return;
        }
        self.output.control.reset(&mut self.streams[key], code);
        self.remove_if_done(key);
    }

    /// Releases a stream that the application has dropped and will read no further, even if the
    /// stream has ended. Like [`Connection::reset`], except that a server still sends a response
    /// that has been queued completely.
    pub fn release(&mut self, id: StreamId, code: ResetCode) {
        match self.streams.find(id) {
            Some((_, stream)) => stream.recv.released = true,
            None => self.landing.unread.release_ended(id),
        }
        let ending = |key| self.streams[key].send.state == SendState::Ending;
        if self.life.side == Side::Client || !self.streams.key(id.0).is_some_and(ending) {
            self.reset(id, code);
        }
    }

    /// Takes back the output that was queued on a stream after its header block. Returns nothing if
    /// the peer may know the stream, or if there is no such stream.
    pub fn withdraw(&mut self, id: StreamId) -> Vec<Unsent> {
        let Some(key) = self.streams.key(id.0).filter(|_| !self.streams.is_known(id.0)) else {
            return Vec::new();
        };
        let (unsent, dropped) = self.streams[key].take_unsent();
        self.give_up(dropped);
        unsent
    }

    /// Whether the peer has run short of credits, or of room in RECVs of
    /// [`rest_slot_size`](field@Config::rest_slot_size), and [`max_recvs`](Config::max_recvs)
    /// allows more RECVs. The driver should then post further RECVs, if there is memory, and call
    /// [`recvs_posted`](Self::recvs_posted). Call this function after each message.
    pub fn wants_recvs(&self) -> bool {
        self.is_live() && self.credits.wants_more()
    }

    /// Tells the connection that `recvs` extra RECVs of [`slot_size`](Config::slot_size) have been
    /// posted, for which the peer gets credits. 0 means that there was no memory; the connection
    /// then waits before it wants more RECVs again.
    pub fn recvs_posted(&mut self, recvs: u32) {
        self.credits.add_recvs(recvs);
    }

    /// Tells the connection that the RECV of the last message is not posted again: see
    /// [`Event::Quiet`]. Call this function after [`receive`](Self::receive) if the message took an
    /// extra RECV, or a short RECV while extra RECVs are posted.
    pub fn recv_gone(&mut self) {
        self.credits.remove_recv();
    }

    /// Tells the connection that `recvs` short RECVs are posted again. The link had left these
    /// RECVs out while extra RECVs were posted: see [`Event::Quiet`].
    pub fn rest_recvs_posted(&mut self, recvs: u32) {
        self.credits.add_rest_recvs(recvs);
    }

    /// Whether extra RECVs are posted.
    pub fn has_extra_recvs(&self) -> bool {
        self.credits.has_extra()
    }

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

    /// Whether [`Connection::poll_landing`] or [`Connection::poll_named`] may return anything, now
    /// or under another [limit](Connection::limit_standing). False while a connection carries only
    /// small calls.
    #[inline]
    pub fn may_want_memory(&self) -> bool {
        self.landing.grants.gives_standing() || self.landing.streams_want(&self.streams)
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
    /// the limits of the [`Config`].
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
        self.landing.clock.stop();
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

    /// Whether [`Connection::poll_lend`] returns anything.
    #[inline]
    pub fn has_queued_lends(&self) -> bool {
        self.leases.has_queued()
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

    /// Whether [`Connection::poll_lend`] may return anything, now or after
    /// [`Connection::retry_lends`].
    #[inline]
    pub fn waits_to_lend(&self) -> bool {
        self.leases.has_queued() || self.leases.has_postponed()
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

    /// Begins to drain the connection. A client opens no more streams. A server sends GOAWAY, after
    /// which its client opens no more streams. Open streams continue, and streams that wait for the
    /// peer to allow one more stream still begin. `text` is truncated to 240 bytes. See
    /// [`Connection::is_drained`].
    pub fn go_away(&mut self, code: CloseCode, text: &str) {
        if self.life.stage != Lifecycle::Open {
            return;
        }
        self.timers.heartbeat.rouse();
        if self.life.go_away() {
            let frame = Frame::GoAway { ack: false, code: code.to_wire(), text: clip(text) };
            self.output.control.push(frame);
        }
    }

    /// Ends all streams that wait until the peer allows them, with [`Event::Refused`], so that they
    /// can be retried on another connection.
    pub fn refuse_waiting(&mut self) {
        self.refuse(self.streams.waiting());
    }

    /// Refuses streams that the peer does not know of, so that they can be retried elsewhere.
    pub(super) fn refuse(&mut self, streams: Vec<usize>) {
        for key in streams {
            let id = StreamId(self.streams[key].id);
            let unsent = self.withdraw(id);
            self.events.push_back(Event::Refused { stream: id, unsent });
            self.remove(key);
        }
    }

    /// Whether the drain is complete: no more streams will be opened, no stream is left, and no
    /// output waits.
    pub fn is_drained(&self) -> bool {
        let is_drained = self.life.stage == Lifecycle::Drained;
        is_drained && self.streams.is_empty() && !self.output.has_output()
    }

    /// Closes the connection. Only a CLOSE frame is still sent, with `text` truncated to 240 bytes;
    /// it may take the last credit. No event reports the end of the individual streams.
    pub fn close(&mut self, code: CloseCode, text: &str) {
        if self.is_live() {
            self.life.close();
            let close = Frame::Close { code: code.to_wire(), text: clip(text) };
            self.output.control.close(close);
        }
    }

    /// Whether the connection is neither closed nor closing.
    pub(super) fn is_live(&self) -> bool {
        self.life.is_live()
    }

    /// Ends the connection: nothing more is sent or expected.
    pub(super) fn end_life(&mut self) {
        self.life.end();
        self.output.control.shut();
    }

    /// Gives up the grants and leases of dropped output.
    pub(super) fn give_up(&mut self, dropped: DroppedOutput) {
        self.output.dropped(dropped.queued);
        for grant in dropped.grants {
            self.peer_grants.abort(grant, &mut self.output.control);
        }
        for lease in dropped.leases {
            self.lease_ended(lease);
        }
    }

    /// Removes a stream if both of its halves have ended.
    pub(super) fn remove_if_done(&mut self, key: usize) {
        let stream = &self.streams[key];
        if stream.is_done() {
            if stream.send.state == SendState::Ended {
                self.streams.resets.answered();
            }
            self.remove(key);
        }
    }

    /// Removes a stream, also from the queues in which a stream that was reset may still be. A
    /// stream that has ended is in no queue.
    pub(super) fn remove(&mut self, key: usize) {
        let stream = self.streams.remove(key);
        self.output.remove(key, &stream);
        self.landing.remove(key, &stream);
        self.admit();
    }

    /// Begins streams that have waited, as many as the peer now allows.
    #[inline]
    fn admit(&mut self) {
        // When the peer goes away, the streams that wait are refused.
        while self.life.admits()
            && let Some(key) = self.streams.admit()
        {
            let stream = &mut self.streams[key];
            self.output.admit(key, stream);
            self.leases.queue_all(stream);
            self.peer_grants.prepare(key, stream, &mut self.output);
        }
    }

    /// The bytes that all streams hold.
    #[cfg(test)]
    pub(super) fn held(&self) -> u64 {
        self.landing.unread.held(&self.streams)
    }
}

/// Checks the length of a header block against the peer's limit.
fn check_block(block: &Bytes, peer: &PeerSettings) -> Result<(), SendError> {
    let (len, limit) = (block.len(), peer.max_headers);
    if len > limit as usize { Err(SendError::HeadersTooLong { len, limit }) } else { Ok(()) }
}
