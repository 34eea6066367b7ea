//! Processes that pause, over shared memory: a handler that blocks its worker, a client that blocks
//! while it reads, a process that is stopped. Silence is not death (R24): no call is lost, unless
//! the program has set a keep-alive, which then ends it as over tonic's own channel. The server
//! that is stopped is this program again.

// A failed unwrap is a failed test.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::Trial;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::task::JoinSet;
use tonic::service::InterceptorLayer;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Status};
use tonic_rdma::{Channel, Context, Endpoint, FabricKind, Path, Policy};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::codec::CodecKind;
use tonic_rdma_tests::harness::{Client, client_of};
use tonic_rdma_tests::load::{wait_for_path, with_timeout};
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::process::{Process, codec_from_name, role, runtime};
use tonic_rdma_tests::server_process::{self, endpoint, fixed_port};
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{echo, send_many, steps};

/// Longer than a peer that was silent lived once.
const PAUSE: Duration = Duration::from_secs(6);
const SECOND: Duration = Duration::from_secs(1);
/// The metadata of a call whose handler blocks.
const BLOCKS: &str = "blocks";
/// Small messages, some that land, and one that lands in parts.
const SIZES: [usize; 4] = [10, 4000, 300_000, 20 << 20];

fn main() -> ExitCode {
    if let Some(role) = role() {
        let runtime = runtime(codec_from_name(&role[1]));
        match &role.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["server", _, at, device] => {
                runtime.block_on(server_process::serve(at.parse().unwrap(), device, false, || 0))
            }
            _ => panic!("no role: {role:?}"),
        }
        runtime.shutdown_background();
        return ExitCode::SUCCESS;
    }
    let trial = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = vec![
        trial("a_handler_that_blocks_its_worker", a_handler_that_blocks_its_worker),
        trial("a_client_that_blocks_while_it_reads", a_client_that_blocks_while_it_reads),
        trial("a_stopped_server", || runtime(CodecKind::ZeroCopy).block_on(a_stopped_server())),
        trial("a_keep_alive_ends_a_pause", || {
            runtime(CodecKind::ZeroCopy).block_on(a_keep_alive_ends_a_pause());
        }),
    ];
    libtest_mimic::run(&libtest_mimic::Arguments::from_args(), trials).exit_code()
}

/// A runtime with one thread, which a task can block.
fn one_thread() -> tokio::runtime::Runtime {
    tonic_rdma_tests::codec::set_thread_codec(CodecKind::ZeroCopy);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A server with a thread of its own, which calls with [`BLOCKS`] block.
fn serve_on_one_thread() -> SocketAddr {
    let (told, at) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        one_thread().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.send(listener.local_addr().unwrap()).unwrap();
            let blocks = InterceptorLayer::new(|request: Request<()>| {
                if request.metadata().contains_key(BLOCKS) {
                    std::thread::sleep(PAUSE);
                }
                Ok::<_, Status>(request)
            });
            let router = tonic_rdma::Server::builder()
                .fabrics([FabricKind::Shm])
                .context(Context::builder().build())
                .layer(blocks)
                .add_service(Scripted::server(&Probe::default()));
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            router.serve_with_incoming(incoming).await.unwrap();
        });
    });
    at.recv().unwrap()
}

async fn connect(endpoint: Endpoint) -> (Channel, Client) {
    let channel = with_timeout("connecting", endpoint.connect()).await.unwrap();
    (channel.clone(), client_of(AnyChannel::Rdma(channel)))
}

async fn connect_shm(at: SocketAddr) -> (Channel, Client) {
    let (channel, client) =
        connect(endpoint(at, (FabricKind::Shm, &Context::builder().build()))).await;
    wait_for_path(&channel, Path::Shm).await;
    (channel, client)
}

async fn echo_one(mut client: Client, size: usize) -> Result<(), Status> {
    let request = steps("", [echo(1)]).with_payload(1, size);
    client.unary(request).await.map(|reply| reply.into_inner().expect(1, size))
}

/// Calls of all sizes begin at once.
fn echoes(client: &Client) -> JoinSet<Result<(), Status>> {
    SIZES.into_iter().map(|size| echo_one(client.clone(), size)).collect()
}

async fn assert_all_succeed(mut calls: JoinSet<Result<(), Status>>) {
    while let Some(call) = with_timeout("a call", calls.join_next()).await {
        call.unwrap().unwrap();
    }
}

/// No call has left the path, nor has a connection been lost.
fn assert_kept(channel: &Channel) {
    let stats = channel.stats();
    assert_eq!((stats.connections_lost, stats.calls_tcp), (0, 0), "{}", channel.path());
    assert_eq!(channel.path().path, Path::Shm);
}

fn a_handler_that_blocks_its_worker() {
    let at = serve_on_one_thread();
    runtime(CodecKind::ZeroCopy).block_on(async {
        let (channel, client) = connect_shm(at).await;
        echo_one(client.clone(), 10).await.unwrap();
        let mut blocking = Request::new(steps("", [echo(1)]).with_payload(1, 10));
        blocking.metadata_mut().insert(BLOCKS, "1".parse().unwrap());
        let mut blocked = client.clone();
        let blocked = tokio::spawn(async move { blocked.unary(blocking).await });
        // It blocks by then, with these calls behind it.
        tokio::time::sleep(SECOND).await;
        assert_all_succeed(echoes(&client)).await;
        blocked.await.unwrap().unwrap();
        assert_kept(&channel);
    });
}

fn a_client_that_blocks_while_it_reads() {
    let at = serve_on_one_thread();
    one_thread().block_on(async {
        let (channel, mut client) = connect_shm(at).await;
        const MESSAGES: u64 = 40;
        let request = steps("", [send_many(0, 300_000, MESSAGES)]);
        let mut replies = client.download(request).await.unwrap().into_inner();
        let calls = echoes(&client);
        for seed in 0..MESSAGES {
            if seed == 3 {
                std::thread::sleep(PAUSE);
            }
            let reply = with_timeout("a message", replies.message()).await.unwrap();
            reply.unwrap().expect(seed, 300_000);
        }
        assert_eq!(replies.message().await.unwrap().map(|_| ()), None);
        assert_all_succeed(calls).await;
        assert_kept(&channel);
    });
}

async fn start_server() -> (Process, SocketAddr) {
    let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let at = SocketAddr::new(ip, fixed_port(ip, &mut SmallRng::from_os_rng()));
    (server_process::start("", "zero-copy", at, "shm").await, at)
}

fn signal(process: &Process, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &process.id()]).status().unwrap();
    assert!(status.success());
}

async fn a_stopped_server() {
    let (server, at) = start_server().await;
    let (channel, client) = connect_shm(at).await;
    assert_all_succeed(echoes(&client)).await;
    let running = echoes(&client);
    signal(&server, "STOP");
    let later = echoes(&client);
    tokio::time::sleep(PAUSE).await;
    signal(&server, "CONT");
    assert_all_succeed(running).await;
    assert_all_succeed(later).await;
    assert_kept(&channel);
    server.kill().await;
}

/// The same settings, the same process, the same status: over tonic's TCP, and over shared memory.
async fn a_keep_alive_ends_a_pause() {
    let mut codes = Vec::new();
    for path in [Path::Tcp, Path::Shm] {
        let (server, at) = start_server().await;
        let context = Context::builder().build();
        let policy = if path == Path::Tcp { Policy::Off } else { Policy::Auto };
        let endpoint = endpoint(at, (FabricKind::Shm, &context))
            .policy(policy)
            .http2_keep_alive_interval(SECOND)
            .keep_alive_timeout(SECOND);
        let (channel, client) = connect(endpoint).await;
        wait_for_path(&channel, path).await;
        // As long as the process runs, it answers: a call that lasts is not ended.
        let mut lasting = client.clone();
        let mut gated =
            Box::pin(lasting.unary(steps("", [tonic_rdma_tests::service::script::hang()])));
        let waited = tokio::time::timeout(SECOND * 4, &mut gated).await;
        assert!(waited.is_err(), "{waited:?}");
        signal(&server, "STOP");
        let status = with_timeout("the end of the call", gated).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{path:?}: {status:?}");
        codes.push((status.code(), status.message().contains("timed out")));
        signal(&server, "CONT");
        server.kill().await;
    }
    assert_eq!(codes[0].0, codes[1].0);
    assert!(codes[1].1, "the message tells why");
}
