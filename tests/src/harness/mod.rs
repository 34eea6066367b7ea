//! A server and its clients over one fabric.
//!
//! - [`TestEnv`]: the environment of a case
//! - [`server`]: a server, in this process or in a separate process
//! - [`remote`], [`remote_child`]: the two ends of the protocol with a server's process
//! - [`serve!`](crate::serve), [`connect!`](crate::connect): compile the caller's code twice,
//!   against `tonic::transport` and against `tonic_rdma`. This also tests that the builders'
//!   methods have the same names.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::sim::{SimConfig, SimNet};
use tonic_rdma::{
    Context, Copied, Lending, Path, Policy, Pool, PoolConfig, PoolStats, ReasonCode, ServerStats,
};

use crate::channel::AnyChannel;
use crate::fabric::{Fabric, bind_ip, fixed_port};
use crate::harness::remote::Remote;
pub use crate::harness::server::{Listening, Server};
use crate::paths::PathLog;
use crate::pb::conformance_client::ConformanceClient;
use crate::probe::{Probe, RemoteProbe as _};
use crate::service::Scripted;

/// Starts a server: `serve!(env, |server| server.add_service(...))`. The code after `|server|` is
/// compiled twice: for the server builder of `tonic::transport`, and for that of `tonic_rdma`.
#[macro_export]
macro_rules! serve {
    ($env:expr, |$server:ident| $router:expr) => {{
        let listening = $env.listen().await;
        $crate::serve!($env, listening, |$server| $router)
    }};
    ($env:expr, $listening:expr, |$server:ident| $router:expr) => {{
        let env: &$crate::harness::TestEnv = $env;
        let listening: $crate::harness::Listening = $listening;
        let (stop, stopped) = $crate::harness::server::stop();
        match env.fabric().stock_server() {
            true => {
                #[allow(unused_mut)]
                let mut $server = tonic::transport::Server::builder().layer(env.log().layer());
                let router = $router;
                $crate::harness::Server::spawn(
                    listening.addr,
                    stop,
                    router.serve_with_incoming_shutdown(listening.incoming, stopped),
                )
            }
            false => {
                #[allow(unused_mut)]
                let mut $server = env.rdma_server().layer(env.log().layer());
                let router = $router;
                $crate::harness::Server::spawn(
                    listening.addr,
                    stop,
                    router.serve_with_incoming_shutdown(listening.incoming, stopped),
                )
            }
        }
    }};
}

/// Connects: `connect!(env, &server, |endpoint| endpoint.timeout(...))` returns an
/// [`AnyChannel`](crate::channel::AnyChannel). The code after `|endpoint|` is compiled twice: for
/// the endpoint of `tonic::transport`, and for that of `tonic_rdma`.
#[macro_export]
macro_rules! connect {
    ($env:expr, $server:expr) => {
        $crate::connect!($env, $server, |endpoint| endpoint)
    };
    ($env:expr, $server:expr, |$endpoint:ident| $configured:expr) => {{
        let env: &$crate::harness::TestEnv = $env;
        let uri = $server.uri();
        match env.fabric().stock_client() {
            true => {
                let $endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
                let $endpoint = $configured;
                $crate::channel::AnyChannel::Stock($endpoint.connect().await.unwrap())
            }
            false => {
                let $endpoint = env.rdma_endpoint(uri);
                let $endpoint = $configured;
                let channel = $endpoint.connect().await.unwrap();
                env.check_channel(&channel);
                env.fabric().wrap(channel)
            }
        }
    }};
}

pub mod remote;
pub mod remote_child;
pub mod server;

/// A client of the scripted service over any fabric.
pub type Client = ConformanceClient<AnyChannel>;

/// Time limit for the return of closed connections' memory, which usually takes milliseconds.
const POOL_LIMIT: Duration = Duration::from_secs(30);

/// How long a client waits for a fast path that it requires. The time is long enough that a slow
/// path does not count as missing.
const FAST_PATH_TIMEOUT: Duration = Duration::from_secs(30);
/// The same limit for cases that end the fast path for good. It is some hundred times the time of a
/// connection attempt in the guest.
const SHORT_FAST_PATH_TIMEOUT: Duration = Duration::from_secs(8);

/// The environment of one case over one fabric.
#[derive(Debug)]
pub struct TestEnv {
    fabric: Fabric,
    probe: Probe,
    log: PathLog,
    may_fall_back: AtomicBool,
    loses_server: AtomicBool,
    contexts: Option<Contexts>,
    pools: Mutex<Vec<Pool>>,
    remotes: Mutex<Vec<Remote>>,
    server_stats: Mutex<Option<ServerStats>>,
}

/// The devices and pools of the two ends.
#[derive(Debug)]
struct Contexts {
    server: Context,
    client: Context,
    /// The context of a client with memory for few connections.
    few: Context,
}

impl Contexts {
    fn of(fabric: Fabric) -> Option<Self> {
        let pool = PoolConfig::default().total(8 << 20);
        let few = pool.clone().send(2 << 20).landing((6 << 20) - (256 << 10));
        let build_few = || Context::builder().pool(few.clone()).build();
        let config = match fabric {
            Fabric::Sim | Fabric::SimPlain | Fabric::SimSmall => SimConfig::default(),
            // Only the tonic-rdma end has a fast path. The stock end has none.
            Fabric::StockClient | Fabric::StockServer => SimConfig::default(),
            Fabric::SimDelayed => SimConfig { delay: 4, ..SimConfig::default() },
            // Every program has this default: one pool for each process.
            Fabric::Verbs => {
                let both = Context::global();
                return Some(Self { server: both.clone(), client: both, few: build_few() });
            }
            Fabric::ShmTwo => {
                // Both ends lend memory, including memory that they have borrowed. Both also
                // borrow, and map each other's buffers.
                let lending = Lending::SameUserOnward;
                let lending = || Context::builder().lending(lending).borrowing(true);
                let context = || lending().map_peer_buffers(true).build();
                return Some(Self { server: context(), client: context(), few: build_few() });
            }
            Fabric::Shm | Fabric::ShmTonic => {
                let context = || Context::builder().map_peer_buffers(true).build();
                return Some(Self { server: context(), client: context(), few: build_few() });
            }
            Fabric::ShmSmall => {
                let both = Context::builder().pool(pool).map_peer_buffers(true).build();
                return Some(Self { server: both.clone(), client: both, few: build_few() });
            }
            Fabric::Stock | Fabric::Tcp => return None,
        };
        let net = SimNet::new(config);
        let device = |name, last| Context::builder().sim(net.device(name, [10, 0, 0, last].into()));
        let few = device("sim2", 3).pool(few).build();
        if fabric == Fabric::SimSmall {
            let both = device("sim0", 1).pool(pool).build();
            return Some(Self { server: both.clone(), client: both, few });
        }
        Some(Self { server: device("sim0", 1).build(), client: device("sim1", 2).build(), few })
    }
}

impl TestEnv {
    /// An environment for a case over `fabric`.
    pub fn new(fabric: Fabric) -> Self {
        Self::with(fabric, Probe::default(), PathLog::default())
    }

    /// An environment in a server's process, which passes events and calls to `tell` as lines.
    pub(crate) fn with_sink(fabric: Fabric, tell: fn(String)) -> Self {
        Self::with(fabric, Probe::with_sink(tell), PathLog::with_sink(tell))
    }

    fn with(fabric: Fabric, probe: Probe, log: PathLog) -> Self {
        Self {
            fabric,
            probe,
            log,
            may_fall_back: AtomicBool::new(false),
            loses_server: AtomicBool::new(false),
            contexts: Contexts::of(fabric),
            pools: Mutex::default(),
            remotes: Mutex::default(),
            server_stats: Mutex::default(),
        }
    }

    /// The fabric that carries the calls.
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// The probe to which the handlers report.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// The log of the paths that calls took.
    pub fn log(&self) -> &PathLog {
        &self.log
    }

    /// Binds a socket, which is not served yet.
    pub async fn listen(&self) -> Listening {
        self.listen_at(any_port()).await
    }

    /// Like [`listen`](Self::listen), but at this address.
    pub async fn listen_at(&self, addr: SocketAddr) -> Listening {
        self.listen_now(addr)
    }

    /// Like [`listen_at`](Self::listen_at), but on the current runtime.
    pub fn listen_now(&self, addr: SocketAddr) -> Listening {
        let listener = std::net::TcpListener::bind(addr).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        Listening {
            addr: listener.local_addr().unwrap(),
            incoming: TcpIncoming::from(listener).with_nodelay(Some(true)),
        }
    }

    /// A server of the scripted service alone, in a separate process if the fabric requires it.
    pub async fn server(&self) -> Server {
        match self.fabric {
            Fabric::ShmTwo => {
                let (remote, addr) = Remote::start(self.fabric, &self.probe, &self.log);
                self.probe.attach(Arc::new(remote.clone()));
                self.remotes.lock().unwrap().push(remote.clone());
                Server::remote(addr, remote)
            }
            _ => self.server_here().await,
        }
    }

    /// Like [`server`](Self::server), but in this process.
    pub(crate) async fn server_here(&self) -> Server {
        serve!(self, |server| server.add_service(Scripted::server(&self.probe)))
    }

    /// A client of `server` with no limits on message sizes.
    pub async fn client(&self, server: &Server) -> Client {
        client_of(connect!(self, server))
    }

    /// A server and a client of it, with no limits on message sizes.
    pub async fn pair(&self) -> (Server, Client) {
        let server = self.server().await;
        let client = self.client(&server).await;
        (server, client)
    }

    /// A builder for a tonic-rdma server on this fabric.
    pub fn rdma_server(&self) -> tonic_rdma::Server {
        let server = tonic_rdma::Server::builder()
            .policy(self.policy())
            .fabrics(self.fabric.kinds().to_vec());
        *self.server_stats.lock().unwrap() = Some(server.stats());
        match &self.contexts {
            Some(contexts) => server.context(contexts.server.clone()),
            None => server,
        }
    }

    /// Payload bytes that the last tonic-rdma server has copied for calls over the fast path.
    pub fn server_copied(&self) -> Copied {
        if let Some(remote) = self.remotes.lock().unwrap().last() {
            return remote.copied();
        }
        self.server_stats
            .lock()
            .unwrap()
            .as_ref()
            .map(|stats| stats.get().copied_fast)
            .unwrap_or_default()
    }

    /// Like [`rdma_endpoint`](Self::rdma_endpoint), but with memory for few connections. A
    /// connection takes so little of a pool that otherwise the process would run out of descriptors
    /// first, or a guest out of memory for queue pairs.
    pub fn endpoint_for_few(&self, uri: String) -> tonic_rdma::Endpoint {
        let endpoint = self.rdma_endpoint(uri);
        match &self.contexts {
            Some(contexts) => endpoint.context(contexts.few.clone()),
            None => endpoint,
        }
    }

    /// A tonic-rdma endpoint on this fabric.
    pub fn rdma_endpoint(&self, uri: String) -> tonic_rdma::Endpoint {
        let endpoint = tonic_rdma::Endpoint::from_shared(uri)
            .unwrap()
            .policy(self.policy())
            .fabrics(self.fabric.kinds().to_vec());
        match &self.contexts {
            Some(contexts) => {
                let timeout = if self.loses_server.load(Ordering::Relaxed) {
                    SHORT_FAST_PATH_TIMEOUT
                } else {
                    FAST_PATH_TIMEOUT
                };
                endpoint.context(contexts.client.clone()).fast_path_timeout(timeout)
            }
            None => endpoint,
        }
    }

    fn policy(&self) -> Policy {
        match self.fabric.fast() {
            Some(_) => Policy::Require,
            None if self.fabric == Fabric::Tcp => Policy::Off,
            None => Policy::Auto,
        }
    }

    /// Checks that the channel takes the path under test.
    ///
    /// # Panics
    /// The channel takes another path, or gives another reason than the fabric determines.
    pub fn check_channel(&self, channel: &tonic_rdma::Channel) {
        let info = channel.path();
        assert_eq!(info.path, self.fabric.fast().unwrap_or(Path::Tcp), "{info}");
        let reason = match self.fabric {
            Fabric::StockServer => Some(ReasonCode::PeerNotCapable),
            Fabric::Tcp => Some(ReasonCode::Policy),
            _ => None,
        };
        assert_eq!(info.reason.as_ref().map(|r| r.code()), reason, "{info}");
        self.pools.lock().unwrap().push(channel.pool());
    }

    /// Allows calls over TCP from now on, because the case ends the fast path.
    pub fn may_fall_back(&self) {
        self.may_fall_back.store(true, Ordering::Relaxed);
    }

    /// Shortens the wait for the fast path, because the case ends a server or a client's runtime
    /// for good.
    pub fn loses_server(&self) {
        self.loses_server.store(true, Ordering::Relaxed);
    }

    /// The pools of the case that are in use, as text.
    pub fn pools(&self) -> Vec<String> {
        let pools = self.pools.lock().unwrap();
        let all = pools.iter().map(|pool| {
            let PoolStats { send, control, granted, filled, leased, waits, .. } = pool.stats();
            format!(
                "pool: send {send}, control {control}, granted {granted}, filled {filled}, leased {leased}, waits {waits}"
            )
        });
        all.collect()
    }

    /// Waits until every byte of the pools has been returned. Call it after all servers and clients
    /// are closed.
    pub async fn assert_pools_returned(&self) {
        for remote in self.remotes.lock().unwrap().iter() {
            remote.assert_pools_returned();
        }
        let pools = self.pools.lock().unwrap().clone();
        let begin = Instant::now();
        loop {
            let mut stats: Vec<_> = pools.iter().map(Pool::stats).collect();
            if let Some(contexts) = &self.contexts {
                stats
                    .extend(contexts.server.pool_stats().await.into_iter().map(|(_, stats)| stats));
            }
            stats.retain(|stats| stats.in_use_bytes() != 0 || stats.leased != 0);
            if stats.is_empty() {
                return;
            }
            assert!(
                begin.elapsed() < POOL_LIMIT,
                "connections are gone, and still in use: {stats:?}"
            );
            // Polls, because a pool gives no notification.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Checks that every call took the path under test.
    ///
    /// # Panics
    /// A call took another path.
    pub fn check_paths(&self) {
        self.remotes.lock().unwrap().iter().for_each(Remote::sync);
        let entries = self.log.entries();
        assert!(!entries.is_empty(), "the case made no call");
        let fast = self.fabric.fast();
        let may_fall_back = self.may_fall_back.load(Ordering::Relaxed);
        for entry in &entries {
            let right = entry.fast == fast || (may_fall_back && entry.fast.is_none());
            assert!(right, "expected the path {fast:?}: {entry:?}");
        }
        assert!(entries.iter().any(|entry| entry.fast == fast), "no call over {fast:?}");
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        self.remotes.lock().unwrap().iter().for_each(Remote::kill);
    }
}

/// An address for a server, with a [fixed port](fixed_port).
pub fn any_port() -> SocketAddr {
    let ip = bind_ip().unwrap();
    SocketAddr::new(ip, fixed_port(ip))
}

/// A client with no limits on message sizes.
pub fn client_of(channel: AnyChannel) -> Client {
    ConformanceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX)
}
