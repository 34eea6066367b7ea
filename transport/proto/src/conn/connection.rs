//! The state of a connection, and the methods that concern it as a whole.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::answer_clock::AnswerClock;
use super::credits::Credits;
use super::grants::Grants;
use super::heartbeat::{Beat, Heartbeat, QUIET};
use super::keep_alive::{Check, KeepAliveTimer};
use super::leases::Leases;
use super::peer_grants::PeerGrants;
use super::reset_limit::ResetLimit;
use super::send_queue::SendQueue;
use super::stream::SendState;
use super::streams::Streams;
use super::types::{Event, Pending, Side, Stats};
use crate::config::Config;
use crate::error::Breach;
use crate::frame::{FRAME_HEADER, Frame, MESSAGE_HEADER};
use crate::headers::table::Received;
use crate::hello::PeerSettings;
use crate::ids::StreamId;

/// Time between the PINGs of a quiet connection with extra RECVs. Each of them retires one RECV.
pub(super) const RETIRE_INTERVAL: Duration = Duration::from_micros(156_250);

/// Life of a connection.
///
/// | from | go_away here | GOAWAY acknowledged | close here | CLOSE emitted | CLOSE received, dead peer |
/// |---|---|---|---|---|---|
/// | Open | server Draining, client Drained | breach | Closing | | Closed |
/// | Draining | | Drained | Closing | | Closed |
/// | Drained | | breach | Closing | | Closed |
/// | Closing | | | | Closed | |
/// | Closed | | | | | |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lifecycle {
    Open,
    /// GOAWAY has been queued, and the peer may still open streams (server).
    Draining,
    /// The peer opens no more streams.
    Drained,
    /// CLOSE is still to be sent, and nothing else happens.
    Closing,
    Closed,
}

/// One side of a connection. See the [crate docs](crate) for how it is driven.
pub struct Connection {
    pub(super) side: Side,
    pub(super) config: Config,
    pub(super) peer: PeerSettings,
    pub(super) lifecycle: Lifecycle,
    pub(super) credits: Credits,
    pub(super) heartbeat: Heartbeat,
    pub(super) keep_alive: Option<KeepAliveTimer>,
    pub(super) streams: Streams,
    pub(super) output: SendQueue,
    pub(super) answer_clock: AnswerClock,
    pub(super) resets: ResetLimit,
    /// The header table for receiving, which mirrors the peer's.
    pub(super) received_fields: Received,
    pub(super) events: VecDeque<Event>,
    pub(super) grants: Grants,
    pub(super) landing_queue: VecDeque<usize>,
    /// Streams that want landing memory beyond what may be unread: until a reader waits for them,
    /// or others have been read.
    pub(super) parked: VecDeque<usize>,
    /// Streams that want memory which this side names.
    pub(super) named_queue: VecDeque<usize>,
    pub(super) leases: Leases,
    pub(super) peer_grants: PeerGrants,
    /// The client's first message has been sent (client) or received (server). The client sends it
    /// even if it is empty, and the server sends nothing before.
    pub(super) greeting_done: bool,
    /// The peer's GOAWAY has been received.
    pub(super) peer_going_away: bool,
    /// When a message with more than PINGs was last received; `None` once the connection is quiet.
    pub(super) last_activity: Option<Instant>,
    /// When the next PING is due that retires an extra RECV of a quiet connection.
    pub(super) retire_recv_at: Option<Instant>,
    pub(super) stats: Stats,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("side", &self.side)
            .field("lifecycle", &self.lifecycle)
            .field("credits", &self.credits)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}

impl Connection {
    fn new(side: Side, config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection {
            side,
            lifecycle: Lifecycle::Open,
            credits: Credits::new(&config, &peer),
            heartbeat: Heartbeat::new(config.liveness, now),
            keep_alive: config.keep_alive.map(|keep| KeepAliveTimer::new(keep.within_a_day(), now)),
            streams: Streams::new(peer.stream_window, config.stream_window),
            output: SendQueue::new(),
            answer_clock: AnswerClock::default(),
            resets: ResetLimit::new(config.max_streams, now),
            received_fields: Received::default(),
            events: VecDeque::new(),
            grants: Grants::new(&config, now),
            landing_queue: VecDeque::new(),
            parked: VecDeque::new(),
            named_queue: VecDeque::new(),
            leases: Leases::default(),
            peer_grants: PeerGrants::new(side, peer.align),
            greeting_done: false,
            peer_going_away: false,
            last_activity: None,
            retire_recv_at: None,
            stats: Stats::default(),
            config,
            peer,
        }
    }

    /// The connecting side, with the settings of the peer's [`crate::Accept`]. `config` has been
    /// checked ([`Config::check`]) and is what the [`crate::Hello`] stated.
    pub fn client(config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection::new(Side::Client, config, peer, now)
    }

    /// The accepting side, with the settings of the peer's [`crate::Hello`]. `config` has been
    /// checked and is what the [`crate::Accept`] stated.
    pub fn server(config: Config, peer: PeerSettings, now: Instant) -> Self {
        Connection::new(Side::Server, config, peer, now)
    }

    /// Which side this is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Maximum length in bytes of a piece that is sent eagerly. Longer pieces are sent by WRITE. A
    /// piece that is longer than the next RECV goes in several messages.
    pub fn eager_limit(&self) -> usize {
        self.peer.slot_size as usize - MESSAGE_HEADER - FRAME_HEADER
    }

    /// Counters since the start.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Returns what is still open.
    pub fn pending(&self) -> Pending {
        Pending {
            streams: self.streams.len(),
            grants: self.grants.outstanding(),
            peer_grants: self.peer_grants.len(),
        }
    }

    /// Whether [`Connection::open`] may succeed, now or when a stream ends.
    pub fn takes_streams(&self) -> bool {
        self.lifecycle == Lifecycle::Open && !self.peer_going_away && self.streams.has_ids()
    }

    /// Whether one more stream may be opened now.
    pub fn has_stream_room(&self) -> bool {
        self.streams.len() < self.peer.max_streams as usize
    }

    /// Whether the peer may know of the stream, because its first frame has been handed out. True
    /// for streams that have ended.
    pub fn is_transmitted(&self, id: StreamId) -> bool {
        self.streams.is_known(id.0) || self.streams.key(id.0).is_none()
    }

    /// Whether the peer has run short of credits, or of room in RECVs of
    /// [`rest_slot_size`](field@Config::rest_slot_size), and [`max_recvs`](Config::max_recvs)
    /// allows more RECVs. If so, the driver should post some, if there is memory, and call
    /// [`recvs_posted`](Self::recvs_posted). To be checked after each message.
    pub fn wants_recvs(&self) -> bool {
        self.is_live() && self.credits.wants_more()
    }

    /// Tells the connection that `recvs` extra RECVs of [`slot_size`](Config::slot_size) have been
    /// posted, for which the peer gets credits. 0 means that there was no memory; the connection
    /// then waits before it wants some again.
    pub fn recvs_posted(&mut self, recvs: u32) {
        self.credits.add_recvs(recvs);
    }

    /// Tells the connection that the RECV of the last message is not posted again: see
    /// [`Event::Quiet`]. To be called after [`receive`](Self::receive), for an extra RECV, or for
    /// one of those at the start while extra ones are posted.
    pub fn recv_gone(&mut self) {
        self.credits.remove_recv();
    }

    /// Tells the connection that `recvs` of the RECVs at the start are posted again, which had been
    /// left out while extra ones were: see [`Event::Quiet`].
    pub fn rest_recvs_posted(&mut self, recvs: u32) {
        self.credits.add_rest_recvs(recvs);
    }

    /// Whether extra RECVs are posted.
    pub fn has_extra_recvs(&self) -> bool {
        self.credits.has_extra()
    }

    /// Whether the peer has sent nothing by WRITE for [`idle_recall`](Config::idle_recall), so that
    /// idle landing memory may be returned.
    pub fn lands_nothing(&self, now: Instant) -> bool {
        self.grants.is_idle(now)
    }

    /// Returns the next event that the driver has to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether a proof, or an answer to a PING, is awaited, so that [`Connection::next_timeout`]
    /// may be the end of the peer's time to answer. It changes as soon as anything is received.
    pub fn is_asking(&self) -> bool {
        self.heartbeat.is_asking() || self.keep_alive.as_ref().is_some_and(|k| k.is_asking())
    }

    /// Tells the connection that the peer's end of the link exists: the answer to
    /// [`Event::Probe`], or any other proof.
    pub fn peer_exists(&mut self, now: Instant) {
        self.heartbeat.received(now);
    }

    /// A message has been received.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heartbeat.received(now);
        if let Some(keep_alive) = &mut self.keep_alive {
            keep_alive.received();
        }
    }

    /// Whether nothing is open and nothing has been received for a while but PINGs, so that
    /// [`Connection::next_timeout`] is far away, or never. It changes with the next other message,
    /// and when this side opens something: see [`Connection::is_roused`].
    pub fn is_resting(&self) -> bool {
        self.heartbeat.is_resting()
    }

    /// Whether this side has opened something while the connection was at rest, so that
    /// [`Connection::handle_timeout`] is due at once. To be checked after [`Connection::open`].
    pub fn is_roused(&self) -> bool {
        self.heartbeat.is_roused()
    }

    /// Returns when [`Connection::handle_timeout`] is due next.
    pub fn next_timeout(&self) -> Option<Instant> {
        if !self.is_live() {
            return None;
        }
        let heartbeat = self.heartbeat.deadline();
        let keep_alive = self.keep_alive.as_ref().and_then(|keep_alive| {
            keep_alive.deadline(self.heartbeat.last_received(), self.heartbeat.is_resting())
        });
        let others = [self.grants.recall_deadline(), self.retire_recv_at, self.answers_due()];
        others.into_iter().chain([heartbeat, keep_alive]).flatten().min()
    }

    /// Handles the timers. Received messages must be passed to [`receive`](Self::receive) first.
    ///
    /// # Errors
    /// The peer has kept memory that others wait for, which is its fault. The connection is
    /// closing, as after a breach in [`receive`](Self::receive).
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Breach> {
        if !self.is_live() {
            return Ok(());
        }
        if self.heartbeat.deadline().is_some_and(|at| now >= at) {
            self.check_quiet(now);
        }
        match self.heartbeat.timeout(now, self.is_idle()) {
            Beat::Nothing | Beat::Rest => {}
            Beat::Probe => self.events.push_back(Event::Probe),
            Beat::Dead => {
                self.end_life();
                self.events.push_back(Event::Dead);
                return Ok(());
            }
        }
        let (last, streams) = (self.heartbeat.last_received(), !self.streams.is_empty());
        match self.keep_alive.as_mut().map(|keep_alive| keep_alive.timeout(now, last, streams)) {
            None | Some(Check::Nothing) => {}
            Some(Check::Ping) => self.send_ping(),
            Some(Check::Dead) => {
                self.end_life();
                self.events.push_back(Event::KeepAliveTimedOut);
                return Ok(());
            }
        }
        if self.grants.recall_deadline().is_some_and(|at| now >= at) {
            self.recall_standing();
        }
        if self.retire_recv_at.is_some_and(|at| now >= at) {
            self.send_ping();
            self.retire_recv_at = self.has_extra_recvs().then(|| now + RETIRE_INTERVAL);
        }
        self.tick_answers(now)
    }

    /// Sends a PING, unless the answer to one is outstanding: for a caller that needs a message to
    /// be sent.
    pub fn send_ping(&mut self) {
        if self.is_live() && !self.heartbeat.awaits_pong() {
            self.heartbeat.count_ping();
            let token = self.stats.messages_received;
            self.output.control.push(Frame::Ping { ack: false, token });
        }
    }

    /// Whether neither side waits for the other, or keeps anything of the other's. A client that
    /// has not sent its first message is waited for.
    fn is_idle(&self) -> bool {
        let is_open =
            self.lifecycle == Lifecycle::Open && !self.peer_going_away && self.greeting_done;
        let owes =
            self.output.has_output() || self.heartbeat.awaits_pong() || self.has_extra_recvs();
        is_open && !owes && self.last_activity.is_none() && self.pending() == Pending::default()
    }

    /// A message with more than PINGs has been received.
    pub(super) fn is_active(&mut self, now: Instant) {
        (self.last_activity, self.retire_recv_at) = (Some(now), None);
        self.heartbeat.active(now);
    }

    /// Checks whether the connection has become quiet. Called when the timer finds nothing received
    /// for a while, and when the peer has sent a PING.
    pub(super) fn check_quiet(&mut self, now: Instant) {
        if self.last_activity.is_some_and(|at| now.saturating_duration_since(at) >= QUIET) {
            self.last_activity = None;
            self.streams.shrink();
            self.credits.clear_short();
            self.retire_recv_at = self.has_extra_recvs().then_some(now);
            self.events.push_back(Event::Quiet);
        }
    }

    /// Whether the connection is neither closed nor closing.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self.lifecycle, Lifecycle::Closing | Lifecycle::Closed)
    }

    /// Nothing more is sent or expected.
    pub(super) fn end_life(&mut self) {
        self.lifecycle = Lifecycle::Closed;
        self.output.control.shut();
    }

    pub(super) fn remove_if_done(&mut self, key: usize) {
        let stream = &self.streams[key];
        if stream.send.state.is_done() && stream.recv.state.is_done() {
            if stream.send.state == SendState::Ended {
                self.resets.answered();
            }
            self.remove(key);
        }
    }

    /// Removes a stream. One that has ended is in no queue; one that was aborted may be.
    pub(super) fn remove(&mut self, key: usize) {
        let stream = self.streams.remove(key);
        self.settle_removed(&stream);
        self.output.remove(key, &stream);
        if stream.queues.landing {
            self.landing_queue.retain(|k| *k != key);
        }
        if stream.queues.parked {
            self.parked.retain(|k| *k != key);
        }
        if stream.queues.naming {
            self.named_queue.retain(|k| *k != key);
        }
    }
}
