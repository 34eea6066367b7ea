//! Tells a server's handler the path of its request.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::context::Context;
use crate::path::Path;
use crate::pool::Pool;

/// The path of a request. On the fast path, the request's extensions contain this value next to the
/// connect info of the TCP connection over which the client received its ticket.
///
/// On both paths, [`tonic::Request::remote_addr`], `local_addr` and `peer_certs` refer to that TCP
/// connection, so code that authorises by address or certificate needs no change. All three are
/// `None` on a fast path whose client is behind a gateway
/// ([`Server::offer_through_gateways`](crate::Server::offer_through_gateways)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaConnectInfo {
    /// The path that the request took.
    pub path: Path,
    /// The RDMA device at this end. `None` on TCP and shared memory.
    pub device: Option<Arc<str>>,
    /// This end's address on the path. `None` if the path has no IP addresses, like shared memory.
    pub local_addr: Option<SocketAddr>,
    /// The client's address on the path. `None` if the path has no IP addresses, like shared
    /// memory.
    pub remote_addr: Option<SocketAddr>,
    /// The client's process ID on shared memory, as reported by the kernel. `None` on other paths.
    pub peer_pid: Option<u32>,
    pub(crate) pool: ConnectionPool,
}

/// The pool of the device over which `request` arrived. A response from this pool is sent without a
/// copy. On TCP, the pool consists of ordinary memory of the default size, so a handler needs no
/// branch.
///
/// ```
/// use tonic::{Request, Response, Status};
///
/// async fn handler(request: Request<()>) -> Result<Response<bytes::Bytes>, Status> {
///     let pool = tonic_rdma::pool(&request);
///     let buf = pool.alloc(1 << 20).await;
///     let mut buf = buf.map_err(|e| Status::resource_exhausted(e.to_string()))?;
///     buf.resize_zeroed(1 << 20); // read a file into it
///     Ok(Response::new(buf.freeze()))
/// }
/// ```
pub fn pool<T>(request: &tonic::Request<T>) -> Pool {
    match request.extensions().get::<RdmaConnectInfo>() {
        Some(RdmaConnectInfo { pool: ConnectionPool(Some(pool)), .. }) => Pool(pool.clone()),
        _ => Pool(Context::global().ordinary_pool()),
    }
}

/// The pool whose buffers a response sends without a copy. All values compare equal, so that a
/// comparison of two [`RdmaConnectInfo`] ignores the pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionPool(pub(crate) Option<tonic_rdma_memory::Pool>);

impl PartialEq for ConnectionPool {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ConnectionPool {}

/// The path of `request`, with its addresses. For a request over TCP, the addresses come from the
/// TCP connect info.
///
/// ```
/// use tonic::{Request, Response, Status};
///
/// async fn handler(request: Request<()>) -> Result<Response<String>, Status> {
///     let info = tonic_rdma::connect_info(&request);
///     Ok(Response::new(format!("you came by {}", info.path)))
/// }
/// ```
pub fn connect_info<T>(request: &tonic::Request<T>) -> RdmaConnectInfo {
    if let Some(info) = request.extensions().get::<RdmaConnectInfo>() {
        // Leave out the pool, so that a caller that keeps the info does not keep the pool alive.
        return RdmaConnectInfo { pool: ConnectionPool::default(), ..info.clone() };
    }
    RdmaConnectInfo {
        path: Path::Tcp,
        device: None,
        local_addr: request.local_addr(),
        remote_addr: request.remote_addr(),
        peer_pid: None,
        pool: ConnectionPool::default(),
    }
}
