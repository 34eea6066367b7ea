//! Peers that have a ticket and violate the protocol with raw work requests on a queue pair. Each
//! harms only its own connection.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use rand::Rng;
use tonic_rdma_fabric::{
    AnyLink, Completion, ConnectError, Fabric, Link, LinkConfig, LinkError, Work, WriteSource,
};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::frame::{Composer, Frame, Reader};
use tonic_rdma_proto::{Config, Hello, headers};
use tonic_rdma_tests::bootstrap::fabric_offer::Fabric as Offered;
use tonic_rdma_tests::load::{Load, Tally, poll_until, with_timeout};
use tonic_rdma_tests::offer::request_grant;
use tonic_rdma_tests::pb::step::Step as Kind;
use tonic_rdma_tests::pb::{Message, Script, Step};
use tonic_rdma_tests::server_process::POOL_SIZE;
use tonic_rdma_tests::service::pattern;

use crate::fault_test::{FaultTest, Topology, kind};
use crate::log::Log;

/// Connections that are abandoned during the handshake.
const ABANDONED_CONNECTS: usize = 20;

/// The length for which a peer requests memory, in bytes.
const ASKED: usize = 1 << 20;

/// The number of guessed addresses, and the step between them, which no chunk of landing memory for
/// such a request undercuts.
const GUESSES: u64 = 24;
const STEP: u64 = ASKED as u64 / 2;

pub async fn peers_that_break_the_rules(log: Log) {
    let mut test = FaultTest::new(Topology::one_device(), log).await;
    let channel = test.connect().await;
    let tally = Tally::default();
    let load = Load::start(&channel, 0, &tally);
    let host = Host::new(&test);

    // Invalid handshakes.
    let (ticket, place) = host.request_ticket().await;
    let hello = Hello::new(ticket, Config::default().settings()).encode();
    for bad in [
        &b""[..],
        &[0xff; 56],
        &hello[..40],
        &Hello::new([7; 16], Config::default().settings()).encode(),
    ] {
        let refused = host.connect(place, bad).await.map(drop).unwrap_err();
        assert!(matches!(refused, ConnectError::Rejected { .. }), "{refused}");
        test.count_fault();
    }
    drop(host.connect(place, &hello).await.unwrap());
    let spent = host.connect(place, &hello).await.map(drop).unwrap_err();
    assert!(matches!(spent, ConnectError::Rejected { .. }), "a ticket is good once: {spent}");
    for _ in 0..ABANDONED_CONNECTS {
        let (ticket, place) = host.request_ticket().await;
        let hello = Hello::new(ticket, Config::default().settings()).encode();
        let _ = tokio::time::timeout(Duration::from_millis(1), host.connect(place, &hello)).await;
        test.count_fault();
    }

    // Violations on an open connection.
    for breach in Breach::ALL {
        host.run_peer(&mut test, breach).await;
    }
    let ok = tally.of("OK");
    let read = || async { tally.of("OK") };
    poll_until("no calls beside the hostile peers", read, |now| *now > ok + 10).await;
    load.stop().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
    println!("  beside them {} calls went well", tally.of("OK"));
    drop((channel, host));
    test.end("hostile peers").await;
}

/// All connections of a device share a protection domain, so the key of another connection's
/// landing memory is valid for every peer. A peer does not know the address, and has one guess per
/// ticket. Here it knows the key, and guesses near its own memory.
pub async fn a_key_without_its_address(log: Log) {
    // Chunks of 2 MiB and more keep their offset within a huge page (SECURITY.md), so those of this
    // pool are shorter: every bit of a page number is to vary.
    let pool = format!("env {POOL_SIZE}={}", 32 << 20);
    let mut test = FaultTest::with_wrapper(&pool, Topology::one_device(), log).await;
    let channel = test.connect().await;
    let tally = Tally::default();
    let load = Load::start(&channel, 0, &tally);
    let host = Host::new(&test);

    // The victim has written its message, and not sent DONE yet.
    let mut victim = host.connect_with_ticket().await;
    let granted = victim.grant().await;
    let (message, payload) = upload(ASKED);
    victim.write(&message, granted.addr, granted.rkey);
    let mut granted_addrs = vec![granted.addr];
    tokio::select! {
        () = guess(&host, &mut test, granted.rkey, &mut granted_addrs) => {}
        error = victim.answer_pings() => panic!("the connection whose memory they look for has ended: {error}"),
    }
    // Its memory is unchanged: the handler checks each byte.
    victim
        .frame(&Frame::Done { stream: 1, end: true, id: granted.id, len: ASKED as u32, begin: 0 })
        .await;
    let summary = victim.reply().await;
    assert_eq!((summary.count, summary.total), (1, payload as u64));
    assert_random(&granted_addrs);

    let ok = tally.of("OK");
    let read = || async { tally.of("OK") };
    poll_until("no calls beside the peers that guess", read, |now| *now > ok + 10).await;
    load.stop().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
    println!("  {GUESSES} guesses; beside them {} calls went well", tally.of("OK"));
    drop((victim, channel, host));
    test.end("guessed addresses").await;
}

/// Peers connect one after the other. Each requests memory, and WRITEs near it with the key of
/// another connection.
async fn guess(host: &Host, test: &mut FaultTest, rkey: u32, granted_addrs: &mut Vec<u64>) {
    for guess in 0..GUESSES {
        let mut peer = host.connect_with_ticket().await;
        let (before, by) = (test.server_log_count("fast path lost"), guess / 2 * STEP);
        let own = peer.grant().await;
        granted_addrs.push(own.addr);
        let beside =
            if guess % 2 == 0 { own.addr.wrapping_add(by) } else { own.addr.wrapping_sub(by) };
        peer.write(&[0; 4096], beside, rkey);
        match with_timeout("the end of a peer that guessed", peer.wait_for_end()).await {
            LinkError::Completion { code: 10, .. } if kind() == "rxe" => {}
            LinkError::Disconnected { .. } if kind() == "siw" => {}
            other => panic!("guess {guess}: {other}"),
        }
        drop(peer);
        test.count_fault();
        let read = || async { test.server_log_count("fast path lost") };
        poll_until("the loss is not in the server's log", read, |now| *now > before).await;
    }
}

/// Checks the addresses of grants: each bit of the page number varies, up to the length that
/// SECURITY.md gives for the device.
fn assert_random(granted_addrs: &[u64]) {
    let top = u64::BITS - granted_addrs.iter().max().unwrap().leading_zeros();
    match kind().as_str() {
        "rxe" => assert_eq!(top, 64),
        // A process has 39 bits of address space under User Mode Linux, and 47 on other x86-64
        // kernels.
        _ => assert!(top >= 39, "{top}"),
    }
    const PAGE: u32 = 12;
    for bit in PAGE..top {
        let set = granted_addrs.iter().filter(|addr| (*addr >> bit) & 1 == 1).count();
        assert!(
            set > 0 && set < granted_addrs.len(),
            "bit {bit} of {top} is always the same: {granted_addrs:x?}"
        );
    }
    println!("  {} bits of the page number vary in {} grants", top - PAGE, granted_addrs.len());
}

/// An Upload message of `len` bytes on the wire, and the bytes of payload in it.
fn upload(len: usize) -> (Vec<u8>, usize) {
    let steps = [Kind::Receive(1), Kind::Summary(true)].map(|step| Step { step: Some(step) });
    let script = Some(Script { steps: steps.to_vec(), ..Script::default() });
    let of = |payload| Message {
        payload: pattern::make(7, payload),
        seed: 7,
        script: script.clone(),
        ..Message::default()
    };
    const PREFIX: usize = 5;
    // The rest of the message has the same length in both.
    let payload = 2 * len - PREFIX - of(len).encoded_len();
    let mut bytes = vec![0];
    bytes.put_u32((len - PREFIX) as u32);
    of(payload).encode(&mut bytes).unwrap();
    assert_eq!(bytes.len(), len);
    (bytes, payload)
}

/// Commits a random breach next to a channel that must not be affected.
pub async fn run_hostile_peer(test: &mut FaultTest) {
    let load = test.under_load().await;
    let breach = Breach::ALL[load.test.rng.random_range(0..Breach::ALL.len())];
    Host::new(load.test).run_peer(load.test, breach).await;
    let channel = load.channel.clone();
    let tally = load.end().await;
    assert_eq!((tally.failed(), channel.stats().calls_tcp), (0, 0), "{tally:?}");
}

/// A violation of the protocol.
#[derive(Clone, Copy, Debug)]
enum Breach {
    /// A message of another protocol.
    Words,
    /// PINGs as fast as the device accepts them.
    Flood,
    /// All its SENDs at once, many more than it has credits.
    PastItsCredits,
    /// A message that is longer than the RECV of a connection at rest that it takes.
    LongerThanItsRecv,
    /// Nothing, after it has opened a stream and been granted memory.
    Silence,
    /// A WRITE with a key that the peer was not given.
    UnknownKey,
    /// A WRITE to an address far from its grant, with the grant's key.
    FarFromItsGrant,
    /// A WRITE just beyond the region, which is no longer than a chunk of landing memory.
    BehindItsGrant,
}

impl Breach {
    const ALL: [Self; 8] = [
        Self::Words,
        Self::Flood,
        Self::PastItsCredits,
        Self::LongerThanItsRecv,
        Self::Silence,
        Self::UnknownKey,
        Self::FarFromItsGrant,
        Self::BehindItsGrant,
    ];

    async fn commit(self, peer: &mut Peer) {
        let ping = Frame::Ping { ack: false, token: 1 };
        match self {
            Self::Words => peer.post(b"GET / HTTP/1.1\r\n\r\n"),
            Self::Flood => {
                let mut left = 10_000;
                while left > 0 && peer.try_frame(&ping).await.is_ok() {
                    left -= 1;
                }
                assert!(left > 0, "nothing stops a flood of PINGs");
            }
            Self::PastItsCredits => {
                // The device does not report the end to the other side: a stream is open, so that
                // the silence is noticed.
                peer.grant().await;
                for slot in 0..config().send_slots as usize {
                    let len = peer.compose(slot, &ping);
                    peer.queue(Work::Send { offset: slot * config().slot_size as usize, len })
                        .unwrap();
                }
                peer.link.ring_doorbell().unwrap();
            }
            Self::LongerThanItsRecv => {
                let len: u16 = 2048;
                let mut message = vec![0; len.into()];
                message[4..6].copy_from_slice(&len.to_le_bytes());
                peer.post(&message);
            }
            Self::Silence => {
                peer.grant().await;
            }
            Self::UnknownKey => peer.write_at(|grant| (grant.addr, grant.rkey ^ 0x00ff_ff00)).await,
            Self::FarFromItsGrant => {
                peer.write_at(|grant| (grant.addr + (1 << 40), grant.rkey)).await
            }
            Self::BehindItsGrant => {
                peer.write_at(|grant| (grant.addr + (64 << 20), grant.rkey)).await
            }
        }
    }
}

fn config() -> LinkConfig {
    LinkConfig {
        recv_slots: 32,
        slot_size: 4096,
        send_slots: 100,
        staging: 64 << 10,
        send_queue: 200,
        inline: 0,
        ..LinkConfig::default()
    }
}

/// A hostile host: its device and pool, and the server's address.
struct Host {
    fabric: Fabric,
    pool: Pool,
    server: SocketAddr,
}

impl Host {
    fn new(test: &FaultTest) -> Self {
        let fabric = Fabric::open(Some(&test.topology.client_device)).unwrap();
        let pool = Pool::new(PoolConfig::default().total(8 << 20), fabric.registrar()).unwrap();
        Self { fabric, pool, server: test.at }
    }

    /// Gets a ticket, and the address for which it is valid.
    async fn request_ticket(&self) -> ([u8; 16], SocketAddr) {
        let grant = request_grant(self.server, "verbs").await;
        let Some(Offered::Verbs(verbs)) = &grant.fabrics[0].fabric else { panic!("{grant:?}") };
        let address = &verbs.addresses[0];
        let place = SocketAddr::new(address.ip.parse().unwrap(), address.port as u16);
        (grant.ticket[..].try_into().unwrap(), place)
    }

    async fn connect(&self, place: SocketAddr, hello: &[u8]) -> Result<Peer, ConnectError> {
        let limit = Duration::from_secs(20);
        let connected =
            self.fabric.connect(&place.into(), &config(), &self.pool, hello, limit).await?;
        Ok(Peer {
            link: connected.link,
            pool: self.pool.clone(),
            next: 0,
            done: 0,
            messages: VecDeque::new(),
            credits: 0,
        })
    }

    /// Connects a peer that commits this breach. The server must close its connection, and log it.
    async fn run_peer(&self, test: &mut FaultTest, breach: Breach) {
        let before = test.server_log_count("fast path lost");
        let mut peer = self.connect_with_ticket().await;
        breach.commit(&mut peer).await;
        let end = with_timeout("the end of a peer that broke the rules", peer.wait_for_end()).await;
        println!("  {breach:?}: {end}");
        drop(peer);
        test.count_fault();
        let read = || async { test.server_log_count("fast path lost") };
        poll_until("the loss is not in the server's log", read, |now| *now > before).await;
    }

    /// Connects a peer, once those that were dropped have returned their memory: a queue pair is
    /// destroyed in the background, also that of a connect that was abandoned. The pool has room
    /// for three, and at most one other is in use.
    async fn connect_with_ticket(&self) -> Peer {
        let LinkConfig { recv_slots, slot_size, send_slots, staging, .. } = config();
        let of_one = (recv_slots + send_slots) as usize * slot_size as usize + staging as usize;
        let read = || async { self.pool.stats().control };
        poll_until("peers that have ended hold memory", read, |control| *control <= of_one).await;
        let (ticket, place) = self.request_ticket().await;
        let mut config = Config::default();
        (config.slot_size, config.recv_slots) = (4096, 32);
        self.connect(place, &Hello::new(ticket, config.settings()).encode()).await.unwrap()
    }
}

/// A grant for this peer.
struct Granted {
    id: u32,
    addr: u64,
    rkey: u32,
}

/// A hostile peer with a queue pair.
struct Peer {
    link: AnyLink,
    pool: Pool,
    next: u64,
    done: u64,
    messages: VecDeque<Bytes>,
    /// RECVs posted again for which no credits have been returned yet.
    credits: u16,
}

impl Peer {
    async fn poll(&mut self) -> Result<(), LinkError> {
        let mut out = Vec::new();
        let result = poll_fn(|cx| self.link.poll(cx, &mut out)).await;
        for completion in out {
            match completion {
                Completion::Sent { id } => self.done = self.done.max(id),
                Completion::Received { slot, len } => {
                    self.messages.push_back(Bytes::copy_from_slice(self.link.recv_slot(slot, len)));
                    self.link.repost(slot)?;
                    self.credits += 1;
                }
            }
        }
        result
    }

    async fn wait_for_end(&mut self) -> LinkError {
        loop {
            if let Err(error) = self.poll().await {
                return error;
            }
        }
    }

    fn queue(&mut self, work: Work) -> Result<u64, LinkError> {
        self.next += 1;
        self.link.queue(self.next, work, true).map(|_| self.next)
    }

    /// Posts a SEND with arbitrary bytes.
    fn post(&mut self, bytes: &[u8]) {
        self.link.block_mut()[..bytes.len()].copy_from_slice(bytes);
        self.queue(Work::Send { offset: 0, len: bytes.len() }).unwrap();
        self.link.ring_doorbell().unwrap();
    }

    fn compose(&mut self, slot: usize, frame: &Frame) -> usize {
        let size = config().slot_size as usize;
        let mut message = Composer::new(&mut self.link.block_mut()[slot * size..][..size]);
        assert!(message.add(frame));
        message.finish(std::mem::take(&mut self.credits))
    }

    /// Answers PINGs until the connection ends.
    async fn answer_pings(&mut self) -> LinkError {
        loop {
            while let Some(message) = self.messages.pop_front() {
                let mut reader = Reader::new(message).unwrap();
                while let Some(frame) = reader.next_frame().unwrap() {
                    if let Frame::Ping { ack: false, token } = frame
                        && let Err(error) = self.try_frame(&Frame::Ping { ack: true, token }).await
                    {
                        return error;
                    }
                }
            }
            if let Err(error) = self.poll().await {
                return error;
            }
        }
    }

    /// Sends a frame after all earlier work has completed, and waits for its completion.
    async fn try_frame(&mut self, frame: &Frame) -> Result<(), LinkError> {
        while self.done < self.next {
            self.poll().await?;
        }
        let len = self.compose(0, frame);
        let id = self.queue(Work::Send { offset: 0, len })?;
        self.link.ring_doorbell()?;
        while self.done < id {
            self.poll().await?;
        }
        Ok(())
    }

    async fn frame(&mut self, frame: &Frame) {
        with_timeout("a SEND", self.try_frame(frame)).await.unwrap();
    }

    /// Requests memory as the protocol says.
    async fn grant(&mut self) -> Granted {
        let mut block = BytesMut::new();
        let path = "/tonic_rdma.conformance.v1.Conformance/Upload";
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            ("content-type", "application/grpc"),
        ] {
            headers::encode(&mut block, name, value.as_bytes()).unwrap();
        }
        self.frame(&Frame::Headers {
            stream: 1,
            end: false,
            more: false,
            indexed: false,
            block: block.freeze(),
        })
        .await;
        self.frame(&Frame::Request { stream: 1, len: ASKED as u64, begin: 0 }).await;
        loop {
            while let Some(message) = self.messages.pop_front() {
                let mut reader = Reader::new(message).unwrap();
                while let Some(frame) = reader.next_frame().unwrap() {
                    if let Frame::Grant { stream: 1, id, rkey, addr, .. } = frame {
                        return Granted { id, addr, rkey };
                    }
                }
            }
            with_timeout("a grant", self.poll()).await.unwrap();
        }
    }

    /// The response message of its call.
    async fn reply(&mut self) -> Message {
        let mut body = BytesMut::new();
        loop {
            while let Some(message) = self.messages.pop_front() {
                let mut reader = Reader::new(message).unwrap();
                while let Some(frame) = reader.next_frame().unwrap() {
                    match frame {
                        Frame::Data { stream: 1, data, .. } => body.put(data),
                        Frame::Headers { stream: 1, end: true, .. } => {
                            let message =
                                body.get(5..).expect("the call failed: there is no message");
                            return Message::decode(message).unwrap();
                        }
                        _ => {}
                    }
                }
            }
            with_timeout("the answer", self.poll()).await.unwrap();
        }
    }

    /// WRITEs outside of its grant.
    async fn write_at(&mut self, aim: fn(Granted) -> (u64, u32)) {
        let (remote_addr, rkey) = aim(self.grant().await);
        self.write(&[0; 4096], remote_addr, rkey);
    }

    fn write(&mut self, bytes: &[u8], remote_addr: u64, rkey: u32) {
        let mut buf = self.pool.try_alloc(bytes.len()).unwrap();
        buf.put_slice(bytes);
        let src = WriteSource::Bytes(self.pool.resolve(&buf.freeze()).unwrap());
        self.queue(Work::Write { src, remote_addr, rkey }).unwrap();
        self.link.ring_doorbell().unwrap();
    }
}
