//! tonic over rdma-io-tonic: HTTP/2 over a byte stream that is carried by SENDs.

use anyhow::Context as _;
use benches::{
    client::{Client, tonic_endpoint},
    contender::Contender,
    service::{self, MAX_REPLY},
    session::{self, CallRunner},
};
use rdma_io::send_recv_transport::SendRecvConfig;
use rdma_io_tonic::{RdmaConnector, RdmaIncoming};
use std::net::{IpAddr, SocketAddr};

/// HTTP/2 windows in bytes, of a stream and of a connection.
///
/// rdma-io-tonic does not limit a sender to the receives that the peer has posted. HTTP/2 sends a
/// frame of 16 KiB as two messages, which soon exhaust the default of 8 receives. Then the
/// connection stalls over RoCE and breaks over iWARP. With these windows and the number of receives
/// in `settings`, at least one receive is always left.
const WINDOW: u32 = 512 << 10;

/// Settings with enough receives for the windows, and some more. Each receive is a memory region,
/// so with many more receives 64 connections exceed Soft-iWARP's limits. The settings allow several
/// concurrent sends instead of the default of one.
fn settings() -> SendRecvConfig {
    SendRecvConfig { num_recv_bufs: 72, num_send_bufs: 4, ..SendRecvConfig::stream() }
}

pub(crate) async fn serve(addr: IpAddr) -> anyhow::Result<()> {
    let incoming = RdmaIncoming::bind(&SocketAddr::new(addr, 0), settings())?;
    println!("{}", incoming.local_addr().context("it does not say where it listens")?);
    let mut server = service::tonic_server()
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW);
    Ok(server
        .add_routes(service::routes(Contender::RdmaIoTonic, MAX_REPLY))
        .serve_with_incoming(incoming)
        .await?)
}

pub(crate) async fn client(server_addr: String) -> anyhow::Result<()> {
    let connect = async move |_| {
        let endpoint = tonic_endpoint(format!("http://{server_addr}"))?
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        let connector = RdmaConnector::new(settings());
        Ok(Client::tonic(endpoint.connect_with_connector(connector).await?))
    };
    match CallRunner::new(connect).await {
        Ok(calling) => session::run(calling).await,
        Err(error) => session::report_failure(&error),
    }
}
