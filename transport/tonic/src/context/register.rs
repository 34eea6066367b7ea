//! Registers application memory with all devices of a context.

use std::sync::Arc;

use tonic_rdma_memory::LendableMemory;

use super::registered::{RegisterRegionError, Registered, RegisteredRegion};
use super::{Context, DevicePool};

impl Context {
    /// Registers application memory, so that its bytes are sent in place. The memory can be a
    /// mapped file, a boxed slice, huge pages, a slab of a cache, or any other owner of bytes that
    /// neither move nor change.
    ///
    /// The memory is registered once with each device that the context uses, now or when the
    /// context first uses the device. The memory counts against RLIMIT_MEMLOCK in addition to the
    /// pools. If a later registration fails, the failure is logged as a warning,
    /// [`Registered::devices`] leaves the device out, and messages over this device copy the bytes.
    /// The pages are pinned on a thread that may block.
    ///
    /// The memory need not be page-aligned. Devices only read the memory, so it may be mapped
    /// read-only. A privately mapped file is copied from the page cache once, when its pages are
    /// pinned. A shared mapping is not copied, but Linux before 6.2 pins only writable mappings
    /// (EFAULT).
    ///
    /// # Mapped files
    /// A program that registers memory mapped from a file promises that nobody truncates the file
    /// while the memory is registered or in use, that is, until the memory is dropped. If somebody
    /// does, the process ends with SIGBUS, as with any other code that reads such a mapping
    /// (mmap(2)). A private mapping (MAP_PRIVATE) does not prevent this. The following keep the
    /// promise:
    ///
    /// - a memory file that is sealed with F_SEAL_SHRINK, like that of a
    ///   [`LendableBuf`](crate::LendableBuf)
    /// - a copy of the file, for example in a boxed slice
    /// - a file that nobody else may write to
    ///
    /// ```no_run
    /// # async fn send(file: std::fs::File) -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::Context;
    ///
    /// // SAFETY: nobody writes to the file or truncates it while it is mapped.
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
    /// If the future is dropped, the memory is registered with no device. The memory is dropped
    /// once the kernel has ended a registration in progress.
    pub async fn register<T>(&self, memory: T) -> Result<Registered, RegisterRegionError>
    where
        T: AsRef<[u8]> + Send + 'static,
    {
        self.register_region(RegisteredRegion::new(memory)).await
    }

    /// Registers application memory like [`register`](Self::register), and allows this memory to be
    /// lent to processes of this host, as
    /// [`ContextBuilder::lending`](crate::ContextBuilder::lending) permits. Over shared memory,
    /// fields of 32 KiB and more in this memory are then not copied either: the peer reads these
    /// fields in place.
    ///
    /// The memory is a separate file, which the borrowing processes map read-only and **whole**.
    /// These processes see all of this memory. With
    /// [`Lending::SameUserRegistered`](crate::Lending::SameUserRegistered) they see none of the
    /// pool's send memory, because the context then lends only memory that was registered with this
    /// method. All of the memory may be lent at the same time. The memory stays registered until
    /// the last reader has dropped it. Nobody can truncate the file, because its seals forbid that.
    ///
    /// ```no_run
    /// # async fn lend() -> Result<(), Box<dyn std::error::Error>> {
    /// use tonic_rdma::{Context, LendableBuf, Lending};
    ///
    /// let context = Context::builder().lending(Lending::SameUserRegistered).build();
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
    /// The errors of [`register`](Self::register).
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
        self.register_region(RegisteredRegion::lendable(memory)).await
    }

    async fn register_region(
        &self,
        region: Arc<RegisteredRegion>,
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
                (
                    device.clone(),
                    DevicePool { fabric: held.fabric.clone(), pool: held.pool.clone() },
                )
            };
            match region.register_with(&device, &held.pool).await {
                Err(error) if !held.fabric.is_removed() => break Err(error),
                _ => {}
            }
        }
    }
}
