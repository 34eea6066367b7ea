//! Upper bound: SENDs and WRITEs over a fabric's link, without protocol, calls or messages.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use tonic_rdma::FabricKind;
use tonic_rdma_fabric::bare::{self, Bare, BareError, Limits};
use tonic_rdma_fabric::{Addr, Fabric, Lending, LinkError, ShmAccess, ShmAddr};
use tonic_rdma_memory::{Pool, PoolConfig};

use crate::measure::{Round, latencies, throughput};
use crate::session::RowRunner;
use crate::work::{Kind, Row, SMALL};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a measured WRITE in bytes. Soft-RoCE carries at most 8 MiB.
const MAX_WRITE: usize = 4 << 20;
/// Number of target buffers of [`MAX_WRITE`] bytes. WRITEs in flight go to different memory, like
/// messages that have not been read yet, so they do not share cache lines.
const N_TARGETS: usize = 8;
/// WRITEs in flight for rows that do not specify it.
const DEFAULT_WINDOW: usize = 16;

const LIMITS: Limits =
    Limits { places: N_TARGETS, place_len: MAX_WRITE, landing_part: 1, requested: u64::MAX };

/// Echoes SENDs, and grants memory for WRITEs, until the process ends.
///
/// # Errors
/// The fabric is not available, or the client disconnected early.
pub async fn serve(
    kind: FabricKind,
    addr: SocketAddr,
    ready: impl FnOnce(String),
) -> anyhow::Result<()> {
    let (fabric, at): (Fabric, Addr) = match kind {
        FabricKind::Shm => {
            (Fabric::shm(ShmAccess::SameUser, Lending::Off)?, ShmAddr::unique().into())
        }
        _ => (Fabric::at(addr.ip())?, SocketAddr::new(addr.ip(), 0).into()),
    };
    let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
    let mut listener = fabric.listen(&at)?;
    ready(match listener.local_addr() {
        Addr::Shm(name) => name.name().to_owned(),
        other => other.to_string(),
    });
    let incoming = listener.accept().await?;
    let link = incoming.accept(&bare::config(), &pool, b"", TIMEOUT).await?;
    match bare::serve(link, pool, LIMITS).await {
        Err(BareError::Link(LinkError::Disconnected { .. })) => Ok(()),
        ended => Ok(ended?),
    }
}

/// The client's end.
#[derive(Debug)]
pub struct Raw {
    bare: Bare,
    path: String,
}

impl Raw {
    /// Connects to the address that the server process printed.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn connect(kind: FabricKind, server_addr: &str) -> anyhow::Result<Self> {
        let (fabric, addr): (Fabric, Addr) = match kind {
            FabricKind::Shm => (
                Fabric::shm(ShmAccess::SameUser, Lending::Off)?,
                server_addr.parse::<ShmAddr>()?.into(),
            ),
            _ => {
                let addr: SocketAddr = server_addr.parse()?;
                (Fabric::toward(addr, None, None, TIMEOUT).await?, addr.into())
            }
        };
        let pool = Pool::new(PoolConfig::default(), fabric.registrar())?;
        let connected = fabric.connect(&addr, &bare::config(), &pool, b"", TIMEOUT).await?;
        let bare = Bare::open(connected.link, pool, LIMITS).await?;
        ensure!(bare.longest() == MAX_WRITE, "no landing memory for WRITEs of {MAX_WRITE} bytes");
        let path = format!("raw {} ({})", fabric.provider(), fabric.name());
        Ok(Self { bare, path })
    }
}

impl RowRunner for Raw {
    /// Round trips of small messages, and WRITEs, for which the direction makes no difference.
    fn supports(&self, row: &Row) -> bool {
        matches!(row.kind, Kind::Latency | Kind::Bulk { .. } | Kind::Stream { .. })
    }

    /// Fabric and device.
    fn path(&self) -> String {
        self.path.clone()
    }

    async fn prepare(&mut self, _: &Row) -> anyhow::Result<()> {
        Ok(())
    }

    async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let (size, in_flight) = match row.kind {
            Kind::Latency => {
                let mut times = Vec::with_capacity(row.calls);
                for _ in 0..row.calls {
                    let begin = Instant::now();
                    self.bare.echo(SMALL, 1, 1).await?;
                    times.push(begin.elapsed());
                }
                times.sort_unstable();
                return Ok(latencies(times));
            }
            Kind::Bulk { size, in_flight, .. } => (size, in_flight),
            Kind::Stream { size } => (size, DEFAULT_WINDOW),
            _ => bail!("there is no such row for a bare link"),
        };
        // A longer message is split into several WRITEs.
        let (piece, pieces) = (size.min(MAX_WRITE), size.div_ceil(MAX_WRITE));
        let begin = Instant::now();
        // It returns when all has arrived.
        self.bare.write(piece, row.calls * pieces, in_flight * pieces).await?;
        Ok(throughput(row.calls, size, begin.elapsed()))
    }
}
