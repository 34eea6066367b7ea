//! What a server's handler can learn about the path a request came by.

use crate::path::Path;
use std::net::SocketAddr;

/// The path a request came by. On the fast path it is in the request's extensions, beside the
/// connect info of the TCP connection that the client got its ticket over.
///
/// [`tonic::Request::remote_addr`], `local_addr` and `peer_certs` speak of that TCP connection on
/// both paths, so that code which authorises by address or certificate needs no change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaConnectInfo {
    /// The path of this request.
    pub path: Path,
    /// The RDMA device at this end. `None` on TCP.
    pub device: Option<String>,
    /// This end's address on that path.
    pub local_addr: Option<SocketAddr>,
    /// The client's address on that path.
    pub remote_addr: Option<SocketAddr>,
}

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
        return info.clone();
    }
    RdmaConnectInfo {
        path: Path::Tcp,
        device: None,
        local_addr: request.local_addr(),
        remote_addr: request.remote_addr(),
    }
}
