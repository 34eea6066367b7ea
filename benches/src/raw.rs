//! An upper bound for calls: SENDs and WRITEs over a fabric's link, without the protocol.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tonic_rdma::FabricKind;
use tonic_rdma_fabric::bare::{self, Bare, BareError, BareLimits};
use tonic_rdma_fabric::{Addr, Fabric, Lending, LinkError, ShmAccess, ShmAddr};
use tonic_rdma_memory::{Pool, PoolConfig};

use crate::measure::{Round, latencies, throughput};
use crate::session::RowRunner;
use crate::work::{Row, SMALL, WorkKind};

const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a measured WRITE in bytes. With Soft-RoCE, a WRITE has at most 8 MiB.
const MAX_WRITE: usize = 4 << 20;
/// Number of target buffers. Each has the length of a message, and at least [`MAX_WRITE`] bytes.
/// WRITEs in flight go to different memory, like messages that have not been read yet, so they do
/// not share cache lines.
const N_TARGETS: usize = 8;
/// Number of WRITEs in flight in rows that do not specify this number.
const DEFAULT_WINDOW: usize = 16;

/// Returns an end's limits for messages of up to `message` bytes. Each target has this length. For
/// messages longer than a WRITE, the source has this length as well, as with calls.
fn limits(message: usize) -> BareLimits {
    BareLimits {
        places: N_TARGETS,
        place_len: message,
        landing_part: 1,
        source_len: if message > MAX_WRITE { message } else { 0 },
        requested: u64::MAX,
        requested_writes: u64::MAX,
    }
}

/// A pool for messages of up to `message` bytes. Unused memory is not allocated.
fn pool(message: usize, fabric: &Fabric) -> anyhow::Result<Pool> {
    let landing = N_TARGETS * message;
    let size = PoolConfig::default().total(2 * landing).landing(landing).send(landing / 2);
    Ok(Pool::new(size, fabric.registrar())?)
}

/// Echoes SENDs, and grants memory for messages of up to `longest` bytes, to one client after
/// another.
///
/// # Errors
/// The fabric is not available, or a connection failed.
pub async fn serve(
    kind: FabricKind,
    addr: SocketAddr,
    longest: usize,
    ready: impl FnOnce(String),
) -> anyhow::Result<()> {
    let (fabric, at): (Fabric, Addr) = match kind {
        FabricKind::Shm => {
            (Fabric::shm(ShmAccess::SameUser, Lending::Off)?, ShmAddr::unique().into())
        }
        _ => {
            let ip = addr.ip();
            let fabric = Fabric::at(ip).with_context(|| {
                format!("cannot serve at {ip} (--addr takes an address of an RDMA device)")
            })?;
            (fabric, SocketAddr::new(ip, 0).into())
        }
    };
    let mut listener = fabric.listen(&at)?;
    ready(match listener.local_addr() {
        Addr::Shm(name) => name.name().to_owned(),
        other => other.to_string(),
    });
    loop {
        let incoming = listener.accept().await?;
        // Each connection gets a pool for messages of up to `longest` bytes.
        let pool = pool(longest, &fabric)?;
        let link = incoming.accept(&bare::config(), &pool, b"", TIMEOUT).await?;
        match bare::serve(link, pool, limits(longest)).await {
            Err(BareError::Link(LinkError::Disconnected { .. })) => {}
            ended => ended?,
        }
    }
}

/// The client's end.
#[derive(Debug)]
pub struct Raw {
    fabric: Fabric,
    addr: Addr,
    /// `None` while the connection is being reopened.
    bare: Option<Bare>,
    /// Bytes of a target buffer.
    target: usize,
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
        let bare = Some(open(&fabric, &addr, MAX_WRITE).await?);
        Ok(Self { fabric, addr, bare, target: MAX_WRITE })
    }
}

/// Opens a connection whose target buffers have `target` bytes each.
async fn open(fabric: &Fabric, addr: &Addr, target: usize) -> anyhow::Result<Bare> {
    let pool = pool(target, fabric)?;
    let connected = fabric.connect(addr, &bare::config(), &pool, b"", TIMEOUT).await?;
    let bare = Bare::open(connected.link, pool, limits(target)).await?;
    ensure!(bare.longest() == target, "no landing memory for messages of {target} bytes");
    Ok(bare)
}

impl RowRunner for Raw {
    /// Supports round trips of small messages, and WRITEs, for which the direction makes no
    /// difference.
    fn supports(&self, row: &Row) -> bool {
        matches!(row.kind, WorkKind::Latency | WorkKind::Bulk { .. } | WorkKind::Stream { .. })
    }

    /// Names the fabric and the device.
    fn path(&self) -> String {
        format!("raw {} ({})", self.fabric.provider(), self.fabric.name())
    }

    async fn prepare(&mut self, row: &Row) -> anyhow::Result<()> {
        let size = if let WorkKind::Bulk { size, .. } = row.kind { size } else { 0 };
        let target = size.max(MAX_WRITE);
        if self.bare.is_none() || self.target != target {
            // The server has one client at a time.
            if let Some(bare) = self.bare.take() {
                bare.close();
            }
            self.bare = Some(open(&self.fabric, &self.addr, target).await?);
            self.target = target;
        }
        Ok(())
    }

    async fn round(&mut self, row: &Row) -> anyhow::Result<Round> {
        let bare = self.bare.as_mut().context("the row was not prepared")?;
        let (size, in_flight) = match row.kind {
            WorkKind::Latency => {
                let mut times = Vec::with_capacity(row.calls);
                for _ in 0..row.calls {
                    let begin = Instant::now();
                    bare.echo(SMALL, 1, 1).await?;
                    times.push(begin.elapsed());
                }
                times.sort_unstable();
                return Ok(latencies(times));
            }
            WorkKind::Bulk { size, in_flight, .. } => (size, in_flight),
            WorkKind::Stream { size } => (size, DEFAULT_WINDOW),
            _ => bail!("there is no such row for a bare link"),
        };
        // A longer message is split into several WRITEs.
        let (piece, pieces) = (size.min(MAX_WRITE), size.div_ceil(MAX_WRITE));
        let begin = Instant::now();
        // `write` returns when all messages have arrived.
        bare.write(piece, row.calls * pieces, in_flight * pieces).await?;
        Ok(throughput(row.calls, size, begin.elapsed()))
    }
}
