//! The heap that a connection holds while its peer sends frames of all kinds, in random order,
//! never exceeds what the windows of the streams allow (R19).
//!
//! Each stream has a handler that keeps its request and reads nothing, so its data stays unread
//! until it is reset. One more stream is discarded. Data for that stream fills the messages, so a
//! piece that keeps its message alive keeps a lot of memory.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use bytes::Bytes;
use tonic_rdma_proto::frame::Frame;
use tonic_rdma_proto::{LentBody, LentPlace};
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::process::Process;
use tonic_rdma_tests::wire::head;

use super::peer::{Ended, Peer, Standing, data};
use super::{DISCARDED, WARM_UP};

/// Number of streams that are held at the same time.
const STREAMS: usize = 8;
/// The number of the peer's steps in a run.
const STEPS: u32 = 1200;
/// Bytes of the headers of a stream, its first buffers, and the buffer that pieces are joined in.
const EACH_STREAM: usize = 128 << 10;
/// Bytes that a lent piece takes: its place in the queue, and the bytes around the lent ones.
const EACH_LENT: usize = 1536;
/// Maximum number of bytes around the lent ones.
const AROUND: usize = 900;
/// Maximum bytes of a piece that counts in its stream's window. The allowed heap is little more
/// than the sent data, so that uncharged data is detected.
const SHORT: usize = 2000;
/// Bytes of the memory from which the peer lends parts.
const LENDABLE: usize = 4096;
/// Bytes that the connection itself may take in addition to those at the beginning.
const SLACK: usize = 512 << 10;

/// Pseudo-random numbers (xorshift), from a seed that is not 0.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap() % most
    }
}

/// The unread part of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct Unread {
    window: usize,
    bulk: usize,
    lent: usize,
    /// Bytes of a REQUEST that have not been granted.
    requested: usize,
}

impl Unread {
    fn allows(&self) -> usize {
        2 * self.window + self.bulk * 3 / 2 + self.lent * EACH_LENT + EACH_STREAM
    }
}

struct Model {
    server: Process,
    peer: Peer,
    random: Random,
    /// The streams that are held.
    streams: BTreeMap<u32, Unread>,
    next_stream: u32,
    /// Bytes sent on the discarded stream.
    discarded: usize,
    /// Memory that the peer lends, if it does.
    lends: Option<Bytes>,
    /// The ids of grants to the server, of memory that the server never writes to.
    granted: Vec<u32>,
    next_grant: u32,
    /// The bytes that all streams so far allow together.
    ever: usize,
    /// The maximum of held bytes, and the allowed bytes at that time.
    most: (usize, usize),
    /// The number of frames sent, by name.
    sent: BTreeMap<&'static str, usize>,
    before: usize,
}

/// Runs the model against a server with these settings, from this seed.
pub(crate) async fn heap_is_within_the_windows(settings: &str, lends: bool, seed: u64) {
    let mut server = Process::start("", &format!("server {} {settings}", STREAMS + 2));
    let at: SocketAddr = server.read_line().await.parse().unwrap();
    let mut peer = Peer::connect_lending(at).await;
    let lends = if lends { Some(peer.lendable(LENDABLE).await) } else { None };
    peer.send(&[head(DISCARDED, "Discard")]).await.unwrap();
    for n in 1..=WARM_UP / 4000 {
        peer.wait_for_window(n * 4000).await;
        peer.send(&[data(DISCARDED, 4000)]).await.unwrap();
    }
    peer.sync().await.unwrap();
    let mut model = Model {
        server,
        peer,
        random: Random(seed),
        streams: BTreeMap::new(),
        next_stream: DISCARDED + 1,
        discarded: WARM_UP,
        lends,
        granted: Vec::new(),
        next_grant: 1,
        ever: 0,
        most: (0, 0),
        sent: BTreeMap::new(),
        before: 0,
    };
    model.before = model.ask("heap").await;
    for step in 0..STEPS {
        model.step().await.unwrap_or_else(|Ended(why)| panic!("{why} at step {step} of {seed}"));
        if step % 40 == 39 {
            model.check(seed).await;
        }
    }
    model.finish(seed).await;
}

impl Model {
    async fn ask(&mut self, what: &str) -> usize {
        self.server.ask(what).await.parse().unwrap()
    }

    async fn send(&mut self, frames: &[Frame]) -> Result<(), Ended> {
        for frame in frames {
            *self.sent.entry(frame.name()).or_default() += 1;
        }
        self.peer.send(frames).await
    }

    /// A frame that fills a message.
    async fn filler(&mut self, len: usize) -> Frame {
        self.peer.wait_for_window(self.discarded + len).await;
        self.discarded += len;
        data(DISCARDED, len)
    }

    /// A held stream on which the next piece may be sent.
    fn pick(&mut self) -> Option<u32> {
        let free = self.streams.iter().filter(|(_, unread)| unread.requested == 0);
        let free: Vec<_> = free.map(|(stream, _)| *stream).collect();
        if free.is_empty() { None } else { Some(free[self.random.below(free.len())]) }
    }

    /// Counts a piece of a stream in the stream's window. Returns the length of the piece, cut to
    /// what the window allows.
    fn window(&mut self, stream: u32, len: usize) -> usize {
        let window = self.peer.window as usize;
        let unread = self.streams.get_mut(&stream).unwrap();
        let len = len.min(window - unread.window);
        unread.window += len;
        self.ever += 2 * len;
        len
    }

    async fn step(&mut self) -> Result<(), Ended> {
        self.answer().await?;
        let what = self.random.below(100);
        if self.streams.is_empty() || what < 4 && self.streams.len() < STREAMS {
            let stream = self.next_stream;
            self.next_stream += 1;
            self.streams.insert(stream, Unread::default());
            self.ever += EACH_STREAM;
            return self.send(&[head(stream, "Hold")]).await;
        }
        if what < 6 {
            let at = self.random.below(self.streams.len());
            let stream = *self.streams.keys().nth(at).unwrap();
            self.streams.remove(&stream);
            self.send(&[Frame::Reset { stream, code: 8 }]).await?;
            return self.peer.sync().await;
        }
        if what < 10 {
            return self.small_frames(what).await;
        }
        let Some(stream) = self.pick() else { return self.peer.sync().await };
        match what {
            // Pieces of one byte, each with its own message.
            10..30 => {
                let len = self.window(stream, 1);
                let frames = [data(stream, len), self.filler(3900).await];
                self.send(&frames).await
            }
            30..55 => {
                let len = 1 + self.random.below(SHORT);
                let len = self.window(stream, len);
                self.send(&[data(stream, len)]).await
            }
            55..65 => {
                let len = (16 << 10) + self.random.below(50 << 10);
                self.streams.get_mut(&stream).unwrap().requested = len;
                let len = len as u64;
                self.send(&[Frame::Request { stream, len, begin: 0, field: None }]).await
            }
            _ => self.lend(stream).await,
        }
    }

    /// Sends frames without a payload, and grants that the server never uses.
    async fn small_frames(&mut self, what: usize) -> Result<(), Ended> {
        let frame = match what {
            6 => Frame::Window { stream: *self.streams.keys().next().unwrap(), increment: 1 },
            7 => Frame::Ping { ack: false, token: 0 },
            8 if self.granted.len() < 4 => {
                self.granted.push(self.next_grant);
                self.next_grant += 1;
                let (id, addr) = (self.next_grant - 1, 1 << 20);
                Frame::Grant { stream: 0, id, rkey: 1, len: 64 << 10, addr }
            }
            _ => match self.granted.pop() {
                Some(id) => Frame::Recall { id },
                None => return Ok(()),
            },
        };
        self.send(&[frame]).await
    }

    async fn lend(&mut self, stream: u32) -> Result<(), Ended> {
        let Some(bytes) = self.lends.clone() else { return Ok(()) };
        let len = 1 + self.random.below(bytes.len());
        let Some(lent) = self.peer.lend(bytes.slice(..len)).await? else { return Ok(()) };
        let place = LentPlace { lease: lent.lease, key: lent.key, addr: lent.addr };
        let around = self.random.below(AROUND);
        let (head, tail) = (Bytes::from(vec![0; around / 2]), Bytes::from(vec![0; around / 2]));
        let lent = Box::new(LentBody { head, place, len: len as u32, tail });
        let unread = self.streams.get_mut(&stream).unwrap();
        unread.lent += 1;
        self.ever += EACH_LENT;
        self.send(&[Frame::Lent { stream, end: false, lent }]).await?;
        // After these messages, the next lent piece arrives in another buffer for received
        // messages.
        for _ in 0..8 {
            let filler = self.filler(3900).await;
            self.send(&[filler]).await?;
        }
        Ok(())
    }

    /// Uses the grants that have arrived, and takes leases back.
    async fn answer(&mut self) -> Result<(), Ended> {
        while let Some(frame) = self.peer.frames.pop_front() {
            match frame {
                Frame::Return { lease } => self.peer.end_lease(lease),
                Frame::Grant { stream, id, rkey, len, addr } => {
                    let grant = Standing { id, rkey, len, addr };
                    self.answer_grant(stream, grant).await?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    async fn answer_grant(&mut self, stream: u32, grant: Standing) -> Result<(), Ended> {
        let id = grant.id;
        let used = match stream {
            0 => self.pick().map(|stream| {
                let len = 1 + self.random.below(SHORT.min(grant.len as usize));
                self.streams.get_mut(&stream).unwrap().bulk += len;
                self.ever += len * 3 / 2;
                (stream, len)
            }),
            _ => self.streams.get_mut(&stream).map(|unread| {
                let len = (grant.len as usize).min(unread.requested);
                unread.requested -= len;
                unread.bulk += len;
                self.ever += len * 3 / 2;
                (stream, len)
            }),
        };
        let Some((stream, len)) = used.filter(|(_, len)| *len > 0) else {
            return self.send(&[Frame::Abort { id }]).await;
        };
        self.peer.write(grant, Bytes::from(vec![0; len]));
        self.send(&[Frame::Done { stream, end: false, id, len: len as u32, begin: 0 }]).await
    }

    /// Checks that heap and landing memory hold no more than the streams allow now, and that the
    /// heap never held more than all streams so far allow.
    async fn check(&mut self, seed: u64) {
        self.peer.sync().await.unwrap();
        let allowed = self.streams.values().map(Unread::allows).sum::<usize>() + SLACK;
        let before = self.before;
        let mut more = 0;
        // Handlers of streams that were reset end a little later.
        for _ in 0..200 {
            more = self.ask("heap").await.saturating_sub(before) + self.ask("landing").await;
            if more <= allowed {
                break;
            }
            self.peer.sync().await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        self.most = self.most.max((more, allowed));
        let streams = &self.streams;
        assert!(more <= allowed, "seed {seed}: {more} bytes, {allowed} allowed by {streams:?}");
        let peak = self.ask("peak").await.saturating_sub(before);
        assert!(peak <= self.ever + SLACK, "seed {seed}: {peak} bytes, {} allowed", self.ever);
    }

    /// Ends all streams, and checks that the heap is as it was. Then tries the remaining kinds of
    /// frames.
    async fn finish(mut self, seed: u64) {
        // The number of grants to take back depends on when the server answers.
        while self.sent.get("RECALL").is_none_or(|sent| *sent < 3) {
            for what in [8, 9] {
                self.small_frames(what).await.unwrap_or_else(|Ended(why)| panic!("{why}: {seed}"));
            }
        }
        for stream in std::mem::take(&mut self.streams).into_keys() {
            self.send(&[Frame::Reset { stream, code: 8 }]).await.unwrap();
        }
        self.check(seed).await;
        println!("seed {seed}: at most {:?} bytes held and allowed, {:?}", self.most, self.sent);
        let mut kinds = vec!["HEADERS", "DATA", "WINDOW", "RESET", "REQUEST", "GRANT", "DONE"];
        kinds.extend(["RECALL", "PING"]);
        kinds.extend(self.lends.is_some().then_some("LENT"));
        for kind in kinds {
            assert!(self.sent.get(kind).is_some_and(|sent| *sent >= 3), "{kind}: {:?}", self.sent);
        }
        let goaway = Frame::GoAway { ack: false, code: 0, text: Bytes::new() };
        let close = Frame::Close { code: 0, text: Bytes::new() };
        let ends = async {
            let sent = self.send(&[goaway, close]).await;
            while sent.is_ok() && self.peer.sync().await.is_ok() {}
        };
        with_timeout("the end", ends).await;
        assert!(self.server.ask("heap").await.parse::<usize>().is_ok(), "the server goes on");
    }
}
