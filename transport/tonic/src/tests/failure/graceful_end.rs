//! A peer whose runtime or process ends without failing a call does not count as lost.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic_rdma_proto::Hello;

use crate::bootstrap::client::{OfferedPlace, offer};
use crate::connection::ConnectionConfig;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::logs::Logs;
use crate::tests::support::world::{Serving, endpoint};
use crate::{Channel, Context, Endpoint, FabricKind, Path, ReasonCode, Server, Side};

/// Time limit of each step.
const LIMIT: Duration = Duration::from_secs(30);

fn server() -> Server {
    Server::builder().context(Context::builder().build()).fabrics([FabricKind::Shm])
}

async fn connect(addr: SocketAddr) -> Channel {
    let context = Context::builder().build();
    let channel =
        endpoint(addr).context(context).fabrics([FabricKind::Shm]).connect().await.unwrap();
    assert_eq!(channel.path().path, Path::Shm, "{}", channel.path());
    assert_eq!(Client::new(channel.clone()).say("hello").await.unwrap(), "hello");
    channel
}

/// Runs `work` on a thread with its own runtime, while the server continues here.
async fn elsewhere(work: impl FnOnce(Runtime) + Send + 'static) {
    let (tell, done) = oneshot::channel();
    thread::spawn(move || {
        work(Builder::new_current_thread().enable_all().build().unwrap());
        tell.send(()).unwrap();
    });
    timeout(LIMIT, done).await.unwrap().unwrap();
}

/// Runs a client. Once the server has no connection left, it must have reported no loss.
async fn is_no_loss(client: fn(SocketAddr, Runtime)) {
    let logs = Logs::capture();
    let mut builder = server();
    let stats = builder.stats();
    let serving = Serving::start(builder.add_service(Echo)).await;
    let addr = serving.addr;
    // Connect once first, because the first connection creates objects that exist once per process.
    elsewhere(move |runtime| drop(runtime.block_on(connect(addr)))).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let at_rest = || async move {
        // The tasks of an idle server: its accept loop, its fast path, and the fast path's
        // listener.
        while tasks() > 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, at_rest()).await.unwrap();
    let before = stats.get();
    elsewhere(move |runtime| client(addr, runtime)).await;
    timeout(LIMIT, at_rest()).await.unwrap();
    let after = stats.get();
    assert_eq!((after.connections, after.connections_lost), (before.connections + 1, 0));
    assert_eq!(logs.lines_with("lost"), [""; 0]);
    assert!(!logs.lines_with("fast path offered").is_empty(), "the log is not seen");
}

#[tokio::test]
async fn a_clients_runtime_ends_before_its_channel() {
    is_no_loss(|addr, runtime| {
        let channel = runtime.block_on(connect(addr));
        drop(runtime);
        drop(channel);
    })
    .await;
}

#[tokio::test]
async fn a_clients_runtime_ends_with_a_call_of_its_own() {
    is_no_loss(|addr, runtime| {
        let channel = runtime.block_on(connect(addr));
        let mut client = Client::new(channel.clone());
        let call = runtime.spawn(async move { client.say("zzz").await });
        // Wait until the server has received the call.
        let served = async {
            while channel.stats().calls_fast < 2 {
                tokio::task::yield_now().await
            }
        };
        runtime.block_on(async { timeout(LIMIT, served).await.unwrap() });
        drop(runtime);
        drop(call);
    })
    .await;
}

/// Behaves like exit(2) or a signal: no destructor runs, and the kernel closes the process's
/// resources.
#[tokio::test]
async fn a_clients_process_ends() {
    is_no_loss(|addr, runtime| {
        let gone = async {
            let uri = format!("http://{addr}");
            let tcp = Endpoint::from_shared(uri.clone()).unwrap().connect_tcp().await.unwrap();
            let offered = offer(&tcp, uri.parse().unwrap(), None, &[Path::Shm]).await.unwrap();
            let OfferedPlace { path, addr, .. } = &offered.places[0];
            let context = Context::builder().build();
            let (fabric, pool) = context.toward(*path, addr, None, None, LIMIT).await.unwrap();
            let options = ConnectionConfig::for_pool(&pool, fabric.grows(), None);
            let hello = Hello::new(offered.ticket.0, options.proto.settings()).encode();
            fabric.connect(addr, &options.link, &pool, &hello, LIMIT).await.unwrap();
        };
        runtime.block_on(gone);
    })
    .await;
}

#[tokio::test]
async fn a_servers_runtime_ends() {
    let (tell, told) = oneshot::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let serving = runtime.block_on(Serving::start(server().add_service(Echo)));
        tell.send(serving.addr).unwrap();
        let _ = runtime.block_on(stopped);
        drop(runtime);
    });
    let mut channel = connect(told.await.unwrap()).await;
    drop(stop);
    let reason = timeout(LIMIT, channel.path_changed()).await.unwrap().reason.unwrap();
    assert_eq!((reason.code(), reason.side()), (ReasonCode::GoAway, Side::Peer), "{reason}");
    assert_eq!(channel.stats().connections_lost, 0);
    server.join().unwrap();
}
