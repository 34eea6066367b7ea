//! Registering memory of the application with all devices of a context.

use std::sync::Arc;

use tonic_rdma_memory::LendableMemory;

use super::registered::{Region, RegisterRegionError, Registered};
use super::{Context, Held};

impl Context {
    /// Registers memory of the application: a mapped file, a boxed slice, huge pages, a slab of a
    /// cache, anything that owns bytes that stay where they are and do not change. Bytes of the
    /// returned value are sent from where they lie.
    ///
    /// The memory is registered once with each device that the context uses, at once or when the
    /// context first uses the device, and counts against RLIMIT_MEMLOCK beside the pools. With a
    /// device that the context uses later the registration may fail; this is logged as a warning,
    /// [`Registered::devices`] does not have it, and over it the bytes are copied as any others.
    /// The pages are pinned on a thread that may block.
    ///
    /// The memory need not be page-aligned, and devices only read it, so it may be mapped
    /// read-only. A file that is mapped private is copied from the page cache when it is pinned,
    /// once; one that is mapped shared is not, but Linux before 6.2 pins it only if it is mapped
    /// writable (EFAULT). While it is registered, a file that is mapped may be truncated without an
    /// end to the process: a handler of SIGBUS, installed with the first such memory, has reads
    /// past the end find zeros. A message with such memory fails with INTERNAL, or, the
    /// first time over shared memory, ends its connection, and [`Registered::is_truncated`] says
    /// so.
    ///
    /// ```no_run
    /// # async fn send(file: std::fs::File) -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::Context;
    ///
    /// // SAFETY: nobody writes to the file while it is mapped.
    /// let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file)? };
    /// let weights = Context::global().register(map).await?;
    /// let block = weights.slice(..4 << 20); // for a field of a message
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// A device that the context uses refuses it, its limit does not allow it, or a part of the
    /// memory is registered with this context already: the error names the device. Then the memory
    /// is registered with no device, and dropped.
    ///
    /// # Panics
    /// Outside of a tokio runtime, if a device pins memory.
    ///
    /// # Cancel safety
    /// If the future is dropped, the memory is registered with no device, and dropped when the
    /// kernel has done what it had begun.
    pub async fn register<T>(&self, memory: T) -> Result<Registered, RegisterRegionError>
    where
        T: AsRef<[u8]> + Send + 'static,
    {
        self.register_region(Region::new(memory)?).await
    }

    /// Registers memory of the application, as [`register`](Self::register) does, that processes of
    /// this host may be lent, as
    /// [`ContextBuilder::lending`](crate::ContextBuilder::lending) allows: fields of 32 KiB and
    /// more that lie in it are not copied over shared memory either. The peer reads them where they
    /// are, and they return when it drops them.
    ///
    /// The memory is a file of its own, which those processes map, read-only and **whole**. They
    /// see all of it, and nothing else: with
    /// [`ContextBuilder::lend_pool`](crate::ContextBuilder::lend_pool) set to false, the context
    /// lends nothing but such memory. There is no limit on how much of it is lent at a
    /// time, as nobody else waits for it; it stays registered until the last reader is done.
    ///
    /// ```no_run
    /// # async fn lend() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::{Context, LendableBuf, Lending};
    ///
    /// let context = Context::builder().lending(Lending::SameUser).lend_pool(false).build();
    /// let mut table = LendableBuf::zeroed(256 << 20)?;
    /// table[..5].copy_from_slice(b"first");
    /// let table = context.register_lendable(table.freeze()).await?;
    /// let block = table.slice(..4 << 20); // for a field of a message
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`register`](Self::register).
    ///
    /// # Panics
    /// Outside of a tokio runtime, if a device pins memory.
    ///
    /// # Cancel safety
    /// That of [`register`](Self::register).
    pub async fn register_lendable(
        &self,
        memory: LendableMemory,
    ) -> Result<Registered, RegisterRegionError> {
        self.register_region(Region::lendable(memory)).await
    }

    async fn register_region(
        &self,
        region: Arc<Region>,
    ) -> Result<Registered, RegisterRegionError> {
        loop {
            // Connections do not wait while pages are pinned. A pool that is made meanwhile is
            // found in the next round.
            let (device, held) = {
                let pools = self.0.state.pools.lock().await;
                let mut pools = pools.iter().filter(|(_, held)| !held.fabric.is_removed());
                let Some((device, held)) = pools.find(|(device, _)| !region.is_with(device)) else {
                    self.0.state.regions.add(&region);
                    break Ok(Registered::of(region));
                };
                (device.clone(), Held { fabric: held.fabric.clone(), pool: held.pool.clone() })
            };
            match region.register_with(&device, &held.pool).await {
                Err(error) if !held.fabric.is_removed() => break Err(error),
                _ => {}
            }
        }
    }
}
