//! A client and a server, an in-memory link between them, and the work of each driver.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::grants::Grant;
use super::super::lifecycle::Lifecycle;
use super::super::*;
use super::loans::Loans;
use super::memory::Memory;
use crate::config::Config;
use crate::frame::{Composer, Frame, Reader};
use crate::ids::{ResetCode, StreamId};
use crate::payload::LentBody;

pub(super) const CLIENT: usize = 0;
pub(super) const SERVER: usize = 1;
/// Work requests on the queue pair, in order.
#[derive(Debug)]
pub(super) enum Wire {
    Send(Bytes),
    Write(Write),
}

/// How a side answers a want of named memory for the field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// Names memory for the whole field at once.
    Whole,
    /// Names memory for at most this many bytes at a time.
    Parts(u32),
    /// Names memory for at most this many bytes, the next time that the driver runs.
    Late(u32),
    Refuse,
}

/// Events and bytes that the application on one side has received on a stream.
#[derive(Debug, Default)]
pub(super) struct App {
    pub(super) blocks: Vec<Bytes>,
    pub(super) body: Vec<u8>,
    pub(super) ended: bool,
    pub(super) reset: Option<ResetCode>,
    pub(super) writable: usize,
    pub(super) landed: Vec<(u32, Flow)>,
    unread: VecDeque<(u32, Flow, Option<usize>)>,
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) conn: Connection,
    pub(super) memory: Memory,
    pub(super) streams: BTreeMap<u32, App>,
    /// Events that concern the connection.
    pub(super) events: Vec<Event>,
    pub(super) refused: Vec<StreamId>,
    /// Streams that are not read.
    pub(super) stalled: BTreeSet<u32>,
    /// Whether landed bytes are copied out and their memory is freed at once, as under memory
    /// pressure.
    pub(super) copy_out: bool,
    pub(super) slots: usize,
    pub(super) staging: usize,
    pub(super) staging_block: usize,
    pub(super) room: usize,
    full: (usize, usize, usize),
    /// The lengths of the posted RECVs, in the order in which a device fills them.
    posted: VecDeque<u32>,
    /// Number of RECVs in excess of the initial ones.
    extra: u32,
    /// Whether the extra RECVs are being removed.
    pub(super) leaving: bool,
    /// Initial RECVs that are left out while there are extra ones.
    left_out: u32,
    /// Whether the end refuses to post more RECVs, as if it had no memory.
    pub(super) refuses: bool,
    /// The streams that name memory.
    pub(super) naming: BTreeMap<u32, Naming>,
    /// How a server with [`Config::names_requests`] names memory for a request.
    pub(super) names: fn(StreamId) -> Option<Naming>,
    /// Wants of named memory to answer the next time that the driver runs, each with the maximum
    /// number of bytes to name.
    late: Vec<(NamedWant, u32)>,
    /// Whether the connection has asked for a proof that the peer's end exists.
    probes: bool,
    pub(super) loans: Loans,
    pub(super) error: Option<crate::Breach>,
}

/// The client and the server.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) now: Instant,
    pub(super) ends: [End; 2],
    /// Work requests in flight to each end.
    pub(super) to: [VecDeque<Wire>; 2],
    /// Directions in which nothing is delivered.
    pub(super) hold: [bool; 2],
    /// Whether the path or the other host is gone, so that probes are not answered.
    pub(super) gone: bool,
    /// A digest of everything transmitted.
    pub(super) digest: u64,
    /// Aligned segments that were sent, and the number of their bytes that WRITEs have carried.
    pub(super) aligned: Vec<Bytes>,
    pub(super) aligned_written: usize,
    /// The number of frames that each end has transmitted, by name.
    pub(super) sent: [BTreeMap<&'static str, usize>; 2],
    pub(super) steps: usize,
    /// The number of probes that were answered.
    pub(super) probed: usize,
}

/// A configuration with small slots and few credits.
pub(super) fn small() -> Config {
    Config { slot_size: 1024, recv_slots: 8, max_recvs: 8, takes_lent: true, ..Config::default() }
}

/// Bytes that depend on position and seed, at an address that is a multiple of 4096.
pub(super) fn pattern(seed: u32, len: usize) -> Bytes {
    pattern_at(0, seed, len)
}

/// Like [`pattern`], at an address that is `place` modulo 4096.
pub(super) fn pattern_at(place: usize, seed: u32, len: usize) -> Bytes {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut block = Vec::with_capacity(4093);
    for _ in 0..4093.min(len) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        block.push(x as u8);
    }
    let mut out: Vec<u8> = Vec::with_capacity(len + 4093 + 4096);
    let front = place.wrapping_sub(out.as_ptr() as usize) % 4096;
    out.resize(front, 0);
    while out.len() < front + len {
        out.extend_from_slice(&block);
    }
    out.truncate(front + len);
    Bytes::from(out).slice(front..)
}

pub(super) fn block(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// The HEADERS frame with the whole header block of a call.
pub(super) fn head(stream: u32) -> Frame {
    Frame::Headers {
        stream,
        end: false,
        more: false,
        indexed: false,
        lands: false,
        block: block("head"),
    }
}

impl End {
    fn new(conn: Connection, budget: usize, loans: Loans) -> Self {
        let config = &conn.terms.own;
        End {
            posted: (0..config.recv_slots).map(|_| config.rest_slot_size()).collect(),
            conn,
            memory: Memory::new(budget),
            streams: BTreeMap::new(),
            events: Vec::new(),
            refused: Vec::new(),
            stalled: BTreeSet::new(),
            copy_out: false,
            slots: 4,
            staging: 4,
            staging_block: 64 << 10,
            room: 1 << 20,
            full: (4, 4, 1 << 20),
            extra: 0,
            leaving: false,
            left_out: 0,
            refuses: false,
            naming: BTreeMap::new(),
            names: |_| Some(Naming::Whole),
            late: Vec::new(),
            probes: false,
            loans,
            error: None,
        }
    }

    /// Handles the RECV of the message just received: posts the RECV again, removes it or leaves it
    /// out. Also posts extra RECVs if the connection wants them.
    fn post(&mut self, recv: u32) {
        let full = self.conn.terms.own.slot_size;
        if self.leaving && self.extra > 0 && recv == full {
            self.extra -= 1;
            self.conn.recv_gone();
        } else if !self.leaving
            && self.extra >= self.conn.terms.own.recv_slots.into()
            && recv < full
        {
            self.left_out += 1;
            self.conn.recv_gone();
        } else {
            self.posted.push_back(recv);
        }
        if self.conn.wants_recvs() && self.refuses {
            self.conn.recvs_posted(0);
        } else if self.conn.wants_recvs() {
            let more = u32::from(self.conn.terms.own.max_recvs - self.conn.terms.own.recv_slots)
                - self.extra;
            self.conn.recvs_posted(more);
            (self.extra, self.leaving) = (self.extra + more, false);
            self.posted.extend((0..more).map(|_| full));
        }
    }

    /// Does the driver's work for a connection that has become quiet.
    pub(super) fn shrink(&mut self) {
        self.leaving = true;
        let (recvs, bytes) =
            (std::mem::take(&mut self.left_out), self.conn.terms.own.rest_slot_size());
        self.posted.extend((0..recvs).map(|_| bytes));
        self.conn.rest_recvs_posted(recvs);
    }

    /// Sets the number of SEND slots, the number and size of staging blocks, and the maximum bytes
    /// of WRITEs in flight.
    pub(super) fn limit(
        &mut self,
        slots: usize,
        staging: usize,
        staging_block: usize,
        room: usize,
    ) {
        (self.slots, self.staging, self.staging_block, self.room) =
            (slots, staging, staging_block, room);
        self.full = (slots, staging, room);
    }

    pub(super) fn app(&self, id: StreamId) -> &App {
        &self.streams[&id.get()]
    }

    fn app_mut(&mut self, id: StreamId) -> &mut App {
        self.streams.entry(id.get()).or_default()
    }

    pub(super) fn take_events(&mut self) {
        while let Some(event) = self.conn.poll_event() {
            self.event(event);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Opened { stream, block, end } => {
                let app = self.app_mut(stream);
                assert!(app.blocks.is_empty() && !app.ended, "opened twice");
                app.blocks.push(block);
                app.ended = end;
                if self.conn.terms.own.names_requests {
                    let naming = (self.names)(stream);
                    self.naming.extend(naming.map(|naming| (stream.get(), naming)));
                    self.conn.decide_naming(stream, naming.is_some());
                }
            }
            Event::Headers { stream, block, end } => {
                let app = self.app_mut(stream);
                assert!(!app.ended && app.reset.is_none(), "HEADERS after the end");
                app.blocks.push(block);
                app.ended = end;
            }
            Event::Data { stream, data, end } => {
                let app = self.app_mut(stream);
                assert!(!app.ended && app.reset.is_none(), "DATA after the end");
                app.ended = end;
                app.body.extend_from_slice(&data);
                app.unread.push_back((data.len() as u32, Flow::Window, None));
                self.read(stream);
            }
            Event::Landed { stream, memory, begin, len, flow, end } => {
                let bytes = self.memory.filled(memory, begin as usize, len as usize);
                let app = self.streams.get_mut(&stream.get()).expect("landed before it was opened");
                assert!(!app.ended && app.reset.is_none(), "landed after the end");
                app.ended = end;
                app.body.extend_from_slice(bytes);
                app.landed.push((len, flow));
                let kept = if self.copy_out {
                    self.memory.free(memory);
                    None
                } else {
                    Some(memory)
                };
                app.unread.push_back((len, flow, kept));
                self.read(stream);
            }
            Event::Lent { stream, lent, end } => {
                let LentBody { head, place, len, tail } = *lent;
                let bytes = [head, self.loans.borrow(place, len), tail].concat();
                let app = self.streams.get_mut(&stream.get()).expect("lent before it was opened");
                assert!(!app.ended && app.reset.is_none(), "lent after the end");
                app.ended = end;
                app.body.extend_from_slice(&bytes);
                app.landed.push((bytes.len() as u32, Flow::Lent));
            }
            Event::LeaseEnded { lease } => self.loans.ended(lease),
            Event::Returned { memory } => self.memory.free(memory),
            Event::Reset { stream, code } => {
                let app = self.app_mut(stream);
                assert!(app.reset.replace(code).is_none(), "reset twice");
            }
            Event::Writable { stream } => self.app_mut(stream).writable += 1,
            Event::Refused { stream, .. } => self.refused.push(stream),
            Event::Quiet => self.shrink(),
            Event::Probe => self.probes = true,
            Event::GoAway { .. }
            | Event::Closed { .. }
            | Event::Dead
            | Event::KeepAliveTimedOut => self.events.push(event),
        }
    }

    /// Reads everything received, unless the stream is stalled.
    pub(super) fn read(&mut self, id: StreamId) {
        if self.stalled.contains(&id.get()) {
            return;
        }
        let Some(app) = self.streams.get_mut(&id.get()) else { return };
        for (len, flow, memory) in app.unread.drain(..) {
            self.conn.consume(id, len, flow);
            if let Some(memory) = memory {
                self.memory.free(memory);
            }
        }
    }

    /// Resumes a stalled stream.
    pub(super) fn unstall(&mut self, id: StreamId) {
        self.stalled.remove(&id.get());
        self.read(id);
        self.conn.reader_waits(id);
    }

    /// Decides about pieces that may be lent, and returns leases.
    pub(super) fn lend(&mut self) {
        self.loans.lend(&mut self.conn);
        self.loans.give_back(&mut self.conn);
    }

    fn name(&mut self, want: NamedWant, most: u32) {
        let len = (want.field - want.offset).min(most);
        let memory = self.memory.name(want.offset, len);
        self.conn.provide_named(want.stream, memory);
    }

    fn grant(&mut self) {
        for (want, most) in std::mem::take(&mut self.late) {
            self.name(want, most);
        }
        loop {
            self.grant_landing();
            let Some(want) = self.conn.poll_named() else { return };
            match self.naming[&want.stream.get()] {
                Naming::Whole => self.name(want, u32::MAX),
                Naming::Parts(most) => self.name(want, most),
                Naming::Late(most) => self.late.push((want, most)),
                Naming::Refuse => self.conn.refuse_named(want.stream),
            }
        }
    }

    fn grant_landing(&mut self) {
        let stalled = &self.stalled;
        while let Some(want) = self.conn.poll_landing(|id| !stalled.contains(&id.get())) {
            assert!(want.min <= want.want && want.min > 0);
            match self.memory.alloc(want.want, want.min) {
                Some(memory) => self.conn.provide_landing(want.key, memory),
                None => {
                    if let WantKey::Stream(_) = want.key {
                        self.conn.recall_standing();
                    }
                    return;
                }
            }
        }
    }
}

impl Pair {
    pub(super) fn new(client: Config, server: Config, budget: usize) -> Self {
        client.check().unwrap();
        server.check().unwrap();
        let now = Instant::now();
        let (to_server, to_client) = (client.settings(), server.settings());
        let [lender, borrower] = Loans::pair();
        Pair {
            now,
            ends: [
                End::new(Connection::client(client, to_client, now), budget, lender),
                End::new(Connection::server(server, to_server, now), budget, borrower),
            ],
            to: [VecDeque::new(), VecDeque::new()],
            hold: [false; 2],
            gone: false,
            digest: 0xcbf2_9ce4_8422_2325,
            aligned: Vec::new(),
            aligned_written: 0,
            sent: [BTreeMap::new(), BTreeMap::new()],
            steps: 0,
            probed: 0,
        }
    }

    /// Creates a pair with small slots and ample landing memory.
    pub(super) fn small() -> Self {
        Pair::new(small(), small(), 1 << 30)
    }

    pub(super) fn client(&mut self) -> &mut Connection {
        &mut self.ends[CLIENT].conn
    }

    pub(super) fn server(&mut self) -> &mut Connection {
        &mut self.ends[SERVER].conn
    }

    /// Does a driver's work after an event. Returns whether anything was transmitted.
    pub(super) fn drive(&mut self, end: usize) -> bool {
        let posted = self.drive_unchecked(end);
        self.check();
        posted
    }

    /// Like [`drive`](Self::drive), without the check of credits, for a hostile peer.
    pub(super) fn drive_unchecked(&mut self, end: usize) -> bool {
        let mut posted = false;
        self.ends[end].take_events();
        if std::mem::take(&mut self.ends[end].probes) && !self.gone {
            self.probed += 1;
            let now = self.now;
            self.ends[end].conn.peer_exists(now);
        }
        self.ends[end].grant();
        self.ends[end].lend();
        while let Some(wire) = self.transmit(end) {
            self.to[1 - end].push_back(wire);
            posted = true;
        }
        posted
    }

    fn transmit(&mut self, at: usize) -> Option<Wire> {
        let end = &mut self.ends[at];
        let mut slot = vec![0; end.conn.terms.own.slot_size as usize];
        let room = Room {
            write: end.room,
            staging: if end.staging > 0 { end.staging_block } else { 0 },
            chunk: 0,
        };
        let free = end.slots > 0;
        let wire = match end.conn.poll_transmit(free.then_some(&mut slot[..]), room)? {
            Transmit::Send(len) => {
                assert!(free && len <= end.conn.terms.peer.slot_size as usize);
                end.slots -= 1;
                slot.truncate(len);
                Wire::Send(slot.into())
            }
            Transmit::Write(write) => {
                assert!(!write.src.is_empty() && write.src.len() <= end.room);
                assert!(write.src.len() <= end.conn.terms.own.write_chunk as usize);
                end.room -= write.src.len();
                if !write.pinned {
                    assert!(end.staging > 0 && write.src.len() <= end.staging_block);
                    end.staging -= 1;
                }
                Wire::Write(write)
            }
        };
        self.note(at, &wire);
        if let Wire::Write(write) = &wire {
            self.check_aligned(at, write);
        }
        Some(wire)
    }

    /// Asserts that an aligned segment lands aligned. If it lands in several parts, each part must
    /// land at the remainder that it would have if the segment landed in one piece. Memory that is
    /// named for a part of the segment must receive this part, unless the memory has been recalled:
    /// the peer may then write the bytes of a grant that it has returned.
    fn check_aligned(&mut self, from: usize, write: &Write) {
        let src = write.src.as_ptr() as u64;
        let within = |bytes: &&Bytes| {
            (bytes.as_ptr() as u64..bytes.as_ptr_range().end as u64).contains(&src)
        };
        let segment = self.aligned.iter().find(within);
        let receiver = &self.ends[1 - from];
        if let Some(offset) = receiver.memory.offset_in_field(write) {
            let at = segment.map(|segment| src - segment.as_ptr() as u64);
            let mut grants = receiver.conn.landing.grants.iter();
            let keeps = |grant: &Grant| grant.memory == write.rkey as usize && !grant.recalled;
            assert!(
                at == Some(offset) || self.aligned.is_empty() || !grants.any(|(_, g)| keeps(g)),
                "{at:?} lands at {offset}"
            );
            return;
        }
        let Some(segment) = segment else { return };
        let (align, source) =
            (u64::from(self.ends[1 - from].conn.terms.own.align), segment.as_ptr() as u64);
        let lands = write.addr.wrapping_sub(src - source);
        assert_eq!(lands % align, 0, "{align}");
        if source.is_multiple_of(align) {
            assert_eq!((write.addr ^ src) % 64, 0, "in phase: {align}");
        }
        self.aligned_written += write.src.len();
    }

    /// The number of frames with this name that `end` has transmitted.
    pub(super) fn count(&self, end: usize, frame: &str) -> usize {
        self.sent[end].get(frame).copied().unwrap_or(0)
    }

    fn note(&mut self, end: usize, wire: &Wire) {
        if let Wire::Send(message) = wire {
            let mut reader = Reader::new(message.clone()).expect("own messages are well formed");
            while let Some(frame) = reader.next_frame().expect("own frames are well formed") {
                *self.sent[end].entry(frame.name()).or_default() += 1;
            }
        }
        let mut mix = |bytes: &[u8]| {
            for b in bytes {
                self.digest = (self.digest ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
            }
        };
        match wire {
            Wire::Send(message) => mix(message),
            Wire::Write(write) => {
                mix(&write.addr.to_le_bytes());
                mix(&write.src.len().to_le_bytes());
            }
        }
    }

    /// Delivers the next work request to `end`, and completes it at the sender.
    pub(super) fn deliver(&mut self, end: usize) -> bool {
        let Some(wire) = self.to[end].pop_front() else { return false };
        let (sender, receiver) = match &mut self.ends {
            [client, server] if end == SERVER => (client, server),
            [client, server] => (server, client),
        };
        match wire {
            Wire::Send(message) => {
                sender.slots += 1;
                let recv = receiver.posted.pop_front();
                let fits = recv.is_some_and(|bytes| message.len() <= bytes as usize);
                assert!(fits || receiver.memory.lenient, "{} bytes in {recv:?}", message.len());
                match (receiver.conn.receive(self.now, message), recv) {
                    (Err(breach), _) => receiver.error = Some(breach),
                    (Ok(()), Some(recv)) => receiver.post(recv),
                    (Ok(()), None) => {}
                }
            }
            Wire::Write(write) => {
                sender.room += write.src.len();
                sender.staging += usize::from(!write.pinned);
                receiver.memory.write(&write);
            }
        }
        true
    }

    /// Immediately delivers a message that the test has composed. The message spends a credit of
    /// `from`.
    pub(super) fn inject(&mut self, from: usize, frames: &[Frame]) {
        let mut slot = vec![0; 32_768];
        let mut composer = Composer::new(&mut slot);
        for frame in frames {
            assert!(composer.add(frame), "the message is full");
        }
        let back = self.ends[from].conn.credits.sent();
        if back.full {
            composer.full();
        }
        let len = composer.finish(back.credits);
        slot.truncate(len);
        self.inject_raw(from, slot.into());
    }

    /// Delivers raw bytes without regard to credits.
    pub(super) fn inject_raw(&mut self, from: usize, message: Bytes) {
        let victim = &mut self.ends[1 - from];
        victim.posted.rotate_left(1.min(victim.posted.len()));
        if let Err(breach) = victim.conn.receive(self.now, message) {
            assert!(victim.error.is_none(), "a closed connection takes no messages");
            victim.error = Some(breach);
        }
    }

    /// Asserts that credits are neither lost nor created, and that no SEND finds an empty RECV
    /// queue (R2).
    fn check(&self) {
        for end in self.ends.iter().filter(|end| end.conn.life.is_open()) {
            end.conn.streams.check(end.conn.output.queued());
        }
        for (from, to) in [(CLIENT, SERVER), (SERVER, CLIENT)] {
            let sends = |end: usize| {
                self.to[end].iter().filter_map(|wire| match wire {
                    Wire::Send(message) => Some(message),
                    Wire::Write(_) => None,
                })
            };
            let under_way = sends(to).count() as u32;
            let coming_back: u32 =
                sends(from).map(|m| u32::from(u16::from_le_bytes([m[0], m[1]]))).sum();
            let (sender, receiver) = (&self.ends[from].conn, &self.ends[to].conn);
            let end = &self.ends[to];
            let slots = u32::from(receiver.terms.own.recv_slots) + end.extra - end.left_out;
            assert!(under_way <= slots, "SEND without a posted RECV");
            if self
                .ends
                .iter()
                .all(|end| end.error.is_none() && end.conn.life.stage != Lifecycle::Closed)
            {
                let (ours, to_return) = (sender.credits.available(), receiver.credits.to_return());
                assert_eq!(ours + under_way + to_return + coming_back, slots, "credits");
                // The sizes also match, in the order in which the device fills the RECVs.
                let (rest, full) =
                    (receiver.terms.own.rest_slot_size(), receiver.terms.own.slot_size);
                let coming = sends(from).flat_map(|m| {
                    let bytes = if m[2] & 2 == 0 { rest } else { full };
                    (0..u16::from_le_bytes([m[0], m[1]])).map(move |_| bytes)
                });
                let known = sender.credits.available_bytes().chain(coming);
                let known = known.chain(receiver.credits.to_return_bytes());
                assert!(end.posted.iter().skip(under_way as usize).copied().eq(known), "sizes");
            }
            for end in &self.ends {
                assert!(end.memory.used <= end.memory.budget);
                assert!(end.conn.peer_grants.standing() <= 64);
            }
        }
    }

    /// Does the next action of a fixed sequence.
    pub(super) fn step(&mut self) -> bool {
        let moved = self.step_unchecked();
        self.check();
        moved
    }

    pub(super) fn step_unchecked(&mut self) -> bool {
        let at = self.steps % 4;
        self.steps += 1;
        match at {
            0 => self.drive_unchecked(CLIENT),
            1 => !self.hold[SERVER] && self.deliver(SERVER),
            2 => self.drive_unchecked(SERVER),
            _ => !self.hold[CLIENT] && self.deliver(CLIENT),
        }
    }

    /// Runs until nothing more happens.
    pub(super) fn settle(&mut self) {
        let mut idle = 0;
        for _ in 0..2_000_000 {
            idle = if self.step() { 0 } else { idle + 1 };
            if idle >= 8 {
                return;
            }
        }
        panic!("never settles: {self:?}");
    }

    /// Runs until `done`. Panics if nothing more happens before.
    pub(super) fn until(&mut self, what: &str, done: impl Fn(&Pair) -> bool) {
        let mut idle = 0;
        while !done(self) {
            idle = if self.step() { 0 } else { idle + 1 };
            assert!(idle < 8, "stands still before {what}: {self:?}");
        }
    }

    /// Advances the clock and handles timers that are due.
    pub(super) fn advance(&mut self, time: Duration) {
        self.now += time;
        for end in &mut self.ends {
            if end.conn.next_timeout().is_some_and(|at| at <= self.now)
                && let Err(breach) = end.conn.handle_timeout(self.now)
            {
                assert!(end.error.replace(breach).is_none(), "a closed connection judges nobody");
            }
        }
    }

    /// Opens a call as a driver does.
    pub(super) fn open(&mut self, text: &str, end: bool) -> StreamId {
        self.client().open(block(text), end).unwrap()
    }

    /// Opens a call that names memory for the response.
    pub(super) fn open_naming(&mut self, text: &str, naming: Naming) -> StreamId {
        let id = self.open(text, true);
        self.client().name_memory(id);
        self.ends[CLIENT].naming.insert(id.get(), naming);
        id
    }

    /// Sends a whole body from one end.
    pub(super) fn send(&mut self, end: usize, id: StreamId, body: Bytes) {
        self.ends[end].conn.send_data(id, body, true, true).unwrap();
    }

    /// Makes the server respond with a head, a body and trailers.
    pub(super) fn answer(&mut self, id: StreamId, body: Bytes) {
        let server = self.server();
        server.send_headers(id, block("head"), false).unwrap();
        server.send_data(id, body, false, false).unwrap();
        server.send_headers(id, block("trailers"), true).unwrap();
    }

    /// Asserts that all streams have ended and all resources have been returned.
    pub(super) fn assert_clean(&mut self) {
        for end in &mut self.ends {
            end.loans.keeps = false;
            for id in std::mem::take(&mut end.stalled) {
                end.read(StreamId(id));
            }
        }
        self.settle();
        for end in &mut self.ends {
            end.conn.recall_standing();
        }
        self.settle();
        for (at, end) in self.ends.iter().enumerate() {
            assert_eq!(end.error, None, "end {at}");
            assert_eq!(end.conn.pending(), Pending::default(), "end {at}: {end:?}");
            assert_eq!(end.memory.used, 0, "end {at}: landing memory is lost");
            assert_eq!((end.slots, end.staging, end.room), end.full, "end {at}");
            end.loans.assert_clean();
            let c = &end.conn;
            assert!(
                c.output.control.is_empty()
                    && c.events.is_empty()
                    && c.landing.wants_nothing()
                    && !c.leases.has_queued()
                    && !c.has_postponed_lends()
                    && c.leases() == (0, 0),
                "end {at}"
            );
            assert!(!c.output.has_output() && c.peer_grants.standing() == 0, "end {at}");
            assert_eq!((c.held(), c.output.queued()), (0, 0), "end {at}: bytes of nobody count");
        }
        self.check();
    }
}
