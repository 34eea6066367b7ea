//! A ticket for a peer that a test implements itself.

use std::future::ready;
use std::io;
use std::net::SocketAddr;

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::Endpoint;
use tonic_rdma_proto::hello::{VERSION_MAX, VERSION_MIN};
use tower::service_fn;

use crate::bootstrap::bootstrap_client::BootstrapClient;
use crate::bootstrap::offer_response::Outcome;
use crate::bootstrap::{Grant, OfferRequest, TcpAddress};

/// Requests a grant with a ticket from `server` for `fabric` ("shm" or "verbs").
///
/// # Panics
/// The server does not answer, or does not grant.
pub async fn request_grant(server: SocketAddr, fabric: &str) -> Grant {
    request(server, fabric, false).await
}

/// Requests a grant whose ticket is for a connection that measures.
///
/// # Panics
/// The server does not answer, or does not grant.
pub async fn request_measuring_grant(server: SocketAddr, fabric: &str) -> Grant {
    request(server, fabric, true).await
}

async fn request(server: SocketAddr, fabric: &str, bare: bool) -> Grant {
    let tcp = TcpStream::connect(server).await.unwrap();
    let own = tcp.local_addr().unwrap();
    // The server grants a ticket only to a client that states its own end of this connection.
    let own = TcpAddress { ip: own.ip().to_string(), port: own.port().into() };
    let mut tcp = Some(TokioIo::new(tcp));
    let once = || io::Error::other("it connects once");
    let connector = service_fn(move |_: Uri| ready(tcp.take().ok_or_else(once)));
    let endpoint = Endpoint::from_shared(format!("http://{server}")).unwrap();
    let mut client =
        BootstrapClient::new(endpoint.connect_with_connector(connector).await.unwrap());
    let request = OfferRequest {
        version_min: VERSION_MIN.into(),
        version_max: VERSION_MAX.into(),
        fabrics: vec![fabric.into()],
        client: Some(own),
        bare,
    };
    let response = client.offer(request).await.unwrap().into_inner();
    let Some(Outcome::Grant(grant)) = response.outcome else { panic!("{response:?}") };
    grant
}
