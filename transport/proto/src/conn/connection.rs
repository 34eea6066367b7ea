//! The state of a connection, and what is asked of it as a whole.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use slab::Slab;

use super::answer_clock::AnswerClock;
use super::credits::Credits;
use super::grants::Grants;
use super::heartbeat::{Beat, Heartbeat};
use super::id_map::Ids;
use super::reset_limit::ResetLimit;
use super::stream::{Out, PeerGrant, RecvHalf, SendHalf, Stream};
use super::types::{Event, Pending, Side, Stats};
use crate::config::Config;
use crate::error::Breach;
use crate::frame::{FRAME_HEADER, Frame, MESSAGE_HEADER};
use crate::headers::table::{Received, Sent};
use crate::hello::Settings;
use crate::ids::StreamId;

/// So many empty queues are kept, at most, of room for so many.
const SPARE: usize = 16;
/// A connection at rest that has RECVs to empty sends so many PINGs, at most, in the time after
/// which a silent peer is dead.
const SHED: u32 = 32;

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
pub(super) enum Phase {
    Open,
    /// GOAWAY is on its way; the peer may still open streams (server).
    Draining,
    /// No new streams come.
    Drained,
    /// CLOSE is to be sent, nothing else happens.
    Closing,
    Closed,
}

/// One side of a connection. See the [crate docs](crate) for how it is driven.
pub struct Connection {
    pub(super) side: Side,
    pub(super) config: Config,
    pub(super) peer: Settings,
    pub(super) phase: Phase,
    pub(super) credits: Credits,
    pub(super) heartbeat: Heartbeat,
    pub(super) ids: Ids<usize>,
    pub(super) streams: Slab<Stream>,
    /// Queues of streams that have ended, for those to come.
    pub(super) spare: Vec<VecDeque<Out>>,
    /// Highest stream id that was opened here (client).
    pub(super) last_opened: u32,
    /// Highest stream id that has been on the wire. Streams are transmitted in the order of their
    /// ids, so the peer may know of a stream exactly when its id is not above this one.
    pub(super) last_known: u32,
    /// Frames that do not wait for a stream's turn.
    pub(super) control: VecDeque<Frame>,
    /// Frames that have been taken out of `control`, since the start.
    pub(super) control_out: u64,
    pub(super) answer_clock: AnswerClock,
    /// Frames in `control`, at most, that answer the peer.
    pub(super) answers: usize,
    pub(super) resets: ResetLimit,
    /// The CLOSE frame, in [`Phase::Closing`].
    pub(super) close_frame: Option<Frame>,
    /// Header fields that the peer remembers, and that it wants remembered.
    pub(super) sent_fields: Sent,
    pub(super) received_fields: Received,
    pub(super) send_ready: VecDeque<usize>,
    /// Streams with a WRITE to hand out: those whose source is staged, those whose source is
    /// pinned.
    pub(super) write_ready: [VecDeque<usize>; 2],
    /// Whose turn it is.
    pub(super) write_turn: usize,
    pub(super) events: VecDeque<Event>,
    pub(super) grants: Grants,
    pub(super) landing_queue: VecDeque<usize>,
    /// Standing grants of the peer, unused.
    pub(super) standing: Vec<PeerGrant>,
    /// Grants of the peer that this side has not ended, with their streams. 0: a standing one, or
    /// one that was.
    pub(super) peer_grants: BTreeMap<u32, u32>,
    /// The client's first message goes out even if it is empty; the server waits for it.
    pub(super) greeted: bool,
    /// Alternates SENDs and WRITEs, so that neither starves the other.
    pub(super) wrote_last: bool,
    /// Output has waited for a credit since the last message.
    pub(super) starved: bool,
    /// Peer's GOAWAY received.
    pub(super) peer_going_away: bool,
    /// When more than a PING came last, if the connection has not been at rest since.
    pub(super) stirred: Option<Instant>,
    /// When the next RECV is to be emptied, by a PING that is answered, of those that a connection
    /// at rest has too many.
    pub(super) shed: Option<Instant>,
    pub(super) stats: Stats,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("side", &self.side)
            .field("phase", &self.phase)
            .field("credits", &self.credits)
            .field("streams", &self.streams.len())
            .finish_non_exhaustive()
    }
}

impl Connection {
    fn new(side: Side, config: Config, peer: Settings, now: Instant) -> Self {
        Connection {
            side,
            phase: Phase::Open,
            credits: Credits::new(&config, &peer),
            heartbeat: Heartbeat::new(config.dead_peer, now),
            ids: Ids::default(),
            streams: Slab::new(),
            spare: Vec::new(),
            last_opened: 0,
            last_known: 0,
            control: VecDeque::new(),
            control_out: 0,
            answer_clock: AnswerClock::default(),
            answers: 0,
            resets: ResetLimit::new(config.max_streams, now),
            close_frame: None,
            sent_fields: Sent::default(),
            received_fields: Received::default(),
            send_ready: VecDeque::new(),
            write_ready: [VecDeque::new(), VecDeque::new()],
            write_turn: 0,
            events: VecDeque::new(),
            grants: Grants::new(&config, now),
            landing_queue: VecDeque::new(),
            standing: Vec::new(),
            peer_grants: BTreeMap::new(),
            greeted: false,
            wrote_last: true,
            starved: false,
            peer_going_away: false,
            stirred: None,
            shed: None,
            stats: Stats::default(),
            config,
            peer,
        }
    }

    /// The connecting side, with the settings of the peer's [`crate::Accept`]. `config` has been
    /// checked ([`Config::check`]) and is what the [`crate::Hello`] stated.
    pub fn client(config: Config, peer: Settings, now: Instant) -> Self {
        Connection::new(Side::Client, config, peer, now)
    }

    /// The accepting side, with the settings of the peer's [`crate::Hello`]. `config` has been
    /// checked and is what the [`crate::Accept`] stated.
    pub fn server(config: Config, peer: Settings, now: Instant) -> Self {
        Connection::new(Side::Server, config, peer, now)
    }

    /// Which side this is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The longest piece of a body, in bytes, that both sides allow.
    pub fn max_message(&self) -> u64 {
        self.config.max_message.min(self.peer.max_message)
    }

    /// How long the peer may be silent.
    pub fn dead_peer(&self) -> Duration {
        self.config.dead_peer
    }

    /// Pieces of at most this many bytes go eagerly, longer ones by WRITE.
    pub fn eager_limit(&self) -> usize {
        self.peer.slot_size as usize - MESSAGE_HEADER - FRAME_HEADER
    }

    /// Counters since the start.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// What is still open.
    pub fn pending(&self) -> Pending {
        Pending {
            streams: self.streams.len(),
            grants: self.grants.outstanding(),
            peer_grants: self.peer_grants.len(),
        }
    }

    /// Whether [`Connection::open`] may succeed, now or when a stream ends.
    pub fn takes_streams(&self) -> bool {
        self.phase == Phase::Open && !self.peer_going_away && self.last_opened < u32::MAX
    }

    /// Whether one more stream may be opened now.
    pub fn has_stream_room(&self) -> bool {
        self.streams.len() < self.peer.max_streams as usize
    }

    /// Whether the peer may know of the stream: its first frame has been handed out. True for
    /// streams that have ended.
    pub fn is_transmitted(&self, id: StreamId) -> bool {
        id.0 <= self.last_known || !self.ids.contains_key(&id.0)
    }

    /// Whether the peer has run short of credits, and there may be more RECVs: post some, if there
    /// is memory, and tell with [`recvs_posted`](Self::recvs_posted). To be asked after each
    /// message.
    pub fn wants_recvs(&self) -> bool {
        self.is_live() && self.credits.wants_more()
    }

    /// So many RECVs have been posted on top of those that there were: the peer gets credits for
    /// them. 0 when there is no memory for any, which is not asked for again at once.
    pub fn recvs_posted(&mut self, recvs: u32) {
        self.credits.more(recvs);
    }

    /// The RECV that the last message came in has not been posted again, and will not be: see
    /// [`Event::Quiet`]. To be told after [`receive`](Self::receive), and never of more RECVs than
    /// [`recvs_posted`](Self::recvs_posted) has told of.
    pub fn recv_gone(&mut self) {
        self.credits.fewer();
    }

    /// Whether there are RECVs on top of those of the start.
    pub fn has_extra_recvs(&self) -> bool {
        self.credits.posted() > self.config.recv_slots.into()
    }

    /// Whether nothing has been sent here by WRITE for [`idle_recall`](Config::idle_recall):
    /// landing memory may go.
    pub fn lands_nothing(&self, now: Instant) -> bool {
        self.grants.is_idle(now)
    }

    /// The next thing to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Connection::next_timeout`] is the end of the peer's time to answer: it is sooner,
    /// or later, once anything has come.
    pub fn is_asking(&self) -> bool {
        self.heartbeat.is_asking()
    }

    /// When [`Connection::handle_timeout`] is due next.
    pub fn next_timeout(&self) -> Option<Instant> {
        if !self.is_live() {
            return None;
        }
        let others = [self.grants.recall_deadline(), self.shed, self.answers_due()];
        Some(others.into_iter().flatten().fold(self.heartbeat.deadline(), Instant::min))
    }

    /// Acts on the passing of time. Feed what has been received before calling it.
    ///
    /// # Errors
    /// The peer has not answered in time. The connection is closing, as after a breach in
    /// [`receive`](Self::receive).
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Breach> {
        if !self.is_live() {
            return Ok(());
        }
        match self.heartbeat.timeout(now) {
            Beat::Nothing => {}
            Beat::Ping => {
                self.rest(now);
                self.ping();
            }
            Beat::Dead => {
                self.phase = Phase::Closed;
                self.events.push_back(Event::Dead);
                return Ok(());
            }
        }
        if self.grants.recall_deadline().is_some_and(|at| now >= at) {
            self.recall_standing();
        }
        if self.shed.is_some_and(|at| now >= at) {
            if !self.heartbeat.waits() {
                self.heartbeat.asked();
                self.ping();
            }
            self.shed = self.has_extra_recvs().then(|| now + self.config.dead_peer / SHED);
        }
        self.tick_answers(now)
    }

    fn ping(&mut self) {
        let token = self.stats.messages_received;
        self.control.push_back(Frame::Ping { ack: false, token });
    }

    /// Finds out whether the connection has come to rest: either side has asked whether the other
    /// is there.
    pub(super) fn rest(&mut self, now: Instant) {
        let quarter = self.config.dead_peer / 4;
        if self.stirred.is_some_and(|at| now.saturating_duration_since(at) >= quarter) {
            self.stirred = None;
            self.credits.rested();
            self.shed = self.has_extra_recvs().then_some(now);
            self.events.push_back(Event::Quiet);
        }
    }

    /// Neither closed nor about to be.
    pub(super) fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Closing | Phase::Closed)
    }

    pub(super) fn insert(&mut self, id: u32, recv: RecvHalf) -> usize {
        let out = self.spare.pop().unwrap_or_default();
        let stream = Stream::new(id, recv, out, self.peer.stream_window, self.config.stream_window);
        let key = self.streams.insert(stream);
        self.ids.insert(id, key);
        key
    }

    pub(super) fn mark_send(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.in_send_ready {
            stream.in_send_ready = true;
            self.send_ready.push_back(key);
        }
    }

    pub(super) fn mark_write(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.in_write_ready
            && let Some(pinned) = stream.can_write()
        {
            stream.in_write_ready = true;
            let queue = &mut self.write_ready[usize::from(pinned)];
            match stream.hurried {
                0 => queue.push_back(key),
                _ => queue.push_front(key),
            }
        }
    }

    pub(super) fn remove_if_done(&mut self, key: usize) {
        let stream = &self.streams[key];
        if stream.send.is_done() && stream.recv.is_done() {
            if stream.send == SendHalf::Ended {
                self.resets.answered();
            }
            self.remove(key);
        }
    }

    /// A stream that ended well is in no queue; one that was cut off may be.
    pub(super) fn remove(&mut self, key: usize) {
        let mut stream = self.streams.remove(key);
        self.ids.remove(&stream.id);
        self.ends_with(&stream);
        if self.spare.len() < SPARE && stream.out.capacity() <= SPARE {
            stream.out.clear();
            self.spare.push(std::mem::take(&mut stream.out));
        }
        if stream.in_send_ready {
            self.send_ready.retain(|k| *k != key);
        }
        if stream.in_write_ready {
            for queue in &mut self.write_ready {
                queue.retain(|k| *k != key);
            }
        }
        if stream.in_landing_queue {
            self.landing_queue.retain(|k| *k != key);
        }
    }
}
