//! Connects and serves, and reports the path of the payload. No other module makes channels or
//! servers.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use serde::ser::{Serialize, SerializeStruct, Serializer};
use tonic::transport::Uri;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{
    Cause, Channel, Context, Copied, Endpoint, Lending, Path, PathInfo, Policy, Pool, Server,
    ServerStats, TransportStats,
};
use tonic_rdma_channelz::{Channelz, pb};

use crate::cli::{CHUNK, CHUNK_MIN, ConnectTimeout, Path as Way, RANGE_CHUNK_ON_ONE_HOST, Require};
use crate::disk::{self, ALIGN};
use crate::failure::{Failure, causes};
use crate::pb::object_store_client::ObjectStoreClient;
use crate::pb::object_store_server::{ObjectStore, ObjectStoreServer};
use crate::sink::Body;

/// HTTP/2 windows in bytes, for TCP. The default of 64 KiB stalls a bulk stream on every round
/// trip.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// HTTP/2 keep-alive. A silent TCP connection is probed, and closed if no answer arrives.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum wait for the fast path. Bulk transfers wait longer than the transport's default of one
/// second. If no fast path is possible, a transfer does not wait.
const FAST_PATH_TIMEOUT: Duration = Duration::from_secs(5);

/// A connected client. Clones share the connection.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Connected>);

struct Connected {
    channel: Channel,
    store: ObjectStoreClient<Channel>,
}

impl Connection {
    /// Returns the pool to read files into before they are sent, or `None` over TCP, where a pool
    /// has no benefit.
    pub(crate) fn pool(&self) -> Option<Pool> {
        self.0.channel.path().path.is_fast().then(|| self.0.channel.pool())
    }

    /// Whether the server is a process of this host that is reached over shared memory.
    pub(crate) fn is_on_one_host(&self) -> bool {
        self.0.channel.path().path == Path::Shm
    }

    /// Returns how many bytes of a file one message carries: `asked` or the default, but at most
    /// the number that [fits](fitting).
    pub(crate) fn chunk(&self, asked: Option<usize>) -> usize {
        fitting(asked.unwrap_or(CHUNK), self.pool().as_ref())
    }

    /// Like [`chunk`](Connection::chunk), but for a range of a file.
    pub(crate) fn range_chunk(&self, asked: Option<usize>) -> usize {
        let default = if self.is_on_one_host() { RANGE_CHUNK_ON_ONE_HOST } else { CHUNK };
        self.chunk(asked.or(Some(default)))
    }

    /// Whether the server can still change the bytes of a response that arrives over the current
    /// path.
    pub(crate) fn body(&self) -> Body {
        body(self.0.channel.path().path)
    }

    pub(crate) fn store(&self) -> ObjectStoreClient<Channel> {
        self.0.store.clone()
    }
}

/// Whether a peer can still change the bytes of a body that arrived over this path. Over TCP the
/// bytes lie in private memory. With `--lend`, processes of this host are trusted not to change the
/// bytes, because these processes run as this user or as root and could also write to the files.
pub(crate) fn body(path: Path) -> Body {
    let is_trusted = path == Path::Shm && disk::lends();
    if path.is_fast() && !is_trusted { Body::MayChange } else { Body::Settled }
}

/// Checks the environment variables that select the path, before any other work.
pub(crate) fn check_environment() -> Result<(), Failure> {
    tonic_rdma::check_environment().map_err(|error| {
        Failure::usage("wrong environment", error, "correct the variable, or unset it")
    })
}

/// The devices and pools of this process. Payload lands at page boundaries, so that it can be
/// written to files from landing memory. With `--lend`, this process and the same user's other
/// processes on this host lend each other pool memory. Such processes could also open the files.
pub(crate) fn context() -> Context {
    static CONTEXT: OnceLock<Context> = OnceLock::new();
    let lending = if disk::lends() { Lending::SameUser } else { Lending::Off };
    let builder = || {
        let builder = Context::builder().lending(lending).borrowing(disk::lends());
        builder.landing_alignment(ALIGN as usize)
    };
    let made = || builder().map_or_else(|_| Context::global(), |builder| builder.build());
    CONTEXT.get_or_init(made).clone()
}

/// An endpoint for `server`, which was given by `flag`, with the options of `way`.
pub(crate) fn endpoint(server: &str, way: &Way, flag: &str) -> Result<Endpoint, Failure> {
    let url = if server.contains("://") { server.to_owned() } else { format!("http://{server}") };
    let shown = crate::names::Shown(&url).to_string();
    let endpoint =
        Endpoint::from_shared(url).map_err(|error| bad_url(&shown, &causes(&error), flag))?;
    if endpoint.uri().scheme_str() != Some("http") || endpoint.uri().host().is_none() {
        return Err(bad_url(&shown, "it is not an http:// address", flag));
    }
    let endpoint = endpoint
        .connect_timeout(Duration::from_secs(way.timeout.connect_timeout))
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .fast_path_timeout(FAST_PATH_TIMEOUT)
        .context(context());
    let Require { require_rdma, require_fast_path } = way.require;
    Ok(match (require_rdma, require_fast_path) {
        (true, _) => endpoint.require_rdma(true),
        (false, true) => endpoint.require_fast_path(true),
        (false, false) => endpoint,
    })
}

/// Connects to `server` with the options of `way`.
pub(crate) async fn connect(server: &str, way: &Way) -> Result<Connection, Failure> {
    let channel = channel(endpoint(server, way, "--server")?, way.require, "--server").await?;
    let store = ObjectStoreClient::new(channel.clone());
    Ok(Connection(Arc::new(Connected { channel, store })))
}

/// A client for the list of a server's connections.
pub(crate) type ChannelzClient = pb::channelz_client::ChannelzClient<Channel>;

/// Connects to the service that lists a server's connections. Uses TCP, so that no memory is
/// registered for the list. Also returns the server's address, for display.
pub(crate) async fn channelz(
    server: &str,
    timeout: ConnectTimeout,
) -> Result<(ChannelzClient, String), Failure> {
    let way = Way { require: Require::default(), timeout };
    let endpoint = endpoint(server, &way, "URL")?.policy(Policy::Off);
    let shown = crate::names::Shown(&endpoint.uri().to_string()).to_string();
    let channel = channel(endpoint, way.require, "URL").await?;
    Ok((ChannelzClient::new(channel), shown.trim_end_matches('/').to_owned()))
}

/// Connects to a server that was given by `flag`.
async fn channel(endpoint: Endpoint, require: Require, flag: &str) -> Result<Channel, Failure> {
    let shown = crate::names::Shown(&endpoint.uri().to_string()).to_string();
    let shown = shown.trim_end_matches('/');
    let error = match endpoint.connect().await {
        Ok(channel) => return Ok(channel),
        Err(error) => error,
    };
    let why = causes(&error);
    Err(match Cause::of(&error) {
        None => no_server(endpoint.uri(), shown, why, flag).await,
        Some(Cause::Required(_)) if require.require_rdma => {
            let cure = "or leave out --require-rdma to use shared memory or TCP";
            Failure::new(format!("no RDMA to {shown}"), why, cure)
        }
        Some(Cause::Required(_)) => {
            let cure = match require.require_fast_path {
                true => "or leave out --require-fast-path to use TCP",
                false => "or change TONIC_RDMA",
            };
            Failure::new(format!("no fast path to {shown}"), why, cure)
        }
        _ => Failure::new(format!("cannot connect to {shown}"), why, ""),
    })
}

/// Explains a failed TCP connection: the host name is unknown, or no server listens there.
async fn no_server(uri: &Uri, shown: &str, why: String, flag: &str) -> Failure {
    let host = uri.host().unwrap_or_default();
    let name = host.trim_start_matches('[').trim_end_matches(']');
    if name.parse::<IpAddr>().is_err()
        && let Err(error) = tokio::net::lookup_host((name, uri.port_u16().unwrap_or(80))).await
    {
        let what = format!("the host name '{}' cannot be resolved", crate::names::Shown(name));
        let cure = "check its spelling, /etc/hosts and DNS, or give the server's IP address";
        return Failure::new(what, error, cure);
    }
    Failure::new(
        format!("no server answers at {shown}"),
        why,
        format!("start one with `rpc-demo serve --root DIR`, or name another with {flag}"),
    )
}

fn bad_url(shown: &str, why: &str, flag: &str) -> Failure {
    let variable = if flag == "--peer" { "" } else { " or in RPC_DEMO_SERVER" };
    Failure::usage(
        format!("'{shown}' is not a server address"),
        why,
        format!("give one like http://127.0.0.1:50051 with {flag}{variable}"),
    )
}

/// A bound server.
pub(crate) struct Listener {
    incoming: TcpIncoming,
    server: Server,
    /// The bound address.
    pub(crate) addr: SocketAddr,
}

impl Listener {
    /// Binds `addr`; port 0 takes any free port.
    pub(crate) fn bind(addr: SocketAddr) -> Result<Listener, Failure> {
        let cannot = |error: io::Error| {
            let cure =
                "name an address of this host and a free port with --addr (port 0 takes any)";
            Failure::new(format!("cannot listen on {addr}"), error, cure)
        };
        let incoming = TcpIncoming::bind(addr).map_err(cannot)?.with_nodelay(Some(true));
        let addr = incoming.local_addr().map_err(cannot)?;
        Ok(Listener {
            incoming,
            server: Server::builder().context(context()).measuring(true),
            addr,
        })
    }

    /// The counters of bytes that the server copies.
    pub(crate) fn copies(&self) -> Copies {
        Copies(self.server.stats())
    }

    /// Serves until `stop`, then waits for the calls in flight.
    pub(crate) async fn serve(
        self,
        service: impl ObjectStore,
        lists_connections: bool,
        stop: impl Future<Output = ()>,
    ) -> Result<(), tonic_rdma::Error> {
        let channelz = lists_connections.then(|| {
            let channelz = Channelz::new();
            channelz.add_server("rpc-demo", &self.server);
            channelz.service()
        });
        self.server
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(ObjectStoreServer::new(service))
            .add_optional_service(channelz)
            .serve_with_incoming_shutdown(self.incoming, stop)
            .await
    }
}

/// Counts bytes that a server's transport copies.
pub(crate) struct Copies(ServerStats);

impl Copies {
    /// Payload bytes that a CPU has copied at this end so far. The kernel's copies on TCP and
    /// WRITEs to shared memory do not count.
    pub(crate) fn bytes(&self) -> u64 {
        let stats = self.0.get();
        stats.copied_fast.total() + stats.copied_tcp.total()
    }
}

/// The direction of payload, seen from this process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    /// From this process to the server.
    Sent,
    /// From the server to this process.
    Received,
}

/// Counts the payload of a transfer.
pub(crate) struct Meter {
    channel: Channel,
    direction: Direction,
    before: TransportStats,
}

impl Meter {
    pub(crate) fn start(connection: &Connection, direction: Direction) -> Meter {
        let channel = connection.0.channel.clone();
        let before = channel.stats();
        Meter { channel, direction, before }
    }

    /// The payload since the start, by path.
    pub(crate) fn route(&self) -> Route {
        let after = self.channel.stats();
        let bytes = |stats: &TransportStats| match self.direction {
            Direction::Sent => {
                let sent = [stats.bytes_sent_write, stats.bytes_sent_lent, stats.bytes_sent_send];
                (sent, stats.bytes_sent_tcp)
            }
            Direction::Received => {
                let received = [
                    stats.bytes_received_write,
                    stats.bytes_received_lent,
                    stats.bytes_received_send,
                ];
                (received, stats.bytes_received_tcp)
            }
        };
        let ((before, before_tcp), (now, now_tcp)) = (bytes(&self.before), bytes(&after));
        let [write, lent, send] = std::array::from_fn(|way| now[way].saturating_sub(before[way]));
        let tcp = now_tcp.saturating_sub(before_tcp);
        let copied = |stats: &TransportStats| {
            let mut copied = stats.copied_fast;
            copied += stats.copied_tcp;
            copied
        };
        let copied = copied(&after) - copied(&self.before);
        Route { path: self.channel.path(), write, lent, send, tcp, copied }
    }
}

/// How the payload of a transfer was carried. Payload is the content of gRPC messages, which is a
/// few bytes longer than the files.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// The path at the end of the transfer, with the device, or the reason for TCP.
    path: PathInfo,
    /// Payload bytes by RDMA WRITE.
    write: u64,
    /// Payload bytes that the receiver read in the sender's memory, over shared memory.
    lent: u64,
    /// Payload bytes inside SENDs.
    send: u64,
    /// Payload bytes over TCP.
    tcp: u64,
    /// Payload bytes that a CPU has copied at this end, in both directions, without the kernel's
    /// copies on TCP.
    copied: Copied,
}

/// Returns the pool for data that is sent in reply to a request, if the request arrived over a fast
/// path.
pub(crate) fn pool<T>(request: &tonic::Request<T>) -> Option<Pool> {
    tonic_rdma::connect_info(request).path.is_fast().then(|| tonic_rdma::pool(request))
}

/// The message size in bytes, at most `asked`, that a connection with this pool can send without a
/// copy. Several such messages fit into the send memory, and each lands in one piece in a pool of
/// equal size at the peer.
pub(crate) fn fitting(asked: usize, pool: Option<&Pool>) -> usize {
    let Some(sizes) = pool.map(Pool::config) else { return asked };
    let most =
        (sizes.send / SENDING).min(sizes.landing / LANDED).min(sizes.chunk.saturating_sub(BESIDE));
    asked.min((most - most % BESIDE).max(CHUNK_MIN))
}

/// A message takes at most 1/16 of the send memory, and 1/48 of the landing memory. With the
/// default number of jobs, each job can then have one message in flight, two messages that wait for
/// the disk and one message that is being written. Together these messages fill two thirds of the
/// landing memory. With a memlock limit of 8 MiB, messages are still long enough to [bypass the
/// page cache](crate::disk::MIN_LEN).
const SENDING: usize = 16;
const LANDED: usize = 48;
/// The bytes that a message takes in addition to its payload: a page of framing, and up to a page
/// because the payload is aligned.
const BESIDE: usize = 8 << 10;

/// The fields of a route in `--json`. `reason` and `cause` explain why the path is TCP.
impl Serialize for Route {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let reason = self.path.reason.as_ref();
        let mut route = serializer.serialize_struct("route", 11)?;
        route.serialize_field("path", self.path.path.as_str())?;
        route.serialize_field("shown", &self.path.to_string())?;
        route.serialize_field("device", &self.path.device)?;
        route.serialize_field("reason", &reason.map(|reason| reason.code().to_string()))?;
        route.serialize_field("cause", &reason.map(ToString::to_string))?;
        route.serialize_field("write_bytes", &self.write)?;
        route.serialize_field("lent_bytes", &self.lent)?;
        route.serialize_field("send_bytes", &self.send)?;
        route.serialize_field("tcp_bytes", &self.tcp)?;
        route.serialize_field("copied_bytes", &self.copied.total())?;
        let reasons: std::collections::BTreeMap<_, _> = self.copied.by_reason().collect();
        route.serialize_field("copied", &reasons)?;
        route.end()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.write + self.lent + self.send + self.tcp;
        let percent = |bytes| if all == 0 { 0.0 } else { bytes as f64 * 100.0 / all as f64 };
        write!(f, "{} bytes copied", self.copied.total())?;
        let mut before = " (";
        for (reason, bytes) in self.copied.by_reason().filter(|(_, bytes)| *bytes > 0) {
            write!(f, "{before}{reason} {bytes}")?;
            before = ", ";
        }
        f.write_str(if before == ", " { "), " } else { ", " })?;
        let way = match self.path.path {
            Path::Shm => "WRITE to shared memory",
            _ => "RDMA WRITE",
        };
        if self.lent > 0 {
            write!(f, "{} bytes lent ({:.1} %), ", self.lent, percent(self.lent))?;
        }
        write!(f, "{} bytes by {way} ({:.1} %)", self.write, percent(self.write))?;
        if self.path.path.is_fast() && self.tcp > 0 {
            write!(f, ", {} bytes by TCP", self.tcp)?;
        }
        write!(f, ", path {}", self.path)
    }
}
