//! Devices and their memory, shared by the channels and servers of a process.

mod builder;
mod device_monitor;
mod pool_size;
mod rail_health;
mod register;
mod registered;
pub(crate) mod sources;
mod survey;

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use builder::ContextBuilder;
use builder::ContextSettings;
pub(crate) use device_monitor::Changes;
use device_monitor::DeviceMonitor;
pub(crate) use rail_health::{RailHealth, RailKey};
use registered::Regions;
pub use registered::{RegisterRegionError, Registered};
pub(crate) use sources::Sources;
use survey::{FirstDevice, Survey};
use tokio::sync::Mutex;
#[cfg(feature = "test-util")]
use tonic_rdma_fabric::sim::SimDevice;
use tonic_rdma_fabric::{Addr, Fabric, FabricError, HostSnapshot, LocalAddress, off_worker};
use tonic_rdma_memory::{
    HeapRegistrar, PerProcess, Pool, PoolConfig, PoolError, PoolStats, throttled,
};
use tonic_rdma_proto::Side;

use crate::channel::backoff::Jitter;
use crate::connection::ConnectionConfig;
#[cfg(feature = "diagnose")]
use crate::diagnose::PoolSizeBy;
use crate::path::policy::FabricKind;
use crate::path::reason::Reason;
use crate::path::{Path, from_error};

/// RDMA devices and shared memory on this host, with one pool for each. All channels and servers
/// that use a clone of the context share these devices and pools.
///
/// [`Context::global`] serves the whole process, and is the default of endpoints and servers.
/// Nothing is opened or pinned before the first connection needs it, so a process that stays on TCP
/// pins nothing. A child of fork(2) keeps the settings of a context, and opens its own devices and
/// pools.
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
    settings: ContextSettings,
    /// A child of fork(2) begins with an empty state.
    state: PerProcess<ContextState>,
}

/// The devices and pools of a context.
#[derive(Default)]
struct ContextState {
    shm: OnceLock<Fabric>,
    /// Pools by device name. The lock is held while a pool is created, so that each pool is created
    /// once. The lock is also held from the check that application memory is registered with every
    /// pool until the memory is in `regions`, so that no new pool misses the memory.
    pools: Mutex<HashMap<String, DevicePool>>,
    /// Registered application memory.
    regions: Regions,
    device_monitor: DeviceMonitor,
    rails: RailHealth,
    first_device: FirstDevice,
    /// A pool of memory that is not registered with any device.
    ordinary: OnceLock<Pool>,
}

/// A device and its pool.
struct DevicePool {
    fabric: Fabric,
    pool: Pool,
}

/// A place to listen: a device, its address if it has one, and its pool.
pub(crate) struct ListenTarget {
    pub(crate) fabric: Fabric,
    pub(crate) addr: Option<IpAddr>,
    pub(crate) pool: Pool,
}

impl Context {
    /// The context of the process, with all devices and a pool of the default size for each.
    pub fn global() -> Self {
        static GLOBAL: PerProcess<Context> = PerProcess::new(|| Context::builder().build());
        GLOBAL.clone()
    }

    /// Create a builder for a separate context.
    pub fn builder() -> ContextBuilder {
        ContextBuilder::default()
    }

    /// The paths over `fabrics`, in the order of `fabrics`.
    pub(crate) fn paths(&self, fabrics: &[FabricKind]) -> Vec<Path> {
        #[cfg(feature = "test-util")]
        if !self.0.settings.sim.is_empty() {
            return vec![Path::Sim];
        }
        let path = |fabric: &FabricKind| match fabric {
            FabricKind::Shm => Path::Shm,
            FabricKind::Verbs => Path::Verbs,
        };
        fabrics.iter().map(path).collect()
    }

    /// The only device to use, as the environment or else the builder names it.
    pub(crate) fn only(&self, env: Option<&str>) -> Option<String> {
        env.map(str::to_owned).or_else(|| self.0.settings.device.clone())
    }

    /// The type of service of a device's packets, as the environment or else the builder sets it.
    #[cfg(feature = "diagnose")]
    pub(crate) fn type_of_service(&self, env: Option<u8>) -> Option<u8> {
        self.0.settings.type_of_service(env)
    }

    fn shm(&self) -> Result<Fabric, FabricError> {
        if let Some(fabric) = self.0.state.shm.get() {
            return Ok(fabric.clone());
        }
        let fabric = Fabric::shm(self.0.settings.shm_access.clone(), self.0.settings.lending)?;
        Ok(self.0.state.shm.get_or_init(|| fabric).clone())
    }

    /// The configuration of a connection with memory from `pool`. `grows` says whether slots are
    /// added and removed with the load, and `env_tos` is the type of service that the environment
    /// sets.
    pub(crate) fn configure(
        &self,
        side: Side,
        pool: &Pool,
        grows: bool,
        env_tos: Option<u8>,
    ) -> ConnectionConfig {
        self.0.settings.configure(side, pool, grows, env_tos)
    }

    /// The configuration of an RDMA device's pool. `ignores_ipc_lock` says that the device applies
    /// RLIMIT_MEMLOCK even to processes with CAP_IPC_LOCK.
    #[cfg(feature = "diagnose")]
    pub(crate) fn pool_config(&self, ignores_ipc_lock: bool) -> PoolConfig {
        pool_size::pinned(self.0.settings.pool.clone(), ignores_ipc_lock)
    }

    /// Returns who has set the size of RDMA devices' pools, the operator or the program. `None` if
    /// the size follows from the machine.
    #[cfg(feature = "diagnose")]
    pub(crate) fn pool_size_set_by(&self) -> Option<PoolSizeBy> {
        match (pool_size::by_operator().verbs, self.0.settings.pool.configured_total()) {
            (Some(_), _) => Some(PoolSizeBy::Environment),
            (None, total) => total.map(|_| PoolSizeBy::Program),
        }
    }

    /// The simulated device, if one is set.
    pub(crate) fn simulated(&self) -> Option<Fabric> {
        #[cfg(feature = "test-util")]
        return self.sim().ok();
        #[cfg(not(feature = "test-util"))]
        None
    }

    #[cfg(feature = "test-util")]
    fn sim(&self) -> Result<Fabric, FabricError> {
        self.0.settings.sim.first().cloned().map(Fabric::Sim).ok_or(FabricError::NoDevice)
    }

    /// Checks whether this host has a usable device for the path. If only one RDMA device can be
    /// used, the check also creates the device's pool.
    pub(crate) async fn check(&self, path: Path, env_device: Option<&str>) -> Result<(), Reason> {
        let only = self.only(env_device);
        let named = only.is_some();
        let (fabric, alone) = match path {
            Path::Shm => (self.shm().map_err(from_error::fabric)?, false),
            #[cfg(feature = "test-util")]
            Path::Sim => (self.sim().map_err(from_error::fabric)?, true),
            Path::Verbs | Path::Tcp => {
                let seen = self.0.state.device_monitor.seen();
                self.0.state.first_device.open(only, seen).await?
            }
        };
        if alone || (named && path == Path::Verbs) {
            self.pool(&fabric).await?;
        }
        Ok(())
    }

    /// The addresses of this host from which a connection over a path can be made.
    pub(crate) async fn sources(
        &self,
        path: Path,
        env_device: Option<&str>,
        peers: Vec<IpAddr>,
    ) -> Sources {
        let only = self.only(env_device);
        let named = only.is_some();
        let found = match path {
            Path::Verbs => blocking(move || Sources::of(only.as_deref(), peers)).await,
            #[cfg(feature = "test-util")]
            Path::Sim => Ok(Sources::simulated(&self.0.settings.sim)),
            _ => Ok(Sources::default()),
        };
        let found = found.unwrap_or_else(|reason| {
            tracing::debug!(%reason, "no list of local addresses: routes decide alone");
            Sources::default()
        });
        Sources { named, ..found }
    }

    /// The device that reaches `peer`, and its pool. `source` is this host's address, if an address
    /// was chosen.
    pub(crate) async fn toward(
        &self,
        path: Path,
        peer: &Addr,
        source: Option<IpAddr>,
        env_device: Option<&str>,
        timeout: Duration,
    ) -> Result<(Fabric, Pool), Reason> {
        let fabric = match (path, peer) {
            (Path::Verbs, Addr::Ip(peer)) => {
                let only = self.only(env_device);
                Fabric::toward(*peer, source, only.as_deref(), timeout)
                    .await
                    .map_err(from_error::connect)?
            }
            #[cfg(feature = "test-util")]
            (Path::Sim, _) => {
                let lies_on = |device: &&SimDevice| {
                    source.is_none_or(|source| {
                        device.addresses().is_ok_and(|addresses| addresses.contains(&source))
                    })
                };
                let device = self.0.settings.sim.iter().find(lies_on).cloned();
                device.map(Fabric::Sim).ok_or(FabricError::NoDevice).map_err(from_error::fabric)?
            }
            _ => self.shm().map_err(from_error::fabric)?,
        };
        let pool = self.pool(&fabric).await?;
        Ok((fabric, pool))
    }

    /// The places where a server listens for a path. On RDMA, if a device has the address of the
    /// server's TCP port, that address is the only place. Otherwise every address of each device is
    /// a place.
    pub(crate) async fn local(
        &self,
        path: Path,
        bound: Option<IpAddr>,
        env_device: Option<&str>,
    ) -> Result<Vec<ListenTarget>, Reason> {
        let places = match path {
            Path::Shm => vec![(self.shm().map_err(from_error::fabric)?, None)],
            #[cfg(feature = "test-util")]
            Path::Sim => {
                let mut places = Vec::new();
                for fabric in self.0.settings.sim.iter().cloned().map(Fabric::Sim) {
                    let addresses = fabric.addresses().map_err(from_error::fabric)?;
                    places.extend(addresses.into_iter().map(|at| (fabric.clone(), Some(at))));
                }
                places
            }
            Path::Verbs | Path::Tcp => {
                let only = self.only(env_device);
                let survey = self.0.state.first_device.survey().clone();
                let seen = self.0.state.device_monitor.seen();
                blocking(move || places(&survey, seen, bound, only.as_deref())).await?
            }
        };
        let (mut found, mut failed) = (Vec::new(), None);
        for (fabric, addr) in places {
            let pool = self.pool(&fabric).await.and_then(|pool| match pool.may_land() {
                // The Offer reports this error to clients. Other errors are ignored here, because
                // their causes may be gone when a client connects.
                Err(error @ PoolError::File { .. }) => Err(from_error::pool(&error)),
                _ => Ok(pool),
            });
            match pool {
                Ok(pool) => {
                    if let Some(addr) = addr {
                        self.0.state.device_monitor.listens(addr);
                    }
                    found.push(ListenTarget { fabric, addr, pool });
                }
                Err(reason) => {
                    throttled!(warn, device = fabric.name(), %reason, "no pool: the device is left out");
                    failed = Some(reason);
                }
            }
        }
        match failed {
            Some(reason) if found.is_empty() => Err(reason),
            _ => Ok(found),
        }
    }

    /// A pool of ordinary memory with this context's sizes, for use without a device.
    pub(crate) fn ordinary_pool(&self) -> Pool {
        let make = |config: PoolConfig| Pool::new(config, Arc::new(HeapRegistrar::default()));
        let pool = self.0.state.ordinary.get_or_init(|| {
            let own = make(self.0.settings.pool.clone());
            match own.or_else(|_| make(PoolConfig::default())) {
                Ok(pool) => pool,
                Err(error) => unreachable!("ordinary memory has no limit to fit into: {error}"),
            }
        });
        pool.clone()
    }

    /// The health of the rails of this host's devices.
    pub(crate) fn rails(&self) -> &RailHealth {
        &self.0.state.rails
    }

    /// A number that increases with each channel, so that channels begin at different rails. The
    /// number begins at a random value, because other processes of the host have the same rails.
    pub(crate) fn turn(&self) -> usize {
        self.0.state.rails.turn(|| match self.simulated() {
            Some(_) => 0,
            None => random() as usize,
        })
    }

    /// Random numbers for pauses, seeded by the standard library or by a simulated network.
    pub(crate) fn jitter(&self) -> Jitter {
        #[cfg(feature = "test-util")]
        if let Some(device) = self.0.settings.sim.first() {
            return Jitter::new(device.draw());
        }
        Jitter::new(random())
    }

    /// Statistics of the pools created so far, with the names of their devices.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the method changes nothing.
    pub async fn pool_stats(&self) -> Vec<(String, PoolStats)> {
        let pools = self.0.state.pools.lock().await;
        let mut stats: Vec<_> =
            pools.iter().map(|(name, held)| (name.clone(), held.pool.stats())).collect();
        stats.sort_by(|(a, _), (b, _)| a.cmp(b));
        stats
    }

    /// Returns the pool of a device, which is created at its first use.
    pub(crate) async fn pool(&self, fabric: &Fabric) -> Result<Pool, Reason> {
        let mut pools = self.0.state.pools.lock().await;
        if let Some(held) = pools.get(fabric.name()).filter(|held| !held.fabric.is_removed()) {
            return Ok(held.pool.clone());
        }
        // Forget old registrations, because the device may have been removed and have returned.
        self.0.state.regions.forget(fabric.name());
        let config = pool_size::of(fabric, self.0.settings.pool.clone());
        let registrar = fabric.registrar();
        let made = if registrar.pins() {
            // Do not block a worker, because pinning a few megabytes takes milliseconds.
            off_worker(move || Pool::new(config, registrar)).await.map_err(from_error::no_thread)?
        } else {
            Pool::new(config, registrar)
        };
        let pool = made.map_err(|e| from_error::pool(&e))?;
        // A message in one device's pool may be sent over any rail.
        pools.values().for_each(|other| pool.share_send_memory(&other.pool));
        let pooled = DevicePool { fabric: fabric.clone(), pool: pool.clone() };
        pools.insert(fabric.name().to_owned(), pooled);
        let registering = registered::register_all(
            self.0.state.regions.all(),
            fabric.name().to_owned(),
            pool.clone(),
        );
        match pool.pins() {
            // The connection does not wait for the registration, and the registration continues if
            // the connection is dropped.
            true => drop(tokio::spawn(crate::executor::boxed(registering))),
            false => registering.await,
        }
        if fabric.provider() == "verbs" {
            self.0.state.device_monitor.watch_removal(fabric);
            self.0.state.first_device.survey().watch(fabric);
            self.watch_devices();
        }
        Ok(pool)
    }

    /// Subscribes to changes on this host that affect the path.
    pub(crate) fn changes(&self, path: Path) -> Changes {
        if path != Path::Verbs {
            return Changes::default();
        }
        self.watch_devices();
        self.0.state.device_monitor.subscribe()
    }

    fn watch_devices(&self) {
        let inner = Arc::downgrade(&self.0);
        self.0.state.device_monitor.start(move || {
            let inner = inner.clone();
            async move { Some(Context(inner.upgrade()?).forget_removed().await) }
        });
    }

    /// Releases devices that were removed, because the kernel waits for their release. Returns
    /// whether any device was removed.
    async fn forget_removed(&self) -> bool {
        let mut pools = self.0.state.pools.lock().await;
        let before = pools.len();
        pools.retain(|name, held| {
            let stays = !held.fabric.is_removed();
            if !stays {
                self.0.state.regions.forget(name);
            }
            stays
        });
        before != pools.len()
    }
}

/// Returns every usable device, with its addresses to listen on.
fn places(
    survey: &Survey,
    seen: Arc<HostSnapshot>,
    bound: Option<IpAddr>,
    only: Option<&str>,
) -> Result<Vec<(Fabric, Option<IpAddr>)>, FabricError> {
    // This call reports the cause if no device is usable.
    let first = Fabric::open_listed(&survey.devices(seen)?, only)?;
    let on_devices = Fabric::local_addresses(only)?;
    if let Some(bound) = bound
        && on_devices.iter().any(|at| at.ip == bound)
    {
        return Ok(vec![(Fabric::at(bound)?, Some(bound))]);
    }
    let mut places = Vec::new();
    for LocalAddress { ip: addr, device, .. } in on_devices {
        if device == first.name() {
            places.push((first.clone(), Some(addr)));
            continue;
        }
        match Fabric::at(addr) {
            Ok(fabric) => places.push((fabric, Some(addr))),
            Err(error) => throttled!(warn, %device, %addr, %error, "RDMA device is left out"),
        }
    }
    Ok(places)
}

async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, FabricError> + Send + 'static,
) -> Result<T, Reason> {
    off_worker(f).await.map_err(from_error::no_thread)?.map_err(from_error::fabric)
}

/// Returns a number that differs between processes and calls. The number need not be secret.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("pool", &self.0.settings.pool)
            .field("device", &self.0.settings.device)
            .field("sim", &self.simulated().is_some())
            .finish_non_exhaustive()
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::global()
    }
}

impl ContextBuilder {
    /// Build the context. No device is opened yet.
    pub fn build(self) -> Context {
        Context(Arc::new(Inner { settings: self.0, state: PerProcess::new(ContextState::default) }))
    }
}
