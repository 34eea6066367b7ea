//! What is called, and the server process of a contender.

use crate::{
    contender::{Contender, Way},
    pb::{
        Blob,
        bench_server::{Bench, BenchServer},
    },
};
use anyhow::Context as _;
use bytes::Bytes;
use std::{net::SocketAddr, path::PathBuf};
use tokio::net::UnixListener;
use tokio_stream::{Stream, wrappers::UnixListenerStream};
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

/// Largest message in bytes that the programs here exchange.
pub const LIMIT: usize = 128 << 20;

/// HTTP/2 windows in bytes, of a stream and of a connection. Wide enough that 8 calls of 1 MiB never
/// wait for a window: TCP is to be compared at its best.
pub const WINDOWS: (u32, u32) = (8 << 20, 16 << 20);

/// Answers from memory that is there already, so that the transport is measured and not the handler.
#[derive(Clone, Debug)]
struct Replies(Bytes);

impl Replies {
    fn reply(&self, request: &Blob) -> Result<Blob, Status> {
        let length = usize::try_from(request.reply).unwrap_or(usize::MAX);
        if length > self.0.len() {
            return Err(Status::out_of_range(format!("a reply has at most {} bytes", self.0.len())));
        }
        Ok(Blob { payload: self.0.slice(..length), reply: 0, count: 0 })
    }
}

type BlobStream = std::pin::Pin<Box<dyn Stream<Item = Result<Blob, Status>> + Send>>;

#[tonic::async_trait]
impl Bench for Replies {
    async fn exchange(&self, request: Request<Blob>) -> Result<Response<Blob>, Status> {
        Ok(Response::new(self.reply(request.get_ref())?))
    }

    type StreamStream = BlobStream;

    async fn stream(&self, request: Request<Blob>) -> Result<Response<BlobStream>, Status> {
        let reply = self.reply(request.get_ref())?;
        let count = usize::try_from(request.get_ref().count).unwrap_or(usize::MAX);
        let replies = std::iter::repeat_n(reply, count).map(Ok);
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Place {
    /// An IP address; port 0 takes a free one.
    Ip(SocketAddr),
    /// A unix socket at this path.
    Unix(PathBuf),
}

/// Serves until the process ends, calling `ready` with the address, or path, once clients can connect.
///
/// # Errors
/// The address cannot be bound, or serving fails.
pub async fn serve(
    contender: Contender,
    place: Place,
    largest_reply: usize,
    ready: impl FnOnce(String),
) -> anyhow::Result<()> {
    let service = BenchServer::new(Replies(Bytes::from(vec![0x5a; largest_reply])))
        .max_decoding_message_size(LIMIT)
        .max_encoding_message_size(LIMIT);
    let (stream, connection) = WINDOWS;
    let tonic = || {
        tonic::transport::Server::builder()
            .initial_stream_window_size(stream)
            .initial_connection_window_size(connection)
    };
    match (contender.way(), place) {
        (Way::Tonic { .. }, Place::Unix(path)) => {
            let listener = UnixListener::bind(&path).context("cannot bind the unix socket")?;
            ready(path.display().to_string());
            tonic().add_service(service).serve_with_incoming(UnixListenerStream::new(listener)).await?;
        }
        (Way::Tonic { .. }, Place::Ip(addr)) => {
            let incoming = TcpIncoming::bind(addr)?.with_nodelay(Some(true));
            ready(incoming.local_addr()?.to_string());
            tonic().add_service(service).serve_with_incoming(incoming).await?;
        }
        (Way::Ours(fabric), Place::Ip(addr)) => {
            let incoming = TcpIncoming::bind(addr)?.with_nodelay(Some(true));
            ready(incoming.local_addr()?.to_string());
            tonic_rdma::Server::builder()
                .fabrics(fabric)
                .initial_stream_window_size(stream)
                .initial_connection_window_size(connection)
                .add_service(service)
                .serve_with_incoming(incoming)
                .await?;
        }
        (Way::Ours(_), Place::Unix(_)) => anyhow::bail!("tonic-rdma is found by an IP address"),
    }
    Ok(())
}
