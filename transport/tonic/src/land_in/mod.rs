//! Application memory in which a field of a reply or of a request lands.
//!
//! | file | what |
//! |---|---|
//! | `allocators` | the server's buffers for requests to land in |
//! | `tonic_rdma_codec::land_in` | the call's side of a buffer, and its outcome |

pub(crate) mod allocators;

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;

pub(crate) use tonic_rdma_codec::land_in::{Claimed, Target};
pub use tonic_rdma_codec::land_in::{Outcome, WhyCopied, WhyEmpty};
use tonic_rdma_memory::{InUse, NamedBuffer};

/// An application buffer in which the longest `bytes` field of a reply lands or, at a
/// [server](crate::Server::land_in), of a request.
///
/// The buffer is passed by value: a `Vec<u8>`, a boxed slice, huge pages, a block for O_DIRECT, a
/// slot of a cache, or the mapping of a file. The call then owns the buffer, even if the call's
/// future is dropped, times out or is forgotten. [`finish`](Self::finish) returns the buffer by
/// value once no peer and no device can write to it. Until then the reply's field is a
/// [`Bytes`](bytes::Bytes) over the buffer, not a copy of it. Nobody may truncate a file that is
/// mapped as the buffer until `finish` has returned it, or the process ends with SIGBUS: see
/// [`Context::register`](crate::Context::register).
///
/// ```no_run
/// # use tonic_rdma_example_services::store::{Name, store_client::StoreClient};
/// # async fn read(mut client: StoreClient<tonic_rdma::Channel>) -> Result<(), Box<dyn std::error::Error>> {
/// use tonic_rdma::LandIn;
///
/// let land_in = LandIn::new(vec![0; 16 << 20]);
/// let mut request = tonic::Request::new(Name { name: "block".into() });
/// land_in.attach(&mut request);
/// let reply = client.get(request).await?.into_inner();
/// let len = reply.data.len(); // Bytes over the buffer
/// drop(reply);
/// let finished = land_in.finish().await?;
/// assert_eq!(finished.outcome.filled(), len);
/// let buffer: Vec<u8> = finished.buffer;
/// # Ok(()) }
/// ```
///
/// # How the field gets there
///
/// | path | how |
/// |---|---|
/// | RDMA | the server's WRITE goes to the buffer, so no CPU copies |
/// | shared memory | the server cannot map the buffer, so its WRITE, a copy, goes to landing memory, and the field is copied to the buffer. A [`LandableBuf`](crate::LandableBuf) that [stays registered](Self::keep_registered) can be mapped, and the WRITE then goes to the buffer |
/// | TCP | the message is assembled as it arrives, and the field is copied |
///
/// [`Outcome`] says how the field got into the buffer, and [`Copied::named`](crate::Copied::named)
/// counts the copies. The stub has to use [`ProstCodec`](crate::codec::ProstCodec), and the field
/// has to be of type `Bytes`. Otherwise the reply is delivered in the ordinary way, and the buffer
/// stays empty. Only the reply's first message lands in the buffer.
///
/// # Who can write to the buffer
///
/// Over RDMA the buffer is registered for this call alone. The buffer's key is withdrawn when the
/// transfer has ended, unless the buffer is to [stay registered](Self::keep_registered). Until
/// `finish` has returned the buffer, a server that breaks the protocol can change data that it has
/// sent, so check the bytes in the returned buffer, not in the reply. The server cannot reach any
/// other memory of the process. The buffer counts as pinned memory, like memory of
/// [`Context::register`](crate::Context::register), and within the same limits.
///
/// Registering costs a system call, and time for each page. Registering is worth its cost for large
/// fields. Below a few hundred KiB, the ordinary path with a copy is faster.
///
/// Clones are handles to the same buffer.
pub struct LandIn<T> {
    target: Target,
    _owner: PhantomData<fn() -> T>,
}

/// The result of an allocator of [`Server::land_in`](crate::Server::land_in): a buffer by value, or
/// a [`LandIn`], which several requests can use one after the other.
pub trait IntoLandIn: sealed::Sealed {
    /// The application's buffer.
    type Buffer: AsMut<[u8]> + Send + 'static;

    /// Converts the result to a handle for a request.
    #[doc(hidden)]
    fn into_land_in(self) -> LandIn<Self::Buffer>;
}

mod sealed {
    use super::LandIn;

    pub trait Sealed {}
    impl<T: AsMut<[u8]> + Send + 'static> Sealed for T {}
    impl<T: AsMut<[u8]> + Send + 'static> Sealed for LandIn<T> {}
}

impl<T: AsMut<[u8]> + Send + 'static> IntoLandIn for T {
    type Buffer = T;

    fn into_land_in(self) -> LandIn<T> {
        LandIn::new(self)
    }
}

impl<T: AsMut<[u8]> + Send + 'static> IntoLandIn for LandIn<T> {
    type Buffer = T;

    fn into_land_in(self) -> LandIn<T> {
        self
    }
}

/// The result of [`LandIn::finish`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Finished<T> {
    /// The buffer that was given to [`LandIn::new`].
    pub buffer: T,
    /// How the field got into the buffer, or why the buffer is empty.
    pub outcome: Outcome,
}

/// Why [`LandIn::finish`] returns no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FinishError {
    /// The reply, or clones of its field, are still alive. Drop the reply and the clones, and call
    /// `finish` again.
    #[error(
        "{0} parts of the reply's field are still alive: drop the reply, then call finish again"
    )]
    Viewed(usize),
    /// The buffer was already returned.
    #[error("the buffer was already returned")]
    Taken,
}

impl<T: AsMut<[u8]> + Send + 'static> LandIn<T> {
    /// Takes a buffer in which one reply at a time lands. `as_mut` is called once, and the field
    /// lands at the beginning of its result.
    ///
    /// If the longest `bytes` field of the first message is longer than the buffer, the call fails
    /// with OUT_OF_RANGE, and the status names both lengths. Later messages of a stream may be
    /// longer. With another codec than `ProstCodec` no call fails, and the buffer stays empty.
    pub fn new(buffer: T) -> Self {
        LandIn { target: Target::new(NamedBuffer::new(buffer)), _owner: PhantomData }
    }

    /// Keeps the whole buffer registered over RDMA, from the first reply that lands in it until
    /// [`finish`](Self::finish). Several calls can then use the buffer one after the other, and
    /// only the first call registers it. [`outcome`](Self::outcome) waits until the next call may
    /// use the buffer.
    ///
    /// **Only for servers that are trusted not to break the protocol.** A server that has had the
    /// key can write to the buffer, and to no other memory, until `finish` or until its connection
    /// has ended. By then the buffer may hold a later reply, even a reply of another server.
    /// Without this option the key is withdrawn before the next call can use the buffer.
    ///
    /// Over shared memory, the option applies only to a [`LandableBuf`](crate::LandableBuf). Peers
    /// then map the buffer if their program has turned mapping on
    /// ([`ContextBuilder::map_peer_buffers`](crate::ContextBuilder::map_peer_buffers)). A mapping
    /// cannot be withdrawn: a process that has mapped the buffer can write to the buffer for as
    /// long as the process runs, even after `finish` has returned the buffer.
    ///
    /// A buffer is registered with one device at a time. A connection over another device registers
    /// the buffer again. A device that is removed stays in use until the buffer is registered with
    /// another device, or until `finish`.
    #[must_use]
    pub fn keep_registered(self) -> Self {
        self.target.buffer.keep_registered();
        self
    }

    /// Waits until no call uses the buffer, and returns the outcome of the last call. The last call
    /// may have begun during the wait, if the buffer is attached to several requests. The next call
    /// may use the buffer once the field is dropped.
    ///
    /// # Cancel safety
    /// Cancel safe: the method changes nothing.
    pub async fn outcome(&self) -> Outcome {
        poll_fn(|cx| self.target.buffer.poll_idle(cx)).await;
        self.target.outcome()
    }

    /// Makes the reply to `request` land in the buffer. Call this before the request is sent
    /// through this crate's [`Channel`](crate::Channel). Other transports ignore the buffer. If the
    /// buffer is attached to several requests, the first call that begins gets the buffer.
    pub fn attach<M>(&self, request: &mut tonic::Request<M>) {
        request.extensions_mut().insert(self.target.clone());
    }

    /// Waits until no call uses the buffer, and returns the buffer. A call that has not begun does
    /// not get the buffer. The wait ends with the transfer, or with the peer's connection. If the
    /// peer pauses, the wait continues, unless the keep-alive of
    /// [`Endpoint::http2_keep_alive_interval`](crate::Endpoint::http2_keep_alive_interval) ends the
    /// connection.
    ///
    /// # Cancel safety
    /// Cancel safe: the buffer stays in place, and `finish` can be called again.
    ///
    /// # Errors
    /// Returns [`FinishError::Viewed`] if the reply or a clone of its field is still alive, and
    /// [`FinishError::Taken`] if the buffer was already returned.
    pub async fn finish(&self) -> Result<Finished<T>, FinishError> {
        let buffer = &self.target.buffer;
        buffer.close();
        loop {
            poll_fn(|cx| buffer.poll_idle(cx)).await;
            match buffer.take::<T>() {
                Ok(buffer) => {
                    return Ok(Finished { buffer, outcome: self.target.outcome() });
                }
                Err(InUse::Viewed(views)) => return Err(FinishError::Viewed(views)),
                Err(InUse::Taken) => return Err(FinishError::Taken),
                // A call claimed the buffer before the buffer was closed.
                Err(InUse::Claimed) => {}
            }
        }
    }
}

impl<T> Clone for LandIn<T> {
    fn clone(&self) -> Self {
        LandIn { target: self.target.clone(), _owner: PhantomData }
    }
}

impl<T> fmt::Debug for LandIn<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LandIn").field("buffer", &self.target.buffer).finish_non_exhaustive()
    }
}
