//! A peer that has a ticket and hoards landing memory: it requests as much as it may, never writes
//! to it, and ignores RESET and RECALL. Otherwise it follows the protocol, and answers every PING.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tonic_rdma_fabric::{AnyLink, Completion, Fabric, Link, LinkConfig, LinkError, Work};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::frame::{Composer, Frame, Reader};
use tonic_rdma_proto::{
    Accept, CloseCode, Config, Connection, Event, Hello, Room, Transmit, headers,
};
use tonic_rdma_tests::bootstrap::fabric_offer::Fabric as Offered;
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::offer::request_grant;

const CALLS: usize = 64;
/// Bytes of landing memory that each call requests.
const CALL_SIZE: usize = 4 << 20;
const SLOT: usize = 4096;

pub(crate) struct GreedyPeer {
    link: AnyLink,
    conn: Connection,
    next: u64,
    _pool: Pool,
}

impl GreedyPeer {
    /// Connects with a ticket from the server at `at`, over `kind` ("shm" or "verbs"). Opens all
    /// its calls to `path`, with `deadline` as their `grpc-timeout`.
    pub(crate) async fn connect(
        at: SocketAddr,
        kind: &str,
        fabric: &Fabric,
        path: &str,
        deadline: Option<&str>,
    ) -> Self {
        let grant = request_grant(at, kind).await;
        let place = match &grant.fabrics[0].fabric {
            Some(Offered::Shm(shm)) => tonic_rdma_fabric::Addr::Shm(shm.socket.parse().unwrap()),
            Some(Offered::Verbs(verbs)) => {
                let address = &verbs.addresses[0];
                SocketAddr::new(address.ip.parse().unwrap(), address.port as u16).into()
            }
            _ => panic!("{grant:?}"),
        };
        let config = Config { slot_size: SLOT as u32, ..Config::default() };
        let hello = Hello::new(grant.ticket[..].try_into().unwrap(), config.settings()).encode();
        let pool = Pool::new(PoolConfig::default().total(8 << 20), fabric.registrar()).unwrap();
        let link = LinkConfig {
            recv_slots: 32,
            slot_size: SLOT as u32,
            send_slots: 4,
            staging: 0,
            inline: 0,
            ..LinkConfig::default()
        };
        let connecting = fabric.connect(&place, &link, &pool, &hello, Duration::from_secs(20));
        let connected = with_timeout("connecting", connecting).await.unwrap();
        let settings = Accept::decode(&connected.private_data).unwrap().settings;
        let mut conn = Connection::client(config, settings, std::time::Instant::now());
        for _ in 0..CALLS {
            let id = conn.open(head(path, deadline), false).unwrap();
            // Zeros from the heap, which are never sent.
            conn.send_data(id, Bytes::from(vec![0; CALL_SIZE]), true, false).unwrap();
        }
        GreedyPeer { link: connected.link, conn, next: 0, _pool: pool }
    }

    /// The number of grants that it holds.
    pub(crate) fn peer_grants(&self) -> usize {
        self.conn.pending().peer_grants
    }

    /// Runs until it holds this many grants. Returns false if the connection ends first.
    pub(crate) async fn hold_grants(&mut self, grants: usize) -> bool {
        while self.peer_grants() < grants {
            if self.step().await.is_err() {
                return false;
            }
        }
        true
    }

    /// Runs until the server closes the connection, and returns the server's reason.
    pub(crate) async fn run_until_closed(mut self) -> String {
        let mut reason = None;
        loop {
            let ended = self.step().await;
            while let Some(event) = self.conn.poll_event() {
                if let Event::Closed { code, text } = event {
                    assert_eq!(code, CloseCode::Breach, "{text}");
                    reason = Some(text);
                }
            }
            match (reason, ended) {
                (Some(reason), _) => return reason,
                (None, Err(error)) => panic!("ended without a word: {error}"),
                (None, Ok(())) => reason = None,
            }
        }
    }

    /// Sends all pending messages, then polls once.
    async fn step(&mut self) -> Result<(), LinkError> {
        let nothing = Room { write: 0, staging: 0, chunk: 0 };
        loop {
            let slot = &mut self.link.block_mut()[..SLOT];
            let Some(Transmit::Send(len)) = self.conn.poll_transmit(Some(slot), nothing) else {
                break;
            };
            self.next += 1;
            let id = self.next;
            let mut done = matches!(
                self.link.queue(id, Work::Send { offset: 0, len }, true)?,
                tonic_rdma_fabric::Posted::Done
            );
            self.link.ring_doorbell()?;
            while !done {
                done = self.poll(id).await?;
            }
        }
        self.poll(0).await.map(drop)
    }

    /// Handles new completions. Returns true if the SEND with this id has completed.
    async fn poll(&mut self, id: u64) -> Result<bool, LinkError> {
        let mut out = Vec::new();
        let result = poll_fn(|cx| self.link.poll(cx, &mut out)).await;
        let mut done = false;
        for completion in out {
            match completion {
                Completion::Sent { id: sent } => done |= sent == id,
                Completion::Received { slot, len } => {
                    let message = without_resets_and_recalls(Bytes::copy_from_slice(
                        self.link.recv_slot(slot, len),
                    ));
                    self.link.repost(slot)?;
                    self.conn.receive(std::time::Instant::now(), message).unwrap();
                }
                Completion::NotMapped { rkey } => self.conn.cannot_write(rkey),
                Completion::Forgotten { rkey } => self.conn.forget_unwritable(rkey),
                Completion::Answered => {}
            }
        }
        result.map(|()| done)
    }
}

fn head(path: &str, deadline: Option<&str>) -> Bytes {
    let mut block = BytesMut::new();
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        ("content-type", "application/grpc"),
    ];
    for (name, value) in fields.into_iter().chain(deadline.map(|time| ("grpc-timeout", time))) {
        headers::encode(&mut block, name, value.as_bytes()).unwrap();
    }
    block.freeze()
}

/// The message without the RESETs and RECALLs, which this peer ignores.
fn without_resets_and_recalls(message: Bytes) -> Bytes {
    let mut reader = Reader::new(message).unwrap();
    let (credits, full, waited) = (reader.credits, reader.full, reader.waited);
    let mut slot = vec![0; SLOT];
    let mut filtered = Composer::new(&mut slot);
    while let Some(frame) = reader.next_frame().unwrap() {
        if !matches!(frame, Frame::Reset { .. } | Frame::Recall { .. }) {
            assert!(filtered.add(&frame));
        }
    }
    if waited {
        filtered.waited();
    }
    if full {
        filtered.full();
    }
    let len = filtered.finish(credits);
    slot.truncate(len);
    slot.into()
}
