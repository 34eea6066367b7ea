//! What is called, and the servers that both contenders run.

use crate::pb::{
    Blob,
    bench_server::{Bench, BenchServer},
};
use bytes::Bytes;
use std::net::SocketAddr;
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

/// Largest message in bytes that the programs here exchange.
pub const LIMIT: usize = 64 << 20;

/// HTTP/2 windows in bytes, of a stream and of a connection. Wide enough that 8 calls of 1 MiB never
/// wait for a window: TCP is to be compared at its best.
pub const WINDOWS: (u32, u32) = (8 << 20, 16 << 20);

/// Which transport carries the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Contender {
    /// tonic's own, over TCP.
    Stock,
    /// tonic-rdma.
    Rdma,
}

/// Answers from memory that is there already, so that the transport is measured and not the handler.
#[derive(Clone, Debug)]
struct Replies(Bytes);

#[tonic::async_trait]
impl Bench for Replies {
    async fn exchange(&self, request: Request<Blob>) -> Result<Response<Blob>, Status> {
        let length = usize::try_from(request.get_ref().reply).unwrap_or(usize::MAX);
        if length > self.0.len() {
            return Err(Status::out_of_range(format!("a reply has at most {} bytes", self.0.len())));
        }
        Ok(Response::new(Blob { payload: self.0.slice(..length), reply: 0 }))
    }
}

/// Serves until the process ends, calling `ready` with the address once clients can connect.
/// `frame_size` is the largest HTTP/2 frame in bytes that the stock server takes; `None`: 16 KiB.
///
/// # Errors
/// The address cannot be bound, or serving fails.
pub async fn serve(
    contender: Contender,
    addr: SocketAddr,
    largest_reply: usize,
    frame_size: Option<u32>,
    ready: impl FnOnce(SocketAddr),
) -> anyhow::Result<()> {
    let service = BenchServer::new(Replies(Bytes::from(vec![0x5a; largest_reply])))
        .max_decoding_message_size(LIMIT)
        .max_encoding_message_size(LIMIT);
    let incoming = TcpIncoming::bind(addr)?.with_nodelay(Some(true));
    ready(incoming.local_addr()?);
    let (stream, connection) = WINDOWS;
    match contender {
        Contender::Stock => {
            tonic::transport::Server::builder()
                .initial_stream_window_size(stream)
                .initial_connection_window_size(connection)
                .max_frame_size(frame_size)
                .add_service(service)
                .serve_with_incoming(incoming)
                .await?;
        }
        Contender::Rdma => {
            tonic_rdma::Server::builder()
                .initial_stream_window_size(stream)
                .initial_connection_window_size(connection)
                .add_service(service)
                .serve_with_incoming(incoming)
                .await?;
        }
    }
    Ok(())
}
