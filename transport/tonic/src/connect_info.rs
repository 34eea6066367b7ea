//! What a server's handler can learn about the path a request came by.

use std::net::SocketAddr;
use std::sync::Arc;

use tonic_rdma_memory::Pool;

use crate::context::Context;
use crate::path::Path;

/// The path a request came by. On the fast path it is in the request's extensions, beside the
/// connect info of the TCP connection that the client got its ticket over.
///
/// [`tonic::Request::remote_addr`], `local_addr` and `peer_certs` speak of that TCP connection on
/// both paths, so that code which authorises by address or certificate needs no change. They are
/// `None` on a fast path whose client is behind a gateway
/// ([`Server::offer_through_gateways`](crate::Server::offer_through_gateways)).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaConnectInfo {
    /// The path of this request.
    pub path: Path,
    /// The RDMA device at this end. `None` on TCP and shared memory.
    pub device: Option<Arc<str>>,
    /// This end's address on that path.
    pub local_addr: Option<SocketAddr>,
    /// The client's address on that path.
    pub remote_addr: Option<SocketAddr>,
    /// The client's process, as the kernel says, where memory is shared with it. `None` elsewhere.
    pub peer_pid: Option<u32>,
    pub(crate) pool: ConnectionPool,
}

/// The pool to answer `request` from without a copy: that of the device that the request came by.
/// On TCP it is a pool of ordinary memory, so that a handler needs no branch; its size is the
/// default one.
///
/// ```
/// use tonic::{Request, Response, Status};
///
/// async fn handler(request: Request<()>) -> Result<Response<bytes::Bytes>, Status> {
///     let pool = tonic_rdma::pool(&request);
///     let mut buf = pool.alloc(1 << 20).await.map_err(|e| Status::resource_exhausted(e.to_string()))?;
///     buf.resize_zeroed(1 << 20); // read a file into it
///     Ok(Response::new(buf.freeze()))
/// }
/// ```
pub fn pool<T>(request: &tonic::Request<T>) -> Pool {
    match request.extensions().get::<RdmaConnectInfo>() {
        Some(RdmaConnectInfo { pool: ConnectionPool(Some(pool)), .. }) => pool.clone(),
        _ => Context::global().ordinary_pool(),
    }
}

/// What answers can come from without a copy. Two requests by the same path came by the same path,
/// whatever that is.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionPool(pub(crate) Option<Pool>);

impl PartialEq for ConnectionPool {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ConnectionPool {}

/// The path that `request` came by. For a request that came over TCP the answer is made from its
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
        // Who keeps it does not keep the pool.
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
