//! Upper bound: SENDs and WRITEs over a fabric's link, without protocol, calls or messages.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::{BufMut, Bytes};
use tonic_rdma::FabricKind;
use tonic_rdma_fabric::{
    Addr, AnyLink, Completion, Fabric, Lending, Link, LinkConfig, Posted, ShmAccess, ShmAddr, Work,
    WriteSource,
};
use tonic_rdma_memory::{LandingBuf, Pool, PoolConfig};

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

#[derive(Debug)]
struct Driver {
    link: AnyLink,
    out: Vec<Completion>,
    /// Received messages that have not been taken.
    messages: Vec<Vec<u8>>,
    queued: u64,
    done: u64,
}

impl Driver {
    fn new(link: AnyLink) -> Self {
        Self { link, out: Vec::new(), messages: Vec::new(), queued: 0, done: 0 }
    }

    async fn poll(&mut self) -> anyhow::Result<()> {
        poll_fn(|cx| self.link.poll(cx, &mut self.out)).await?;
        for completion in self.out.drain(..) {
            match completion {
                Completion::Sent { id } => self.done = id,
                Completion::Received { slot, len } => {
                    self.messages.push(self.link.recv_slot(slot, len).to_vec());
                    self.link.repost(slot)?;
                }
            }
        }
        Ok(())
    }

    async fn receive(&mut self) -> anyhow::Result<Vec<u8>> {
        loop {
            if let Some(message) = self.messages.pop() {
                return Ok(message);
            }
            self.poll().await?;
        }
    }

    fn queue(&mut self, work: Work, signal: bool) -> anyhow::Result<()> {
        self.queued += 1;
        if self.link.queue(self.queued, work, signal)? == Posted::Done {
            self.done = self.queued;
        }
        Ok(())
    }

    /// One message is in flight at a time, so the first slot is free.
    fn send(&mut self, message: &[u8]) -> anyhow::Result<()> {
        let slot = self
            .link
            .block_mut()
            .get_mut(..message.len())
            .context("the message is longer than a slot")?;
        slot.copy_from_slice(message);
        self.queue(Work::Send { offset: 0, len: message.len() }, false)?;
        Ok(self.link.ring_doorbell()?)
    }
}

/// The target of a WRITE.
#[derive(Clone, Copy, Debug)]
struct WriteTarget {
    addr: u64,
    rkey: u32,
}

impl WriteTarget {
    /// Encoded length in bytes.
    const LEN: usize = 12;

    fn of(landing: &LandingBuf) -> Self {
        Self { addr: landing.addr(), rkey: landing.rkey() }
    }

    fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (addr, rkey) = bytes.split_first_chunk()?;
        Some(Self {
            addr: u64::from_le_bytes(*addr),
            rkey: u32::from_le_bytes(rkey.try_into().ok()?),
        })
    }
}

fn landing(pool: &Pool) -> anyhow::Result<Vec<LandingBuf>> {
    (0..N_TARGETS)
        .map(|_| pool.landing().alloc(MAX_WRITE, MAX_WRITE)?.context("no landing memory"))
        .collect()
}

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
    let link = listener.accept().await?.accept(&LinkConfig::default(), &pool, b"", TIMEOUT).await?;
    let mut driver = Driver::new(link);
    let landing = landing(&pool)?;
    driver.receive().await?;
    let mut grants = Vec::new();
    for target in landing.iter().map(WriteTarget::of) {
        driver.link.share(target.rkey)?;
        grants.extend(target.encode());
    }
    driver.send(&grants)?;
    while let Ok(message) = driver.receive().await {
        driver.send(&message)?;
    }
    // The queue pair must be destroyed before the memory that it can write to.
    drop(driver);
    drop(landing);
    Ok(())
}

/// The client's end.
#[derive(Debug)]
pub struct Raw {
    driver: Driver,
    pool: Pool,
    targets: Vec<WriteTarget>,
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
        let connected = fabric.connect(&addr, &LinkConfig::default(), &pool, b"", TIMEOUT).await?;
        let mut driver = Driver::new(connected.link);
        driver.send(b"grant")?;
        let grants = driver.receive().await?;
        let targets: Option<Vec<_>> =
            grants.chunks(WriteTarget::LEN).map(WriteTarget::decode).collect();
        let targets = targets
            .filter(|targets| targets.len() == N_TARGETS)
            .context("grants that make no sense")?;
        let path = format!("raw {} ({})", fabric.provider(), fabric.name());
        Ok(Self { driver, pool, targets, path })
    }

    /// Keeps up to `window` WRITEs in flight, each to its own part of the targets as long as there
    /// is enough memory.
    async fn writes(&mut self, bytes: &Bytes, count: usize, window: usize) -> anyhow::Result<()> {
        let driver = &mut self.driver;
        // Earlier SENDs may not have been reported yet; they are not counted.
        let first = driver.queued;
        let (last, per_target) = (first + count as u64, MAX_WRITE / bytes.len());
        let (n_slots, window) = (window.min(N_TARGETS * per_target), window as u64);
        while driver.done < last {
            loop {
                let in_flight = driver.queued - driver.done.max(first);
                if driver.queued == last || in_flight >= window || driver.link.send_room() == 0 {
                    break;
                }
                let src = WriteSource::Bytes(self.pool.resolve(bytes).context("not pool memory")?);
                let slot = (driver.queued - first) as usize % n_slots;
                let WriteTarget { addr, rkey } = self.targets[slot / per_target];
                let remote_addr = addr + (slot % per_target * bytes.len()) as u64;
                let work = Work::Write { src, remote_addr, rkey };
                // The last WRITE before a wait must be signaled.
                driver.queue(work, driver.queued + 1 == last || in_flight + 1 == window)?;
            }
            driver.link.ring_doorbell()?;
            if driver.done < driver.queued {
                driver.poll().await?;
            }
        }
        Ok(())
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
                    self.driver.send(&[7; SMALL])?;
                    self.driver.receive().await?;
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
        let mut buf = self.pool.try_alloc(piece)?;
        buf.put_bytes(0xa5, piece);
        let bytes = buf.freeze();
        let begin = Instant::now();
        self.writes(&bytes, row.calls * pieces, in_flight * pieces).await?;
        // The peer's reply confirms that everything has arrived.
        self.driver.send(b"end")?;
        self.driver.receive().await?;
        Ok(throughput(row.calls, size, begin.elapsed()))
    }
}
