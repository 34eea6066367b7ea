//! Memory of the application that the field of a message lands in: of a reply, or of a request.
//!
//! | file | what |
//! |---|---|
//! | `allocators` | the buffers that a server has its requests land in |
//! | `tonic_rdma_codec::land_in` | the call's side of a buffer, and what has become of it |

pub(crate) mod allocators;

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;

pub(crate) use tonic_rdma_codec::land_in::{Claimed, Target};
pub use tonic_rdma_codec::land_in::{Outcome, WhyCopied, WhyEmpty};
use tonic_rdma_memory::{InUse, NamedBuffer};

/// A buffer of the application that the longest `bytes` field of a reply is to land in; at a
/// [server](crate::Server::land_in), of a request.
///
/// The buffer is given away by value: a `Vec<u8>`, a boxed slice, a mapping (of a file that nobody
/// truncates), huge pages, a block for O_DIRECT, a slot of a cache. The call owns it from then on,
/// also if its future is dropped, times out or is forgotten, and it comes back by value from
/// [`finish`](Self::finish) when no peer and no device can write to it any longer. The field of the
/// reply is a [`Bytes`](bytes::Bytes) over the buffer meanwhile, not a copy of it.
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
/// | RDMA | the server's WRITE goes to the buffer: no CPU copies |
/// | shared memory | the server's WRITE, a copy, goes to landing memory, and the field is copied from there: the server cannot map the buffer. It can map a [`LandableBuf`](crate::LandableBuf) that [stays registered](Self::keep_registered): then its WRITE goes there |
/// | TCP | the message is put together as it arrives, and the field is copied |
///
/// [`Outcome`] tells which way it was, and [`Copied::named`](crate::Copied::named) counts the
/// copies. The stub has to use [`ProstCodec`](crate::codec::ProstCodec), and the field has to be of
/// type `Bytes`; otherwise the reply is delivered as ever, and the buffer comes back empty. The
/// first message of the reply is the one that lands.
///
/// # Who can write to the buffer
///
/// Over RDMA the buffer is registered for this call alone, and its key is withdrawn when the
/// transfer has ended, unless it is to [stay registered](Self::keep_registered). Until the buffer
/// has come back, a server that breaks the protocol can change what it has sent: check the bytes in
/// the returned buffer, not in the reply. Nothing else of the process is within its reach. The
/// memory counts as pinned, as that of [`Context::register`](crate::Context::register) does, and
/// within the same limits.
///
/// Registering costs a system call and time by the page. It pays for large fields: below some
/// hundred KiB the ordinary path and a copy are faster.
///
/// Clones are handles of the same buffer.
pub struct LandIn<T> {
    target: Target,
    _owner: PhantomData<fn() -> T>,
}

/// What an allocator of [`Server::land_in`](crate::Server::land_in) returns: a buffer by value, or
/// a [`LandIn`], which several requests have one after the other.
pub trait IntoLandIn: sealed::Sealed {
    /// The buffer.
    type Buffer: AsMut<[u8]> + Send + 'static;

    /// For a request to land in.
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

/// What [`LandIn::finish`] returns.
#[derive(Debug)]
#[non_exhaustive]
pub struct Finished<T> {
    /// The buffer that was given to [`LandIn::new`].
    pub buffer: T,
    /// What it contains.
    pub outcome: Outcome,
}

/// Why [`LandIn::finish`] returns no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FinishError {
    /// The reply, or clones of its field, are alive: drop them, and call `finish` again.
    #[error("{0} parts of the reply's field are alive: drop the reply, then finish again")]
    Viewed(usize),
    /// The buffer has come back before.
    #[error("the buffer has come back already")]
    Taken,
}

impl<T: AsMut<[u8]> + Send + 'static> LandIn<T> {
    /// Takes a buffer for one reply at a time to land in. `as_mut` is called once; the field lands
    /// at the beginning of what it returns.
    pub fn new(buffer: T) -> Self {
        LandIn { target: Target::new(NamedBuffer::new(buffer)), _owner: PhantomData }
    }

    /// A call whose field is longer than the buffer fails with OUT_OF_RANGE and both lengths,
    /// before the field is transferred where the server tells how long it is. Without this the
    /// reply is delivered as ever, and the buffer stays empty.
    #[must_use]
    pub fn or_fail(mut self) -> Self {
        self.target.fails_if_too_long();
        self
    }

    /// Keeps all of the buffer registered, over RDMA, from the first reply that lands in it until
    /// [`finish`](Self::finish), for use with one call after the other: only the first one
    /// registers it. [`outcome`](Self::outcome) waits until the next call may have it.
    ///
    /// **Only for servers that are trusted not to break the protocol.** One that has had the key
    /// can write to the buffer, and to nothing else, until `finish`, or until its connection has
    /// ended: while a later reply lies there, also that of another server. Without this the key is
    /// withdrawn before the next call can have the buffer.
    ///
    /// Over shared memory this makes a difference for a [`LandableBuf`](crate::LandableBuf) alone,
    /// which peers then map if their program has turned that on
    /// ([`ContextBuilder::map_peer_buffers`](crate::ContextBuilder::map_peer_buffers)). Nothing can
    /// take that away from them: a process that has mapped the buffer can write to it for as long
    /// as it runs, also when `finish` has returned it.
    ///
    /// A buffer is registered with one device at a time. A connection over another one registers it
    /// anew. A device that is removed stays in use until then, or until `finish`.
    #[must_use]
    pub fn keep_registered(self) -> Self {
        self.target.buffer.keep_registered();
        self
    }

    /// Waits until no call has the buffer, and returns what has become of it in the last one, which
    /// may have begun meanwhile where several calls have it attached. The next call may have it
    /// then, once the field is dropped.
    ///
    /// # Cancel safety
    /// Cancel safe: it changes nothing.
    pub async fn outcome(&self) -> Outcome {
        poll_fn(|cx| self.target.buffer.poll_idle(cx)).await;
        self.target.outcome()
    }

    /// The reply to `request` is to land in the buffer. Call this before the request is sent
    /// through this crate's [`Channel`](crate::Channel); other transports ignore it. If several
    /// requests have the buffer, the first whose call begins gets it.
    pub fn attach<M>(&self, request: &mut tonic::Request<M>) {
        request.extensions_mut().insert(self.target.clone());
    }

    /// Waits until no call has the buffer any longer, and returns it. A call that has not begun yet
    /// does not get it. The wait ends with the transfer, or with the connection of the peer. One
    /// that pauses is waited for, unless
    /// [`Endpoint::http2_keep_alive_interval`](crate::Endpoint::http2_keep_alive_interval) is set.
    ///
    /// # Cancel safety
    /// Cancel safe: the buffer stays where it is, and this can be called again.
    ///
    /// # Errors
    /// [`FinishError::Viewed`] if the reply is alive, [`FinishError::Taken`] the second time.
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
                // Begun before it was closed.
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
