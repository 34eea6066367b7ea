//! A connection as a whole: its parts, its timers and its end.

use std::collections::VecDeque;
use std::time::Instant;

use super::credits::Credits;
use super::heartbeat::Beat;
use super::keep_alive::KeepAliveCheck;
use super::landing::Landing;
use super::leases::Leases;
use super::lifecycle::{Life, Lifecycle, clip};
use super::output_queue::OutputQueue;
use super::peer_grants::PeerGrants;
use super::send_half::SendState;
use super::streams::Streams;
use super::timers::Timers;
use super::types::{CreditCounts, Event, Pending, Side, Stats};
use crate::config::Config;
use crate::config::Terms;
use crate::error::{Breach, CloseCode};
use crate::frame::Frame;
use crate::headers::table::Received;
use crate::hello::PeerSettings;
use crate::ids::StreamId;

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

    /// Returns the next event that the driver has to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether this side awaits a proof or the answer to a keep-alive PING, so that
    /// [`Connection::next_timeout`] may be the deadline for the proof or answer. The state changes
    /// as soon as anything is received.
    pub fn is_asking(&self) -> bool {
        self.timers.is_asking()
    }

    /// Records a proof that the peer's end of the link exists, such as the answer to an
    /// [`Event::Probe`].
    pub fn peer_exists(&mut self, now: Instant) {
        self.timers.heartbeat.received(now);
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

    /// Returns when [`Connection::handle_timeout`] is due next.
    pub fn next_timeout(&self) -> Option<Instant> {
        if !self.is_live() {
            return None;
        }
        let answers = self.landing.clock.deadline(self.timers.heartbeat.last_received());
        let others = [self.landing.grants.recall_deadline(), answers];
        others.into_iter().chain([self.timers.deadline()]).flatten().min()
    }

    /// Handles the timers. Received messages must be passed to [`receive`](Self::receive) first.
    ///
    /// # Errors
    /// The peer has kept memory for too long while others wait for it. The connection is closing,
    /// as after a breach in [`receive`](Self::receive).
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Breach> {
        if !self.is_live() {
            return Ok(());
        }
        if self.timers.is_silent(now) {
            self.check_quiet(now);
        }
        match self.timers.heartbeat.timeout(now, self.is_idle()) {
            Beat::Nothing | Beat::Rest => {}
            Beat::Probe => self.events.push_back(Event::Probe),
            Beat::Dead => {
                self.end_life();
                self.events.push_back(Event::Dead);
                return Ok(());
            }
        }
        match self.timers.check_keep_alive(now, !self.streams.is_empty()) {
            KeepAliveCheck::Nothing => {}
            KeepAliveCheck::Ping => self.send_ping(),
            KeepAliveCheck::Dead => {
                self.end_life();
                self.events.push_back(Event::KeepAliveTimedOut);
                return Ok(());
            }
        }
        if self.landing.grants.recall_deadline().is_some_and(|at| now >= at) {
            self.recall_standing();
        }
        if self.timers.retires_recv(now, self.credits.has_extra()) {
            self.send_ping();
        }
        let handed_out = self.output.control.handed_out();
        let owed = self.landing.tick(now, &self.streams, handed_out);
        if let Err(breach) = &owed {
            self.close(CloseCode::Breach, &breach.to_string());
        }
        owed
    }

    /// Sends a PING, unless an earlier PING is unanswered. Callers use a PING if they need some
    /// message to be sent.
    pub fn send_ping(&mut self) {
        if self.is_live() && !self.timers.heartbeat.awaits_pong() {
            self.timers.heartbeat.count_ping();
            let token = self.stats.messages_received;
            self.output.control.push(Frame::Ping { ack: false, token });
        }
    }

    /// Whether the connection may rest: it is quiet, and neither side waits for the other side or
    /// holds any of its memory. A connection does not rest before the client's first message, or
    /// when either side is going away.
    fn is_idle(&self) -> bool {
        let is_open = self.life.is_open() && self.life.greeted;
        let owes = self.output.has_output()
            || self.timers.heartbeat.awaits_pong()
            || self.has_extra_recvs();
        is_open && !owes && self.timers.is_quiet() && self.pending() == Pending::default()
    }

    /// Checks whether the connection has become quiet. Called when the timer finds that nothing has
    /// been received for a while, and when a PING or the answer to a PING has been received.
    pub(super) fn check_quiet(&mut self, now: Instant) {
        if self.timers.becomes_quiet(now, self.credits.has_extra()) {
            self.streams.shrink();
            self.credits.clear_short();
            self.events.push_back(Event::Quiet);
        }
    }

    /// Whether the connection is neither closed nor closing.
    pub(super) fn is_live(&self) -> bool {
        self.life.is_live()
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
            self.life.stage = Lifecycle::Closing;
            let close = Frame::Close { code: code.to_wire(), text: clip(text) };
            self.output.control.close(close);
        }
    }

    /// Ends the connection: nothing more is sent or expected.
    pub(super) fn end_life(&mut self) {
        self.life.stage = Lifecycle::Closed;
        self.output.control.shut();
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
            self.prepare(key);
        }
    }
}
