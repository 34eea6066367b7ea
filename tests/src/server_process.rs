//! A server of the scripted service in its own process, for tests that kill, stop or measure it.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};
use tonic_rdma::{Context, ContextBuilder, Endpoint, FabricKind, PoolConfig};

use crate::load::poll_until;
use crate::probe::Probe;
use crate::process::{Process, in_use};
use crate::service::Scripted;

/// Maximum number of connections that any test makes.
const MAX_CONNECTIONS: usize = 20_000;

/// The environment variable with the size of a server's pool, in bytes. Without it, the size is the
/// default of the machine.
pub const POOL_SIZE: &str = "TONIC_RDMA_TEST_POOL";

/// The fabric and the context for the name of a device, or for `shm`.
pub fn fabric_of(device: &str) -> (FabricKind, Context) {
    let (fabric, context) = builder_of(device);
    (fabric, context.build())
}

fn builder_of(device: &str) -> (FabricKind, ContextBuilder) {
    match device {
        "shm" => (FabricKind::Shm, Context::builder()),
        "all" => (FabricKind::Verbs, Context::builder()),
        _ => (FabricKind::Verbs, Context::builder().device(device)),
    }
}

/// An endpoint whose channels wait up to 10 s for the fast path.
pub fn endpoint(server: SocketAddr, (kind, context): (FabricKind, &Context)) -> Endpoint {
    Endpoint::from_shared(format!("http://{server}"))
        .unwrap()
        .fabrics([kind])
        .context(context.clone())
        .fast_path_timeout(Duration::from_secs(10))
}

/// The role of the server's process. It serves, and answers `pools` with the bytes of the pools in
/// use, and `heap` with the result of `heap`. With `alone` it does not read standard input.
#[allow(clippy::panic)]
pub async fn serve(at: SocketAddr, device: &str, alone: bool, heap: fn() -> usize) {
    let (fabric, builder) = builder_of(device);
    let context = match std::env::var(POOL_SIZE) {
        Ok(bytes) => builder.pool(PoolConfig::default().total(bytes.parse().unwrap())),
        Err(_) => builder,
    }
    .build();
    let listener = tokio::net::TcpListener::bind(at).await.unwrap();
    let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
    let mut server = tonic_rdma::Server::builder()
        .fabrics([fabric])
        .context(context.clone())
        .max_connections(MAX_CONNECTIONS)
        .measuring(true);
    let router = server.add_service(Scripted::server(&Probe::default()));
    let mut serving = tokio::spawn(router.serve_with_incoming(incoming));
    println!("ready");
    let mut lines = BufReader::new(stdin()).lines();
    loop {
        tokio::select! {
            line = lines.next_line(), if !alone => match line {
                Ok(Some(question)) if question == "heap" => println!("{}", heap()),
                Ok(Some(_)) => println!("{}", in_use(&context).await),
                _ => return,
            },
            end = &mut serving => panic!("the server ended: {end:?}"),
        }
    }
}

/// Starts a server's process as [`Process::start`] does, and waits until it serves.
pub async fn start(wrapper: &str, codec: &str, at: SocketAddr, device: &str) -> Process {
    let mut server = Process::start(wrapper, &format!("server {codec} {at} {device}"));
    assert_eq!(server.read_line().await, "ready");
    server
}

/// Waits until a server uses no byte of its pools.
pub async fn wait_for_idle_pools(server: &mut Process) {
    let server = tokio::sync::Mutex::new(server);
    let read = || async { server.lock().await.in_use().await };
    poll_until("bytes are in use at the server, with no channel left", read, |bytes| *bytes == 0)
        .await;
}
