//! The contract of every provider, as test functions. The tests of a provider call them with its
//! fabric.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests")]

pub mod bare;
#[cfg(all(target_os = "linux", feature = "shm"))]
pub mod lingering;
pub mod process;
#[cfg(all(target_os = "linux", feature = "shm"))]
pub mod stranger;

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::task::Poll;
use std::time::Duration;

pub use bare::*;
use bytes::{Bytes, BytesMut};
use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, ConnectError, Connected, Fabric, Link, LinkConfig, LinkError,
    Listener, Posted, Takes, Work, WriteSource,
};
use tonic_rdma_memory::{LandingBuf, Pool, PoolConfig};

/// A timeout that is long enough for a busy machine. No test waits for it to expire.
pub const TIMEOUT: Duration = Duration::from_secs(20);

pub fn config() -> LinkConfig {
    LinkConfig {
        recv_slots: 16,
        recv_extra: 8,
        slot_size: 1024,
        send_slots: 32,
        staging: 128 << 10,
        send_queue: 64,
        inline: 256,
        busy_poll_limit: BUSY_POLL_LIMIT.get(),
        takes: Takes::ALL,
        ..LinkConfig::default()
    }
}

thread_local! {
    /// The busy-poll limit of links that this thread's test makes. It is the default unless the
    /// test sets it.
    pub static BUSY_POLL_LIMIT: Cell<Duration> = const { Cell::new(Duration::from_millis(2)) };
}

/// The device under test in the guest.
pub fn guest_device() -> String {
    std::env::var("GUEST_DEVICE").expect("GUEST_DEVICE must name the RDMA device to test on")
}

/// A side on the device under test.
pub fn on_guest_device() -> Side {
    Side::new(Fabric::open(Some(&guest_device())).expect("the device under test"))
}

/// A device with a pool on it.
pub struct Side {
    pub fabric: Fabric,
    pub pool: Pool,
}

impl Side {
    pub fn new(fabric: Fabric) -> Side {
        let pool = Pool::new(PoolConfig::default(), fabric.registrar()).expect("pool");
        Side { fabric, pool }
    }

    /// Whether the address is one of this side's.
    pub fn is_at(&self, addr: &Addr) -> bool {
        match addr {
            Addr::Ip(addr) => addr.ip() == self.ip(),
            Addr::Process(pid) => *pid == std::process::id(),
            _ => false,
        }
    }

    pub fn ip(&self) -> IpAddr {
        self.fabric.addresses().expect("addresses")[0]
    }

    pub fn listen(&self) -> Listener {
        let addr = match self.fabric.provider() {
            "shm" => Addr::Shm(tonic_rdma_fabric::ShmAddr::unique()),
            _ => Addr::Ip(SocketAddr::new(self.ip(), 0)),
        };
        self.fabric.listen(&addr).expect("listen")
    }

    pub async fn connect(&self, addr: &Addr) -> Result<Connected, ConnectError> {
        self.connect_with(addr, &config(), b"hello").await
    }

    pub async fn connect_with(
        &self,
        addr: &Addr,
        config: &LinkConfig,
        private_data: &[u8],
    ) -> Result<Connected, ConnectError> {
        self.fabric.connect(addr, config, &self.pool, private_data, TIMEOUT).await
    }

    /// A pattern in pool memory.
    pub fn payload(&self, len: usize, seed: u8) -> Bytes {
        let mut buf = self.pool.try_alloc(len).expect("alloc");
        buf.resize_zeroed(len);
        buf.as_mut_slice().copy_from_slice(&pattern(len, seed));
        buf.freeze()
    }

    pub fn landing(&self, len: usize) -> LandingBuf {
        let mut landing = self.pool.landing();
        landing.alloc(len, len).expect("registration").expect("landing memory")
    }
}

pub fn pattern(len: usize, seed: u8) -> BytesMut {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ ((i >> 8) as u8) ^ seed).collect()
}

/// A link and its reports.
pub struct End {
    pub link: AnyLink,
    pub got: VecDeque<Completion>,
    pub sent: Vec<u64>,
    next_id: u64,
}

impl End {
    pub fn new(link: AnyLink) -> End {
        End { link, got: VecDeque::new(), sent: Vec::new(), next_id: 1 }
    }

    /// Polls until the link reports something.
    pub async fn poll(&mut self) -> Result<(), LinkError> {
        let mut out = Vec::new();
        let result = poll_fn(|cx| self.link.poll(cx, &mut out)).await;
        assert!(result.is_err() || !out.is_empty(), "ready without a report");
        for completion in out {
            match completion {
                Completion::Sent { id } => self.sent.push(id),
                received => self.got.push_back(received),
            }
        }
        result
    }

    /// Receives the next message and reposts its slot.
    pub async fn receive(&mut self) -> Result<Vec<u8>, LinkError> {
        let (slot, data) = self.receive_and_hold().await?;
        self.link.repost(slot)?;
        assert!(self.link.recv_slot(slot, 1024).is_empty(), "a posted slot shows nothing");
        Ok(data)
    }

    pub async fn receive_and_hold(&mut self) -> Result<(u32, Vec<u8>), LinkError> {
        loop {
            if let Some(Completion::Received { slot, len }) = self.got.pop_front() {
                let data = self.link.recv_slot(slot, len).to_vec();
                assert_eq!(data.len(), len as usize);
                return Ok((slot, data));
            }
            self.poll().await?;
        }
    }

    /// Queues a SEND from a SEND slot that is not in use, and returns its id.
    pub fn queue_send(&mut self, slot: usize, data: &[u8], signal: bool) -> Result<u64, LinkError> {
        let offset = slot * config().slot_size as usize;
        self.link.block_mut()[offset..offset + data.len()].copy_from_slice(data);
        self.queue(Work::Send { offset, len: data.len() }, signal)
    }

    pub fn queue(&mut self, work: Work, signal: bool) -> Result<u64, LinkError> {
        let id = self.next_id;
        if self.link.queue(id, work, signal)? == Posted::Done {
            self.sent.push(id);
        }
        self.next_id += 1;
        Ok(id)
    }

    pub fn post(&mut self, slot: usize, data: &[u8]) -> u64 {
        let id = self.queue_send(slot, data, true).expect("queue");
        self.link.ring_doorbell().expect("ring");
        id
    }

    /// Sends, and waits for the completion.
    pub async fn send(&mut self, slot: usize, data: &[u8]) -> u64 {
        let id = self.post(slot, data);
        self.done(id).await.expect("send");
        id
    }

    /// Waits until the work with this id has completed.
    pub async fn done(&mut self, id: u64) -> Result<(), LinkError> {
        while self.sent.iter().all(|sent| *sent < id) {
            self.poll().await?;
        }
        Ok(())
    }

    /// Polls until the link is dead, and returns its error.
    pub async fn death(&mut self) -> LinkError {
        loop {
            if let Err(error) =
                tokio::time::timeout(TIMEOUT, self.poll()).await.expect("the link does not die")
            {
                let mut out = Vec::new();
                let again = poll_fn(|cx| self.link.poll(cx, &mut out)).await;
                assert_eq!(
                    again.unwrap_err().to_string(),
                    error.to_string(),
                    "the same error each time"
                );
                assert!(self.link.queue(0, Work::Send { offset: 0, len: 1 }, false).is_err());
                assert_eq!(error.peer(), self.link.peer());
                return error;
            }
        }
    }

    /// Whether the link has nothing to report now.
    pub async fn is_quiet(&mut self) -> bool {
        let mut out = Vec::new();
        poll_fn(|cx| Poll::Ready(self.link.poll(cx, &mut out).is_pending())).await
    }
}

/// Two connected ends: (accepting, connecting).
pub async fn pair(server: &Side, client: &Side) -> (End, End) {
    let mut listener = server.listen();
    pair_over(&mut listener, server, client, &config()).await
}

pub async fn pair_over(
    listener: &mut Listener,
    server: &Side,
    client: &Side,
    config: &LinkConfig,
) -> (End, End) {
    let addr = listener.local_addr();
    let accept = async {
        let incoming = listener.accept().await.expect("request");
        incoming.accept(config, &server.pool, b"", TIMEOUT).await.expect("accept")
    };
    let connect = async { client.connect_with(&addr, config, b"").await.expect("connect") };
    let (accepted, connected) = tokio::join!(accept, connect);
    (End::new(accepted), End::new(connected.link))
}

/// A pair whose connecting side has sent first (R3), so that the other side may send.
pub async fn greeted_pair(server: &Side, client: &Side) -> (End, End) {
    let (mut s, mut c) = pair(server, client).await;
    c.send(0, b"first").await;
    assert_eq!(s.receive().await.unwrap(), b"first");
    (s, c)
}

/// Gives the peer access to landing memory, and tells the peer. The peer may WRITE from then on.
pub async fn grant(s: &mut End, c: &mut End, rkey: u32) {
    s.link.share(rkey).unwrap();
    s.send(31, b"granted").await;
    assert_eq!(c.receive().await.unwrap(), b"granted");
}

pub async fn private_data_goes_both_ways(server: &Side, client: &Side) {
    let mut listener = server.listen();
    let addr = listener.local_addr();
    assert!(addr.ip().is_none_or(|a| a.port() != 0));
    let hello: Vec<u8> = (1..=56).collect();
    let config = config();
    let accept = async {
        let incoming = listener.accept().await.unwrap();
        assert_eq!(incoming.private_data(), hello);
        assert!(client.is_at(&incoming.peer_addr()));
        assert!(server.is_at(&incoming.local_addr()) || incoming.local_addr() == addr);
        incoming.accept(&config, &server.pool, b"welcome", TIMEOUT).await.unwrap()
    };
    let (accepted, connected) = tokio::join!(accept, client.connect_with(&addr, &config, &hello));
    let connected = connected.unwrap();
    let (answer, padding) = connected.private_data.split_at(7);
    assert_eq!(answer, b"welcome");
    assert!(padding.iter().all(|b| *b == 0));
    for (link, local, remote) in [(&accepted, server, client), (&connected.link, client, server)] {
        let peer = link.peer();
        assert!(local.is_at(&peer.local) && remote.is_at(&peer.remote), "{peer:?}");
        assert_eq!(
            (peer.provider, peer.device.as_str()),
            (local.fabric.provider(), local.fabric.name())
        );
    }
    assert!(addr.ip().is_none() || connected.link.peer().remote == addr);
    let too_long = client.connect_with(&addr, &config, &[0; 57]).await.unwrap_err();
    assert!(matches!(too_long, ConnectError::PrivateDataTooLong { len: 57 }), "{too_long}");
}

pub async fn rejections_arrive(server: &Side, client: &Side) {
    let mut listener = server.listen();
    let addr = listener.local_addr();
    let reject = async { listener.accept().await.unwrap().reject(b"no thanks") };
    let ((), refused) = tokio::join!(reject, client.connect(&addr));
    match refused.map(drop).unwrap_err() {
        ConnectError::Rejected { addr: at, private_data } => {
            assert_eq!(at, addr);
            assert!(private_data.starts_with(b"no thanks"), "{private_data:?}");
        }
        other => panic!("{other}"),
    }
    let neglect = async { drop(listener.accept().await.unwrap()) };
    let ((), refused) = tokio::join!(neglect, client.connect(&addr));
    let error = refused.map(drop).unwrap_err();
    assert!(matches!(error, ConnectError::Rejected { .. }), "{error}");
    // The listener continues.
    let (mut s, mut c) = pair_over(&mut listener, server, client, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

pub async fn nobody_listens(server: &Side, client: &Side) {
    let listener = server.listen();
    let addr = listener.local_addr();
    let taken = server.fabric.listen(&addr).map(drop).unwrap_err();
    assert!(taken.to_string().contains("in use"), "{taken}");
    drop(listener);
    let error = client.connect(&addr).await.map(drop).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { addr: at } if *at == addr), "{error}");
}

/// Sends as many SENDs as the peer has RECVs, repeatedly and in both directions.
pub async fn sends_fill_all_credits(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let credits = config().recv_slots as usize;
    for round in 0..20u8 {
        exchange(&mut c, &mut s, credits, round).await;
        exchange(&mut s, &mut c, credits, round).await;
    }
}

async fn exchange(sender: &mut End, receiver: &mut End, count: usize, round: u8) {
    let mut last = 0;
    for i in 0..count {
        last = sender.queue_send(i, &message(i, round), i + 1 == count).unwrap();
    }
    sender.link.ring_doorbell().unwrap();
    sender.done(last).await.unwrap();
    for i in 0..count {
        assert_eq!(
            receiver.receive().await.unwrap(),
            message(i, round),
            "message {i} of round {round}"
        );
    }
    assert_eq!(sender.link.send_room(), sender.link.caps().send_queue);
}

/// Extra RECVs are posted and used, then removed one by one, and posted again.
pub async fn extra_recvs_come_and_go(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let LinkConfig { recv_slots, recv_extra, slot_size, .. } = config();
    let (least, most) = (recv_slots as usize, (recv_slots + recv_extra) as usize);
    let used = server.pool.stats().control;
    if !server.fabric.grows() {
        assert_eq!(s.link.grow(&server.pool).unwrap(), 0, "all are there from the start");
        s.link.shrink().unwrap();
        exchange(&mut c, &mut s, least, 0).await;
        assert_eq!(server.pool.stats().control, used);
        return;
    }
    for round in 0..3 {
        assert_eq!(s.link.grow(&server.pool).unwrap(), recv_extra);
        assert_eq!(server.pool.stats().control, used + (recv_extra * slot_size) as usize);
        assert_eq!(s.link.grow(&server.pool).unwrap(), 0, "all are posted");
        exchange(&mut c, &mut s, most, round).await;
        exchange(&mut c, &mut s, most, round).await;

        s.link.shrink().unwrap();
        // Some of these messages fill initial RECVs, so only some of the extra RECVs are removed.
        // `grow` posts those again.
        exchange(&mut c, &mut s, least + 2, round).await;
        let revived = s.link.grow(&server.pool).unwrap();
        assert!((1..recv_extra).contains(&revived), "{revived}");
        exchange(&mut c, &mut s, most, round).await;

        s.link.shrink().unwrap();
        exchange(&mut c, &mut s, most, round).await;
        assert_eq!(server.pool.stats().control, used, "the memory is back with the last of them");
        exchange(&mut c, &mut s, least, round).await;
    }
}

/// Sends messages of these lengths in one batch, and returns how many of their RECVs were posted
/// again.
async fn pass(sender: &mut End, receiver: &mut End, lens: &[usize], round: u8) -> usize {
    let mut last = 0;
    for (slot, len) in lens.iter().enumerate() {
        last = sender.queue_send(slot, &pattern(*len, round), slot + 1 == lens.len()).unwrap();
    }
    sender.link.ring_doorbell().unwrap();
    sender.done(last).await.unwrap();
    let mut posted = 0;
    for len in lens {
        let (slot, data) = receiver.receive_and_hold().await.unwrap();
        assert_eq!(data, pattern(*len, round));
        posted += usize::from(receiver.link.repost(slot).unwrap());
    }
    posted
}

/// The RECVs of a link at rest may be shorter than extra RECVs. The short RECVs are not posted
/// again while extra RECVs are in use.
pub async fn short_recvs_make_way_for_extra_ones(server: &Side, client: &Side) {
    let config = LinkConfig { recv_slots: 4, rest_recv_size: 256, ..config() };
    let (short, long) = ([256; 4], [1024; 8]);
    let (mut s, mut c) = pair_over(&mut server.listen(), server, client, &config).await;
    let used = server.pool.stats().control;
    if !server.fabric.grows() {
        assert_eq!(pass(&mut c, &mut s, &[1024; 4], 0).await, 4, "slots of a ring are long");
        let (grown, rejoined) = (s.link.grow(&server.pool).unwrap(), s.link.shrink().unwrap());
        assert_eq!((grown, rejoined), (0, 0));
        return;
    }
    for round in 0..3 {
        assert_eq!(pass(&mut c, &mut s, &short, round).await, 4);
        assert_eq!(s.link.grow(&server.pool).unwrap(), 8);
        // Posted RECVs are filled in turn.
        assert_eq!(pass(&mut c, &mut s, &[&short[..], &long[..]].concat(), round).await, 8);
        assert_eq!(pass(&mut c, &mut s, &long, round).await, 8);
        assert_eq!(server.pool.stats().control, used + 8 * 1024);

        assert_eq!(s.link.shrink().unwrap(), 4);
        assert_eq!(s.link.shrink().unwrap(), 0, "all are posted");
        assert_eq!(pass(&mut c, &mut s, &long[..5], round).await, 0);
        // Load returns before the link is at rest. The long RECVs are posted again, behind those
        // that are already posted.
        assert_eq!(s.link.grow(&server.pool).unwrap(), 5);
        let posted = [&long[..3], &short[..], &long[..5]].concat();
        assert_eq!(pass(&mut c, &mut s, &posted, round).await, 8);

        assert_eq!(s.link.shrink().unwrap(), 4);
        assert_eq!(pass(&mut c, &mut s, &[&long[..], &short[..]].concat(), round).await, 4);
        assert_eq!(server.pool.stats().control, used, "the memory is back with the last of them");
    }
}

/// If the pool has little memory to spare, only a part of the extra RECVs is posted. If the pool
/// has no memory to spare, no extra RECV is posted.
pub async fn extra_recvs_take_what_the_pool_can_spare(server: &Side, client: &Side) {
    let config = LinkConfig {
        recv_slots: 4,
        recv_extra: 32,
        slot_size: 4096,
        rest_recv_size: 1024,
        staging: 0,
        send_slots: 4,
        ..config()
    };
    let (mut s, mut c) = pair_over(&mut server.listen(), server, client, &config).await;
    if !server.fabric.grows() {
        return;
    }
    let spares = |len: usize| std::iter::from_fn(move || server.pool.spare(len));
    let mut others: Vec<_> = spares(128 << 10).chain(spares(4096)).collect();
    assert_eq!(s.link.grow(&server.pool).unwrap(), 0);
    assert_eq!(pass(&mut c, &mut s, &[1024; 4], 0).await, 4, "the short ones stay");
    others.drain(..1).for_each(drop);
    let _taken = server.pool.spare(64 << 10);
    assert_eq!(s.link.grow(&server.pool).unwrap(), 8);
    assert_eq!(pass(&mut c, &mut s, &[1024; 4], 0).await, 0);
    for _ in 0..3 {
        assert_eq!(pass(&mut c, &mut s, &[1024; 8], 1).await, 8);
    }
    assert_eq!(s.link.grow(&server.pool).unwrap(), 0, "as many as there is memory for");
}

/// The SEND slots of a busy connection are leased and used. They are returned only while nothing is
/// in flight.
pub async fn busy_send_slots_come_and_go(server: &Side, client: &Side) {
    let config = LinkConfig { send_slots: 1, busy_send_slots: 8, staging: 0, ..config() };
    let (mut s, mut c) = pair_over(&mut server.listen(), server, client, &config).await;
    let used = client.pool.stats().control;
    if !client.fabric.grows() {
        assert_eq!((c.link.grow_sends(&client.pool), c.link.shrink_sends()), (None, None));
        return;
    }
    assert_eq!(c.link.shrink_sends(), None, "there are none");
    for round in 0..3 {
        let only = message(0, round);
        let id = c.post(0, &only);
        assert!(c.link.queue(0, Work::Send { offset: 1024, len: 1 }, false).is_err(), "one slot");
        // Work in flight keeps its memory.
        assert_eq!(c.link.grow_sends(&client.pool), Some(8));
        c.link.block_mut().fill(0xff);
        tokio::join!(async { c.done(id).await.unwrap() }, async {
            assert_eq!(s.receive().await.unwrap(), only);
        });
        assert_eq!(c.link.grow_sends(&client.pool), None, "there are all");
        assert_eq!(client.pool.stats().control, used + 8 * 1024);
        for slot in 0..8 {
            c.queue_send(slot, &message(slot, round), slot == 7).unwrap();
        }
        c.link.ring_doorbell().unwrap();
        assert_eq!(c.link.shrink_sends(), None, "work is in flight");
        let receive = async {
            for slot in 0..8 {
                assert_eq!(s.receive().await.unwrap(), message(slot, round));
            }
        };
        tokio::join!(receive, async { c.done(id + 8).await.unwrap() });
        assert_eq!(c.link.shrink_sends(), Some(1));
        assert_eq!(c.link.shrink_sends(), None);
        assert_eq!(client.pool.stats().control, used);
    }
}

fn message(i: usize, round: u8) -> BytesMut {
    pattern(1 + i * 41, round)
}

/// SENDs of sizes around the inline limit arrive, sent one by one and mixed in a batch.
pub async fn sends_of_all_sizes(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let inline = c.link.caps().max_inline;
    let mut sizes = vec![0, 1, 63, 64, 65, 255, 256, 257, 1023, 1024];
    sizes.extend([inline.saturating_sub(1), inline, inline + 1]);
    for (i, size) in sizes.iter().copied().enumerate() {
        c.send(0, &pattern(size, i as u8)).await;
        assert_eq!(s.receive().await.unwrap(), pattern(size, i as u8), "{size} bytes");
    }
    let mut last = 0;
    for (i, size) in sizes.iter().copied().enumerate() {
        last = c.queue_send(i, &pattern(size, i as u8), i + 1 == sizes.len()).unwrap();
    }
    c.link.ring_doorbell().unwrap();
    c.done(last).await.unwrap();
    for (i, size) in sizes.iter().copied().enumerate() {
        assert_eq!(s.receive().await.unwrap(), pattern(size, i as u8), "{size} bytes");
    }
}

/// The announcing SEND never overtakes the WRITEs before it (R4), for any kind of source.
pub async fn writes_land_before_the_send(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let chunk = 64 << 10;
    for round in 0..3u8 {
        let landing = server.landing(1 << 20);
        grant(&mut s, &mut c, landing.rkey()).await;
        let total = landing.capacity().min(1 << 20);
        let (addr, rkey) = (landing.addr(), landing.rkey());
        let data = pattern(total, round);
        let mut bytes = client.pool.try_alloc(total).unwrap();
        bytes.resize_zeroed(total);
        bytes.as_mut_slice().copy_from_slice(&data);
        let bytes = bytes.freeze();
        // Alternate between frozen pool memory, an owned buffer and staging.
        for (i, part) in data.chunks(chunk).enumerate() {
            let src = match i % 3 {
                0 => WriteSource::Bytes(
                    client.pool.resolve(&bytes.slice(i * chunk..i * chunk + part.len())).unwrap(),
                ),
                1 => {
                    let mut buf = client.pool.try_alloc(part.len()).unwrap();
                    buf.resize_zeroed(part.len());
                    buf.as_mut_slice().copy_from_slice(part);
                    WriteSource::Buf(buf)
                }
                _ => {
                    let offset = config().send_slots as usize * config().slot_size as usize;
                    c.link.block_mut()[offset..offset + part.len()].copy_from_slice(part);
                    WriteSource::Staged { offset, len: part.len() }
                }
            };
            let staged = i % 3 == 2;
            let remote_addr = addr + (i * chunk) as u64;
            let id = c.queue(Work::Write { src, remote_addr, rkey }, staged).unwrap();
            if staged {
                // Staging is reused, so this WRITE must complete first.
                c.link.ring_doorbell().unwrap();
                c.done(id).await.unwrap();
            }
        }
        // The source may be dropped, because the link keeps the memory alive (R10).
        drop(bytes);
        let id = c.queue_send(1, b"landed", true).unwrap();
        c.link.ring_doorbell().unwrap();
        let (received, done) = tokio::join!(s.receive(), c.done(id));
        assert_eq!(received.unwrap(), b"landed");
        let landed = landing.filled(total).lend();
        assert!(landed == data, "the data is not there when the SEND is, round {round}");
        done.unwrap();
    }
}

/// Landed data is sent on from where it lies, under a local key of the device. Short pieces are
/// sent inline, and long pieces are not.
pub async fn what_landed_is_sent_on(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let len = 64 << 10;
    let payload = client.payload(len, 5);
    let landing = server.landing(len);
    grant(&mut s, &mut c, landing.rkey()).await;
    let src = WriteSource::Bytes(client.pool.resolve(&payload).unwrap());
    c.queue(Work::Write { src, remote_addr: landing.addr(), rkey: landing.rkey() }, false).unwrap();
    let id = c.queue_send(1, b"there", true).unwrap();
    c.link.ring_doorbell().unwrap();
    let (received, done) = tokio::join!(s.receive(), c.done(id));
    assert_eq!((received.unwrap(), done.unwrap()), (b"there".to_vec(), ()));
    let landed = landing.filled(len).lend();
    for (from, to) in [(0, len), (1, 60), (4095, 4097), (4096, 4097), (100, len - 3)] {
        let back = client.landing(len);
        grant(&mut c, &mut s, back.rkey()).await;
        let part = server.pool.resolve(&landed).unwrap().slice(from..to);
        let src = WriteSource::Bytes(part);
        s.queue(Work::Write { src, remote_addr: back.addr(), rkey: back.rkey() }, false).unwrap();
        let id = s.queue_send(1, b"back", true).unwrap();
        s.link.ring_doorbell().unwrap();
        let (received, done) = tokio::join!(c.receive(), s.done(id));
        assert_eq!((received.unwrap(), done.unwrap()), (b"back".to_vec(), ()));
        assert!(back.filled(to - from).lend() == payload[from..to], "{from}..{to}");
    }
}

/// A full queue applies back-pressure (R5): it has no room, then it has room again, and nothing is
/// lost.
pub async fn a_full_queue_recovers(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let depth = c.link.caps().send_queue;
    let landing = server.landing(64 << 10);
    grant(&mut s, &mut c, landing.rkey()).await;
    let (addr, rkey) = (landing.addr(), landing.rkey());
    // These WRITEs are shorter than a page, because Soft-iWARP would signal each WRITE of a page.
    let payload = client.payload(2048, 9);
    // A link that copies at once is never full.
    let copies = c.link.caps().any_memory;
    for round in 0..5 {
        assert_eq!(c.link.send_room(), depth);
        let mut last = 0;
        for i in 0..depth {
            let src = WriteSource::Bytes(client.pool.resolve(&payload).unwrap());
            last = c
                .queue(Work::Write { src, remote_addr: addr + 2048 * (i as u64 % 32), rkey }, false)
                .unwrap();
        }
        if !copies {
            assert_eq!(c.link.send_room(), 0);
            let error = c.queue(Work::Send { offset: 0, len: 1 }, false).unwrap_err();
            assert!(matches!(error, LinkError::Misuse { .. }), "{error}");
        }
        c.link.ring_doorbell().unwrap();
        assert_eq!(
            c.link.send_room(),
            if copies { depth } else { 0 },
            "ringing frees nothing (round {round})"
        );
        let before = c.sent.len();
        c.done(last).await.unwrap();
        let completions = c.sent.len() - before;
        assert!(completions <= depth / 2, "{completions} completions for {depth} WRITEs");
    }
    c.send(0, b"done").await;
    assert_eq!(s.receive().await.unwrap(), b"done");
    assert!(landing.filled(64 << 10).lend().chunks(2048).all(|c| c == &payload[..]));
}

pub async fn misuse_is_told_and_harmless(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let block = config().block_bytes();
    let landing = server.landing(4096);
    grant(&mut s, &mut c, landing.rkey()).await;
    let (remote_addr, rkey) = (landing.addr(), landing.rkey());
    if !c.link.caps().any_memory {
        let src = WriteSource::Any(Bytes::from_static(b"x"));
        let error = c.queue(Work::Write { src, remote_addr, rkey }, true).unwrap_err();
        assert!(matches!(error, LinkError::Misuse { .. }), "{error}");
    }
    for work in [
        Work::Send { offset: block, len: 1 },
        Work::Send { offset: 0, len: block + 1 },
        Work::Send { offset: usize::MAX, len: 2 },
        Work::Write { src: WriteSource::Staged { offset: block - 1, len: 2 }, remote_addr, rkey },
    ] {
        let error = c.queue(work, true).unwrap_err();
        assert!(matches!(error, LinkError::Misuse { .. }), "{error}");
    }
    assert!(matches!(c.link.repost(0).unwrap_err(), LinkError::Misuse { .. }));
    assert!(matches!(c.link.repost(4711).unwrap_err(), LinkError::Misuse { .. }));
    assert!(c.link.recv_slot(4711, 10).is_empty());
    c.send(2, b"alive").await;
    assert_eq!(s.receive().await.unwrap(), b"alive");
}

pub async fn a_disconnect_is_seen(server: &Side, client: &Side) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    c.send(1, b"last words").await;
    c.link.disconnect();
    c.link.disconnect();
    assert_eq!(s.receive().await.unwrap(), b"last words", "what was sent before arrives");
    let error = s.death().await;
    assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    let error = c.death().await;
    assert!(matches!(error, LinkError::Closed { .. }), "{error}");
}

pub async fn a_drop_is_seen(server: &Side, client: &Side) {
    let (mut s, c) = greeted_pair(server, client).await;
    drop(c);
    let error = s.death().await;
    assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    let (s, mut c) = greeted_pair(server, client).await;
    drop(s);
    let error = c.death().await;
    assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
}

/// The accepting end drops the link at once. Over InfiniBand and RoCE, its connection manager may
/// not yet have processed the last message of the handshake.
pub async fn an_accepted_link_that_is_dropped_at_once_ends(server: &Side, client: &Side) {
    for _ in 0..20 {
        let (s, mut c) = pair(server, client).await;
        drop(s);
        let error = c.death().await;
        assert!(matches!(error, LinkError::Disconnected { .. }), "{error}");
    }
}

/// The target of a WRITE: address and key, derived from those of a grant.
pub type Aim<'a> = &'a dyn Fn(&LandingBuf) -> (u64, u32);

/// Performs a forbidden WRITE, and returns the errors of both ends: (target's, writer's).
pub async fn a_bad_write(server: &Side, client: &Side, aim: Aim<'_>) -> (LinkError, LinkError) {
    let (mut s, mut c) = greeted_pair(server, client).await;
    let landing = server.landing(8192);
    grant(&mut s, &mut c, landing.rkey()).await;
    let (remote_addr, rkey) = aim(&landing);
    let src = WriteSource::Bytes(client.pool.resolve(&client.payload(4096, 1)).unwrap());
    // A link that copies at once reports the error at once.
    if c.queue(Work::Write { src, remote_addr, rkey }, true).is_ok() {
        c.link.ring_doorbell().unwrap();
    }
    let writer = c.death().await;
    drop(c);
    let target = s.death().await;
    drop(s);
    assert!(landing.filled(8192).lend().iter().all(|b| *b == 0), "nothing was written");
    (target, writer)
}

/// A connection attempt that is dropped early frees everything and affects nobody else.
pub async fn a_dropped_attempt_is_harmless(server: &Side, client: &Side) {
    let mut listener = server.listen();
    let addr = listener.local_addr();
    let attempt = tokio::time::timeout(Duration::from_millis(200), client.connect(&addr)).await;
    assert!(attempt.is_err(), "nobody has accepted it");
    let incoming = listener.accept().await.unwrap();
    let late = incoming.accept(&config(), &server.pool, b"", Duration::from_secs(5)).await;
    match late {
        Err(
            ConnectError::PeerGone { .. } | ConnectError::Timeout { .. } | ConnectError::Fabric(_),
        ) => {}
        Err(other) => panic!("{other}"),
        Ok(link) => drop(End::new(link).death().await),
    }
    let (mut s, mut c) = pair_over(&mut listener, server, client, &config()).await;
    c.send(0, b"x").await;
    assert_eq!(s.receive().await.unwrap(), b"x");
}

/// A request that waits longer than its timeout fails with an error that names the step.
pub async fn an_unanswered_request_times_out(server: &Side, client: &Side) {
    let listener = server.listen();
    let addr = listener.local_addr();
    let timeout = Duration::from_millis(300);
    let error = client
        .fabric
        .connect(&addr, &config(), &client.pool, b"", timeout)
        .await
        .map(drop)
        .unwrap_err();
    assert!(matches!(error, ConnectError::Timeout { after, .. } if after == timeout), "{error}");
    assert!(error.to_string().contains("300 ms"), "{error}");
}

/// Another connection is established, and messages go both ways.
pub async fn others_are_served(listener: &mut Listener, side: &Side) {
    let (mut s, mut c) = pair_over(listener, side, side, &config()).await;
    for _ in 0..20 {
        c.send(0, b"ask").await;
        assert_eq!(s.receive().await.unwrap(), b"ask");
        s.send(0, b"answer").await;
        assert_eq!(c.receive().await.unwrap(), b"answer");
    }
}
