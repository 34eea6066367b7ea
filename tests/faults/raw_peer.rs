//! A peer that has a ticket and a queue pair, and composes its own work requests.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message as _;
use tonic_rdma_fabric::{
    AnyLink, Completion, ConnectError, Fabric, Link, LinkConfig, LinkError, Work, WriteSource,
};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::frame::{Composer, Field, Frame, Reader};
use tonic_rdma_proto::{Config, Hello};
use tonic_rdma_tests::bootstrap::fabric_offer::Fabric as Offered;
use tonic_rdma_tests::load::{poll_until, with_timeout};
use tonic_rdma_tests::offer::request_grant;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::wire;

/// The number of bytes of memory that a peer requests.
pub const ASKED: usize = 1 << 20;

pub fn config() -> LinkConfig {
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
pub struct Host {
    fabric: Fabric,
    pool: Pool,
    server: SocketAddr,
}

impl Host {
    pub fn new(device: &str, server: SocketAddr) -> Self {
        let fabric = Fabric::open(Some(device)).unwrap();
        let pool = Pool::new(PoolConfig::default().total(8 << 20), fabric.registrar()).unwrap();
        Self { fabric, pool, server }
    }

    /// Gets a ticket, and the address for which it is valid.
    pub async fn request_ticket(&self) -> ([u8; 16], SocketAddr) {
        let grant = request_grant(self.server, "verbs").await;
        let Some(Offered::Verbs(verbs)) = &grant.fabrics[0].fabric else { panic!("{grant:?}") };
        let address = &verbs.addresses[0];
        let place = SocketAddr::new(address.ip.parse().unwrap(), address.port as u16);
        (grant.ticket[..].try_into().unwrap(), place)
    }

    pub async fn connect(&self, place: SocketAddr, hello: &[u8]) -> Result<Peer, ConnectError> {
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

    /// Connects a peer, once dropped peers have returned their memory. A queue pair is destroyed in
    /// the background, even the queue pair of an abandoned connection attempt. The pool has room
    /// for three peers, and at most one other peer is in use.
    pub async fn connect_with_ticket(&self) -> Peer {
        let LinkConfig { recv_slots, slot_size, send_slots, staging, .. } = config();
        let of_one = (recv_slots + send_slots) as usize * slot_size as usize + staging;
        let read = || async { self.pool.stats().control };
        poll_until("peers that have ended hold memory", read, |control| *control <= of_one).await;
        let (ticket, place) = self.request_ticket().await;
        let mut config = Config::default();
        (config.slot_size, config.recv_slots) = (4096, 32);
        self.connect(place, &Hello::new(ticket, config.settings()).encode()).await.unwrap()
    }
}

/// A grant for this peer.
#[derive(Clone, Copy, Debug)]
pub struct Granted {
    pub id: u32,
    pub addr: u64,
    pub rkey: u32,
    pub len: u32,
}

/// A hostile peer with a queue pair.
pub struct Peer {
    pub link: AnyLink,
    pool: Pool,
    next: u64,
    done: u64,
    messages: VecDeque<Bytes>,
    /// RECVs posted again for which no credits have been returned yet.
    credits: u16,
}

impl Peer {
    pub async fn poll(&mut self) -> Result<(), LinkError> {
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
                Completion::NotMapped { .. }
                | Completion::Forgotten { .. }
                | Completion::Answered => {}
            }
        }
        result
    }

    pub async fn wait_for_end(&mut self) -> LinkError {
        loop {
            if let Err(error) = self.poll().await {
                return error;
            }
        }
    }

    pub fn queue(&mut self, work: Work) -> Result<u64, LinkError> {
        self.next += 1;
        self.link.queue(self.next, work, true).map(|_| self.next)
    }

    /// Posts a SEND with arbitrary bytes.
    pub fn post(&mut self, bytes: &[u8]) {
        self.link.block_mut()[..bytes.len()].copy_from_slice(bytes);
        self.queue(Work::Send { offset: 0, len: bytes.len() }).unwrap();
        self.link.ring_doorbell().unwrap();
    }

    /// Sends messages that return no credits from all SEND slots at once, and waits until they are
    /// sent.
    pub async fn burst(&mut self, frame: &Frame) -> Result<(), LinkError> {
        for slot in 0..config().send_slots as usize {
            self.credits = 0;
            let len = self.compose(slot, frame);
            self.queue(Work::Send { offset: slot * config().slot_size as usize, len })?;
        }
        self.link.ring_doorbell()?;
        while self.done < self.next {
            self.poll().await?;
        }
        Ok(())
    }

    pub fn compose(&mut self, slot: usize, frame: &Frame) -> usize {
        let size = config().slot_size as usize;
        let mut message = Composer::new(&mut self.link.block_mut()[slot * size..][..size]);
        assert!(message.add(frame));
        message.finish(std::mem::take(&mut self.credits))
    }

    /// Answers PINGs until the connection ends.
    pub async fn answer_pings(&mut self) -> LinkError {
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
    pub async fn try_frame(&mut self, frame: &Frame) -> Result<(), LinkError> {
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

    pub async fn frame(&mut self, frame: &Frame) {
        with_timeout("a SEND", self.try_frame(frame)).await.unwrap();
    }

    /// Sends a PING and waits for the answer, by when all earlier writes have arrived (R4).
    pub async fn ping(&mut self) {
        const TOKEN: u64 = 0x7e57;
        self.frame(&Frame::Ping { ack: false, token: TOKEN }).await;
        loop {
            while let Some(message) = self.messages.pop_front() {
                let mut reader = Reader::new(message).unwrap();
                while let Some(frame) = reader.next_frame().unwrap() {
                    if matches!(frame, Frame::Ping { ack: true, token: TOKEN }) {
                        return;
                    }
                }
            }
            with_timeout("a sign of life", self.poll()).await.unwrap();
        }
    }

    /// Requests memory as the protocol requires, for a call that uploads.
    pub async fn grant(&mut self) -> Granted {
        self.open("Upload").await;
        let [granted] = self.request(ASKED as u64, None).await;
        granted
    }

    /// Opens stream 1 with a call to this method.
    pub async fn open(&mut self, method: &str) {
        self.frame(&wire::head(1, method)).await;
    }

    /// Requests memory on stream 1, and waits for this many grants.
    pub async fn request<const N: usize>(
        &mut self,
        len: u64,
        field: Option<Field>,
    ) -> [Granted; N] {
        self.frame(&Frame::Request { stream: 1, len, begin: 0, field }).await;
        let mut grants = Vec::new();
        loop {
            while let Some(message) = self.messages.pop_front() {
                let mut reader = Reader::new(message).unwrap();
                while let Some(frame) = reader.next_frame().unwrap() {
                    match frame {
                        Frame::Grant { stream: 1, id, rkey, addr, len } => {
                            grants.push(Granted { id, addr, rkey, len });
                        }
                        // Memory may be scarce for longer than a silent peer is kept.
                        Frame::Ping { ack: false, token } => {
                            self.frame(&Frame::Ping { ack: true, token }).await;
                        }
                        _ => {}
                    }
                }
            }
            // If memory is scarce, a grant may come in several parts.
            if let Some(grants) = grants.first_chunk::<N>() {
                return *grants;
            }
            with_timeout("a grant", self.poll()).await.unwrap();
        }
    }

    /// Returns the response message of the peer's call.
    pub async fn reply(&mut self) -> Message {
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

    /// Requests memory, and WRITEs to the address and with the key that `aim` computes from the
    /// grant.
    pub async fn write_at(&mut self, aim: fn(Granted) -> (u64, u32)) {
        let (remote_addr, rkey) = aim(self.grant().await);
        self.write(&[0; 4096], remote_addr, rkey);
    }

    pub fn write(&mut self, bytes: &[u8], remote_addr: u64, rkey: u32) {
        let mut buf = self.pool.try_alloc(bytes.len()).unwrap();
        buf.put_slice(bytes);
        let src = WriteSource::Bytes(self.pool.resolve(&buf.freeze()).unwrap());
        self.queue(Work::Write { src, remote_addr, rkey }).unwrap();
        self.link.ring_doorbell().unwrap();
    }
}
