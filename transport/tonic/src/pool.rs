//! The pool as the application sees it.
//!
//! The transport works with `tonic_rdma_memory::Pool`, which also hands out the memory of
//! connections. [`Pool`] offers only what an application needs, so an application cannot take
//! memory that connections need.

use std::fmt;

use bytes::Bytes;
use tonic_rdma_memory::{PinnedBuf, PoolError, PoolSizes, PoolStats};

/// Memory that is registered with one device. The application fills the buffers of a pool, and
/// sends them without a copy. Cheap to clone.
///
/// [`Channel::pool`](crate::Channel::pool) returns the pool of a channel, and
/// [`pool`](crate::pool()) the pool of a request. The context's
/// [`PoolConfig`](crate::PoolConfig) sets the sizes.
///
/// The memory of connections has budgets of its own, from which no buffer is taken.
#[derive(Clone)]
pub struct Pool(pub(crate) tonic_rdma_memory::Pool);

impl Pool {
    /// Allocates a buffer of `len` bytes to fill and send. Waits until there is memory; requests
    /// are served in the order in which they were first polled.
    ///
    /// ```
    /// # use tonic_rdma::{Channel, PoolError};
    /// # async fn fill(channel: Channel) -> Result<bytes::Bytes, PoolError> {
    /// use bytes::BufMut;
    ///
    /// let mut buf = channel.pool().alloc(100).await?;
    /// buf.put_slice(b"payload");
    /// let field = buf.freeze(); // for a field of a message
    /// # Ok(field)
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe. Dropping the future gives up its place in the queue. Memory that was already
    /// assigned to the future goes to the next waiter.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`] at once if `len` exceeds the pool's memory for sending;
    /// [`PoolError::Register`] and [`PoolError::Map`] if the system gives no memory.
    pub fn alloc(
        &self,
        len: usize,
    ) -> impl Future<Output = Result<PinnedBuf, PoolError>> + Send + use<> {
        self.0.alloc(len)
    }

    /// Allocates a buffer of `len` bytes to fill and send, if there is memory now and no other
    /// request waits.
    ///
    /// # Errors
    /// The errors of [`alloc`](Self::alloc), and [`PoolError::Exhausted`].
    pub fn try_alloc(&self, len: usize) -> Result<PinnedBuf, PoolError> {
        self.0.try_alloc(len)
    }

    /// Whether these bytes lie in memory that is registered with the pool's device: in a buffer of
    /// this pool, in bytes that landed over any connection, in
    /// [registered](crate::Context::register) memory, or in a buffer of another device's pool whose
    /// memory is also registered with this device. For such a buffer, the first call may begin to
    /// register the memory, and returns false until that is done. Over shared memory, bytes that
    /// lie elsewhere are also sent from where they lie.
    pub fn contains(&self, bytes: &Bytes) -> bool {
        self.0.resolve(bytes).is_some()
    }

    /// The sizes, after fitting into RLIMIT_MEMLOCK.
    pub fn config(&self) -> &PoolSizes {
        self.0.config()
    }

    /// Returns a snapshot of the pool's figures.
    pub fn stats(&self) -> PoolStats {
        self.0.stats()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
