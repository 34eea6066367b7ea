//! A peer that measures over shared memory, where every WRITE is done when it is queued, and asks
//! for more of them than a server can do while anybody waits (R20).

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tonic_rdma_fabric::{Completion, Connected, Link as _, LinkError, Work, bare};
use tonic_rdma_memory::LandingBuf;
use tonic_rdma_proto::{Config, Hello};

use crate::bootstrap::client::{Place, offer_bare};
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, endpoint};
use crate::{Context, Endpoint, FabricKind, Path, Server};

/// Time until a test that makes no progress fails.
const LIMIT: Duration = Duration::from_secs(60);
/// Calls of the other client while the server writes.
const CALLS: usize = 50;
/// Bytes of the place that the peer grants.
const PLACE: usize = 1 << 20;
/// The kinds of a message that carries places, and of one that asks for WRITEs.
const PLACES: u8 = 2;
const WRITE: u8 = 3;

struct Peer {
    link: tonic_rdma_fabric::AnyLink,
    sends: usize,
    _place: LandingBuf,
}

impl Peer {
    /// Takes a ticket for a measuring connection, connects, and grants a place.
    async fn connect(server: SocketAddr) -> Option<Peer> {
        let uri = format!("http://{server}");
        let tcp = Endpoint::from_shared(uri.clone()).unwrap().connect_tcp().await.unwrap();
        let offered = offer_bare(&tcp, uri.parse().unwrap(), None, &[Path::Shm]).await.unwrap();
        let Place { path, addr, .. } = &offered.places[0];
        let context = Context::builder().build();
        let (fabric, pool) = context.toward(*path, addr, None, None, LIMIT).await.unwrap();
        let hello = Hello::new(offered.ticket.0, Config::default().settings()).encode();
        let connected = fabric.connect(addr, &bare::config(), &pool, &hello, LIMIT).await;
        let Connected { mut link, .. } = connected.ok()?;
        let place = pool.landing_up_to(PLACE).alloc_spare(PLACE).unwrap().unwrap();
        link.share(place.rkey()).unwrap();
        let mut message = vec![PLACES];
        message.extend(place.addr().to_le_bytes());
        message.extend(place.rkey().to_le_bytes());
        message.extend((PLACE as u32).to_le_bytes());
        let mut peer = Peer { link, sends: 0, _place: place };
        peer.send(&message);
        assert_eq!(peer.receive().await.unwrap()[0], PLACES);
        Some(peer)
    }

    fn send(&mut self, message: &[u8]) {
        let offset = self.sends * 512;
        self.sends += 1;
        self.link.block_mut()[offset..][..message.len()].copy_from_slice(message);
        let _ = self.link.queue(0, Work::Send { offset, len: message.len() }, true).unwrap();
        self.link.ring_doorbell().unwrap();
    }

    /// Requests WRITEs of one byte.
    fn request(&mut self, count: u32) {
        let fields = [1, count, u32::MAX];
        let message: Vec<u8> =
            [WRITE].into_iter().chain(fields.into_iter().flat_map(u32::to_le_bytes)).collect();
        self.send(&message);
    }

    async fn receive(&mut self) -> Result<Vec<u8>, LinkError> {
        let mut out = Vec::new();
        poll_fn(|cx| self.link.poll(cx, &mut out)).await?;
        let [Completion::Received { slot, len }] = out[..] else { panic!("{out:?}") };
        Ok(self.link.recv_slot(slot, len).to_vec())
    }

    /// Whether the server has answered, or ended the connection.
    async fn has_heard(&mut self) -> bool {
        let mut out = Vec::new();
        poll_fn(|cx| Poll::Ready(self.link.poll(cx, &mut out).is_ready())).await
    }
}

/// Serves on a thread of its own, which a hanging server blocks alone.
fn serve() -> (SocketAddr, oneshot::Sender<()>) {
    let (tell, told) = mpsc::channel();
    let (stop, stopped) = oneshot::channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = Server::builder().context(Context::builder().build());
            let serving = Serving::start(server.fabrics([FabricKind::Shm]).add_service(Echo)).await;
            tell.send(serving.addr).unwrap();
            let _ = stopped.await;
        });
    });
    (told.recv_timeout(LIMIT).unwrap(), stop)
}

/// Another client is answered while the server writes, and the server ends with the peer.
#[tokio::test]
async fn others_are_served_while_a_peer_has_endless_writes_made() {
    let (server, _stop) = serve();
    let victim = endpoint(server).context(Context::builder().build()).fabrics([FabricKind::Shm]);
    let channel = victim.connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    let mut client = Client::new(channel);
    client.say("before").await.unwrap();
    let attack = async {
        let mut peer = Peer::connect(server).await.unwrap();
        for _ in 0..8 {
            peer.request(1 << 30);
        }
        for n in 0..CALLS {
            assert_eq!(client.say("x").await.unwrap(), "x", "call {n}");
        }
        assert!(!peer.has_heard().await, "the server has written too soon, or refused");
        drop(peer);
        // The server serves one at a time: it has given up the WRITEs of the first.
        while Peer::connect(server).await.is_none() {
            client.say("x").await.unwrap();
        }
    };
    tokio::time::timeout(LIMIT, attack).await.expect("the server answers nobody");
}
