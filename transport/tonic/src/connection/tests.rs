//! Calls over the simulated fabric, without Endpoint and Server.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic_rdma_fabric::sim::{SimConfig, SimDevice, SimNet};
use tonic_rdma_fabric::{Addr, Fabric};
use tonic_rdma_memory::{Pool, PoolConfig};
use tonic_rdma_proto::{Accept, Hello, Settings};
use tower::Service;

use crate::connection::{Accepted, CallError, ConnectionConfig, FastClient, serve_connection};
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// What a test's server does with a call.
#[derive(Clone)]
struct Echo {
    /// Told when a handler is dropped before its end.
    dropped: mpsc::UnboundedSender<()>,
}

struct DropGuard(Option<mpsc::UnboundedSender<()>>);

impl Drop for DropGuard {
    fn drop(&mut self) {
        if let Some(tx) = self.0.take() {
            let _ = tx.send(());
        }
    }
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let guard = DropGuard(Some(self.dropped.clone()));
        Box::pin(async move {
            let mut guard = guard;
            let path = request.uri().path().to_owned();
            let response = match path.as_str() {
                // Headers, the request's bytes as they come, trailers.
                "/echo" => Response::new(Body::new(request.into_body())),
                "/collect" => {
                    let all = request.into_body().collect().await.unwrap().to_bytes();
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", "0".parse().unwrap());
                    let frames = [Ok::<_, Status>(Frame::data(all)), Ok(Frame::trailers(trailers))];
                    Response::new(Body::new(StreamBody::new(tokio_stream::iter(frames))))
                }
                // Whether the end came with the last of the bytes.
                "/end" => {
                    let len: usize = request.headers()["len"].to_str().unwrap().parse().unwrap();
                    let mut body = request.into_body();
                    let mut got = 0;
                    while got < len {
                        got += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
                    }
                    let status = if body.is_end_stream() {
                        Status::ok("")
                    } else {
                        Status::aborted("no end yet")
                    };
                    status.into_http()
                }
                "/slow" => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    Status::ok("").into_http()
                }
                "/hang" => std::future::pending().await,
                "/panic" => panic!("asked to"),
                _ => Status::not_found("no such call").into_http(),
            };
            guard.0 = None;
            Ok(response)
        })
    }
}

struct Setup {
    net: SimNet,
    server_device: SimDevice,
    client_device: SimDevice,
    client: FastClient,
    server: JoinHandle<Reason>,
    drain: Option<oneshot::Sender<()>>,
    pools: [Pool; 2],
    counters: Arc<Counters>,
    dropped: mpsc::UnboundedReceiver<()>,
}

/// One connection of a [`Setup`].
struct Pair {
    client: FastClient,
    server: JoinHandle<Reason>,
    drain: oneshot::Sender<()>,
    counters: Arc<Counters>,
    server_counters: Arc<Counters>,
    dropped: mpsc::UnboundedReceiver<()>,
}

async fn setup(config: SimConfig, total: usize) -> Setup {
    let net = SimNet::new(config);
    let server_device = net.device("sim0", "10.0.0.1".parse().unwrap());
    let client_device = net.device("sim1", "10.0.0.2".parse().unwrap());
    let fabrics = [Fabric::Sim(server_device.clone()), Fabric::Sim(client_device.clone())];
    let pools = fabrics.each_ref().map(|f| {
        Pool::new(PoolConfig::default().total(total), f.registrar())
            .expect("a pool over the simulated device")
    });
    let Pair { client, server, drain, counters, dropped, .. } = connect(&fabrics, &pools).await;
    let drain = Some(drain);
    Setup { net, server_device, client_device, client, server, drain, pools, counters, dropped }
}

/// Connects the second of these to the first.
async fn connect(fabrics: &[Fabric; 2], pools: &[Pool; 2]) -> Pair {
    connect_to(fabrics, pools, |_| {}).await
}

/// As [`connect`], to a server that is configured.
async fn connect_to(
    fabrics: &[Fabric; 2],
    pools: &[Pool; 2],
    configure: fn(&mut ConnectionConfig),
) -> Pair {
    connect_as(fabrics, pools, configure, |_| {}).await
}

/// As [`connect_to`], by a client that has changed what the server has told it.
async fn connect_as(
    fabrics: &[Fabric; 2],
    pools: &[Pool; 2],
    configure: fn(&mut ConnectionConfig),
    believe: fn(&mut Settings),
) -> Pair {
    let mut listener = fabrics[0].listen(&Addr::Ip("10.0.0.1:0".parse().unwrap())).unwrap();
    let addr = listener.local_addr();
    let time = Duration::from_secs(5);
    let (drop_tx, dropped) = mpsc::unbounded_channel();
    let (drain, drained) = oneshot::channel();
    let server_pool = pools[0].clone();
    let server_counters = Arc::<Counters>::default();
    let counted = server_counters.clone();
    let server = tokio::spawn(async move {
        let mut options = ConnectionConfig::for_pool(&server_pool, true, None);
        configure(&mut options);
        let incoming = listener.accept().await.unwrap();
        let hello = Hello::decode(incoming.private_data()).unwrap();
        assert_eq!(hello.ticket, [9; 16]);
        let accept = Accept { version: hello.version(), settings: options.proto.settings() };
        let link =
            incoming.accept(&options.link, &server_pool, &accept.encode(), time).await.unwrap();
        let drain = async move {
            if drained.await.is_err() {
                std::future::pending().await
            }
        };
        let echo = Echo { dropped: drop_tx };
        let accepted = Accepted {
            link,
            pool: server_pool,
            peer: hello.settings,
            options,
            counters: counted,
            methods: Arc::default(),
            extensions: http::Extensions::new(),
            drain: Box::pin(drain),
        };
        serve_connection(accepted, echo).await
    });
    let options = ConnectionConfig::for_pool(&pools[1], true, None);
    let hello = Hello::new([9; 16], options.proto.settings());
    let connected =
        fabrics[1].connect(&addr, &options.link, &pools[1], &hello.encode(), time).await.unwrap();
    let mut accept = Accept::decode(&connected.private_data).unwrap();
    believe(&mut accept.settings);
    let counters = Arc::new(Counters::default());
    let client = FastClient::start(
        connected.link,
        pools[1].clone(),
        accept.settings,
        &options,
        counters.clone(),
        Arc::default(),
        Arc::new(crate::connection::Origin {
            uri: "http://host".parse().unwrap(),
            user_agent: None,
        }),
    );
    Pair { client, server, drain, counters, server_counters, dropped }
}

fn request(path: &str, body: Body) -> Request<Body> {
    Request::post(format!("http://host{path}")).body(body).unwrap()
}

fn full(bytes: impl Into<Bytes>) -> Body {
    Body::new(http_body_util::Full::new(bytes.into()))
}

fn pattern(len: usize) -> Bytes {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect::<Vec<u8>>().into()
}

async fn collect(response: Response<Body>) -> (Bytes, Option<HeaderMap>) {
    let all = response.into_body().collect().await.unwrap();
    let trailers = all.trailers().cloned();
    (all.to_bytes(), trailers)
}

impl Setup {
    async fn finish(self) {
        let Setup { net, client, server, pools, client_device, server_device, .. } = self;
        let closed = client.closed();
        drop(client);
        assert_eq!(closed.await.code(), ReasonCode::GoAway);
        assert_eq!(server.await.unwrap().code(), ReasonCode::GoAway);
        assert_eq!(net.stats().receiver_not_ready, 0);
        assert_eq!(net.stats().remote_access_errors, 0);
        for pool in pools {
            assert_eq!(pool.stats().in_use_bytes(), 0, "{:?}", pool.stats());
        }
        let _ = (client_device, server_device);
    }
}

#[tokio::test]
async fn bytes_of_every_size_come_back() {
    for config in [SimConfig::default(), SimConfig { seed: 3, delay: 4, ..SimConfig::default() }] {
        let s = setup(config, 64 << 20).await;
        for len in
            [0, 1, 100, 4000, 4079, 4080, 4081, 5000, 65_536, 1 << 20, (1 << 20) + 5, 5_000_000]
        {
            let body = pattern(len);
            let response = s.client.call(request("/collect", full(body.clone()))).await.unwrap();
            let (got, trailers) = collect(response).await;
            assert_eq!(got.len(), len);
            assert!(got == body, "{len}");
            assert_eq!(trailers.unwrap()["grpc-status"], "0");
        }
        assert!(s.counters.snapshot().bytes_sent_write > 7_000_000);
        s.finish().await;
    }
}

#[tokio::test]
async fn a_small_call_is_one_send_each_way() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = async || {
        let response = s.client.call(request("/collect", full(&b"hello"[..]))).await.unwrap();
        collect(response).await
    };
    call().await;
    let before = s.net.stats().sends;
    for _ in 0..1000 {
        call().await;
    }
    assert_eq!(s.net.stats().sends - before, 2000);
    s.finish().await;
}

#[tokio::test]
async fn a_small_pool_carries_large_bodies() {
    let s = setup(SimConfig::default(), 2 << 20).await;
    let body = pattern(10_000_000);
    let mut calls = Vec::new();
    for _ in 0..4 {
        calls.push(tokio::spawn(s.client.call(request("/echo", full(body.clone())))));
    }
    for call in calls {
        let response = call.await.unwrap().unwrap();
        assert!(collect(response).await.0 == body);
    }
    s.finish().await;
}

#[tokio::test]
async fn many_calls_at_once() {
    let s = setup(SimConfig { seed: 5, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let mut calls = Vec::new();
    for i in 0..2000 {
        let body = pattern(i * 7 % 20_000);
        let call = s.client.call(request("/collect", full(body.clone())));
        calls.push(tokio::spawn(async move {
            let (got, _) = collect(call.await.unwrap()).await;
            assert!(got == body);
        }));
    }
    for call in calls {
        call.await.unwrap();
    }
    s.finish().await;
}

#[tokio::test]
async fn both_halves_stream() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let (tx, rx) = mpsc::channel::<Result<Frame<Bytes>, Status>>(1);
    let body = Body::new(StreamBody::new(ReceiverStream::new(rx)));
    tx.send(Ok(Frame::data(Bytes::from_static(b"a")))).await.unwrap();
    let response = s.client.call(request("/echo", body)).await.unwrap();
    let mut incoming = response.into_body();
    for len in [1, 10, 100_000] {
        if len > 1 {
            tx.send(Ok(Frame::data(pattern(len)))).await.unwrap();
        }
        let mut got = 0;
        while got < len {
            got += incoming.frame().await.unwrap().unwrap().into_data().unwrap().len();
        }
    }
    drop(tx);
    assert!(incoming.frame().await.is_none());
    drop(incoming);
    s.finish().await;
}

#[tokio::test]
async fn cancelling_drops_the_handler() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", full(&b"x"[..]))));
    let (got, _) =
        collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    assert_eq!(&got[..], b"y");
    call.abort();
    s.dropped.recv().await.unwrap();
    s.finish().await;
}

#[tokio::test]
async fn a_panic_fails_only_its_call() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    match s.client.call(request("/panic", Body::empty())).await {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Cancelled),
        other => panic!("{other:?}"),
    }
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.finish().await;
}

#[tokio::test]
async fn trailers_only() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let response = s.client.call(request("/nothing", Body::empty())).await.unwrap();
    assert_eq!(response.headers()["grpc-status"], "5");
    assert!(response.body().is_end_stream());
    drop(response);
    s.finish().await;
}

#[tokio::test]
async fn drain_lets_calls_finish_and_takes_no_new_ones() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let (tx, rx) = mpsc::channel::<Result<Frame<Bytes>, Status>>(1);
    let body = Body::new(StreamBody::new(ReceiverStream::new(rx)));
    let response = s.client.call(request("/echo", body)).await.unwrap();
    s.drain.take().unwrap().send(()).unwrap();
    while s.client.is_open() {
        tokio::task::yield_now().await;
    }
    match s.client.call(request("/collect", full(&b"retry me"[..]))).await {
        Err(CallError::NotSent(request, reason)) => {
            assert_eq!(reason.code(), ReasonCode::GoAway);
            assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), &b"retry me"[..]);
        }
        other => panic!("{other:?}"),
    }
    tx.send(Ok(Frame::data(Bytes::from_static(b"still here")))).await.unwrap();
    drop(tx);
    assert_eq!(&collect(response).await.0[..], b"still here");
    assert_eq!(s.server.await.unwrap().code(), ReasonCode::GoAway);
    assert_eq!(s.client.closed().await.code(), ReasonCode::GoAway);
}

#[tokio::test]
async fn a_lost_link_fails_its_calls_once_and_gives_memory_back() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", full(pattern(3_000_000)))));
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.server_device.remove();
    match call.await.unwrap() {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Unavailable),
        other => panic!("{other:?}"),
    }
    assert_eq!(s.client.closed().await.code(), ReasonCode::LinkLost);
    assert_eq!(s.server.await.unwrap().code(), ReasonCode::LinkLost);
    for pool in &s.pools {
        assert_eq!(pool.stats().in_use_bytes(), 0);
    }
    match s.client.call(request("/collect", full(&b"y"[..]))).await {
        Err(CallError::NotSent(..)) => {}
        other => panic!("{other:?}"),
    }
}

/// A program may keep a response for long after its connection has ended.
#[tokio::test]
async fn a_connection_that_has_ended_claims_no_memory() {
    let s = setup(SimConfig { seed: 8, delay: 2, ..SimConfig::default() }, 4 << 20).await;
    let mut other = s.pools[1].landing();
    let held: Vec<_> = std::iter::from_fn(|| other.alloc(64 << 10, 64 << 10).unwrap()).collect();
    other.stop_waiting();
    let response = s.client.call(request("/echo", full(pattern(1 << 20)))).await.unwrap();
    while !other.others_claim() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    s.server_device.remove();
    s.server.await.unwrap();
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while other.others_claim() && tokio::time::Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!other.others_claim());
    let before = s.pools[1].stats().leased;
    drop(held);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(s.pools[1].stats().leased, before, "nor does it lease what comes free");
    drop(response);
}

/// The first stream in line finds no memory, and what is granted behind it leaves the connection
/// too little of what its streams may have together.
#[tokio::test]
async fn a_stream_that_may_have_no_memory_claims_none() {
    const LONG: usize = 900_000;
    const SHORT: usize = 600_000;
    let s = setup(SimConfig::default(), 4 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let pair = connect_to(&fabrics, &s.pools, |options| {
        options.proto.standing_grants = 0;
        (options.proto.bulk_window, options.proto.whole) = (1 << 20, 0);
        options.proto.bulk_total = 1 << 20;
    });
    let Pair { client, server, .. } = pair.await;
    // There is a chunk for the short one, and others have the rest.
    collect(client.call(request("/collect", full(pattern(SHORT)))).await.unwrap()).await;
    let mut other = s.pools[0].landing();
    let rest = [64 << 10, 4 << 10]
        .map(|len| std::iter::from_fn(|| other.alloc(len, len).unwrap()).collect::<Vec<_>>());
    other.stop_waiting();
    // The server hears of both at once.
    s.server_device.freeze(true);
    let call = |len| tokio::spawn(client.call(request("/hang", full(pattern(len)))));
    let calls = [LONG, SHORT].map(call);
    tokio::time::sleep(Duration::from_millis(20)).await;
    s.server_device.freeze(false);
    until("the short one has landed", || s.pools[0].stats().filled >= SHORT).await;
    assert!(!other.others_claim());
    calls.iter().for_each(JoinHandle::abort);
    drop((rest, other, client));
    assert_eq!(server.await.unwrap().code(), ReasonCode::GoAway);
    s.finish().await;
}

/// A busy connection has more RECVs and SEND slots than it starts with, and staging; one at rest
/// has given them back.
#[tokio::test(start_paused = true)]
async fn a_connection_at_rest_pins_8_kib() {
    let s = setup(SimConfig { seed: 4, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let pinned =
        |s: &Setup| s.pools.each_ref().map(|pool| (pool.stats().control, pool.stats().registered));
    const REST: usize = 8 << 10;
    for _ in 0..3 {
        let calls = (0..64).map(|_| s.client.call(request("/collect", full(pattern(3000)))));
        for call in calls.map(tokio::spawn).collect::<Vec<_>>() {
            collect(call.await.unwrap().unwrap()).await;
        }
        let [server, client] = pinned(&s);
        assert!(server.0 > REST && client.0 > REST, "{server:?} {client:?}");
        // Not from pool memory: staged.
        let body = pattern(3 << 20);
        let response = s.client.call(request("/echo", full(body.clone()))).await.unwrap();
        assert!(collect(response).await.0 == body);
        // 31 RECVs go with one PING each, or its answer; landing memory and SEND slots have gone
        // long before.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(pinned(&s), [(REST, REST); 2], "in use, and registered");
    }
    assert_eq!(s.net.stats().receiver_not_ready, 0);
    s.finish().await;
}

/// Other connections have all that the pools can spare: there are few credits, and staging is a
/// SEND slot.
#[tokio::test]
async fn without_memory_to_spare_everything_still_goes() {
    let s = setup(SimConfig { seed: 6, delay: 2, ..SimConfig::default() }, 64 << 20).await;
    let all = |pool: &Pool| {
        let blocks =
            [1 << 20, 64 << 10, 4096].map(|len| std::iter::from_fn(move || pool.spare(len)));
        blocks.into_iter().flatten().collect::<Vec<_>>()
    };
    let others = s.pools.each_ref().map(all);
    let used = s.pools.each_ref().map(|pool| pool.stats().control);
    let calls = (0..64)
        .map(|i| (pattern(i * 30_000), s.client.call(request("/echo", full(pattern(i * 30_000))))));
    for (body, call) in calls.map(|(body, call)| (body, tokio::spawn(call))).collect::<Vec<_>>() {
        assert!(collect(call.await.unwrap().unwrap()).await.0 == body);
    }
    assert_eq!(s.pools.each_ref().map(|pool| pool.stats().control), used, "nothing was to spare");
    assert_eq!(s.net.stats().receiver_not_ready, 0);
    drop(others);
    s.finish().await;
}

/// Sixty clients begin at once, with messages that do not fit the RECVs of connections at rest, at
/// a server whose pool has memory for a few busy connections. All calls succeed, and no message
/// finds no RECV, or one that is too short.
#[tokio::test(start_paused = true)]
async fn sixty_connections_grow_at_once() {
    let config = SimConfig { seed: 8, delay: 2, ..SimConfig::default() };
    let net = SimNet::new(config);
    let devices = ["10.0.0.1", "10.0.0.2"].map(|ip| net.device(ip, ip.parse().unwrap()));
    let fabrics = devices.each_ref().map(|device| Fabric::Sim(device.clone()));
    let pools = [0, 1].map(|at: usize| {
        let total = if at == 0 { 8 << 20 } else { 256 << 20 };
        Pool::new(PoolConfig::default().total(total), fabrics[at].registrar()).unwrap()
    });
    let mut pairs = Vec::new();
    for _ in 0..60 {
        pairs.push(connect(&fabrics, &pools).await);
    }
    let control = || pools.each_ref().map(|pool| pool.stats().control);
    assert_eq!(control(), [60 * (8 << 10); 2]);
    for _ in 0..2 {
        let calls = pairs.iter().flat_map(|pair| {
            [10, 1000, 2000, 4000, 4080, 9000].map(|len| {
                let call = pair.client.call(request("/collect", full(pattern(len))));
                tokio::spawn(async move { (len, collect(call.await.unwrap()).await.0) })
            })
        });
        for call in calls.collect::<Vec<_>>() {
            let (len, body) = call.await.unwrap();
            assert!(body == pattern(len), "{len}");
        }
        let budget = pools[0].config().control;
        assert!(control()[0] > 60 * (8 << 10) && control()[0] <= budget - budget / 4);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(control(), [60 * (8 << 10); 2], "at rest again");
    }
    for pair in pairs {
        drop(pair.client);
        assert_eq!(pair.server.await.unwrap().code(), ReasonCode::GoAway);
    }
    assert_eq!(net.stats().receiver_not_ready, 0);
    assert_eq!(net.breaches(), Vec::<String>::new());
}

/// A peer that sends more than the RECV in front holds ends its own connection only, by name.
#[tokio::test(start_paused = true)]
async fn a_message_longer_than_its_recv_ends_the_connection() {
    let net = SimNet::new(SimConfig::default());
    let devices = ["10.0.0.1", "10.0.0.2"].map(|ip| net.device(ip, ip.parse().unwrap()));
    let fabrics = devices.each_ref().map(|device| Fabric::Sim(device.clone()));
    let pools = fabrics
        .each_ref()
        .map(|fabric| Pool::new(PoolConfig::default().total(8 << 20), fabric.registrar()).unwrap());
    let honest = connect(&fabrics, &pools).await;
    // A peer that believes in RECVs of full slots, as its server stated none shorter.
    let hostile = connect_as(
        &fabrics,
        &pools,
        |_| {},
        |settings| {
            settings.rest_slot_size = settings.slot_size;
        },
    )
    .await;
    let call = hostile.client.call(request("/collect", full(pattern(3000)))).await;
    assert!(call.is_err(), "{call:?}");
    let reason = hostile.server.await.unwrap();
    assert_eq!(reason.code(), ReasonCode::LinkLost);
    assert!(reason.to_string().contains("local length error"), "{reason}");
    let response = honest.client.call(request("/collect", full(pattern(3000)))).await.unwrap();
    assert!(collect(response).await.0 == pattern(3000));
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_given_up() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let call = tokio::spawn(s.client.call(request("/hang", Body::empty())));
    collect(s.client.call(request("/collect", full(&b"y"[..]))).await.unwrap()).await;
    s.server_device.freeze(true);
    match call.await.unwrap() {
        Err(CallError::Status(status)) => assert_eq!(status.code(), tonic::Code::Unavailable),
        other => panic!("{other:?}"),
    }
    assert_eq!(s.client.closed().await.code(), ReasonCode::LinkLost);
}

#[tokio::test(start_paused = true)]
async fn the_last_answer_gets_to_a_peer_that_pauses() {
    let mut s = setup(SimConfig::default(), 64 << 20).await;
    let pause = |ms| tokio::time::sleep(Duration::from_millis(ms));
    let call = tokio::spawn(s.client.call(request("/slow", Body::empty())));
    pause(50).await;
    s.drain.take().unwrap().send(()).unwrap();
    pause(50).await;
    s.server_device.freeze(true);
    pause(4000).await;
    s.server_device.freeze(false);
    assert_eq!(call.await.unwrap().unwrap().headers()["grpc-status"], "0");
    s.finish().await;
}

/// Large frames one behind the other: memory comes free only as the reader reads.
#[tokio::test(start_paused = true)]
async fn a_stream_of_large_frames_never_waits_for_a_timer() {
    for total in [2 << 20, 8_126_464, 64 << 20] {
        let s = setup(SimConfig::default(), total).await;
        let started = tokio::time::Instant::now();
        let frame = pattern(1_048_586);
        let frames = tokio_stream::iter((0..64).map({
            let frame = frame.clone();
            move |_| Ok::<_, Status>(Frame::data(frame.clone()))
        }));
        let response =
            s.client.call(request("/echo", Body::new(StreamBody::new(frames)))).await.unwrap();
        let mut body = response.into_body();
        let mut got = 0;
        while let Some(frame) = body.frame().await {
            got += frame.unwrap().into_data().unwrap().len();
        }
        assert_eq!(got, 64 * frame.len());
        drop(body);
        // The clock only moves when every task waits: then something was not woken.
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{total}: stalled for {:?}",
            started.elapsed()
        );
        s.finish().await;
    }
}

/// A unary handler starts when it has seen the end: until then it holds its message, and with it
/// memory.
#[tokio::test]
async fn the_end_comes_with_the_last_bytes() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let mut calls = Vec::new();
    for len in [0, 10, 5000, 100_000, 1_048_585].into_iter().cycle().take(40) {
        let mut request = request("/end", full(pattern(len)));
        request.headers_mut().insert("len", len.to_string().parse().unwrap());
        calls.push(tokio::spawn(s.client.call(request)));
    }
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().headers()["grpc-status"], "0");
    }
    s.finish().await;
}

/// Between parts of a long body, which its reader copies, others have their turn.
#[tokio::test]
async fn a_long_body_leaves_others_their_turns() {
    let setup = setup(SimConfig::default(), 64 << 20).await;
    let response = setup.client.call(request("/collect", full(pattern(16 << 20)))).await.unwrap();
    let mut body = response.into_body();
    let mut longest = body.frame().await.unwrap().unwrap().into_data().unwrap().len();
    let turns = Arc::new(AtomicUsize::new(0));
    let other = {
        let turns = turns.clone();
        tokio::spawn(async move {
            loop {
                turns.fetch_add(1, Relaxed);
                tokio::task::yield_now().await;
            }
        })
    };
    while let Some(frame) = body.frame().await {
        longest = longest.max(frame.unwrap().into_data().map_or(0, |data| data.len()));
    }
    assert_eq!(longest, 16 << 10);
    assert!(turns.load(Relaxed) >= 15, "{turns:?}");
    other.abort();
    drop(body);
    setup.finish().await;
}

/// A device that registers nothing any more costs the call that needs memory, and no other.
#[tokio::test]
async fn a_device_that_registers_no_more_costs_the_call_that_needs_it() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    s.server_device.fail_registrations(0, u64::MAX);
    for _ in 0..2 {
        let failed = s.client.call(request("/collect", full(pattern(3 << 20)))).await;
        let status = match failed.map(Response::into_body) {
            Ok(body) => body.collect().await.map(|_| ()).unwrap_err(),
            Err(CallError::Status(status)) => status,
            Err(other) => panic!("{other:?}"),
        };
        assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
        let response = s.client.call(request("/collect", full(pattern(100)))).await.unwrap();
        assert_eq!(collect(response).await.0, pattern(100));
    }
    s.server_device.fail_registrations(0, 0);
    let response = s.client.call(request("/collect", full(pattern(3 << 20)))).await.unwrap();
    assert_eq!(collect(response).await.0, pattern(3 << 20));
    s.finish().await;
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        tokio::task::yield_now().await;
    }
}

/// No call waits for the registration of another one's memory, of its own connection or another.
#[tokio::test]
async fn calls_do_not_wait_for_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let other = connect(&fabrics, &s.pools).await;
    let body = pattern(1 << 20);
    let bulk = async |client: &FastClient| {
        let response = client.call(request("/collect", full(body.clone()))).await.unwrap();
        assert!(collect(response).await.0 == body);
    };
    for _ in 0..4 {
        bulk(&other.client).await;
    }
    let leased = || s.pools[0].stats().leased;
    let before = leased();
    s.server_device.hold_registrations(true);
    let first = s.client.call(request("/collect", full(body.clone())));
    let first = tokio::spawn(async move { collect(first.await.unwrap()).await.0 });
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    assert!(leased() > before);
    let registrations = s.pools[0].stats().registrations;
    let begin = std::time::Instant::now();
    for _ in 0..20 {
        let small = s.client.call(request("/collect", full(&b"hello"[..]))).await.unwrap();
        assert_eq!(&collect(small).await.0[..], b"hello");
        bulk(&other.client).await;
    }
    assert!(!first.is_finished());
    assert_eq!(s.pools[0].stats().registrations, registrations);
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    s.server_device.hold_registrations(false);
    assert!(first.await.unwrap() == body);
    // Those that follow find the memory that was granted in advance.
    for _ in 0..4 {
        bulk(&s.client).await;
    }
    drop(other.client);
    assert_eq!(other.server.await.unwrap().code(), ReasonCode::GoAway);
    let pool = s.pools[0].clone();
    s.finish().await;
    until("all is returned", || pool.stats().leased == 0).await;
}

/// A stream that waits for a registration is not short of memory: nothing makes room for it.
#[tokio::test]
async fn a_registration_is_no_shortage_of_memory() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let fabrics = [&s.server_device, &s.client_device].map(|device| Fabric::Sim(device.clone()));
    let other = connect(&fabrics, &s.pools).await;
    let body = pattern(1 << 20);
    let call = |path| other.client.call(request(path, full(body.clone())));
    call("/collect").await.unwrap();
    s.server_device.hold_registrations(true);
    // Nobody reads what these send. Some find memory, the others wait for it.
    let calls: Vec<_> = (0..16).map(|_| tokio::spawn(call("/hang"))).collect();
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    // Several of the periods after which what nobody reads is copied.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let filled = s.pools[0].stats().filled;
    assert!((body.len()..16 * body.len()).contains(&filled), "{filled}");
    s.server_device.hold_registrations(false);
    until("all have landed", || s.pools[0].stats().filled >= 16 * body.len()).await;
    let copied = other.server_counters.snapshot().copied_fast;
    assert_eq!((copied.pressure, copied.joined), (0, 0), "{copied:?}");
    calls.iter().for_each(JoinHandle::abort);
    drop(other.client);
    assert_eq!(other.server.await.unwrap().code(), ReasonCode::GoAway);
    s.finish().await;
}

/// A grant in advance that has to wait for its memory is given when that is registered, and not
/// when something happens next. While the test polls, the clock stands, and no timer expires.
#[tokio::test(start_paused = true)]
async fn standing_grants_follow_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let body = pattern(1 << 20);
    for _ in 0..4 {
        s.client.call(request("/collect", full(body.clone()))).await.unwrap();
    }
    let pool = s.pools[0].clone();
    let stats = || (pool.stats().granted, pool.stats().filled, pool.stats().leased);
    assert!(stats().0 > 0, "some is granted in advance");
    let leased = stats().2;
    s.server_device.hold_registrations(true);
    // Nobody reads these messages, so that others have to be granted in advance.
    let mut calls = Vec::new();
    while stats().2 == leased {
        let (_, filled, _) = stats();
        calls.push(tokio::spawn(s.client.call(request("/hang", full(body.clone())))));
        until("it has landed", || stats().1 > filled).await;
    }
    until("it is being registered", || s.server_device.held_registrations() == 1).await;
    let (granted, sends) = (stats().0, s.net.stats().sends);
    s.server_device.hold_registrations(false);
    until("it is granted", || stats().0 > granted).await;
    assert!(s.net.stats().sends - sends <= 1, "a message was needed");
    calls.iter().for_each(JoinHandle::abort);
    s.finish().await;
}

/// A connection that ends while its memory is being registered leaves nothing behind.
#[tokio::test]
async fn a_connection_may_end_during_a_registration() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    let device = s.server_device.clone();
    device.hold_registrations(true);
    let call = tokio::spawn(s.client.call(request("/collect", full(pattern(1 << 20)))));
    until("it is being registered", || device.held_registrations() == 1).await;
    call.abort();
    let pool = s.pools[0].clone();
    s.finish().await;
    assert!(pool.stats().leased > 0, "it cannot be interrupted");
    device.hold_registrations(false);
    until("it is returned", || pool.stats().leased == 0).await;
}

/// Where a registration on the pool's thread fails, the call fails, and the next one succeeds.
#[tokio::test]
async fn a_registration_that_fails_later_fails_its_call() {
    let s = setup(SimConfig::default(), 64 << 20).await;
    s.server_device.hold_registrations(false);
    s.server_device.fail_registrations(0, u64::MAX);
    let body = pattern(5_000_000);
    for n in 0..3 {
        let call = s.client.call(request("/collect", full(body.clone())));
        match tokio::time::timeout(Duration::from_secs(20), call).await.unwrap() {
            Err(CallError::Status(status)) => {
                assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{n}: {status}");
            }
            other => panic!("{n}: {other:?}"),
        }
    }
    s.server_device.fail_registrations(0, 0);
    let response = s.client.call(request("/collect", full(body.clone()))).await.unwrap();
    assert!(collect(response).await.0 == body);
    s.finish().await;
}
