//! Application memory that is sent in place.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use tonic_rdma_fabric::off_worker;
use tonic_rdma_memory::{
    LendableMemory, Pool, PoolRegistration, RegionError, RegisterError, throttled,
};

/// The error of [`Context::register`](crate::Context::register), if the memory cannot be
/// registered.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {source}")]
pub struct RegisterRegionError {
    /// The device that refused the memory, or `shm` for shared memory.
    pub device: String,
    /// The cause.
    pub source: RegionError,
}

/// Application memory that is registered with the devices of a [`Context`](crate::Context).
///
/// [`bytes`](Self::bytes) and [`slice`](Self::slice) return [`Bytes`] of the memory. In a message's
/// `bytes` fields, these bytes are sent without a copy, over every device and over shared memory,
/// wherever [pool memory](crate::Channel::pool) is sent without a copy. Over TCP, these bytes are
/// written to the socket like any other bytes.
///
/// The memory is deregistered and dropped once this value and all its bytes are dropped and no
/// device uses it any more.
pub struct Registered {
    region: Arc<RegisteredRegion>,
    /// Keeps `region` alive.
    bytes: Bytes,
}

impl Registered {
    pub(super) fn of(region: Arc<RegisteredRegion>) -> Self {
        let bytes = match region.memory.is_empty() {
            true => Bytes::new(),
            false => Bytes::from_owner(BytesOwner(region.clone())),
        };
        Registered { region, bytes }
    }

    /// All of the memory.
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// A part of the memory.
    ///
    /// # Panics
    /// If the range reaches past the end of the memory.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Bytes {
        self.bytes.slice(range)
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The names of the devices that the memory is registered with now, in alphabetical order.
    /// Shared memory is `shm`.
    pub fn devices(&self) -> Vec<String> {
        let mut names: Vec<_> =
            self.region.registrations().iter().map(|(device, _)| device.clone()).collect();
        names.sort_unstable();
        names
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("len", &self.len())
            .field("devices", &self.devices())
            .finish_non_exhaustive()
    }
}

/// The owner of the [`Bytes`] that the application holds.
struct BytesOwner(Arc<RegisteredRegion>);

impl AsRef<[u8]> for BytesOwner {
    fn as_ref(&self) -> &[u8] {
        &self.0.memory
    }
}

/// Application memory and its registrations by device. Each registration holds the memory, so the
/// memory is dropped last.
pub(super) struct RegisteredRegion {
    memory: Bytes,
    /// The memory as lendable memory, if it may be lent to peers.
    lendable: Option<Arc<LendableMemory>>,
    registrations: Mutex<Vec<(String, PoolRegistration)>>,
}

impl RegisteredRegion {
    pub(super) fn new(memory: impl AsRef<[u8]> + Send + 'static) -> Arc<Self> {
        Arc::new(RegisteredRegion {
            memory: Bytes::from_owner(memory),
            lendable: None,
            registrations: Mutex::default(),
        })
    }

    pub(super) fn lendable(memory: LendableMemory) -> Arc<Self> {
        let lendable = Arc::new(memory);
        let memory = LendableMemory::bytes(lendable.clone());
        Arc::new(RegisteredRegion {
            memory,
            lendable: Some(lendable),
            registrations: Mutex::default(),
        })
    }

    fn registrations(&self) -> MutexGuard<'_, Vec<(String, PoolRegistration)>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the memory is registered with a device.
    pub(super) fn is_with(&self, device: &str) -> bool {
        self.registrations().iter().any(|(name, _)| name == device)
    }

    /// Registers the memory with the device of a pool.
    pub(super) async fn register_with(
        &self,
        device: &str,
        pool: &Pool,
    ) -> Result<(), RegisterRegionError> {
        let fails = |source| RegisterRegionError { device: device.to_owned(), source };
        let pool = pool.clone();
        let (memory, lendable) = (self.memory.clone(), self.lendable.clone());
        let pins = pool.pins();
        let register = move || match lendable {
            Some(lendable) => pool.register_lendable(lendable),
            None => pool.register(memory),
        };
        let registration = if pins {
            match off_worker(register).await {
                Ok(registration) => registration,
                Err(error) => Err(RegisterError::new(self.memory.len(), error).into()),
            }
        } else {
            register()
        };
        let registration = registration.map_err(fails)?;
        self.registrations().push((device.to_owned(), registration));
        Ok(())
    }
}

/// All application memory that is registered with a context.
#[derive(Default)]
pub(super) struct Regions(Mutex<Vec<Weak<RegisteredRegion>>>);

impl Regions {
    /// The regions in use.
    pub(super) fn all(&self) -> Vec<Weak<RegisteredRegion>> {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|region| region.strong_count() > 0);
        regions.clone()
    }

    pub(super) fn add(&self, region: &Arc<RegisteredRegion>) {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.retain(|region| region.strong_count() > 0);
        regions.push(Arc::downgrade(region));
    }

    /// Ends the registrations with a device that was removed.
    pub(super) fn forget(&self, device: &str) {
        for region in self.all().iter().filter_map(Weak::upgrade) {
            region.registrations().retain(|(name, _)| name != device);
        }
    }
}

/// Registers regions with a device that the context has begun to use.
pub(super) async fn register_all(regions: Vec<Weak<RegisteredRegion>>, device: String, pool: Pool) {
    for region in regions {
        // Leave out regions that were dropped in the meantime.
        let Some(region) = region.upgrade() else { continue };
        if let Err(error) = region.register_with(&device, &pool).await {
            throttled!(warn, %error, "application memory is not registered: it is copied");
        }
    }
}
