//! A service of blobs with any codec at either end, over any fabric that works within one process.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses what it needs"
)]

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll};

use bytes::{BufMut, Bytes};
use http::uri::PathAndQuery;
use http::{Request, Response};
use prost::Message;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt, iter};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codec::{Codec, Decoder, Encoder};
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::{Status, Streaming};
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{
    Channel, Context, Copied, Endpoint, FabricKind, Policy, Pool, PoolConfig, Server,
    ServerObserver, ServerStats,
};
use tower::Service;

/// A message with each kind of field that can hold bytes.
#[derive(Clone, PartialEq, Message)]
pub struct Blob {
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
    #[prost(uint64, tag = "2")]
    pub number: u64,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub parts: Vec<Bytes>,
    #[prost(message, repeated, tag = "4")]
    pub nested: Vec<Blob>,
    #[prost(oneof = "Kind", tags = "5, 6")]
    pub kind: Option<Kind>,
    #[prost(map = "string, message", tag = "7")]
    pub map: HashMap<String, Blob>,
    #[prost(bytes = "vec", tag = "8")]
    pub vec: Vec<u8>,
    #[prost(string, tag = "9")]
    pub text: String,
    #[prost(bytes = "bytes", tag = "100000")]
    pub last: Bytes,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    #[prost(bytes = "bytes", tag = "5")]
    Raw(Bytes),
    #[prost(message, tag = "6")]
    Inner(Box<Blob>),
}

impl Blob {
    pub fn of(data: Bytes) -> Self {
        Blob { data, ..Blob::default() }
    }
}

/// Reads the `data` of a [`Blob`] as text.
#[derive(Clone, PartialEq, Message)]
pub struct Text {
    #[prost(string, tag = "1")]
    pub text: String,
}

/// The codec of one end, selected at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Ours,
    Plain,
}

#[derive(Clone, Debug)]
pub struct Either<T, U>(pub Which, PhantomData<fn(T) -> U>);

impl<T, U> Either<T, U> {
    pub fn new(which: Which) -> Self {
        Either(which, PhantomData)
    }
}

type BoxEncoder<T> = Box<dyn Encoder<Item = T, Error = Status> + Send>;
type BoxDecoder<T> = Box<dyn Decoder<Item = T, Error = Status> + Send>;

pub struct AnyEncoder<T>(BoxEncoder<T>);
pub struct AnyDecoder<T>(BoxDecoder<T>);

impl<T> Encoder for AnyEncoder<T> {
    type Item = T;
    type Error = Status;
    fn encode(&mut self, item: T, dst: &mut tonic::codec::EncodeBuf<'_>) -> Result<(), Status> {
        self.0.encode(item, dst)
    }
    fn buffer_settings(&self) -> tonic::codec::BufferSettings {
        self.0.buffer_settings()
    }
}

impl<T> Decoder for AnyDecoder<T> {
    type Item = T;
    type Error = Status;
    fn decode(&mut self, src: &mut tonic::codec::DecodeBuf<'_>) -> Result<Option<T>, Status> {
        self.0.decode(src)
    }
    fn buffer_settings(&self) -> tonic::codec::BufferSettings {
        self.0.buffer_settings()
    }
}

impl<T: Message + 'static, U: Message + Default + 'static> Codec for Either<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = AnyEncoder<T>;
    type Decoder = AnyDecoder<U>;

    fn encoder(&mut self) -> AnyEncoder<T> {
        AnyEncoder(match self.0 {
            Which::Ours => Box::new(tonic_rdma::codec::ProstCodec::<T, U>::new().encoder()),
            Which::Plain => Box::new(tonic_prost::ProstCodec::<T, U>::new().encoder()),
        })
    }

    fn decoder(&mut self) -> AnyDecoder<U> {
        AnyDecoder(match self.0 {
            Which::Ours => Box::new(tonic_rdma::codec::ProstCodec::<T, U>::new().decoder()),
            Which::Plain => Box::new(tonic_prost::ProstCodec::<T, U>::new().decoder()),
        })
    }
}

/// The data that the handlers received.
#[derive(Debug, Default)]
pub struct Seen {
    /// Number of `data` fields in the pool of the connection over which they arrived.
    pub in_pool: AtomicUsize,
    /// Number of all `data` fields that are not empty.
    pub all: AtomicUsize,
    /// Blobs that a handler keeps.
    pub held: Mutex<Vec<Blob>>,
}

impl Seen {
    fn look(&self, pool: &Pool, blob: &Blob) {
        if !blob.data.is_empty() {
            self.all.fetch_add(1, Relaxed);
            self.in_pool.fetch_add(usize::from(pool.contains(&blob.data)), Relaxed);
        }
    }

    /// The numbers of fields in landing memory, and of all fields, since the last call.
    pub fn take(&self) -> (usize, usize) {
        (self.in_pool.swap(0, Relaxed), self.all.swap(0, Relaxed))
    }
}

/// | method | kind | answer |
/// |---|---|---|
/// | Echo | unary | the blob |
/// | Up | client streaming | the last blob, with the count of all blobs as its number |
/// | Down | server streaming | the blob, as often as its number says |
/// | Chat | bidirectional | each blob |
/// | Keep | unary | an empty blob; the handler keeps its argument |
/// | Put | unary | an empty blob; the handler drops its argument |
/// | Forward | unary | the echo of another server |
/// | Behind | unary | the blob, after a call within the process to a service with our codec |
/// | Give | unary | as many bytes as the number says, in pool memory |
/// | Text | unary | decodes a [`Text`] |
#[derive(Clone)]
pub struct Blobs {
    pub codec: Which,
    pub seen: Arc<Seen>,
    pub limit: usize,
    /// The client that `Forward` uses.
    pub forward: Option<Client>,
}

impl NamedService for Blobs {
    const NAME: &'static str = "test.Blobs";
}

type Reply<T> = Result<tonic::Response<T>, Status>;
pub type BlobStream = Pin<Box<dyn Stream<Item = Result<Blob, Status>> + Send>>;

impl Service<Request<Body>> for Blobs {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body>) -> Self::Future {
        let (seen, limit, forward, codec) =
            (self.seen.clone(), self.limit, self.forward.clone(), self.codec);
        let other = Blobs { codec: Which::Ours, ..self.clone() };
        let mut grpc = tonic::server::Grpc::new(Either::<Blob, Blob>::new(self.codec))
            .max_decoding_message_size(limit)
            .max_encoding_message_size(limit);
        let look = move |request: &tonic::Request<Blob>| {
            seen.look(&tonic_rdma::pool(request), request.get_ref());
            seen.clone()
        };
        let each = {
            let seen = self.seen.clone();
            move |request: tonic::Request<Streaming<Blob>>| {
                let pool = tonic_rdma::pool(&request);
                let seen = seen.clone();
                request.into_inner().map(move |blob| {
                    let blob = blob?;
                    seen.look(&pool, &blob);
                    Ok::<_, Status>(blob)
                })
            }
        };
        Box::pin(async move {
            Ok(match req.uri().path() {
                "/test.Blobs/Echo" => {
                    let echo = |request: tonic::Request<Blob>| {
                        let look = look.clone();
                        async move {
                            look(&request);
                            Reply::Ok(tonic::Response::new(request.into_inner()))
                        }
                    };
                    grpc.unary(tower::service_fn(echo), req).await
                }
                "/test.Blobs/Behind" => {
                    let empty = Request::post("/test.Blobs/Put").body(Body::empty()).unwrap();
                    let Ok(_) = { other }.call(empty).await;
                    let echo = |request: tonic::Request<Blob>| async {
                        Reply::Ok(tonic::Response::new(request.into_inner()))
                    };
                    grpc.unary(tower::service_fn(echo), req).await
                }
                "/test.Blobs/Keep" => {
                    let keep = |request: tonic::Request<Blob>| {
                        let look = look.clone();
                        async move {
                            let seen = look(&request);
                            seen.held.lock().unwrap().push(request.into_inner());
                            Reply::Ok(tonic::Response::new(Blob::default()))
                        }
                    };
                    grpc.unary(tower::service_fn(keep), req).await
                }
                "/test.Blobs/Put" => {
                    let put = |request: tonic::Request<Blob>| {
                        look(&request);
                        async { Reply::Ok(tonic::Response::new(Blob::default())) }
                    };
                    grpc.unary(tower::service_fn(put), req).await
                }
                "/test.Blobs/Forward" => {
                    let forward = |request: tonic::Request<Blob>| {
                        look(&request);
                        let mut next = forward.clone().unwrap();
                        async move { Ok(tonic::Response::new(next.echo(request.into_inner()).await?)) }
                    };
                    grpc.unary(tower::service_fn(forward), req).await
                }
                "/test.Blobs/Give" => {
                    let give = |request: tonic::Request<Blob>| async move {
                        let pool = tonic_rdma::pool(&request);
                        let len = request.get_ref().number as usize;
                        let mut buf = pool.alloc(len).await.unwrap();
                        buf.put_slice(&pattern(len, 1));
                        Reply::Ok(tonic::Response::new(Blob::of(buf.freeze())))
                    };
                    grpc.unary(tower::service_fn(give), req).await
                }
                "/test.Blobs/Text" => {
                    let mut grpc = tonic::server::Grpc::new(Either::<Blob, Text>::new(codec));
                    let text = |_: tonic::Request<Text>| async {
                        Reply::Ok(tonic::Response::new(Blob::default()))
                    };
                    grpc.unary(tower::service_fn(text), req).await
                }
                "/test.Blobs/Up" => {
                    let up = |request: tonic::Request<Streaming<Blob>>| {
                        let each = each.clone();
                        async move {
                            let mut blobs = each(request);
                            let (mut last, mut count) = (Blob::default(), 0);
                            while let Some(blob) = blobs.next().await {
                                last = blob?;
                                count += 1;
                            }
                            last.number = count;
                            Reply::Ok(tonic::Response::new(last))
                        }
                    };
                    grpc.client_streaming(tower::service_fn(up), req).await
                }
                "/test.Blobs/Down" => {
                    let down = |request: tonic::Request<Blob>| {
                        let look = look.clone();
                        async move {
                            look(&request);
                            let blob = request.into_inner();
                            let count = blob.number as usize;
                            let blobs: BlobStream =
                                Box::pin(iter(std::iter::repeat_n(Ok(blob), count)));
                            Reply::Ok(tonic::Response::new(blobs))
                        }
                    };
                    grpc.server_streaming(tower::service_fn(down), req).await
                }
                "/test.Blobs/Chat" => {
                    let chat = |request: tonic::Request<Streaming<Blob>>| {
                        let each = each.clone();
                        async move {
                            let blobs: BlobStream = Box::pin(each(request));
                            Reply::Ok(tonic::Response::new(blobs))
                        }
                    };
                    grpc.streaming(tower::service_fn(chat), req).await
                }
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// A client of [`Blobs`].
#[derive(Clone)]
pub struct Client {
    grpc: Grpc<Channel>,
    codec: Which,
}

impl Client {
    pub fn new(channel: Channel, codec: Which, limit: usize) -> Self {
        let grpc =
            Grpc::new(channel).max_decoding_message_size(limit).max_encoding_message_size(limit);
        Client { grpc, codec }
    }

    fn codec(&self) -> Either<Blob, Blob> {
        Either::new(self.codec)
    }

    async fn ready(&mut self) -> Result<(), Status> {
        self.grpc.ready().await.map_err(|e| Status::from_error(e.into()))
    }

    pub async fn unary(&mut self, path: &'static str, blob: Blob) -> Result<Blob, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static(path);
        Ok(self.grpc.unary(tonic::Request::new(blob), path, self.codec()).await?.into_inner())
    }

    pub async fn echo(&mut self, blob: Blob) -> Result<Blob, Status> {
        self.unary("/test.Blobs/Echo", blob).await
    }

    pub async fn up(
        &mut self,
        blobs: impl Stream<Item = Blob> + Send + 'static,
    ) -> Result<Blob, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static("/test.Blobs/Up");
        Ok(self
            .grpc
            .client_streaming(tonic::Request::new(blobs), path, self.codec())
            .await?
            .into_inner())
    }

    pub async fn down(&mut self, blob: Blob) -> Result<Streaming<Blob>, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static("/test.Blobs/Down");
        Ok(self
            .grpc
            .server_streaming(tonic::Request::new(blob), path, self.codec())
            .await?
            .into_inner())
    }

    pub async fn chat(
        &mut self,
        blobs: impl Stream<Item = Blob> + Send + 'static,
    ) -> Result<Streaming<Blob>, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static("/test.Blobs/Chat");
        Ok(self.grpc.streaming(tonic::Request::new(blobs), path, self.codec()).await?.into_inner())
    }
}

/// The fabric that carries the calls. Most tests of the fast path run over each fabric in
/// [`FAST`](Fabric::FAST).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    Sim,
    /// Memory that the two ends share, although they are in one process.
    Shm,
    Tcp,
}

impl Fabric {
    /// The fabrics with a fast path.
    pub const FAST: &[Fabric] = &[Fabric::Sim, Fabric::Shm];

    /// Contexts of hosts on one network, with pools of `total` bytes.
    pub fn hosts<const N: usize>(self, total: usize) -> [Option<Context>; N] {
        let pool = || Context::builder().pool(PoolConfig::default().total(total));
        let net = SimNet::new(SimConfig::default());
        std::array::from_fn(|n| match self {
            Fabric::Sim => {
                let device = net.device(format!("sim{n}"), [10, 0, 0, n as u8 + 1].into());
                Some(pool().sim(device).build())
            }
            Fabric::Shm => Some(pool().build()),
            Fabric::Tcp => None,
        })
    }
}

/// A server of [`Blobs`], and a channel to it.
pub struct World {
    pub addr: SocketAddr,
    pub server: ServerStats,
    pub observer: ServerObserver,
    pub seen: Arc<Seen>,
    pub channel: Channel,
    pub endpoint: Endpoint,
    fabric: Fabric,
    task: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub const LIMIT: usize = usize::MAX;

impl World {
    pub async fn new(fabric: Fabric, codec: Which) -> World {
        World::with(fabric, codec, 32 << 20, LIMIT).await
    }

    pub async fn with(fabric: Fabric, codec: Which, pool: usize, limit: usize) -> World {
        let blobs = Blobs { codec, seen: Arc::default(), limit, forward: None };
        World::between(fabric, fabric.hosts(pool), blobs).await
    }

    /// Two ends in one process that share memory if they may, and otherwise use TCP.
    pub async fn optional(codec: Which) -> World {
        let blobs = Blobs { codec, seen: Arc::default(), limit: LIMIT, forward: None };
        let set = (|s: Server| s.policy(Policy::Auto), |e: Endpoint| e.policy(Policy::Auto));
        World::set(Fabric::Shm, Fabric::Shm.hosts(32 << 20), blobs, set.0, set.1).await
    }

    /// A server and a client on two hosts.
    pub async fn between(fabric: Fabric, contexts: [Option<Context>; 2], blobs: Blobs) -> World {
        World::set(fabric, contexts, blobs, |server| server, |endpoint| endpoint).await
    }

    /// A world with custom settings of the server and of the endpoint.
    pub async fn set(
        fabric: Fabric,
        [server, client]: [Option<Context>; 2],
        blobs: Blobs,
        serve: impl FnOnce(Server) -> Server,
        connect: impl FnOnce(Endpoint) -> Endpoint,
    ) -> World {
        let policy = if fabric == Fabric::Tcp { Policy::Off } else { Policy::Require };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut builder = serve(Server::builder().policy(policy)).fabrics([FabricKind::Shm]);
        if let Some(context) = server {
            builder = builder.context(context);
        }
        let (stats, observer) = (builder.stats(), builder.observer());
        let seen = blobs.seen.clone();
        let router = builder.add_service(blobs);
        let task = tokio::spawn(async move {
            router.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap();
        });
        let mut endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap().policy(policy);
        endpoint = connect(endpoint.fabrics([FabricKind::Shm]));
        if let Some(context) = client {
            endpoint =
                endpoint.context(context).fast_path_timeout(std::time::Duration::from_secs(20));
        }
        let channel = endpoint.connect().await.unwrap();
        World { addr, server: stats, observer, seen, channel, endpoint, fabric, task }
    }

    /// Connects another channel.
    pub async fn connect(&self) -> Channel {
        self.endpoint.connect().await.unwrap()
    }

    pub fn client(&self, codec: Which) -> Client {
        Client::new(self.channel.clone(), codec, LIMIT)
    }

    /// The bytes that both ends have copied.
    pub fn copied(&self) -> Copied {
        let (client, server) = (self.channel.stats(), self.server.get());
        let mut all = Copied::default();
        match self.fabric {
            Fabric::Tcp => [client.copied_tcp, server.copied_tcp],
            _ => [client.copied_fast, server.copied_fast],
        }
        .into_iter()
        .for_each(|copied| all += copied);
        all
    }
}

/// Fills a buffer of the channel's pool with a pattern, and freezes the buffer.
pub async fn pooled(channel: &Channel, len: usize, seed: u8) -> Bytes {
    let mut buf = channel.pool().alloc(len).await.unwrap();
    buf.put_slice(&pattern(len, seed));
    buf.freeze()
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed))
        .collect()
}

/// Makes small and bulk calls in each direction.
pub async fn calls(channel: Channel) {
    let mut client = Client::new(channel, Which::Ours, LIMIT);
    for len in [10, 100 << 10, 3 << 20, 16] {
        let data = Bytes::from(pattern(len, 3));
        let answer = client.echo(Blob::of(data.clone())).await.unwrap();
        assert!(answer.data == data, "{len} bytes");
    }
}
