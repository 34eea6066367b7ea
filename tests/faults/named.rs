//! Buffers of a server for requests to land in, and peers that keep their keys. A buffer that has
//! come back to the server does not change.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use bytes::BytesMut;
use prost::Message as _;
use tokio::sync::{mpsc, oneshot};
use tonic::{Request, Response, Status};
use tonic_rdma::{Context, FabricKind, IntoLandIn, LandIn, LandRequest, Outcome, Policy, Server};
use tonic_rdma_fabric::LinkError;
use tonic_rdma_proto::frame::{Field, Frame};
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::{poll_until, with_timeout};
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::pb::conformance_server::ConformanceServer;
use tonic_rdma_tests::process::runtime;
use tonic_rdma_tests::service::UnaryOnly;
use tonic_rdma_tests::service::script::payload;

use crate::fault_test::{Topology, kind};
use crate::log::Log;
use crate::raw_peer::{Granted, Host, Peer};

const LEN: usize = 300_000;
/// Rounds of each attack.
const ROUNDS: usize = 5;

/// A buffer that reports when it is dropped.
struct Buffer(Vec<u8>, Arc<AtomicUsize>);

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.1.fetch_sub(1, SeqCst);
    }
}

/// A handler that has got its buffer back, and checks it again on request.
struct Returned {
    buffer: Vec<u8>,
    outcome: Outcome,
    again: oneshot::Sender<()>,
}

async fn keep(
    mut request: Request<Message>,
    told: mpsc::Sender<Returned>,
) -> Result<Response<Message>, Status> {
    let land_in = request.extensions_mut().remove::<LandIn<Buffer>>();
    drop(request);
    let Some(land_in) = land_in else { return Ok(Response::new(Message::default())) };
    let finished = land_in.finish().await.map_err(|error| Status::internal(error.to_string()))?;
    let (again, look) = oneshot::channel();
    let bytes = finished.buffer.0.clone();
    let returned = Returned { buffer: bytes.clone(), outcome: finished.outcome, again };
    told.send(returned).await.map_err(|_| Status::internal("the test has ended"))?;
    let _ = look.await;
    assert!(finished.buffer.0 == bytes, "the buffer has changed after it came back");
    Ok(Response::new(Message::default()))
}

/// A server on its own thread, whose requests land in the buffers from `allocate`.
async fn serve<B: IntoLandIn, F>(
    device: String,
    client_device: &str,
    allocate: impl Fn(&LandRequest<'_>) -> Option<B> + Send + Sync + 'static,
    handle: impl Fn(Request<Message>) -> F + Clone + Send + Sync + 'static,
) -> SocketAddr
where
    F: Future<Output = Result<Response<Message>, Status>> + Send + 'static,
{
    let (at, mut listens) = mpsc::channel(1);
    // The service on that thread has the codec that `land_in` needs.
    std::thread::spawn(move || {
        runtime(CodecKind::ZeroCopy).block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            at.send(listener.local_addr().unwrap()).await.unwrap();
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            let mut server = Server::builder()
                .fabrics([FabricKind::Verbs])
                .context(Context::builder().device(device).build())
                .land_in("/tonic_rdma.conformance.v1.Conformance/Unary", allocate);
            let service = ConformanceServer::new(UnaryOnly(handle));
            server.add_service(service).serve_with_incoming(incoming).await.unwrap();
        })
    });
    let at = listens.recv().await.unwrap();
    // The codec of the service is known once the service has answered.
    let channel = tonic_rdma::Endpoint::from_shared(format!("http://{at}"))
        .unwrap()
        .policy(Policy::Require)
        .fabrics([FabricKind::Verbs])
        .context(Context::builder().device(client_device).build())
        .fast_path_timeout(std::time::Duration::from_secs(60))
        .connect()
        .await
        .unwrap();
    let channel = tonic_rdma_tests::channel::AnyChannel::Rdma(channel);
    client_of(channel).unary(payload(1, 10)).await.unwrap();
    at
}

/// Waits for the end of a connection whose WRITE was refused.
async fn refused(peer: &mut Peer) {
    match with_timeout("the end of a peer that writes where it may not", peer.wait_for_end()).await
    {
        LinkError::Completion { code: 10, .. } if kind() == "rxe" => {}
        LinkError::Disconnected { .. } if kind() == "siw" => {}
        other => panic!("{other}"),
    }
}

/// A message with a field of [`LEN`] bytes, and the field's position.
fn message() -> (Vec<u8>, Field) {
    let message = Message { payload: payload(3, LEN).payload, seed: 3, ..Message::default() };
    let mut body = BytesMut::from(&[0][..]);
    body.extend_from_slice(&(message.encoded_len() as u32).to_be_bytes());
    message.encode(&mut body).unwrap();
    let at = body.windows(64).position(|part| part == &message.payload[..64]).unwrap();
    (body.to_vec(), Field { at: at as u32, len: LEN as u32 })
}

/// A raw peer's connection, and the memory granted to its call: before the field, for the field,
/// and after it.
async fn granted(host: &Host, body: &[u8], field: Field) -> (Peer, [Granted; 3]) {
    let mut peer = host.connect_with_ticket().await;
    peer.open("Unary").await;
    let grants: [Granted; 3] = peer.request(body.len() as u64, Some(field)).await;
    assert_eq!((grants[0].len, grants[1].len), (field.at, field.len));
    (peer, grants)
}

/// Writes the message, and announces it.
async fn write(peer: &mut Peer, grants: &[Granted; 3], body: &[u8]) {
    let mut from = 0;
    for (at, Granted { id, addr, rkey, len }) in grants.iter().copied().enumerate() {
        let part = &body[from..from + len as usize];
        peer.write(part, addr, rkey);
        from += part.len();
        let end = at == 2;
        peer.frame(&Frame::Done { stream: 1, end, id, len, begin: 0 }).await;
    }
}

pub async fn a_key_that_was_withdrawn(_: Log) {
    let Topology { server_device, client_device, .. } = Topology::one_device();
    let buffers = Arc::new(AtomicUsize::new(0));
    let (told, mut returned) = mpsc::channel(1);
    let counted = buffers.clone();
    let allocate = move |_: &LandRequest<'_>| {
        counted.fetch_add(1, SeqCst);
        Some(Buffer(vec![0xee; LEN], counted.clone()))
    };
    let handle = move |request| keep(request, told.clone());
    let at = serve(server_device, &client_device, allocate, handle).await;
    let host = Host::new(&client_device, at);
    let (body, field) = message();
    let gone = async |why: &str| {
        poll_until(why, || async { buffers.load(SeqCst) }, |buffers| *buffers == 0).await;
    };

    for _ in 0..ROUNDS {
        let (mut peer, grants) = granted(&host, &body, field).await;
        write(&mut peer, &grants, &body).await;
        let back: Returned = with_timeout("the buffer", returned.recv()).await.unwrap();
        assert!(matches!(back.outcome, Outcome::Landed { len: LEN, .. }), "{:?}", back.outcome);
        assert!(back.buffer == payload(3, LEN).payload);
        // The handler has its buffer back, so the key no longer works.
        peer.write(&[0; 4096], grants[1].addr, grants[1].rkey);
        refused(&mut peer).await;
        // The end of the connection may have dropped the handler.
        let _ = back.again.send(());
        gone("the handler keeps its buffer").await;
    }

    // Peers that write a part and then announce nothing, announce only a part, or vanish.
    for round in 0..3 * ROUNDS {
        let (mut peer, grants) = granted(&host, &body, field).await;
        peer.write(&body[..field.at as usize], grants[0].addr, grants[0].rkey);
        let Granted { id, addr, rkey, .. } = grants[1];
        peer.write(&body[field.at as usize..][..4096], addr, rkey);
        if round % 3 == 1 {
            let done = Frame::Done { stream: 1, end: false, id, len: 4096, begin: 0 };
            peer.frame(&done).await;
        }
        assert_eq!(buffers.load(SeqCst), 1);
        if round % 3 == 2 {
            // The server may return the buffer before the peer is gone.
            peer.frame(&Frame::Reset { stream: 1, code: 8 }).await;
        }
        drop(peer);
        gone("a buffer of a peer that is gone").await;
    }
    assert!(returned.try_recv().is_err(), "no handler saw half a message");
}

/// A handler that leaves the buffer to the next request.
async fn leave(mut request: Request<Message>) -> Result<Response<Message>, Status> {
    let land_in = request.extensions_mut().remove::<LandIn<Vec<u8>>>();
    drop(request);
    let Some(land_in) = land_in else { return Ok(Response::new(Message::default())) };
    let total = land_in.outcome().await.filled() as u64;
    Ok(Response::new(Message { total, ..Message::default() }))
}

/// A buffer that stays registered has less protection. Until its owner has it back, a peer that has
/// had the key can change the buffer, but no memory next to it.
pub async fn a_key_that_is_kept(_: Log) {
    let Topology { server_device, client_device, .. } = Topology::one_device();
    let land_in = LandIn::new(vec![0xee; LEN]).keep_registered();
    let shared = land_in.clone();
    let allocate = move |_: &LandRequest<'_>| Some(shared.clone());
    let at = serve(server_device, &client_device, allocate, leave).await;
    let host = Host::new(&client_device, at);
    let (body, field) = message();
    let mut peers = Vec::new();
    for _ in 0..2 {
        let (mut peer, grants) = granted(&host, &body, field).await;
        write(&mut peer, &grants, &body).await;
        assert_eq!(peer.reply().await.total as usize, LEN);
        peers.push((peer, grants[1]));
    }
    let [(mut first, key), (mut second, other)] = <[_; 2]>::try_from(peers).ok().unwrap();
    assert_eq!((key.addr, key.rkey), (other.addr, other.rkey), "it was registered once");
    // The first peer's call has ended, and the second peer's call has landed in the buffer since.
    first.write(&[0x11; 4096], key.addr, key.rkey);
    first.ping().await;
    // This WRITE extends beyond the end of the buffer.
    second.write(&[0x33; 4096], other.addr + LEN as u64 - 2048, other.rkey);
    refused(&mut second).await;
    let finished = with_timeout("the buffer", land_in.finish()).await.unwrap();
    let sent = payload(3, LEN).payload;
    assert!(finished.buffer[..4096] == [0x11; 4096], "{:02x?}", &finished.buffer[..16]);
    assert!(finished.buffer[4096..] == sent[4096..]);
    // The buffer now belongs to its owner.
    first.write(&[0x22; 4096], key.addr, key.rkey);
    refused(&mut first).await;
    assert!(finished.buffer[..4096] == [0x11; 4096] && finished.buffer[4096..] == sent[4096..]);
}
