//! A peer over shared memory that has a ticket and composes its own messages. It respects its
//! credits.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, Fabric, Lending, Lent, Link, LinkConfig, LinkError, ShmAccess, Work,
    WriteSource,
};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::frame::{Composer, Frame, Reader};
use tonic_rdma_proto::{Accept, Config, Hello};
use tonic_rdma_tests::bootstrap::fabric_offer::Fabric as Offered;
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::offer::request_grant;

const SLOT: usize = 4096;

/// A standing grant: landing memory that any stream may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    pub(crate) id: u32,
    pub(crate) rkey: u32,
    pub(crate) len: u32,
    pub(crate) addr: u64,
}

pub(crate) struct Peer {
    link: AnyLink,
    pool: Pool,
    /// SENDs for which the server has RECVs posted.
    credits: u32,
    /// Messages received since credits were last returned.
    credits_to_return: u16,
    work: u64,
    pings: u64,
    ponged: u64,
    /// Frames from the server, except PONGs and WINDOWs.
    pub(crate) frames: VecDeque<Frame>,
    /// The sum of all window increments.
    pub(crate) window_growth: u32,
    /// The initial window of a stream.
    pub(crate) window: u32,
}

/// The connection has ended, with the server's reason.
#[derive(Debug)]
pub(crate) struct Ended(pub(crate) String);

impl Peer {
    pub(crate) async fn connect(server: SocketAddr) -> Self {
        Peer::connect_as(server, Lending::Off).await
    }

    /// Like [`connect`](Self::connect), but lends to a server that borrows.
    pub(crate) async fn connect_lending(server: SocketAddr) -> Self {
        Peer::connect_as(server, Lending::SameUser).await
    }

    /// Like [`connect`](Self::connect), but lends as `lending` allows.
    pub(crate) async fn connect_as(server: SocketAddr, lending: Lending) -> Self {
        let fabric = Fabric::shm(ShmAccess::SameUser, lending).unwrap();
        let config = PoolConfig::default().total(16 << 20);
        let pool = Pool::new(config, fabric.registrar()).unwrap().for_peer();
        let grant = request_grant(server, "shm").await;
        let Some(Offered::Shm(shm)) = &grant.fabrics[0].fabric else { panic!("{grant:?}") };
        let config =
            Config { slot_size: SLOT as u32, recv_slots: 32, max_recvs: 32, ..Config::default() };
        let hello = Hello::new(grant.ticket[..].try_into().unwrap(), config.settings()).encode();
        let sizes = LinkConfig {
            recv_slots: 32,
            slot_size: SLOT as u32,
            send_slots: 8,
            staging: 0,
            ..LinkConfig::default()
        };
        let addr = Addr::Shm(shm.socket.parse().unwrap());
        let limit = Duration::from_secs(20);
        let connected = fabric.connect(&addr, &sizes, &pool, &hello, limit).await.unwrap();
        let settings = Accept::decode(&connected.private_data).unwrap().settings;
        Peer {
            link: connected.link,
            pool,
            credits: settings.recv_slots.into(),
            credits_to_return: 0,
            work: 0,
            pings: 0,
            ponged: 0,
            frames: VecDeque::new(),
            window_growth: 0,
            window: settings.stream_window,
        }
    }

    /// Receives until the link has something to report.
    async fn receive(&mut self) -> Result<(), Ended> {
        let mut out = Vec::new();
        let what = "a word of the server's";
        let result = with_timeout(what, poll_fn(|cx| self.link.poll(cx, &mut out))).await;
        for completion in out {
            let Completion::Received { slot, len } = completion else { continue };
            let message = Bytes::copy_from_slice(self.link.recv_slot(slot, len));
            self.link.repost(slot).map_err(gone)?;
            self.credits_to_return += 1;
            let mut reader = Reader::new(message).unwrap();
            self.credits += u32::from(reader.credits);
            while let Some(frame) = reader.next_frame().unwrap() {
                match frame {
                    Frame::Ping { ack: true, token } => self.ponged = token,
                    Frame::Window { increment, .. } => self.window_growth += increment,
                    Frame::Close { text, .. } => {
                        return Err(Ended(String::from_utf8_lossy(&text).into_owned()));
                    }
                    frame => self.frames.push_back(frame),
                }
            }
        }
        result.map_err(gone)
    }

    fn queue(&mut self, work: Work) -> Result<(), Ended> {
        self.work += 1;
        // Over shared memory the work is done when this returns.
        self.link.queue(self.work, work, true).map(drop).map_err(gone)
    }

    /// Sends frames, with as many in a message as fit.
    pub(crate) async fn send(&mut self, frames: &[Frame]) -> Result<(), Ended> {
        let mut rest = frames;
        while !rest.is_empty() {
            // The last credit is reserved for a message that returns credits.
            while self.credits < 2 {
                self.receive().await?;
            }
            let mut message = Composer::new(&mut self.link.block_mut()[..SLOT]);
            let fit = rest.iter().take_while(|frame| message.add(frame)).count();
            assert!(fit > 0, "a frame that fits no message: {:?}", rest[0]);
            let len = message.finish(std::mem::take(&mut self.credits_to_return));
            rest = &rest[fit..];
            self.credits -= 1;
            self.queue(Work::Send { offset: 0, len })?;
            self.link.ring_doorbell().map_err(gone)?;
        }
        Ok(())
    }

    /// Waits until the server has processed everything sent so far.
    pub(crate) async fn sync(&mut self) -> Result<(), Ended> {
        self.pings += 1;
        self.send(&[Frame::Ping { ack: false, token: self.pings }]).await?;
        while self.ponged < self.pings {
            self.receive().await?;
        }
        Ok(())
    }

    /// Waits until this many bytes in total may be sent on the only stream whose window grows.
    pub(crate) async fn wait_for_window(&mut self, bytes: usize) {
        let grows = async {
            while bytes > (self.window + self.window_growth) as usize {
                self.receive().await.unwrap();
            }
        };
        with_timeout("a window", grows).await;
    }

    /// The next standing grant from the server.
    pub(crate) async fn next_standing_grant(&mut self) -> Standing {
        loop {
            match self.frames.pop_front() {
                Some(Frame::Grant { stream: 0, id, rkey, len, addr }) => {
                    return Standing { id, rkey, len, addr };
                }
                Some(_) => {}
                None => self.receive().await.unwrap(),
            }
        }
    }

    /// Memory that may be lent.
    pub(crate) async fn lendable(&self, len: usize) -> Bytes {
        let mut buf = self.pool.alloc(len).await.unwrap();
        buf.resize_zeroed(len);
        buf.freeze()
    }

    /// Lends bytes, once the server has mapped their memory. `None` if the pool lends no more.
    pub(crate) async fn lend(&mut self, bytes: Bytes) -> Result<Option<Lent>, Ended> {
        loop {
            let Some(bytes) = self.pool.lend(&bytes) else { return Ok(None) };
            if let Some(lent) = self.link.lend(bytes).map_err(gone)? {
                return Ok(Some(lent));
            }
            self.sync().await?;
        }
    }

    /// Notes that the server no longer reads a lease.
    pub(crate) fn end_lease(&mut self, lease: u32) {
        self.link.end_lease(lease);
    }

    pub(crate) fn write(&mut self, at: Standing, bytes: Bytes) {
        let work =
            Work::Write { src: WriteSource::Any(bytes), remote_addr: at.addr, rkey: at.rkey };
        self.queue(work).unwrap();
    }
}

fn gone(error: LinkError) -> Ended {
    Ended(error.to_string())
}

/// A piece of a body. It is all zeros, which are empty gRPC messages wherever the body is cut.
pub(crate) fn data(stream: u32, len: usize) -> Frame {
    Frame::Data { stream, end: false, data: Bytes::from(vec![0; len]) }
}
