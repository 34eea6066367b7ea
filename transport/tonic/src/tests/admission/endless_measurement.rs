//! A peer measures over shared memory, where every WRITE is done when it is queued. The peer asks
//! for WRITEs without end, which would block other clients if the server did all of them in one
//! turn (R20).

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tonic_rdma_fabric::Connected;
use tonic_rdma_fabric::bare::{self, Bare, BareError, BareLimits};
use tonic_rdma_proto::{Config, Hello};

use crate::bootstrap::client::{OfferedPlace, offer_bare};
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, endpoint};
use crate::{Context, Endpoint, FabricKind, Path, Server};

/// Time until a test that makes no progress fails.
const LIMIT: Duration = Duration::from_secs(60);
/// Calls of the other client while the server writes.
const CALLS: usize = 50;

/// Takes a ticket for a measuring connection, and connects. `None` while another peer measures.
async fn measuring(server: SocketAddr, limits: BareLimits) -> Option<Bare> {
    let uri = format!("http://{server}");
    let tcp = Endpoint::from_shared(uri.clone()).unwrap().connect_tcp().await.unwrap();
    let offered = offer_bare(&tcp, uri.parse().unwrap(), None, &[Path::Shm]).await.unwrap();
    let OfferedPlace { path, addr, .. } = &offered.places[0];
    let context = Context::builder().build();
    let (fabric, pool) = context.toward(*path, addr, None, None, LIMIT).await.unwrap();
    let hello = Hello::new(offered.ticket.0, Config::default().settings()).encode();
    let connected = fabric.connect(addr, &bare::config(), &pool, &hello, LIMIT).await;
    let Connected { link, .. } = connected.ok()?;
    Some(Bare::open(link, pool, limits).await.unwrap())
}

/// Serves on its own thread, so that a server that hangs blocks nothing else.
fn serve() -> (SocketAddr, oneshot::Sender<()>) {
    let (tell, told) = mpsc::channel();
    let (stop, stopped) = oneshot::channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = Server::builder().context(Context::builder().build()).measuring(true);
            let serving = Serving::start(server.fabrics([FabricKind::Shm]).add_service(Echo)).await;
            tell.send(serving.addr).unwrap();
            let _ = stopped.await;
        });
    });
    (told.recv_timeout(LIMIT).unwrap(), stop)
}

/// Another client is answered while the server writes all the time. This client is also answered
/// after a peer has asked for a billion WRITEs in one request, which ends the peer's connection.
#[tokio::test]
async fn others_are_served_while_a_peer_has_endless_writes_made() {
    let (server, _stop) = serve();
    let victim = endpoint(server).context(Context::builder().build()).fabrics([FabricKind::Shm]);
    let channel = victim.connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    let mut client = Client::new(channel);
    let attack = async {
        let mut peer = measuring(server, BareLimits::default()).await.unwrap();
        let calls = async {
            for n in 0..CALLS {
                assert_eq!(client.say("x").await.unwrap(), "x", "call {n}");
            }
        };
        tokio::select! {
            ended = peer.written(1, usize::MAX, 8) => panic!("{ended:?}"),
            () = calls => {}
        }
        peer.close();
        // The server serves one measuring connection at a time, and has given up the first one's
        // WRITEs.
        let limits = BareLimits { requested_writes: u64::MAX, ..BareLimits::default() };
        let mut peer = loop {
            match measuring(server, limits).await {
                Some(peer) => break peer,
                None => assert_eq!(client.say("x").await.unwrap(), "x"),
            }
        };
        let error = peer.written(1, 1 << 30, 8).await.unwrap_err();
        assert!(matches!(error, BareError::Link(_)), "{error}");
        assert_eq!(client.say("x").await.unwrap(), "x");
    };
    tokio::time::timeout(LIMIT, attack).await.expect("the server answers nobody");
}
