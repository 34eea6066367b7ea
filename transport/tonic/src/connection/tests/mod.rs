//! Calls over the simulated fabric, without Endpoint and Server.
//!
//! | file | what |
//! |---|---|
//! | `calls` | bodies, streams, cancellation, fairness |
//! | `ends` | connections that drain, are lost, or whose peer is silent |
//! | `at_rest` | how much memory a connection at rest pins, and how a busy connection gets more |
//! | `landing` | landing memory that is scarce, or is being registered |
//! | `turns` | loops that a peer keeps busy |

mod at_rest;
mod calls;
mod ends;
mod landing;
mod turns;

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
use tonic_rdma_proto::{Accept, Hello, PeerSettings};
use tower::Service;

use crate::connection::{Accepted, CallError, ConnectionConfig, FastClient, serve_connection};
use crate::path::reason::{Reason, ReasonCode};
use crate::telemetry::stats::Counters;

/// Handles calls as a test's server.
#[derive(Clone)]
struct Echo {
    /// Gets a message when a handler is dropped before its end.
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
                // Answers with the request's body as it arrives.
                "/echo" => Response::new(Body::new(request.into_body())),
                "/collect" => {
                    let all = request.into_body().collect().await.unwrap().to_bytes();
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", "0".parse().unwrap());
                    let frames = [Ok::<_, Status>(Frame::data(all)), Ok(Frame::trailers(trailers))];
                    Response::new(Body::new(StreamBody::new(tokio_stream::iter(frames))))
                }
                // The answer says whether the end came with the last bytes.
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

/// Connects the second fabric to the first.
async fn connect(fabrics: &[Fabric; 2], pools: &[Pool; 2]) -> Pair {
    connect_to(fabrics, pools, |_| {}).await
}

/// Like [`connect`], but `configure` changes the server's configuration.
async fn connect_to(
    fabrics: &[Fabric; 2],
    pools: &[Pool; 2],
    configure: fn(&mut ConnectionConfig),
) -> Pair {
    connect_as(fabrics, pools, configure, |_| {}).await
}

/// Like [`connect_to`], but `believe` changes the settings that the client got from the server.
async fn connect_as(
    fabrics: &[Fabric; 2],
    pools: &[Pool; 2],
    configure: fn(&mut ConnectionConfig),
    believe: fn(&mut PeerSettings),
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
        let (peer, methods) = (hello.settings, Arc::default());
        let mut accepted = Accepted::new(link, server_pool, peer, options, counted, methods);
        accepted.drain = Box::pin(drain);
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
