//! What the channels and servers of a process share: RDMA devices and their pinned memory.

use crate::{
    cause,
    path::Path,
    reason::{Reason, ReasonCode},
};
use rand::{SeedableRng, rngs::StdRng};
use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::sync::Mutex;
use tonic_rdma_fabric::{Fabric, sim::SimDevice};
use tonic_rdma_memory::{HeapRegistrar, Pool, PoolConfig, PoolStats};

/// RDMA devices and one pool of pinned memory for each, shared by all channels and servers that are
/// given a clone of it.
///
/// [`Context::global`] serves the whole process and is what endpoints and servers use unless they
/// are told otherwise. Nothing is opened or pinned before the first connection needs it, so that a
/// process which stays on TCP pins nothing.
///
/// ```
/// use tonic_rdma::{Context, Endpoint, PoolConfig};
///
/// let context = Context::builder().pool(PoolConfig::default()).device("mlx5_0").build();
/// let endpoint = Endpoint::from_static("http://10.0.0.1:50051").context(context);
/// ```
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    pool: PoolConfig,
    device: Option<String>,
    sim: Option<SimDevice>,
    /// By the device's name. Held while a pool is made, so that it is made once.
    pools: Mutex<HashMap<String, Pool>>,
    /// Of memory that no device knows.
    ordinary: OnceLock<Pool>,
}

impl Context {
    /// The context of the process: any device, a pool of the default size for each.
    pub fn global() -> Self {
        static GLOBAL: OnceLock<Context> = OnceLock::new();
        GLOBAL.get_or_init(|| Self::builder().build()).clone()
    }

    /// A context of your own.
    pub fn builder() -> ContextBuilder {
        ContextBuilder { pool: PoolConfig::default(), device: None, sim: None }
    }

    /// The path that this context's devices give.
    pub(crate) fn path(&self) -> Path {
        if self.0.sim.is_some() { Path::Sim } else { Path::Verbs }
    }

    /// The device to keep to: the environment's before the builder's.
    fn only(&self, env: Option<&str>) -> Option<String> {
        env.map(str::to_owned).or_else(|| self.0.device.clone())
    }

    /// Finds out whether this host has a device that works at all. With a single device, or one
    /// that was named, its pool is made too: there is no other that a connection could use.
    pub(crate) async fn check(&self, env_device: Option<&str>) -> Result<(), Reason> {
        let only = self.only(env_device);
        let named = only.is_some();
        let (fabric, alone) = match &self.0.sim {
            Some(device) => (Fabric::Sim(device.clone()), true),
            None => {
                blocking(move || {
                    let fabric = Fabric::open(only.as_deref())?;
                    Ok((fabric, Fabric::devices()?.len() == 1))
                })
                .await?
            }
        };
        if named || alone {
            self.pool(&fabric).await?;
        }
        Ok(())
    }

    /// The device towards `peer`, and its pool.
    pub(crate) async fn toward(
        &self,
        peer: SocketAddr,
        env_device: Option<&str>,
        timeout: Duration,
    ) -> Result<(Fabric, Pool), Reason> {
        let fabric = match &self.0.sim {
            Some(device) => Fabric::Sim(device.clone()),
            None => {
                let only = self.only(env_device);
                Fabric::toward(peer, only.as_deref(), timeout).await.map_err(cause::connect)?
            }
        };
        let pool = self.pool(&fabric).await?;
        Ok((fabric, pool))
    }

    /// The devices and addresses that a server should listen on, with their pools: the address
    /// that the TCP port is bound to if it lies on a device, otherwise every address that does.
    pub(crate) async fn local(
        &self,
        bound: Option<IpAddr>,
        env_device: Option<&str>,
    ) -> Result<Vec<(Fabric, IpAddr, Pool)>, Reason> {
        let only = self.only(env_device);
        let places = match &self.0.sim {
            Some(device) => {
                let fabric = Fabric::Sim(device.clone());
                let addresses = fabric.addresses().map_err(cause::fabric)?;
                addresses.into_iter().map(|addr| (fabric.clone(), addr)).collect()
            }
            None => blocking(move || places(bound, only.as_deref())).await?,
        };
        let mut found = Vec::new();
        for (fabric, addr) in places {
            let pool = self.pool(&fabric).await?;
            found.push((fabric, addr, pool));
        }
        Ok(found)
    }

    /// A pool of ordinary memory, of this context's sizes, for where there is no device.
    pub(crate) fn ordinary_pool(&self) -> Pool {
        let make = |config: PoolConfig| Pool::new(config, Arc::new(HeapRegistrar::default()));
        let pool = self.0.ordinary.get_or_init(|| {
            let own = make(self.0.pool.clone());
            match own.or_else(|_| make(PoolConfig::default())) {
                Ok(pool) => pool,
                Err(error) => unreachable!("ordinary memory has no limit to fit into: {error}"),
            }
        });
        pool.clone()
    }

    /// Where chance comes from: the operating system, or a simulated network's seed.
    pub(crate) fn rng(&self) -> StdRng {
        match &self.0.sim {
            Some(device) => StdRng::seed_from_u64(device.draw()),
            None => StdRng::from_rng(&mut rand::rng()),
        }
    }

    /// The figures of the pools that have been made so far, by the names of their devices.
    pub async fn pool_stats(&self) -> Vec<(String, PoolStats)> {
        let pools = self.0.pools.lock().await;
        let mut stats: Vec<_> = pools.iter().map(|(name, pool)| (name.clone(), pool.stats())).collect();
        stats.sort_by(|(a, _), (b, _)| a.cmp(b));
        stats
    }

    async fn pool(&self, fabric: &Fabric) -> Result<Pool, Reason> {
        let mut pools = self.0.pools.lock().await;
        if let Some(pool) = pools.get(fabric.name()) {
            return Ok(pool.clone());
        }
        let (config, registrar) = (self.0.pool.clone(), fabric.registrar());
        let made = if registrar.pins() {
            // Pinning takes milliseconds for every few megabytes.
            tokio::task::spawn_blocking(move || Pool::new(config, registrar)).await.map_err(|_| stopping())?
        } else {
            Pool::new(config, registrar)
        };
        let pool = made.map_err(|e| cause::pool(&e))?;
        pools.insert(fabric.name().to_owned(), pool.clone());
        Ok(pool)
    }
}

/// Every usable device with the addresses to listen on.
fn places(
    bound: Option<IpAddr>,
    only: Option<&str>,
) -> Result<Vec<(Fabric, IpAddr)>, tonic_rdma_fabric::FabricError> {
    // Says what is wrong when nothing can be used.
    let first = Fabric::open(only)?;
    let on_devices = Fabric::local_addresses(only)?;
    if let Some(bound) = bound
        && on_devices.iter().any(|(addr, _)| *addr == bound)
    {
        return Ok(vec![(Fabric::at(bound)?, bound)]);
    }
    let mut places = Vec::new();
    for (addr, device) in on_devices {
        if device == first.name() {
            places.push((first.clone(), addr));
            continue;
        }
        match Fabric::at(addr) {
            Ok(fabric) => places.push((fabric, addr)),
            Err(error) => tracing::warn!(%device, %addr, %error, "RDMA device is left out"),
        }
    }
    Ok(places)
}

async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, tonic_rdma_fabric::FabricError> + Send + 'static,
) -> Result<T, Reason> {
    tokio::task::spawn_blocking(f).await.map_err(|_| stopping())?.map_err(cause::fabric)
}

fn stopping() -> Reason {
    Reason::new(ReasonCode::LinkLost, "the tokio runtime is shutting down")
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("pool", &self.0.pool)
            .field("device", &self.0.device)
            .field("sim", &self.0.sim.is_some())
            .finish_non_exhaustive()
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::global()
    }
}

/// Makes a [`Context`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ContextBuilder {
    pool: PoolConfig,
    device: Option<String>,
    sim: Option<SimDevice>,
}

impl ContextBuilder {
    /// Size and kind of the pool of each device. Default is 64 MiB, less where the memlock limit
    /// asks for it.
    pub fn pool(mut self, config: PoolConfig) -> Self {
        self.pool = config;
        self
    }

    /// Use this RDMA device only, by its name in `rdma link`. `TONIC_RDMA_DEVICE`, where it is set,
    /// wins over this.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Use a device of a simulated network in place of RDMA devices, for tests. Client and server
    /// each need a device of the same network, and live in the same process.
    pub fn sim(mut self, device: SimDevice) -> Self {
        self.sim = Some(device);
        self
    }

    /// The context. Opens nothing yet.
    pub fn build(self) -> Context {
        Context(Arc::new(Inner {
            pool: self.pool,
            device: self.device,
            sim: self.sim,
            pools: Mutex::default(),
            ordinary: OnceLock::new(),
        }))
    }
}
