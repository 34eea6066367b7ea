//! Registers application memory with all devices of a context.

use std::sync::Arc;

use tonic_rdma_memory::LendableMemory;

use super::registered::{Region, RegisterRegionError, Registered};
use super::{Context, Held};

impl Context {
    /// Registers application memory, so that its bytes are sent from where they lie: a mapped file,
    /// a boxed slice, huge pages, a slab of a cache, or any other owner of bytes that neither move
    /// nor change.
    ///
    /// The memory is registered once with each device that the context uses, now or when the
    /// context first uses the device. It counts against RLIMIT_MEMLOCK in addition to the pools. A
    /// later registration may fail, which is logged as a warning. [`Registered::devices`] then
    /// leaves that device out, and over it the bytes are copied like any others. The pages are
    /// pinned on a thread that may block.
    ///
    /// The memory need not be page-aligned. Devices only read it, so it may be mapped read-only. A
    /// privately mapped file is copied from the page cache once, when it is pinned. A shared
    /// mapping is not copied, but Linux before 6.2 pins it only if it is writable (EFAULT). A
    /// mapped file may be truncated while it is registered, without ending the process: a SIGBUS
    /// handler, installed with the first such memory, makes reads past the end return zeros. A
    /// message with such memory fails with INTERNAL, or, the first time over shared memory, ends
    /// its connection. [`Registered::is_truncated`] then returns true.
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
    /// A device that the context uses refuses the memory, the device's limit does not allow it, or
    /// a part of the memory is already registered with this context. The error names the device.
    /// The memory is then registered with no device, and dropped.
    ///
    /// # Panics
    /// Outside of a tokio runtime, if a device pins memory.
    ///
    /// # Cancel safety
    /// If the future is dropped, the memory is registered with no device, and is dropped once the
    /// kernel has ended what it began.
    pub async fn register<T>(&self, memory: T) -> Result<Registered, RegisterRegionError>
    where
        T: AsRef<[u8]> + Send + 'static,
    {
        self.register_region(Region::new(memory)?).await
    }

    /// Registers application memory like [`register`](Self::register), and lets it be lent to
    /// processes of this host, as [`ContextBuilder::lending`](crate::ContextBuilder::lending)
    /// allows. Over shared memory, fields of 32 KiB and more that lie in it are then not copied
    /// either: the peer reads them in place, and they return when it drops them.
    ///
    /// The memory is a file of its own, which those processes map, read-only and **whole**. They
    /// see all of it and nothing else: with
    /// [`ContextBuilder::lend_pool`](crate::ContextBuilder::lend_pool) set to false, the context
    /// lends only such memory. All of the memory may be lent at the same time, because nothing else
    /// waits for it. The memory stays registered until the last reader is done.
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
    /// The panics of [`register`](Self::register).
    ///
    /// # Panics
    /// Outside of a tokio runtime, if a device pins memory.
    ///
    /// # Cancel safety
    /// The cancel safety of [`register`](Self::register).
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
            // Release the lock, so that connections do not wait while pages are pinned. The next
            // round finds a pool that is created during that time.
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
