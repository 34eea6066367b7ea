//! ruapc: MessagePack messages of up to 256 KiB go by SEND, and longer messages by READ. ruapc
//! supports only unary calls.

use anyhow::Context as _;
use benches::{
    measure::Calls,
    service::MAX_REPLY,
    session::{self, CallRunner},
    work::{WorkKind, Row},
};
use bytes::Bytes;
use ruapc::{
    Client, Context, Endpoint, Error, ErrorKind, Router, Server, SocketPoolConfig, Transport,
    rdma::{RdmaConnectionTuningConfig, RdmaSocketPoolConfig},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// A request or a reply.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
struct Blob {
    #[schemars(with = "Vec<u8>")]
    payload: Bytes,
    /// The length of the reply in bytes. Used in requests only.
    reply: u64,
}

#[ruapc::service]
trait Bench {
    async fn exchange(&self, ctx: &Context, request: &Blob) -> ruapc::Result<Blob>;
}

/// Replies from preallocated memory, like the other servers.
struct Replies(Bytes);

impl Bench for Replies {
    async fn exchange(&self, _: &Context, request: &Blob) -> ruapc::Result<Blob> {
        let length = usize::try_from(request.reply).unwrap_or(usize::MAX);
        if length > self.0.len() {
            return Err(Error::new(ErrorKind::InvalidArgument, "the reply is too long".into()));
        }
        Ok(Blob { payload: self.0.slice(..length), reply: 0 })
    }
}

/// Maximum number of connections of a row.
const CONNECTIONS: usize = 64;

/// Default settings with two exceptions: the buffer memory of ruapc's own benchmark, and a limit on
/// data in flight that admits 8 messages of 16 MiB, each of which takes a buffer of 64 MiB.
fn config() -> SocketPoolConfig {
    let connection =
        RdmaConnectionTuningConfig { max_inflight_large_bytes: 512 << 20, ..Default::default() };
    let rdma = RdmaSocketPoolConfig { connection, ..Default::default() };
    SocketPoolConfig { buffer_pool_memory: 1 << 30, rdma: Some(rdma), ..Default::default() }
}

/// Listens on one port per connection, because a client keeps only one connection per address.
pub(crate) async fn serve(addr: IpAddr) -> anyhow::Result<()> {
    let mut router = Router::default();
    Bench::ruapc_export(Arc::new(Replies(Bytes::from(vec![0x5a; MAX_REPLY]))), &mut router);
    let server = Server::create(router, &config())?;
    let mut addresses = Vec::new();
    for _ in 0..CONNECTIONS {
        addresses.push(server.listen(SocketAddr::new(addr, 0)).await?.to_string());
    }
    println!("{}", addresses.join(","));
    server.join().await;
    Ok(())
}

/// An address that no other connection of this process uses.
#[derive(Debug)]
struct LeasedAddr {
    addr: SocketAddr,
    free: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Drop for LeasedAddr {
    fn drop(&mut self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.addr);
    }
}

#[derive(Clone)]
struct Connection {
    context: Context,
    client: Client,
    _leased: Arc<LeasedAddr>,
}

impl Calls for Connection {
    fn payload(&self, length: usize) -> Bytes {
        Bytes::from(vec![0xa5; length])
    }

    async fn unary(&mut self, payload: Bytes, reply: usize) -> anyhow::Result<usize> {
        let request = Blob { payload, reply: reply as u64 };
        Ok(self.client.exchange(&self.context, &request).await?.payload.len())
    }

    async fn stream(&mut self, _: usize, _: usize) -> anyhow::Result<()> {
        anyhow::bail!("it has no streams")
    }

    async fn open(&mut self) -> anyhow::Result<Box<dyn Send>> {
        anyhow::bail!("it has no streams")
    }

    /// A message, including its framing, has at most 64 MiB.
    fn supports(&self, row: &Row) -> bool {
        match row.kind {
            WorkKind::Stream { .. }
            | WorkKind::IdleStreams { .. }
            | WorkKind::Phase { .. }
            | WorkKind::Connect { .. }
            | WorkKind::Resting { .. }
            | WorkKind::Clients { .. } => false,
            WorkKind::Bulk { size, .. } | WorkKind::LatencyUnderLoad { size } => {
                size < RdmaConnectionTuningConfig::MAX_LARGE_MSG_SIZE as usize
            }
            WorkKind::Latency | WorkKind::Rate { .. } | WorkKind::Open { .. } => {
                row.connections() <= CONNECTIONS
            }
        }
    }

    fn path(&self) -> String {
        "ruapc".to_owned()
    }
}

pub(crate) async fn client(server_addr: String) -> anyhow::Result<()> {
    let addresses: Result<Vec<SocketAddr>, _> = server_addr.split(',').map(str::parse).collect();
    let free = Arc::new(Mutex::new(addresses.context("no addresses to connect to")?));
    let context = Context::create(&config())?;
    let connect = async move |_| {
        let addr = free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let addr = addr.context("more connections than addresses")?;
        let leased = LeasedAddr { addr, free: Arc::clone(&free) };
        // `compare` has its own time limit, which is the same for all contenders.
        let client = Client { timeout: Duration::from_secs(3600), ..Client::default() };
        let endpoint = Endpoint::rdma(Transport::TCP, [addr])?;
        let mut connection = Connection {
            context: context.with_endpoint(endpoint),
            client,
            _leased: Arc::new(leased),
        };
        // The first call connects.
        connection.unary(Bytes::new(), 0).await.context("cannot connect")?;
        Ok(connection)
    };
    match CallRunner::new(connect).await {
        Ok(calling) => session::run(calling).await,
        Err(error) => session::report_failure(&error),
    }
}
