//! The connection.
//!
//! | file | what |
//! |---|---|
//! | `credits` | who may SEND |
//! | `stream` | a stream's two halves and their transition tables |
//! | `landing` | memory that is granted to the peer (receiving bulk) |
//! | `bulk` | memory that the peer has granted (sending bulk) |
//! | `receive` | messages in |
//! | `transmit` | messages and WRITEs out |
//! | `heartbeat` | PING, dead peer |
//!
//! # Bulk transfers
//!
//! A piece of a body that does not fit a control slot goes by WRITE, into memory that the receiver has
//! granted: a standing grant, advertised beforehand, or grants that answer a REQUEST. A receiver short of
//! memory grants less than was asked, and goes on when memory comes free. Every grant ends with DONE (its
//! bytes have been written) or ABORT (they will not be), both behind the last WRITE on the queue pair, so
//! that the receiver knows that nothing touches the memory any more (R4, R9).
//!
//! # Flow control
//!
//! Eager data and standing grants are bounded by the stream's window, which grows again as the application
//! reads. Requested grants are bounded by the receiver, which grants no more than `bulk_window` for a stream
//! at once. So a stream that is not read stops only itself (R13).

mod bulk;
mod credits;
mod heartbeat;
mod landing;
mod receive;
mod stream;
#[cfg(test)]
mod tests;
mod transmit;

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use bytes::Bytes;
use slab::Slab;

use self::credits::Credits;
use self::heartbeat::{Beat, Heartbeat};
use self::landing::Grants;
use self::stream::{Bulk, Out, PeerGrant, RecvHalf, SendHalf, Stream};
use crate::config::Config;
use crate::error::{Breach, CloseCode};
use crate::frame::{FRAME_HEADER, Frame, MAX_TEXT, MESSAGE_HEADER};
use crate::hello::Settings;
use crate::ids::{GrantId, ResetCode, StreamId};

/// Which side of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Connects, opens streams, sends first (iWARP wants the connecting side to).
    Client,
    /// Accepts.
    Server,
}

/// How received bytes are accounted until [`Connection::consume`] is told that they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Against the stream's window.
    Window,
    /// Against what the stream may hold of requested grants.
    Bulk,
}

/// What the driver has to act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The client opened a stream (server only).
    Opened {
        /// The stream.
        stream: StreamId,
        /// Its header block.
        block: Bytes,
        /// The client's half has ended.
        end: bool,
    },
    /// The response's header block, or trailers.
    Headers {
        /// The stream.
        stream: StreamId,
        /// The block.
        block: Bytes,
        /// The peer's half has ended: these are trailers, or a response of trailers only.
        end: bool,
    },
    /// Body bytes that came in a control message; counts as [`Flow::Window`].
    Data {
        /// The stream.
        stream: StreamId,
        /// The bytes: a slice of the message.
        data: Bytes,
        /// The peer's half has ended.
        end: bool,
    },
    /// Body bytes have been written to landing memory, which now belongs to this side again.
    Landed {
        /// The stream.
        stream: StreamId,
        /// The driver's key of the memory ([`GrantMemory::key`]).
        memory: usize,
        /// Bytes written, from the start of the memory.
        len: u32,
        /// How they count.
        flow: Flow,
        /// The peer's half has ended.
        end: bool,
    },
    /// Landing memory came back unused, or for a stream that nobody reads any more.
    Returned {
        /// The driver's key of the memory.
        memory: usize,
    },
    /// The peer reset the stream: it sends no more and wants no more. If its half had ended before, only
    /// this side's output is unwanted.
    Reset {
        /// The stream.
        stream: StreamId,
        /// Why.
        code: ResetCode,
    },
    /// There is room for more output on a stream that had reached its mark.
    Writable {
        /// The stream.
        stream: StreamId,
    },
    /// The stream was opened here but never transmitted, and will not be: the peer is going away.
    Refused {
        /// The stream.
        stream: StreamId,
    },
    /// The peer takes no new streams.
    GoAway {
        /// Why.
        code: CloseCode,
        /// Its text.
        text: String,
    },
    /// The peer closed the connection with an error.
    Closed {
        /// Why.
        code: CloseCode,
        /// Its text.
        text: String,
    },
    /// The peer has said nothing for the configured time, though asked.
    Dead,
}

/// Landing memory that the driver gives to the connection to grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMemory {
    /// The driver's key, returned in [`Event::Landed`] or [`Event::Returned`].
    pub key: usize,
    /// Address as the peer's WRITE names it.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Bytes.
    pub len: u32,
}

/// For what landing memory is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WantKey {
    /// A stream's request.
    Stream(StreamId),
    /// A standing grant.
    Standing,
}

/// Landing memory wanted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LandingWant {
    /// For what.
    pub key: WantKey,
    /// Best length in bytes.
    pub want: u32,
    /// Shortest useful length in bytes.
    pub min: u32,
}

/// What the driver can take now.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes of WRITEs.
    pub write: usize,
    /// Bytes of staging memory, for sources that are not pinned.
    pub staging: usize,
}

/// A WRITE to post.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What to write.
    pub src: Bytes,
    /// Whether the source was said to lie in pinned memory; otherwise it is staged.
    pub pinned: bool,
    /// Where to.
    pub addr: u64,
    /// The key to it.
    pub rkey: u32,
}

/// Work to post, in the order in which it was handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// The slot holds a message of this many bytes.
    Send(usize),
    /// A WRITE.
    Write(Write),
}

/// Why output was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The stream is closed for sending: reset, ended, or unknown.
    #[error("stream is closed for sending")]
    Closed,
    /// The peer takes no new streams: it is going away, or the connection is closed.
    #[error("the peer takes no new streams")]
    GoingAway,
    /// The peer's limit of streams is reached; a stream that ends makes room.
    #[error("the peer's limit of {0} streams is reached")]
    TooManyStreams(u32),
    /// A piece longer than the longest message that both sides allow.
    #[error("message of {len} bytes, the limit is {limit}")]
    TooLong {
        /// Bytes.
        len: u64,
        /// The lower of both sides' limits.
        limit: u64,
    },
    /// A header block longer than allowed.
    #[error("header block of {len} bytes, the limit is {limit}")]
    HeadersTooLong {
        /// Bytes.
        len: usize,
        /// The limit.
        limit: u32,
    },
    /// Stream ids are used up (2^32 - 1); the connection must be replaced.
    #[error("stream ids are used up")]
    IdsUsedUp,
}

/// Counters of one connection, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Body bytes sent in control messages.
    pub eager_sent: u64,
    /// Body bytes received in control messages.
    pub eager_received: u64,
    /// WRITEs handed out.
    pub writes: u64,
    /// Body bytes handed out as WRITEs.
    pub write_sent: u64,
    /// Body bytes received by WRITE.
    pub write_received: u64,
    /// Times that output had to wait for a credit.
    pub credit_waits: u64,
    /// Grants given.
    pub grants_given: u64,
}

/// What is still open, for drain and for tests that everything came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Open streams.
    pub streams: usize,
    /// Grants that the peer holds.
    pub grants: usize,
    /// Standing grants of the peer that this side holds.
    pub peer_grants: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// GOAWAY sent (server) or drain begun (client).
    Draining,
    /// Like Draining, and the peer has acknowledged.
    Drained,
    /// CLOSE is to be sent, nothing else happens.
    Closing,
    Closed,
}

/// Stream ids are checked to grow, so a peer cannot choose them to collide.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 << 8) ^ u64::from(*b);
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.0 = u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Ids<V> = HashMap<u32, V, BuildHasherDefault<IdHasher>>;

/// Output of a stream may queue up to this many bytes before the driver should wait.
const QUEUE_MARK: usize = 1 << 20;

/// One side of a connection. See the [crate docs](crate) for how it is driven.
pub struct Connection {
    side: Side,
    config: Config,
    peer: Settings,
    phase: Phase,
    credits: Credits,
    heartbeat: Heartbeat,
    ids: Ids<usize>,
    streams: Slab<Stream>,
    /// Highest stream id so far.
    last_stream: u32,
    /// Frames that do not wait for a stream's turn.
    control: VecDeque<Frame>,
    send_ready: VecDeque<usize>,
    write_ready: VecDeque<usize>,
    events: VecDeque<Event>,
    grants: Grants,
    landing_queue: VecDeque<usize>,
    /// Standing grants of the peer, unused.
    standing: Vec<PeerGrant>,
    /// Grants of the peer that this side has not ended.
    peer_grants: HashSet<u32>,
    /// The client's first message goes out even if it is empty; the server waits for it.
    greeted: bool,
    /// Alternates SENDs and WRITEs, so that neither starves the other.
    wrote_last: bool,
    /// Peer's GOAWAY received.
    peer_going_away: bool,
    stats: Stats,
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
            credits: Credits::new(config.recv_slots, peer.recv_slots),
            heartbeat: Heartbeat::new(config.dead_peer, now),
            ids: Ids::default(),
            streams: Slab::new(),
            last_stream: 0,
            control: VecDeque::new(),
            send_ready: VecDeque::new(),
            write_ready: VecDeque::new(),
            events: VecDeque::new(),
            grants: Grants::new(&config, now),
            landing_queue: VecDeque::new(),
            standing: Vec::new(),
            peer_grants: HashSet::new(),
            greeted: false,
            wrote_last: true,
            peer_going_away: false,
            stats: Stats::default(),
            config,
            peer,
        }
    }

    /// The connecting side, with the settings of the peer's [`crate::Accept`]. `config` has been checked
    /// ([`Config::check`]) and is what the [`crate::Hello`] stated.
    pub fn client(config: Config, peer: Settings, now: Instant) -> Self {
        Connection::new(Side::Client, config, peer, now)
    }

    /// The accepting side, with the settings of the peer's [`crate::Hello`].
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
        self.phase == Phase::Open && !self.peer_going_away
    }

    /// Whether one more stream may be opened now.
    pub fn has_stream_room(&self) -> bool {
        self.streams.len() < self.peer.max_streams as usize
    }

    /// Opens a stream with a header block (client only). `end`: no body follows.
    ///
    /// # Errors
    /// [`SendError::GoingAway`], [`SendError::TooManyStreams`], [`SendError::HeadersTooLong`],
    /// [`SendError::IdsUsedUp`]. Nothing has happened then.
    pub fn open(&mut self, block: Bytes, end: bool) -> Result<StreamId, SendError> {
        if self.side == Side::Server || !self.takes_streams() {
            return Err(SendError::GoingAway);
        }
        if !self.has_stream_room() {
            return Err(SendError::TooManyStreams(self.peer.max_streams));
        }
        self.check_block(&block)?;
        self.last_stream = self.last_stream.checked_add(1).ok_or(SendError::IdsUsedUp)?;
        let id = self.last_stream;
        let key = self.insert(id, RecvHalf::Headers);
        self.push_headers(key, block, end);
        Ok(StreamId(id))
    }

    fn insert(&mut self, id: u32, recv: RecvHalf) -> usize {
        let stream = Stream::new(id, recv, self.peer.stream_window, self.config.stream_window);
        let key = self.streams.insert(stream);
        self.ids.insert(id, key);
        key
    }

    fn check_block(&self, block: &Bytes) -> Result<(), SendError> {
        let limit = self.config.max_header_block;
        if block.len() > limit as usize {
            return Err(SendError::HeadersTooLong { len: block.len(), limit });
        }
        Ok(())
    }

    fn push_headers(&mut self, key: usize, block: Bytes, end: bool) {
        let stream = &mut self.streams[key];
        stream.out.push_back(Out::Headers { block, end });
        if end {
            stream.send = SendHalf::Ending;
        }
        self.mark_send(key);
    }

    fn open_for_sending(&self, id: StreamId) -> Result<usize, SendError> {
        let key = *self.ids.get(&id.0).ok_or(SendError::Closed)?;
        if self.streams[key].send.accepts() { Ok(key) } else { Err(SendError::Closed) }
    }

    /// Queues a header block: response headers, or trailers with `end`.
    ///
    /// # Errors
    /// [`SendError::Closed`], [`SendError::HeadersTooLong`].
    pub fn send_headers(&mut self, id: StreamId, block: Bytes, end: bool) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        self.check_block(&block)?;
        self.push_headers(key, block, end);
        Ok(())
    }

    /// Queues a piece of the body. `pinned`: it lies in memory that the device can read. A stream whose
    /// [`Connection::has_room`] is false should wait for [`Event::Writable`] first; what is queued before
    /// is still accepted.
    ///
    /// # Errors
    /// [`SendError::Closed`], [`SendError::TooLong`].
    pub fn send_data(
        &mut self,
        id: StreamId,
        bytes: Bytes,
        pinned: bool,
        end: bool,
    ) -> Result<(), SendError> {
        let key = self.open_for_sending(id)?;
        let (len, limit) = (bytes.len() as u64, self.max_message());
        if len > limit {
            return Err(SendError::TooLong { len, limit });
        }
        let eager = bytes.len() <= self.eager_limit();
        let stream = &mut self.streams[key];
        if end {
            stream.send = SendHalf::Ending;
        } else if bytes.is_empty() {
            return Ok(());
        }
        stream.queued += bytes.len();
        stream.full |= stream.queued >= QUEUE_MARK;
        stream.out.push_back(if eager {
            Out::Eager { bytes, end }
        } else {
            Out::Bulk(Bulk { bytes, pinned, end, prepared: false, granted: 0, len, grants: VecDeque::new() })
        });
        if !eager {
            self.prepare_bulk(key);
        }
        self.mark_send(key);
        Ok(())
    }

    /// Ends this side's half of the stream after what is queued.
    ///
    /// # Errors
    /// [`SendError::Closed`].
    pub fn finish(&mut self, id: StreamId) -> Result<(), SendError> {
        self.send_data(id, Bytes::new(), false, true)
    }

    /// Whether the stream takes more output before it should wait. False for a stream that is closed.
    pub fn has_room(&self, id: StreamId) -> bool {
        self.open_for_sending(id).is_ok_and(|key| self.streams[key].queued < QUEUE_MARK)
    }

    /// Whether the stream takes output at all.
    pub fn is_open_for_sending(&self, id: StreamId) -> bool {
        self.open_for_sending(id).is_ok()
    }

    /// Whether the peer may know of the stream: its first frame has been handed out.
    pub fn is_transmitted(&self, id: StreamId) -> bool {
        self.ids.get(&id.0).is_none_or(|&key| self.streams[key].transmitted)
    }

    /// Resets a stream: drops its output, discards what still comes, tells the peer. Unknown and finished
    /// streams are left alone.
    pub fn reset(&mut self, id: StreamId, code: ResetCode) {
        let Some(&key) = self.ids.get(&id.0) else { return };
        let stream = &mut self.streams[key];
        if stream.send == SendHalf::Reset || stream.recv == RecvHalf::Discarding {
            return;
        }
        let grants = stream.drop_output();
        if !stream.transmitted {
            // Nobody has heard of it.
            self.remove(key);
            return;
        }
        stream.send = if stream.send == SendHalf::Ended { SendHalf::Ended } else { SendHalf::Reset };
        stream.recv = stream.recv.reset_by_us();
        stream.wants.clear();
        stream.block.clear();
        self.abort_all(grants);
        self.control.push_back(Frame::Reset { stream: id.0, code: code.0 });
        self.remove_if_done(key);
    }

    fn abort_all(&mut self, grants: Vec<GrantId>) {
        for grant in grants {
            self.abort_grant(grant);
        }
    }

    /// The application has read `len` bytes that came as `flow`. Unknown streams are left alone.
    pub fn consume(&mut self, id: StreamId, len: u32, flow: Flow) {
        let Some(&key) = self.ids.get(&id.0) else { return };
        let stream = &mut self.streams[key];
        match flow {
            Flow::Bulk => {
                stream.held = stream.held.saturating_sub(len.into());
                self.queue_for_landing(key);
            }
            Flow::Window if stream.recv == RecvHalf::Body => {
                stream.unreported = stream.unreported.saturating_add(len);
                if stream.unreported >= self.config.stream_window / 2 {
                    let increment = std::mem::take(&mut stream.unreported);
                    stream.recv_window += increment;
                    self.control.push_back(Frame::Window { stream: id.0, increment });
                }
            }
            Flow::Window => {}
        }
    }

    /// Takes no new streams. A server sends GOAWAY; streams in flight go on. See
    /// [`Connection::is_drained`].
    pub fn go_away(&mut self, code: CloseCode, text: &str) {
        if self.phase != Phase::Open {
            return;
        }
        match self.side {
            Side::Server => {
                self.phase = Phase::Draining;
                let frame = Frame::GoAway { ack: false, code: code.to_wire(), text: clip(text) };
                self.control.push_back(frame);
            }
            Side::Client => self.phase = Phase::Drained,
        }
    }

    /// Drain has begun, the peer opens no more streams, and none is left.
    pub fn is_drained(&self) -> bool {
        self.phase == Phase::Drained && self.streams.is_empty() && !self.has_output()
    }

    /// Closes with an error: the one thing still sent is a CLOSE frame.
    pub fn close(&mut self, code: CloseCode, text: &str) {
        if matches!(self.phase, Phase::Closing | Phase::Closed) {
            return;
        }
        self.phase = Phase::Closing;
        self.control.clear();
        self.send_ready.clear();
        self.write_ready.clear();
        self.control.push_back(Frame::Close { code: code.to_wire(), text: clip(text) });
    }

    /// The next thing to act on.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Connection::handle_timeout`] is due next.
    pub fn next_timeout(&self) -> Option<Instant> {
        if matches!(self.phase, Phase::Closing | Phase::Closed) {
            return None;
        }
        let beat = self.heartbeat.deadline();
        Some(self.grants.recall_deadline().map_or(beat, |recall| beat.min(recall)))
    }

    /// Acts on the passing of time. Feed what has been received before calling it.
    pub fn handle_timeout(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Closing | Phase::Closed) {
            return;
        }
        match self.heartbeat.timeout(now) {
            Beat::Nothing => {}
            Beat::Ping => {
                let token = self.stats.messages_received;
                self.control.push_back(Frame::Ping { ack: false, token });
            }
            Beat::Dead => {
                self.phase = Phase::Closed;
                self.events.push_back(Event::Dead);
            }
        }
        if self.grants.recall_deadline().is_some_and(|at| now >= at) {
            self.recall_standing();
        }
    }

    fn mark_send(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.in_send_ready {
            stream.in_send_ready = true;
            self.send_ready.push_back(key);
        }
    }

    fn mark_write(&mut self, key: usize) {
        let stream = &mut self.streams[key];
        if !stream.in_write_ready && stream.can_write() {
            stream.in_write_ready = true;
            self.write_ready.push_back(key);
        }
    }

    /// Books output that has left the queue.
    fn sent_bytes(&mut self, key: usize, len: usize) {
        let stream = &mut self.streams[key];
        stream.queued -= len;
        if stream.full && stream.queued < QUEUE_MARK {
            stream.full = false;
            if stream.send.accepts() {
                self.events.push_back(Event::Writable { stream: StreamId(stream.id) });
            }
        }
    }

    fn remove_if_done(&mut self, key: usize) {
        let stream = &self.streams[key];
        if stream.send.is_done() && stream.recv.is_done() {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: usize) {
        let stream = self.streams.remove(key);
        self.ids.remove(&stream.id);
        if stream.in_send_ready {
            self.send_ready.retain(|k| *k != key);
        }
        if stream.in_write_ready {
            self.write_ready.retain(|k| *k != key);
        }
        if stream.in_landing_queue {
            self.landing_queue.retain(|k| *k != key);
        }
    }

    /// Answers are produced by what the peer asks; one that does not collect them is cut off (R15).
    fn check_flood(&self) -> Result<(), Breach> {
        let limit = 4096 + 16 * self.config.max_streams as usize;
        if self.control.len() > limit { Err(Breach::Flood(limit)) } else { Ok(()) }
    }
}

/// Text for the wire: whole characters, at most [`MAX_TEXT`] bytes.
fn clip(text: &str) -> Bytes {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Bytes::copy_from_slice(&text.as_bytes()[..end])
}
