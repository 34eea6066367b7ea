//! The tonic-rdma end of a conversation with another language's gRPC: `interop/run` starts both.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Path, Server};
use tonic_rdma_tests::interop::cases;
use tonic_rdma_tests::interop::server::{EchoMetadata, Test};
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::pb::conformance_client::ConformanceClient;
use tonic_rdma_tests::probe::Probe;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{
    before, echo, echo_all, fail_with, hang, payload, receive_all, send_many, steps, summary,
};

#[derive(Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Serve on a port of the system's choice, and print the address
    Serve,
    /// Call a server with each kind of call, and fail unless it answers as it should
    Call {
        /// Where it listens
        addr: SocketAddr,
    },
    /// Call a server with gRPC's interoperability cases
    Cases {
        /// Where it listens
        addr: SocketAddr,
    },
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match Args::parse().role {
        Role::Serve => serve().await,
        Role::Call { addr } => call(addr).await,
        Role::Cases { addr } => {
            println!("gRPC's cases: {}: ok", cases::run(&connect(addr).await?).await.join(", "));
            Ok(())
        }
    }
}

async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into())?;
    println!("{}", incoming.local_addr()?);
    let service = Scripted::server(&Probe::default());
    Server::builder()
        .layer(EchoMetadata)
        .add_service(service)
        .add_service(Test::server())
        .serve_with_incoming(incoming)
        .await?;
    Ok(())
}

async fn connect(addr: SocketAddr) -> Result<Channel, Box<dyn std::error::Error>> {
    let channel = Endpoint::from_shared(format!("http://{addr}"))?.connect().await?;
    let path = channel.path();
    assert_eq!(path.path, Path::Tcp, "{path}");
    println!("path: {path}");
    Ok(channel)
}

async fn call(addr: SocketAddr) -> Result<(), Box<dyn std::error::Error>> {
    let channel = connect(addr).await?;
    let mut client = ConformanceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);

    for size in [0, 1, 70_000, 5 << 20] {
        let request = steps("", [echo(1)]).with_payload(1, size);
        client.unary(request).await?.into_inner().expect(1, size);
    }

    let sent = (1..=20).map(|seed| payload(seed, 1000));
    let first = steps("", [receive_all(), summary()]);
    let stream = tokio_stream::once(first).chain(tokio_stream::iter(sent.clone()));
    let reply = client.upload(stream).await?.into_inner();
    assert_eq!((reply.count, reply.total), (21, 20_000));

    let mut replies = client.download(steps("", [send_many(0, 3000, 20)])).await?.into_inner();
    for _ in 0..20 {
        // The other language's server has no pattern and sends zeros.
        let Message { payload, .. } = replies.message().await?.ok_or("too few messages")?;
        assert_eq!(payload, vec![0; 3000]);
    }
    assert_eq!(replies.message().await?, None);

    let stream = tokio_stream::once(steps("", [echo_all()])).chain(tokio_stream::iter(sent));
    let mut replies = client.chat(stream).await?.into_inner();
    replies.message().await?.ok_or("too few messages")?.expect(0, 0);
    for seed in 1..=20 {
        replies.message().await?.ok_or("too few messages")?.expect(seed, 1000);
    }
    assert_eq!(replies.message().await?, None);

    let refuse =
        fail_with(Code::NotFound, "naïve 100%", b"", &[("t-one", b"1"), ("t-raw-bin", b"\0\xff")]);
    let Err(status) = client.unary(before("", [refuse])).await else {
        return Err("the server should have refused".into());
    };
    assert_eq!((status.code(), status.message()), (Code::NotFound, "naïve 100%"));
    assert_eq!(status.metadata().get("t-one").map(|v| v.as_encoded_bytes()), Some(&b"1"[..]));
    let raw = status.metadata().get_bin("t-raw-bin").ok_or("no trailer")?.to_bytes()?;
    assert_eq!(&raw[..], b"\0\xff");
    ends(&mut client).await
}

/// Calls that do not end well, and calls in parallel with them.
async fn ends(client: &mut ConformanceClient<Channel>) -> Result<(), Box<dyn std::error::Error>> {
    // One message at a time, each answered before the next is sent, and then half-closed.
    let (requests, queue) = mpsc::channel(1);
    requests.send(steps("", [echo_all()])).await?;
    let mut replies = client.chat(ReceiverStream::new(queue)).await?.into_inner();
    replies.message().await?.ok_or("too few messages")?.expect(0, 0);
    for seed in 1..20 {
        requests.send(payload(seed, 10)).await?;
        replies.message().await?.ok_or("too few messages")?.expect(seed, 10);
    }
    drop(requests);
    assert_eq!(replies.message().await?, None);

    let mut late = tonic::Request::new(before(HANGS, [hang()]));
    late.set_timeout(Duration::from_millis(200));
    let Err(status) = client.unary(late).await else {
        return Err("the deadline should have passed".into());
    };
    // The server may notice the deadline first.
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    client.unary(steps(SAW_END, [])).await?;

    // This call is dropped while the server works on it.
    let dropped = client.unary(before(HANGS, [hang()]));
    assert!(tokio::time::timeout(Duration::from_millis(200), dropped).await.is_err());
    client.unary(steps(SAW_END, [])).await?;
    println!("all kinds of call: ok");
    Ok(())
}

/// The id of scripts that the other language's server does not end. It answers `SAW_END` only after
/// it has seen the end of a call with this id.
const HANGS: &str = "never answered";
const SAW_END: &str = "wait for a cancelled call";
