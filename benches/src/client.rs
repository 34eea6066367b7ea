//! A connection to a contender's server process.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::{BufMut, Bytes};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Request;
use tonic::body::Body;
use tonic::service::Routes;
use tonic_rdma::Registered;
use tower::{Service, service_fn};

use crate::buffers::Buffers;
use crate::contender::{Contender, Source, StubCodec, Transport};
use crate::measure::Calls;
use crate::pb::{self, Blob};
use crate::service::{self, MAX_MESSAGE, WINDOWS};
use crate::session::Start;
use crate::work::{Row, WorkKind};

/// A stub with one of the codecs.
#[derive(Clone, Debug)]
enum Stub {
    Plain(pb::bench_client::BenchClient<Channel>),
    ZeroCopy(pb::zero_copy::bench_client::BenchClient<Channel>),
    Own(pb::own::bench_client::BenchClient<Channel>),
}

/// Number of payloads whose memory stays registered. A row has fewer payloads.
const MAX_REGISTERED: usize = 4;

/// A connection to a contender's server, and a stub over it.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
    stub: Stub,
    source: Source,
    /// Whether replies are read.
    reads: bool,
    /// The buffers for long replies to land in. `None` if they land in the connection's memory.
    buffers: Option<Buffers>,
    /// The memory of the last payloads, latest first.
    registered: Arc<Mutex<Vec<Registered>>>,
}

impl Client {
    /// Connects to the address that the server process printed. `room` is the total number of
    /// connections.
    ///
    /// # Errors
    /// The connection fails, or a tonic-rdma contender uses another path than intended.
    pub async fn connect(
        contender: Contender,
        server_addr: &str,
        room: Option<usize>,
        start: Start,
    ) -> anyhow::Result<Self> {
        let client = Self::with_channel(
            Channel::connect(contender, server_addr, room, start).await?,
            contender.codec(),
        );
        let buffers = contender.lands_in().map(Buffers::new);
        Ok(Self { source: contender.source(), reads: contender.reads(), buffers, ..client })
    }

    /// A stub with tonic's codec over tonic's channel, for any transport.
    pub fn tonic(channel: tonic::transport::Channel) -> Self {
        Self::with_channel(Channel::Tonic(channel), StubCodec::Tonic)
    }

    /// A stub over a channel.
    pub(crate) fn with_channel(channel: Channel, codec: StubCodec) -> Self {
        let inner = channel.clone();
        let stub = match codec {
            StubCodec::ZeroCopy => Stub::ZeroCopy(
                pb::zero_copy::bench_client::BenchClient::new(inner)
                    .max_decoding_message_size(MAX_MESSAGE)
                    .max_encoding_message_size(MAX_MESSAGE),
            ),
            StubCodec::Tonic => Stub::Plain(
                pb::bench_client::BenchClient::new(inner)
                    .max_decoding_message_size(MAX_MESSAGE)
                    .max_encoding_message_size(MAX_MESSAGE),
            ),
            StubCodec::Own => Stub::Own(
                pb::own::bench_client::BenchClient::new(inner)
                    .max_decoding_message_size(MAX_MESSAGE)
                    .max_encoding_message_size(MAX_MESSAGE),
            ),
        };
        let (source, registered) = (Source::Best, Arc::default());
        Self { channel, stub, source, reads: false, buffers: None, registered }
    }
}

impl Calls for Client {
    /// The payload is allocated from the channel's pool if the channel has a pool with enough
    /// memory, the codec supports it, the contender does not require heap memory, and the length is
    /// at most [`Source::max_pinned`]. If the contender registers its payloads, the memory of the
    /// last few payloads stays registered.
    async fn payload(&self, length: usize) -> Bytes {
        if self.source.is_pool()
            && (1..=self.source.max_pinned()).contains(&length)
            && let (Channel::Ours(channel), Stub::ZeroCopy(_)) = (&self.channel, &self.stub)
            && let Ok(mut buf) = channel.pool().try_alloc(length)
        {
            buf.put_bytes(0xa5, length);
            return buf.freeze();
        }
        let payload = self.source.heap(0xa5, length);
        if let (Source::Registered, Channel::Ours(channel)) = (self.source, &self.channel) {
            match channel.context().register(payload.clone()).await {
                Ok(registered) => {
                    let mut kept = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
                    kept.truncate(MAX_REGISTERED - 1);
                    kept.insert(0, registered);
                }
                Err(error) => eprintln!("requests come from the heap: {error}"),
            }
        }
        payload
    }

    async fn unary(&mut self, payload: Bytes, reply: usize) -> anyhow::Result<usize> {
        let mut request = Request::new(Blob { payload, reply: reply as u64, count: 0 });
        let land_in = self.buffers.as_ref().and_then(|buffers| buffers.take(reply));
        if let Some(land_in) = &land_in {
            land_in.attach(&mut request);
        }
        let answer = match &mut self.stub {
            Stub::Plain(stub) => stub.exchange(request).await,
            Stub::ZeroCopy(stub) => stub.exchange(request).await,
            Stub::Own(stub) => stub.exchange(request).await,
        };
        let payload = answer?.into_inner().payload;
        if self.reads {
            service::read(&payload);
        }
        let (got, at) = (payload.len(), payload.as_ptr().addr());
        drop(payload);
        if let (Some(buffers), Some(land_in)) = (&self.buffers, land_in) {
            buffers.put_back(land_in, reply, at).await?;
        }
        Ok(got)
    }

    async fn stream(&mut self, size: usize, count: usize) -> anyhow::Result<()> {
        let request = Blob { payload: Bytes::new(), reply: size as u64, count: count as u64 };
        let replies = match &mut self.stub {
            Stub::Plain(stub) => stub.stream(request).await,
            Stub::ZeroCopy(stub) => stub.stream(request).await,
            Stub::Own(stub) => stub.stream(request).await,
        };
        let mut replies = replies?.into_inner();
        for _ in 0..count {
            let got = replies.message().await?.map_or(0, |blob| blob.payload.len());
            ensure!(got == size, "a message of {got} bytes instead of {size}");
        }
        Ok(())
    }

    async fn open(&mut self) -> anyhow::Result<Box<dyn Send>> {
        let request = Blob { payload: Bytes::new(), reply: 0, count: 0 };
        let replies = match &mut self.stub {
            Stub::Plain(stub) => stub.stream(request).await,
            Stub::ZeroCopy(stub) => stub.stream(request).await,
            Stub::Own(stub) => stub.stream(request).await,
        };
        Ok(Box::new(replies?.into_inner()))
    }

    fn supports(&self, row: &Row) -> bool {
        !matches!(row.kind, WorkKind::Phase { .. })
    }

    fn path(&self) -> String {
        self.channel.path()
    }

    fn pool(&self) -> Option<usize> {
        match &self.channel {
            Channel::Ours(channel) if channel.path().path.is_fast() => {
                Some(channel.pool().config().total)
            }
            _ => None,
        }
    }
}

/// A channel of any kind.
#[derive(Clone, Debug)]
pub(crate) enum Channel {
    /// The service, which is called in place without a channel.
    InPlace(Routes),
    /// tonic's channel.
    Tonic(tonic::transport::Channel),
    /// tonic-rdma's channel.
    Ours(tonic_rdma::Channel),
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The future of any transport's response.
type ResponseFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, BoxError>> + Send>>;

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::InPlace(_) => Poll::Ready(Ok(())),
            Self::Tonic(channel) => channel.poll_ready(cx).map_err(Into::into),
            Self::Ours(channel) => channel.poll_ready(cx).map_err(Into::into),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> ResponseFuture {
        // Every contender pays for one allocation more than with a bare channel.
        match self {
            Self::InPlace(routes) => {
                let response = routes.call(request);
                Box::pin(async { Ok(response.await?) })
            }
            Self::Tonic(channel) => {
                let response = channel.call(request);
                Box::pin(async { Ok(response.await?) })
            }
            Self::Ours(channel) => {
                let response = channel.call(request);
                Box::pin(async { Ok(response.await?) })
            }
        }
    }
}

/// tonic's endpoint with tuned settings.
///
/// # Errors
/// `uri` is invalid.
pub fn tonic_endpoint(uri: impl Into<String>) -> anyhow::Result<tonic::transport::Endpoint> {
    let (stream, connection) = WINDOWS;
    Ok(tonic::transport::Endpoint::from_shared(uri.into())?
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
        .tcp_nodelay(true))
}

impl Channel {
    async fn connect(
        contender: Contender,
        server_addr: &str,
        room: Option<usize>,
        start: Start,
    ) -> anyhow::Result<Self> {
        let (stream, connection) = WINDOWS;
        Ok(match contender.transport() {
            Transport::Tonic { unix: false } => {
                let endpoint = tonic_endpoint(format!("http://{server_addr}"))?;
                Self::Tonic(match start {
                    Start::Connect => endpoint.connect().await?,
                    Start::Lazy => endpoint.connect_lazy(),
                })
            }
            Transport::Tonic { unix: true } => {
                let path = server_addr.to_owned();
                let connector = service_fn(move |_| {
                    let path = path.clone();
                    async move {
                        Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?))
                    }
                });
                let endpoint = tonic_endpoint("http://unix.invalid")?;
                Self::Tonic(match start {
                    Start::Connect => endpoint.connect_with_connector(connector).await?,
                    Start::Lazy => endpoint.connect_with_connector_lazy(connector),
                })
            }
            Transport::Ours(fabric) => {
                let endpoint = tonic_rdma::Endpoint::from_shared(format!("http://{server_addr}"))?
                    .fabrics(fabric)
                    .context(service::context(contender, room))
                    .initial_stream_window_size(stream)
                    .initial_connection_window_size(connection)
                    .tcp_nodelay(true)
                    .fast_path_timeout(Duration::from_secs(10));
                let channel = match start {
                    Start::Connect => endpoint.connect().await.context("cannot connect")?,
                    Start::Lazy => endpoint.connect_lazy(),
                };
                let path = channel.path();
                let wanted = fabric.map_or("tcp", |fabric| fabric.as_str());
                ensure!(
                    start == Start::Lazy || path.path.as_str() == wanted,
                    "{contender} should be on {wanted}, but is on {path}"
                );
                match contender.into_tonic() {
                    true => Self::Tonic(channel.into_tonic()),
                    false => Self::Ours(channel),
                }
            }
            Transport::Raw(_) | Transport::Copy(_) | Transport::Neighbour(_) => {
                anyhow::bail!("{contender} carries no calls of this program's")
            }
        })
    }

    fn path(&self) -> String {
        match self {
            Self::InPlace(_) => "in place".to_owned(),
            Self::Tonic(_) => "tonic".to_owned(),
            Self::Ours(channel) => channel.path().to_string(),
        }
    }
}
