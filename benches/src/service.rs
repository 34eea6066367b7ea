//! The benchmark service, and the server process of a contender.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use bytes::{BufMut, Bytes};
use tokio::net::UnixListener;
use tokio::sync::OnceCell;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use tonic_rdma::{Context, FabricKind, LandIn, LandableBuf, Lending, PoolConfig, Registered};

use crate::buffers::Buffers;
use crate::contender::{Contender, Source, StubCodec, Transport};
use crate::pb::{self, Blob};
use crate::raw;
use crate::server_figures::{Meter, Served};
use crate::work::SMALL;

/// Maximum length in bytes of a reply that a row requests.
pub const MAX_REPLY: usize = 64 << 20;

/// Maximum length of a message in bytes.
pub const MAX_MESSAGE: usize = 512 << 20;

/// The path of the method with one request and one reply.
const EXCHANGE: &str = "/tonic_rdma.bench.v1.Bench/Exchange";

/// HTTP/2 windows in bytes, of a stream and of a connection. With these windows, 8 calls of 1 MiB
/// never wait for a window, so TCP performs at its best.
pub const WINDOWS: (u32, u32) = (8 << 20, 16 << 20);

/// Replies from preallocated memory, so that the handler costs little. The memory is pinned if the
/// connection has pinned memory, as in a storage server.
#[derive(Clone, Debug)]
struct Replies {
    source: Source,
    /// Whether requests are read.
    reads: bool,
    heap: Bytes,
    pinned: Arc<OnceLock<Bytes>>,
    /// The buffers for long requests to land in. `None` if they land in the connection's memory.
    buffers: Option<Buffers>,
    context: Context,
    /// Keeps `heap` registered.
    registered: Arc<OnceCell<Option<Registered>>>,
}

impl Replies {
    fn new(contender: Contender, largest: usize, context: Context) -> Self {
        let (source, reads) = (contender.source(), contender.reads());
        let (heap, pinned) = (source.heap(0x5a, largest), Arc::default());
        let buffers = contender.lands_in().map(Buffers::new);
        Self { source, reads, heap, pinned, buffers, context, registered: Arc::default() }
    }

    fn reply(&self, request: &Request<Blob>) -> Result<Blob, Status> {
        if self.reads {
            read(&request.get_ref().payload);
        }
        let length = usize::try_from(request.get_ref().reply).unwrap_or(usize::MAX);
        if length > self.heap.len() {
            return Err(Status::out_of_range(format!(
                "a reply has at most {} bytes",
                self.heap.len()
            )));
        }
        let pinned = self.source.is_pool() && tonic_rdma::connect_info(request).path.is_fast();
        let payload = match pinned && (SMALL + 1..=self.max_pinned()).contains(&length) {
            true => self.pinned(request).slice(..length),
            false => self.heap.slice(..length),
        };
        Ok(Blob { payload, reply: 0, count: 0 })
    }

    /// The reply to a request, and the work that remains before the reply can be sent: to register
    /// its memory, and to put back the buffer in which the request landed. A box holds the work,
    /// because the size of handlers' futures affects the counts.
    fn exchange(&self, mut request: Request<Blob>) -> Result<(Blob, Option<Rest<'_>>), Status> {
        let reply = self.reply(&request)?;
        let land_in = request.extensions_mut().remove::<LandIn<LandableBuf>>();
        let (Some(buffers), Some(land_in)) = (&self.buffers, land_in) else {
            return Ok((reply, self.register()));
        };
        let payload = &request.get_ref().payload;
        let (len, at) = (payload.len(), payload.as_ptr().addr());
        let registers = self.register();
        let rest = async move {
            if let Some(registers) = registers {
                registers.await?;
            }
            let back = buffers.put_back(land_in, len, at).await;
            back.map_err(|error| Status::internal(format!("{error:#}")))
        };
        Ok((reply, Some(Box::pin(rest))))
    }

    fn max_pinned(&self) -> usize {
        self.source.max_pinned().min(self.heap.len())
    }

    /// Registers the memory of replies before the first reply, when the devices are in use. `None`
    /// if nothing is to be registered.
    fn register(&self) -> Option<Rest<'_>> {
        if self.source != Source::Registered || self.registered.initialized() {
            return None;
        }
        let register = || async {
            let registered = self.context.register(self.heap.clone()).await;
            registered.inspect_err(|error| eprintln!("replies come from the heap: {error}")).ok()
        };
        Some(Box::pin(async move {
            self.registered.get_or_init(register).await;
            Ok(())
        }))
    }

    fn pinned(&self, request: &Request<Blob>) -> Bytes {
        let max = self.max_pinned();
        let make = || match tonic_rdma::pool(request).try_alloc(max) {
            Ok(mut buf) => {
                buf.put_bytes(0x5a, max);
                buf.freeze()
            }
            Err(error) => {
                eprintln!("replies come from the heap: {error}");
                self.heap.slice(..max)
            }
        };
        self.pinned.get_or_init(make).clone()
    }

    fn replies(&self, request: Request<Blob>) -> Result<BlobStream, Status> {
        let reply = self.reply(&request)?;
        if request.get_ref().count == 0 {
            return Ok(Box::pin(tokio_stream::pending()));
        }
        let count = usize::try_from(request.get_ref().count).unwrap_or(usize::MAX);
        let replies = std::iter::repeat_n(reply, count).map(Ok);
        Ok(Box::pin(tokio_stream::iter(replies)))
    }
}

type Rest<'a> = Pin<Box<dyn Future<Output = Result<(), Status>> + Send + 'a>>;
type BlobStream = Pin<Box<dyn Stream<Item = Result<Blob, Status>> + Send>>;

/// Implements the service for the stubs in a module.
macro_rules! serve {
    ($($stubs:path),*) => { $(
        const _: () = {
            use $stubs as stubs;

            #[tonic::async_trait]
            impl stubs::Bench for Replies {
                async fn exchange(&self, request: Request<Blob>) -> Result<Response<Blob>, Status> {
                    let (reply, rest) = Replies::exchange(self, request)?;
                    if let Some(rest) = rest {
                        rest.await?;
                    }
                    Ok(Response::new(reply))
                }

                type StreamStream = BlobStream;

                async fn stream(
                    &self,
                    request: Request<Blob>,
                ) -> Result<Response<BlobStream>, Status> {
                    let replies = self.replies(request)?;
                    if let Some(registers) = self.register() {
                        registers.await?;
                    }
                    Ok(Response::new(replies))
                }
            }

            impl Stubs for stubs::BenchServer<Replies> {
                fn routes(replies: Replies) -> Routes {
                    Routes::new(
                        Self::new(replies)
                            .max_decoding_message_size(MAX_MESSAGE)
                            .max_encoding_message_size(MAX_MESSAGE),
                    )
                }
            }
        };
    )* };
}

/// A generated server, for one of the codecs.
trait Stubs {
    fn routes(replies: Replies) -> Routes;
}

serve!(pb::bench_server, pb::zero_copy::bench_server, pb::own::bench_server);

/// Reads every byte once.
pub(crate) fn read(bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0, |sum: u64, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
    std::hint::black_box((sum, rest));
}

/// The service of a contender, with replies of up to `largest_reply` bytes.
pub fn routes(contender: Contender, largest_reply: usize) -> Routes {
    routes_of(contender, Replies::new(contender, largest_reply, Context::global()))
}

fn routes_of(contender: Contender, replies: Replies) -> Routes {
    match contender.codec() {
        StubCodec::Tonic => pb::bench_server::BenchServer::routes(replies),
        StubCodec::ZeroCopy => pb::zero_copy::bench_server::BenchServer::routes(replies),
        StubCodec::Own => pb::own::bench_server::BenchServer::routes(replies),
    }
}

/// tonic's server with tuned settings.
pub fn tonic_server() -> tonic::transport::Server {
    let (stream, connection) = WINDOWS;
    tonic::transport::Server::builder()
        .initial_stream_window_size(stream)
        .initial_connection_window_size(connection)
}

/// Bytes of a pool for messages of any length. The pool is shared memory, and none of it is pinned.
const LONG_POOL: usize = 2 << 30;

/// Number of connections to provide memory for in addition to the measured connections, because
/// closed connections are released with a delay.
const SPARE: usize = 8;

/// Maximum number of streams of a connection if `room` is given.
const MAX_STREAMS: u32 = 16 << 10;

/// The context of a contender. Some contenders have a context with a pool for long messages, or a
/// context that maps the peer's buffers. Others have the global context or, with `room`, a context
/// whose pools have control memory for that number of connections.
pub(crate) fn context(contender: Contender, room: Option<usize>) -> Context {
    static SHARED: OnceLock<Context> = OnceLock::new();
    if contender.source() == Source::LongPool {
        let lending = if contender.lends() { Lending::SameUser } else { Lending::Off };
        let pool = PoolConfig::default().total(LONG_POOL).send(LONG_POOL / 2);
        let pool = pool.landing(LONG_POOL / 4);
        let long = || Context::builder().pool(pool).lending(lending);
        let long = || long().borrowing(contender.lends()).build();
        return SHARED.get_or_init(long).clone();
    }
    if contender == Contender::ShmKept {
        // The other end maps the buffer that stays registered.
        let maps = || Context::builder().map_peer_buffers(true).build();
        return SHARED.get_or_init(maps).clone();
    }
    let Some(connections) = room else { return Context::global() };
    let is_shm = contender.transport() == Transport::Ours(Some(FabricKind::Shm));
    let total: usize = if is_shm { 512 << 20 } else { 64 << 20 };
    let (send, landing) = (total / 4, total / 2);
    let control = (total / 4).max((connections + SPARE) * (408 << 10));
    let pool = PoolConfig::default().total(send + landing + control).send(send).landing(landing);
    SHARED.get_or_init(|| Context::builder().pool(pool).build()).clone()
}

/// The address of a server.
#[derive(Clone, Debug)]
pub enum ListenAddr {
    /// An IP address; port 0 picks a free port.
    Ip(SocketAddr),
    /// A unix socket at this path.
    Unix(PathBuf),
}

/// Serves until the process ends, with memory for `room` connections if given. Calls `ready` once
/// clients can connect.
///
/// # Errors
/// The address cannot be bound, or serving fails.
pub async fn serve(
    contender: Contender,
    listen: ListenAddr,
    largest_reply: usize,
    room: Option<usize>,
    ready: impl FnOnce(Served),
) -> anyhow::Result<()> {
    let context = context(contender, room);
    let replies = Replies::new(contender, largest_reply, context.clone());
    let buffers = replies.buffers.clone();
    let routes = routes_of(contender, replies);
    let (stream, connection) = WINDOWS;
    let streams = room.map(|_| MAX_STREAMS);
    let tonic_server = || tonic_server().max_concurrent_streams(streams);
    let unmetered = |at: String| Served { at, meter: None };
    match (contender.transport(), listen) {
        (Transport::Tonic { .. }, ListenAddr::Unix(path)) => {
            let listener = UnixListener::bind(&path).context("cannot bind the unix socket")?;
            ready(unmetered(path.display().to_string()));
            tonic_server()
                .add_routes(routes)
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await?;
        }
        (Transport::Tonic { .. }, ListenAddr::Ip(addr)) => {
            let incoming = TcpIncoming::bind(addr)?.with_nodelay(Some(true));
            ready(unmetered(incoming.local_addr()?.to_string()));
            tonic_server().add_routes(routes).serve_with_incoming(incoming).await?;
        }
        (Transport::Ours(fabric), ListenAddr::Ip(addr)) => {
            let incoming = TcpIncoming::bind(addr)?.with_nodelay(Some(true));
            let at = incoming.local_addr()?.to_string();
            let mut server = tonic_rdma::Server::builder().fabrics(fabric).context(context.clone());
            if let Some(buffers) = buffers {
                server = server.land_in(EXCHANGE, move |request| {
                    buffers.take(usize::try_from(request.field?).ok()?)
                });
            }
            if let Some(connections) = room {
                server = server.max_connections(connections + SPARE);
            }
            ready(Served { at, meter: Some(Meter::new(context, server.stats())) });
            server
                .max_concurrent_streams(streams)
                .initial_stream_window_size(stream)
                .initial_connection_window_size(connection)
                .add_routes(routes)
                .serve_with_incoming(incoming)
                .await?;
        }
        (Transport::Raw(kind), ListenAddr::Ip(addr)) => {
            raw::serve(kind, addr, largest_reply, |at| ready(unmetered(at))).await?
        }
        (Transport::Copy(_), _) => {
            ready(unmetered("nobody".to_owned()));
            std::future::pending().await
        }
        (Transport::Neighbour(_), _) => {
            anyhow::bail!("{contender} is served by the program in benches/neighbours")
        }
        (Transport::Ours(_) | Transport::Raw(_), ListenAddr::Unix(_)) => {
            anyhow::bail!("only tonic's own transport is bound to a unix socket here")
        }
    }
    Ok(())
}
