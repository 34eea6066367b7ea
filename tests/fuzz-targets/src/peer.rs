//! A connection with a hostile peer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic_rdma_proto::frame::{Frame, Reader};
use tonic_rdma_proto::{
    CloseCode, Config, Connection, Event, Flow, GrantMemory, LentPlace, Payload, ResetCode, Room,
    StreamId, Transmit, WantKey,
};

/// The maximum number of steps in an input.
const STEPS: usize = 400;

/// Runs a connection against a hostile peer.
///
/// The first byte selects side and sizes. If its highest bit is set, both sides have RECVs of two
/// sizes, which are added and removed. In the second byte, bit 0 means that this side does not
/// borrow from the peer, and bit 1 means that this side lends. Each step is a byte, followed by its
/// operands:
///
/// | byte modulo 16 | step |
/// |---|---|
/// | 0 to 4 | the peer sends a message: a length, then this many bytes of frames; header and credits are made valid |
/// | 5 | the peer sends a message without any correction |
/// | 6 | this side opens a stream |
/// | 7, 8 | this side sends headers or data on a stream |
/// | 9 | this side resets or releases a stream |
/// | 10, 11 | this side posts its pending work |
/// | 12 | this side is asked for memory, or to lend some, and answers |
/// | 13 | time passes, and this side tries again to lend bytes that it has postponed |
/// | 14 | this side reads, and returns leases |
/// | 15 | this side drains, closes, or recalls grants |
///
/// # Panics
/// The connection panics, exceeds its limits, uses memory that it was not granted, loses or repeats
/// memory of its own, or sends anything but CLOSE after a breach.
pub fn peer(data: &[u8]) {
    let mut input = Input(data);
    let Some(first) = input.byte() else { return };
    let Some(second) = input.byte() else { return };
    let mut side = Side::new(first, second);
    for _ in 0..STEPS {
        let Some(step) = input.byte() else { break };
        if side.step(step % 16, &mut input).is_none() {
            break;
        }
        side.check();
    }
    side.finish();
}

/// The rest of the input. Reads take bytes from the front.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// Bytes at this address modulo 4096, which decides where they land.
fn lies_at(place: usize, len: usize) -> Bytes {
    let all = Bytes::from(vec![3; len + 4096]);
    let at = place.wrapping_sub(all.as_ptr() as usize) % 4096;
    all.slice(at..at + len)
}

/// A grant that the peer has sent.
#[derive(Debug, Clone, Copy)]
struct Granted {
    addr: u64,
    rkey: u32,
    len: u32,
}

struct Side {
    conn: Connection,
    config: Config,
    now: Instant,
    client: bool,
    /// Whether both sides have RECVs of two sizes.
    two_sizes: bool,
    /// The lengths of the peer's RECVs that this side has credits for, in order.
    peer_recvs: VecDeque<usize>,
    slot: Vec<u8>,
    /// Credits that the peer may still return: messages sent to it, less the credits returned.
    owed: u64,
    granted: Vec<Granted>,
    /// Landing memory held by the connection or its peer, by key, with its length.
    out: BTreeMap<usize, u32>,
    next_memory: usize,
    /// Data that has been received and not consumed.
    unread: Vec<(StreamId, u32, Flow)>,
    /// The peer's leases that have not been returned, and this side's that have not ended.
    borrowed: BTreeSet<u32>,
    lent: BTreeSet<u32>,
    lends: bool,
    breached: bool,
    closes: u32,
    opened: BTreeSet<StreamId>,
}

impl Side {
    fn new(first: u8, second: u8) -> Self {
        let two_sizes = first & 128 != 0;
        let config = Config {
            rest_slot_size: if two_sizes { 512 } else { 0 },
            slot_size: if first & 2 == 0 { 512 } else { 4096 },
            recv_slots: if first & 4 == 0 { 4 } else { 64 },
            max_recvs: 64,
            max_streams: 5,
            stream_window: if first & 8 == 0 { 4096 } else { 100_000 },
            bulk_window: 65_536,
            whole: 100_000,
            takes_lent: second & 1 == 0,
            standing_grants: (first >> 4) & 3,
            align: if first & 64 == 0 { 64 } else { 4096 },
            standing_max: 32 << 10,
            write_chunk: 4096,
            ..Config::default()
        };
        config.check().expect("settings in range");
        let (now, client) = (Instant::now(), first & 1 == 0);
        let peer_slot = if two_sizes { 2048 } else { 512 };
        let peer = Config { slot_size: peer_slot, ..config.clone() }.settings();
        let conn = match client {
            true => Connection::client(config.clone(), peer, now),
            false => Connection::server(config.clone(), peer, now),
        };
        Side {
            conn,
            now,
            client,
            slot: vec![0; 4096],
            two_sizes,
            peer_recvs: vec![512; config.recv_slots.into()].into(),
            config,
            owed: 0,
            granted: Vec::new(),
            out: BTreeMap::new(),
            next_memory: 0,
            unread: Vec::new(),
            borrowed: BTreeSet::new(),
            lent: BTreeSet::new(),
            lends: second & 2 != 0,
            breached: false,
            closes: 0,
            opened: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: u8, input: &mut Input<'_>) -> Option<()> {
        match step {
            0..=4 => {
                let len = usize::from(input.byte()?) * if step == 4 { 4 } else { 1 };
                let frames = input.take(len);
                let credits = self.owed.min(u64::from(step)) as u16;
                let mut message = Vec::with_capacity(8 + frames.len());
                message.extend_from_slice(&credits.to_le_bytes());
                let full = self.two_sizes && !len.is_multiple_of(2);
                message.extend_from_slice(&[u8::from(full) * 2, 0]);
                message.extend_from_slice(&(frames.len() as u32 + 8).to_le_bytes());
                message.extend_from_slice(frames);
                self.owed -= u64::from(credits);
                self.receive(message.into());
            }
            5 => {
                let len = usize::from(input.byte()?);
                let message = input.take(len);
                self.receive(Bytes::copy_from_slice(message));
            }
            6 => {
                let len = usize::from(input.byte()?) * 8;
                // This fails on a server, and after either side has begun to drain or close the
                // connection.
                let opened = self.conn.open(Bytes::from(vec![1; len]), len.is_multiple_of(16));
                self.opened.extend(opened);
            }
            7 => {
                let (id, len) = (self.id(input)?, usize::from(input.byte()?));
                let _ =
                    self.conn.send_headers(id, Bytes::from(vec![2; len]), len.is_multiple_of(3));
            }
            8 => {
                let (id, len) = (self.id(input)?, usize::from(input.short()?) * 4);
                let (pinned, end) = (len.is_multiple_of(8), len.is_multiple_of(7));
                let mut payload = Payload::new();
                if len.is_multiple_of(5) {
                    payload.push(lies_at(0, 22), !pinned);
                    payload.push_aligned(lies_at(len % 67, len), pinned);
                } else if self.lends {
                    payload.push(lies_at(0, len % 67), false);
                    payload.push_aligned(lies_at(0, len), true);
                    payload.last_is_lendable();
                } else {
                    payload.push(lies_at(len % 67, len), pinned);
                }
                let _ = self.conn.send_payload(id, payload, end);
            }
            9 => {
                let id = self.id(input)?;
                match input.byte()? % 2 {
                    0 => self.conn.reset(id, ResetCode::CANCEL),
                    _ => self.conn.release(id, ResetCode::CANCEL),
                }
            }
            10 | 11 => {
                let room = usize::from(input.byte()?) * 512;
                self.post(room, step == 11);
            }
            12 => {
                let kind = input.byte()?;
                self.grant(kind);
                self.lend(kind);
            }
            13 => {
                self.conn.retry_lends();
                self.now += Duration::from_millis(u64::from(input.byte()?) * 40);
                self.breached |= self.conn.handle_timeout(self.now).is_err();
            }
            14 => {
                let count = usize::from(input.byte()?).min(self.unread.len());
                for (id, len, flow) in self.unread.drain(..count) {
                    self.conn.consume(id, len, flow);
                }
                while let Some(lease) = self.borrowed.pop_first() {
                    self.conn.return_lease(lease);
                }
            }
            _ => match input.byte()? % 5 {
                0 => self.conn.go_away(CloseCode::Ok, "drain"),
                1 => self.conn.close(CloseCode::Ok, "close"),
                4 => self.conn.recall_grants(|memory| memory % 2 == 0),
                _ => self.conn.recall_standing(),
            },
        }
        self.events();
        Some(())
    }

    /// The exclusive maximum of a message's offset in its landing memory.
    fn front(&self) -> u32 {
        self.config.align.into()
    }

    /// A stream that either side opened.
    fn id(&self, input: &mut Input<'_>) -> Option<StreamId> {
        let n = usize::from(input.byte()?);
        let known: Vec<StreamId> = self.opened.iter().copied().collect();
        known.get(n % known.len().max(1)).copied()
    }

    fn receive(&mut self, message: Bytes) {
        // Record all grants, including those that precede a breach in the message.
        if let Ok(mut reader) = Reader::new(message.clone()) {
            while let Ok(Some(frame)) = reader.next_frame() {
                if let Frame::Grant { rkey, len, addr, .. } = frame {
                    self.granted.push(Granted { addr, rkey, len });
                }
            }
        }
        let returned = Reader::new(message.clone()).map(|r| (r.credits, r.full));
        let result = self.conn.receive(self.now, message);
        if let Ok((credits, full)) = returned {
            let bytes = if full && self.two_sizes { 2048 } else { 512 };
            self.peer_recvs.extend((0..credits).map(|_| bytes));
        }
        if self.two_sizes {
            if self.conn.has_extra_recvs() && self.next_memory.is_multiple_of(2) {
                self.conn.recv_gone();
            }
            if self.conn.wants_recvs() {
                self.conn.recvs_posted(7);
            }
        }
        if let Err(breach) = &result {
            assert!(!self.breached, "one breach is enough: {breach}");
            assert!(!breach.to_string().is_empty());
            self.breached = true;
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.conn.poll_event() {
            match event {
                Event::Opened { stream, .. } => {
                    assert!(!self.client, "a client is not called");
                    assert!(self.opened.insert(stream), "{stream} is opened twice");
                }
                Event::Data { stream, data, .. } => {
                    self.unread.push((stream, data.len() as u32, Flow::Window))
                }
                Event::Landed { stream, memory, begin, len, flow, .. } => {
                    let had = self.out.remove(&memory).expect("memory that is out lands once");
                    let ends = begin.checked_add(len).expect("no more than fits");
                    assert!(
                        begin < self.front() && len > 0 && ends <= had,
                        "{len} bytes from {begin} on in {had}"
                    );
                    self.unread.push((stream, len, flow));
                }
                Event::Lent { lent, .. } => {
                    assert!(self.config.takes_lent, "this side takes nothing that is lent");
                    // The bytes around lent bytes are held and count in no window, so they must be
                    // few.
                    let around = lent.head.len() + lent.tail.len();
                    assert!(around < self.config.slot_size as usize, "{around} bytes around it");
                    assert!(self.borrowed.insert(lent.place.lease), "{lent:?} is lent twice");
                }
                Event::LeaseEnded { lease } => {
                    assert!(self.lent.remove(&lease), "lease {lease} ends once");
                }
                Event::Quiet => self.conn.rest_recvs_posted(1),
                Event::Returned { memory } => {
                    self.out.remove(&memory).expect("memory that is out returns once");
                }
                _ => {}
            }
        }
    }

    fn post(&mut self, room: usize, with_slot: bool) {
        for _ in 0..64 {
            let slot = with_slot.then_some(self.slot.as_mut_slice());
            let space = Room { write: room, staging: room, chunk: 0 };
            match self.conn.poll_transmit(slot, space) {
                None => return,
                Some(Transmit::Send(len)) => {
                    let recv = self.peer_recvs.pop_front();
                    assert!(recv.is_some_and(|bytes| len <= bytes), "{len} bytes in {recv:?}");
                    self.owed += 1;
                    let mut reader = Reader::new(Bytes::copy_from_slice(&self.slot[..len]))
                        .expect("a good header");
                    let mut frames = Vec::new();
                    while let Some(frame) = reader.next_frame().expect("a good frame") {
                        frames.push(frame);
                    }
                    let closes = frames.iter().filter(|f| matches!(f, Frame::Close { .. })).count();
                    self.closes += closes as u32;
                    assert!(self.closes <= 1, "one CLOSE is enough");
                    if self.breached || self.closes > 0 {
                        assert_eq!(
                            (frames.len(), closes),
                            (1, 1),
                            "only CLOSE behind a breach: {frames:?}"
                        );
                    }
                }
                Some(Transmit::Write(write)) => {
                    assert!(!self.breached && self.closes == 0, "a WRITE behind the end");
                    let len = write.src.len() as u64;
                    assert!(len > 0 && write.src.len() <= room);
                    let within = |g: &Granted| {
                        g.rkey == write.rkey
                            && write.addr >= g.addr
                            && write.addr.checked_add(len).is_some_and(|end| {
                                g.addr.checked_add(g.len.into()).is_some_and(|last| end <= last)
                            })
                    };
                    assert!(self.granted.iter().any(within), "{write:?} was not granted");
                }
            }
        }
    }

    fn grant(&mut self, kind: u8) {
        let Some(want) = self.conn.poll_landing(|_| true) else { return };
        assert!(want.min > 0 && want.min <= want.want, "{want:?}");
        let most = self.config.whole.max(self.config.standing_max + 4096) + self.front();
        assert!(want.want <= most, "{want:?}");
        let len = match kind % 4 {
            0 => want.min,
            1 => want.want,
            2 => want.min / 2,
            _ => want.want.saturating_add(4096),
        };
        let key = self.next_memory;
        self.next_memory += 1;
        self.out.insert(key, len);
        // Sometimes provide the memory for a standing grant, whether or not one is wanted.
        let for_what = if kind >= 240 { WantKey::Standing } else { want.key };
        let addr = (key as u64 + 1) << 24;
        self.conn.provide_landing(for_what, GrantMemory { key, addr, rkey: key as u32, len });
    }

    /// Lends the bytes that may be lent, refuses to lend them, or postpones them.
    fn lend(&mut self, kind: u8) {
        while let Some((id, bytes)) = self.conn.poll_lend() {
            assert!(self.lends && !bytes.is_empty(), "{id}: nothing may be lent");
            match kind % 3 {
                0 if self.conn.may_lend() => {
                    let lease = (0..).find(|lease| !self.lent.contains(lease)).expect("a number");
                    self.lent.insert(lease);
                    let place = LentPlace { lease, key: 1, addr: 1 << 20 };
                    self.conn.provide_lent(id, Some(place));
                }
                1 => return self.conn.postpone_lend(),
                _ => self.conn.provide_lent(id, None),
            }
        }
    }

    fn check(&self) {
        let pending = self.conn.pending();
        let (lent, borrowed) = self.conn.leases();
        assert!(lent <= self.lent.len() && borrowed <= self.borrowed.len(), "{lent} {borrowed}");
        let waiting = self.opened.iter().filter(|id| self.conn.is_waiting(**id)).count();
        assert!(pending.streams - waiting <= 5, "{pending:?}, {waiting} of them wait");
        assert!(
            pending.grants <= self.out.len(),
            "{pending:?}: the peer holds memory that nobody gave"
        );
        if self.breached {
            assert!(self.conn.next_timeout().is_none() && !self.conn.takes_streams());
        }
    }

    /// Closes the connection, in whatever state it is. It must send CLOSE at most once, and then
    /// nothing.
    fn finish(mut self) {
        self.conn.close(CloseCode::Ok, "the end");
        self.events();
        self.post(1 << 20, true);
        self.post(1 << 20, true);
        assert!(self.conn.poll_landing(|_| true).is_none() && self.conn.next_timeout().is_none());
        let before = self.closes;
        self.post(1 << 20, true);
        assert_eq!(self.closes, before, "silence");
    }
}
