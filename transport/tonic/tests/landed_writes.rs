//! Over shared memory, a peer with a ticket keeps writing to its messages while they are decoded.
//! The peer uses the keys that it was granted, in work requests on its link. The decoder reads
//! private copies, so no byte can change between its check and its use.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

mod common;

use std::collections::BTreeMap;
use std::future::{Future, poll_fn, ready};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use common::{Blob, Blobs, Which, World};
use http::Uri;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::TcpStream;
use tonic_rdma::{Context, LandIn, LandableBuf, Server};
use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, Fabric, Lending, Lent, Link, LinkConfig, LinkError, ShmAccess,
    Takes, Work, WriteSource,
};
use tonic_rdma_memory::test_util::ChangingBuf;
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::hello::{Accept, VERSION_MAX, VERSION_MIN};
use tonic_rdma_proto::{
    Config, Connection, Event, Hello, LentPlace, Payload, ResetCode, Room, StreamId, Transmit,
    headers,
};

/// Number of the peer's calls.
const CALLS: usize = 1000;
/// Number of WRITEs to a message between two checks for its answer.
const FLIPS: usize = 64;
/// Time limit of a call.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A message of `tonic_rdma.v1`, reduced to the fields needed here.
#[derive(Clone, PartialEq, Message)]
struct OfferRequest {
    #[prost(uint32, tag = "1")]
    version_min: u32,
    #[prost(uint32, tag = "2")]
    version_max: u32,
    #[prost(string, repeated, tag = "3")]
    fabrics: Vec<String>,
    #[prost(message, optional, tag = "4")]
    client: Option<TcpAddress>,
}

#[derive(Clone, PartialEq, Message)]
struct TcpAddress {
    #[prost(string, tag = "1")]
    ip: String,
    #[prost(uint32, tag = "2")]
    port: u32,
}

#[derive(Clone, PartialEq, Message)]
struct OfferResponse {
    #[prost(message, optional, tag = "3")]
    grant: Option<Grant>,
}

#[derive(Clone, PartialEq, Message)]
struct Grant {
    #[prost(bytes = "vec", tag = "1")]
    ticket: Vec<u8>,
    #[prost(message, repeated, tag = "3")]
    fabrics: Vec<FabricOffer>,
}

#[derive(Clone, PartialEq, Message)]
struct FabricOffer {
    #[prost(message, optional, tag = "3")]
    shm: Option<Shm>,
}

#[derive(Clone, PartialEq, Message)]
struct Shm {
    #[prost(string, tag = "2")]
    socket: String,
}

fn config() -> Config {
    let mut config = Config::default();
    (config.slot_size, config.recv_slots, config.max_recvs) = (4096, 32, 32);
    config.takes_lent = true;
    config
}

/// A malicious connection, which follows the protocol except for its rules about memory.
struct Peer {
    link: AnyLink,
    pool: Pool,
    conn: Connection,
    works: u64,
    /// The key and the address of the last byte that was written within the rules.
    last: Option<(u32, u64)>,
    /// The outcomes of calls, with counts.
    ended: BTreeMap<String, usize>,
    open: Option<StreamId>,
}

impl Peer {
    async fn enter(server: SocketAddr, lending: Lending) -> Peer {
        let tcp = TcpStream::connect(server).await.unwrap();
        let own = tcp.local_addr().unwrap();
        // The server gives a ticket to a client that states the address of its end of this
        // connection.
        let client = Some(TcpAddress { ip: own.ip().to_string(), port: own.port().into() });
        let mut tcp = Some(TokioIo::new(tcp));
        let once = || std::io::Error::other("it connects once");
        let connector = tower::service_fn(move |_: Uri| ready(tcp.take().ok_or_else(once)));
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{server}")).unwrap();
        let mut grpc =
            tonic::client::Grpc::new(endpoint.connect_with_connector(connector).await.unwrap());
        grpc.ready().await.unwrap();
        let request = OfferRequest {
            version_min: VERSION_MIN.into(),
            version_max: VERSION_MAX.into(),
            fabrics: vec!["shm".into()],
            client,
        };
        let path = PathAndQuery::from_static("/tonic_rdma.v1.Bootstrap/Offer");
        let codec = tonic_prost::ProstCodec::<OfferRequest, OfferResponse>::default();
        let offer =
            grpc.unary(tonic::Request::new(request), path, codec).await.unwrap().into_inner();
        let grant = offer.grant.expect("a ticket");
        let socket = &grant.fabrics[0].shm.as_ref().expect("shared memory").socket;
        let hello = Hello::new(grant.ticket.try_into().unwrap(), config().settings()).encode();

        let fabric = Fabric::shm(ShmAccess::SameUser, lending).unwrap();
        let sizes = PoolConfig::default().total(8 << 20);
        let pool = Pool::new(sizes, fabric.registrar()).unwrap().for_peer();
        let link = LinkConfig {
            recv_slots: 32,
            slot_size: 4096,
            send_slots: 8,
            takes: Takes::ALL,
            ..LinkConfig::default()
        };
        let at = Addr::Shm(socket.parse().unwrap());
        let connected = fabric.connect(&at, &link, &pool, &hello, TIMEOUT).await.unwrap();
        let accept = Accept::decode(&connected.private_data).unwrap();
        let conn = Connection::client(config(), accept.settings, Instant::now());
        Peer {
            link: connected.link,
            pool,
            conn,
            works: 0,
            last: None,
            ended: BTreeMap::new(),
            open: None,
        }
    }

    fn queue(&mut self, work: Work) -> Result<(), LinkError> {
        self.works += 1;
        self.link.queue(self.works, work, false).map(drop)
    }

    /// Lends what the protocol allows, once the server has mapped it.
    fn lend(&mut self) {
        while let Some((stream, bytes)) = self.conn.poll_lend() {
            let lent = self.link.lend(self.pool.lend(&bytes).unwrap()).unwrap();
            let place = lent.map(|Lent { lease, key, addr }| LentPlace { lease, key, addr });
            self.conn.provide_lent(stream, place);
        }
    }

    /// Posts everything that the protocol has to send.
    fn post(&mut self) {
        self.lend();
        let room = Room { write: 1 << 20, staging: 0, chunk: 1 << 20 };
        loop {
            let slot = self.link.block_mut().get_mut(..4096);
            match self.conn.poll_transmit(slot, room) {
                Some(Transmit::Send(len)) => self.queue(Work::Send { offset: 0, len }).unwrap(),
                Some(Transmit::Write(write)) => {
                    self.last = Some((write.rkey, write.addr + write.src.len() as u64 - 1));
                    let (remote_addr, rkey) = (write.addr, write.rkey);
                    self.queue(Work::Write { src: WriteSource::Any(write.src), remote_addr, rkey })
                        .unwrap();
                }
                None => break,
            }
        }
        self.link.ring_doorbell().unwrap();
    }

    /// Processes received messages, without waiting.
    async fn look(&mut self) {
        let mut out = Vec::new();
        let polled = poll_fn(|cx| match self.link.poll(cx, &mut out) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => Poll::Ready(Ok(())),
        });
        polled.await.unwrap();
        for completion in out {
            let Completion::Received { slot, len } = completion else { continue };
            let message = Bytes::copy_from_slice(self.link.recv_slot(slot, len));
            self.link.repost(slot).unwrap();
            self.conn.receive(Instant::now(), message).unwrap();
        }
        while let Some(event) = self.conn.poll_event() {
            match event {
                Event::Headers { block, end: true, .. } => {
                    let status = headers::Decoder::new(block)
                        .map(Result::unwrap)
                        .find(|field| &field.name[..] == b"grpc-status")
                        .expect("a status");
                    self.end(format!("grpc-status {}", String::from_utf8_lossy(&status.value)));
                }
                Event::Data { stream, data, .. } => {
                    self.conn.consume(stream, data.len() as u32, tonic_rdma_proto::Flow::Window);
                }
                Event::Reset { code, .. } => self.end(format!("reset: {code}")),
                Event::LeaseEnded { lease } => self.link.end_lease(lease),
                Event::Closed { code, text } => {
                    panic!("the server closed the connection: {code} {text}")
                }
                _ => {}
            }
        }
        self.conn.handle_timeout(Instant::now()).unwrap();
        self.post();
    }

    fn end(&mut self, how: String) {
        *self.ended.entry(how).or_default() += 1;
        if let Some(id) = self.open.take() {
            self.conn.release(id, ResetCode::CANCEL);
        }
    }

    fn begin(&mut self, path: &str, payload: Payload) -> StreamId {
        let mut block = BytesMut::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            ("content-type", "application/grpc"),
        ] {
            headers::encode(&mut block, name, value.as_bytes()).unwrap();
        }
        let id = self.conn.open(block.freeze(), false).unwrap();
        self.conn.send_payload(id, payload, true).unwrap();
        (self.open, self.last) = (Some(id), None);
        self.post();
        id
    }

    /// Calls a method, and changes the last byte of the message until the call has ended: by WRITEs
    /// to the landing memory, or through `change` in the lent memory.
    async fn call(&mut self, path: &str, payload: Payload, change: Option<&ChangingBuf>) {
        self.begin(path, payload);
        let values = [0x81, 0x01];
        let begin = Instant::now();
        while self.open.is_some() {
            assert!(begin.elapsed() < TIMEOUT, "a call does not end; before it: {:?}", self.ended);
            for flip in 0..FLIPS {
                let value = values[flip % 2];
                if let Some(buf) = change {
                    buf.write(buf.bytes().len() - 1, value);
                } else if let Some((rkey, remote_addr)) = self.last {
                    let src = WriteSource::Any(Bytes::copy_from_slice(&[value]));
                    self.queue(Work::Write { src, remote_addr, rkey }).unwrap();
                }
            }
            self.look().await;
            tokio::task::yield_now().await;
        }
    }
}

/// A message in gRPC framing that decodes as a `common::Text`: text, followed by unknown fields of
/// two bytes each. The peer changes the last byte to an unterminated varint and back.
fn message() -> Bytes {
    let mut message = common::Text { text: "x".repeat(6000) }.encode_to_vec();
    for _ in 0..3 {
        message.extend([0x10, 0x81, 0x01]);
    }
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.extend_from_slice(&message);
    framed.freeze()
}

/// Attacks a server from a separate thread, which differs from another process only in that both
/// share an address space. The attacker uses only what the server has granted. Returns the outcomes
/// of the attacker's calls.
async fn attack<A>(attack: impl FnOnce(SocketAddr) -> A + Send + 'static) -> BTreeMap<String, usize>
where
    A: Future<Output = BTreeMap<String, usize>>,
{
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    // Run one attack at a time, because the whole process shares the panic hook.
    static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let _one = ONE.lock().await;
    let contexts = [Some(Context::builder().borrowing(true).build()), None];
    let blobs =
        Blobs { codec: Which::Ours, seen: Arc::default(), limit: common::LIMIT, forward: None };
    let world = World::between(common::Fabric::Shm, contexts, blobs).await;
    let mut honest = world.client(Which::Ours);
    // After these calls the server knows the method's codec, and decodes its messages where they
    // landed.
    for _ in 0..2 {
        honest.unary("/test.Blobs/Text", Blob::of(vec![b'x'; 8000].into())).await.unwrap();
    }
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Relaxed);
        hook(info);
    }));
    let addr = world.addr;
    let attack = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(attack(addr))
    });
    let ended = tokio::task::spawn_blocking(|| attack.join()).await.unwrap();
    let _ = std::panic::take_hook();
    let ended = ended.unwrap();
    println!("{ended:?}");
    assert_eq!(PANICS.load(Relaxed), 0, "the server has panicked: {ended:?}");
    // Other clients are not affected.
    honest.unary("/test.Blobs/Text", Blob::of(vec![b'x'; 8000].into())).await.unwrap();
    ended
}

/// Checks that some reads saw the byte that ends the field, which gives OK, and that the others saw
/// the other byte, which gives INTERNAL.
fn assert_both(ended: &BTreeMap<String, usize>) {
    let known =
        ["grpc-status 0", "grpc-status 13"].iter().filter_map(|how| ended.get(*how)).sum::<usize>();
    assert_eq!(known, CALLS, "{ended:?}");
    assert!(ended.len() == 2, "nothing changed while it was decoded: {ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_changes_while_it_is_decoded_hurts_nobody() {
    let ended = attack(|addr| async move {
        let mut peer = Peer::enter(addr, Lending::Off).await;
        let message = message();
        for _ in 0..CALLS {
            let mut payload = Payload::new();
            payload.push(message.clone(), true);
            peer.call("/test.Blobs/Text", payload, None).await;
        }
        peer.ended
    });
    assert_both(&ended.await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lent_message_that_changes_while_it_is_decoded_hurts_nobody() {
    let ended = attack(|addr| async move {
        let mut peer = Peer::enter(addr, Lending::SameUser).await;
        let message = message();
        let mut buf = peer.pool.try_alloc(message.len()).unwrap();
        buf.put_slice(&message);
        let buf = ChangingBuf::new(buf);
        // The whole message is lent with its header, or all but its first cache line.
        for call in 0..CALLS {
            let all = buf.bytes();
            let mut payload = Payload::new();
            if call % 2 == 0 {
                payload.push(all, true);
            } else {
                payload.push(message.slice(..64), true);
                payload.push(all.slice(64..), true);
            }
            payload.last_is_lendable();
            peer.call("/test.Blobs/Text", payload, Some(&buf)).await;
        }
        assert!(peer.conn.stats().lent > message.len() as u64 * CALLS as u64 / 4, "it is not lent");
        peer.ended
    });
    assert_both(&ended.await);
}

/// Lends pieces of a few bytes, with up to seven other bytes before and up to two after each piece.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lent_pieces_of_any_length_hurt_nobody() {
    let ended = attack(|addr| async move {
        let mut peer = Peer::enter(addr, Lending::SameUser).await;
        let message = message();
        let mut buf = peer.pool.try_alloc(message.len()).unwrap();
        buf.put_slice(&message);
        let lendable = buf.freeze();
        for round in 0..CALLS {
            let (head, len) = (round % 8, 1 + round / 8 % 12);
            let mut payload = Payload::new();
            payload.push(message.slice(..head), true);
            payload.push(lendable.slice(..len), true);
            payload.last_is_lendable();
            payload.push(message.slice(..round % 3), true);
            peer.call("/test.Blobs/Text", payload, None).await;
        }
        assert!(peer.conn.stats().lent > 0, "nothing is lent");
        peer.ended
    });
    let ended = ended.await;
    assert_eq!(ended.values().sum::<usize>(), CALLS, "{ended:?}");
}

/// The peer is asked to map a server's buffer, and does not. At the end of the call the buffer
/// comes back, while the connection remains.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_maps_nothing_keeps_no_buffer() {
    const LEN: usize = 200_000;
    let land_in = LandIn::new(LandableBuf::zeroed(LEN).unwrap()).keep_registered();
    let (shared, context) = (land_in.clone(), Context::builder().build());
    let contexts = [Some(context.clone()), None];
    let blobs = Blobs { codec: Which::Ours, seen: Arc::default(), limit: LEN, forward: None };
    let serve = |server: Server| server.land_in("/test.Blobs/Text", move |_| Some(shared.clone()));
    let world = World::set(common::Fabric::Shm, contexts, blobs, serve, |endpoint| endpoint).await;
    // After this call the server knows the method's codec.
    let mut honest = world.client(Which::Ours);
    honest.unary("/test.Blobs/Text", Blob::of(vec![b'x'; 8000].into())).await.unwrap();
    let registered = || async {
        context.pool_stats().await.iter().map(|(_, stats)| stats.application).sum::<usize>()
    };
    assert_eq!(registered().await, 0, "without a buffer");

    let mut peer = Peer::enter(world.addr, Lending::Off).await;
    let mut payload = Payload::new();
    let mut head = BytesMut::new();
    head.put_u8(0);
    // The four bytes are the tag and the length of the field.
    head.put_u32(LEN as u32 - 1000 + 4);
    head.extend([0x0a, 0xb8, 0x92, 0x0c]);
    payload.push(head.freeze(), true);
    payload.push_aligned(Bytes::from(vec![b'x'; LEN - 1000]), true);
    let id = peer.begin("/test.Blobs/Text", payload);
    // The peer does not poll its link, so it does not map the offered memory.
    let begin = Instant::now();
    while registered().await != LEN {
        assert!(begin.elapsed() < TIMEOUT, "no buffer is registered for it");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    peer.conn.reset(id, ResetCode::CANCEL);
    peer.post();
    let back =
        tokio::time::timeout(TIMEOUT, land_in.finish()).await.expect("it stays with the call");
    assert_eq!((back.unwrap().buffer.len(), registered().await), (LEN, 0));
    peer.look().await;
    honest.unary("/test.Blobs/Text", Blob::of(vec![b'x'; 8000].into())).await.unwrap();
}

/// The peer is asked to map a reply, and does not. Others are lent their replies during that time.
/// The reply comes back at the end of the call or the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_maps_nothing_waits_alone() {
    const LEN: usize = 1 << 20;
    let lending = || Context::builder().lending(Lending::SameUser).borrowing(true);
    let contexts = [(); 2].map(|()| lending().build());
    let server = contexts[0].clone();
    let blobs =
        Blobs { codec: Which::Ours, seen: Arc::default(), limit: common::LIMIT, forward: None };
    let world = World::between(common::Fabric::Shm, contexts.map(Some), blobs).await;
    let in_use = async |held: usize| {
        let waits = async {
            while server.pool_stats().await.iter().map(|(_, stats)| stats.send).sum::<usize>()
                != held
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waits).await.expect("they are never in use");
    };
    let give = Blob { number: LEN as u64, ..Blob::default() };
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(give.encoded_len() as u32);
    give.encode(&mut framed).unwrap();
    let framed = framed.freeze();
    let call = |peer: &mut Peer| {
        let mut payload = Payload::new();
        payload.push(framed.clone(), false);
        peer.begin("/test.Blobs/Give", payload)
    };
    let mut peer = Peer::enter(world.addr, Lending::Off).await;
    // The peer does not poll its link.
    let id = call(&mut peer);
    in_use(LEN).await;
    let mut honest = world.client(Which::Ours);
    for _ in 0..10 {
        let given = honest.unary("/test.Blobs/Give", give.clone()).await.unwrap();
        assert!(given.data == common::pattern(LEN, 1));
    }
    let stats = world.server.get();
    assert!(stats.bytes_sent_lent >= 10 * LEN as u64 && stats.bytes_sent_write == 0);
    in_use(LEN).await;
    peer.conn.reset(id, ResetCode::CANCEL);
    peer.post();
    in_use(0).await;
    let mut another = Peer::enter(world.addr, Lending::Off).await;
    call(&mut another);
    in_use(LEN).await;
    drop(another);
    in_use(0).await;
}
