//! The stream of connections given to a server ends. Established connections are still served, over
//! TCP and over the fast path, as in tonic.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic_rdma::{Channel, Endpoint, Path, Policy, Router, Server};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

type Incoming = ReceiverStream<io::Result<TcpStream>>;

fn router() -> Router {
    Server::builder().add_service(GreeterServer::new(Hello))
}

/// A listener whose connections the test passes on until it drops the sender.
async fn incoming() -> (TcpListener, SocketAddr, mpsc::Sender<io::Result<TcpStream>>, Incoming) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::channel(1);
    (listener, addr, sender, ReceiverStream::new(receiver))
}

async fn connect(addr: SocketAddr, policy: Policy) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    endpoint.policy(policy).connect().await.unwrap()
}

/// The server's answer to a call over this path.
fn greeting(path: Path) -> String {
    format!("hello you, you came by {path}")
}

async fn greet(channel: &Channel) -> Result<String, Status> {
    let request = HelloRequest { name: "you".into() };
    Ok(GreeterClient::new(channel.clone()).say_hello(request).await?.into_inner().message)
}

const BOTH: [(Policy, Path); 2] = [(Policy::Require, Path::Shm), (Policy::Off, Path::Tcp)];

/// The connection is established before the stream ends.
#[tokio::test]
async fn connections_keep_their_path() {
    for (policy, path) in BOTH {
        let (listener, addr, sender, incoming) = incoming().await;
        let server = tokio::spawn(router().serve_with_incoming(incoming));
        let accept = async { sender.send(Ok(listener.accept().await.unwrap().0)).await.unwrap() };
        let (channel, ()) = tokio::join!(connect(addr, policy), accept);
        assert_eq!(greet(&channel).await.unwrap(), greeting(path));
        drop(sender);
        server.await.unwrap().unwrap();
        for _ in 0..100 {
            assert_eq!(greet(&channel).await.unwrap(), greeting(path));
        }
        assert_eq!(channel.path().path, path, "{}", channel.path());
    }
}

/// The stream ends with its only connection, before the client has asked for the fast path.
#[tokio::test]
async fn the_fast_path_comes_up_later_and_nothing_is_left() {
    const ROUNDS: usize = 5;
    for (policy, path) in BOTH.repeat(ROUNDS) {
        let (listener, addr, sender, incoming) = incoming().await;
        let server = tokio::spawn(router().serve_with_incoming(incoming));
        let before = TcpStream::connect(addr).await.unwrap();
        sender.send(Ok(listener.accept().await.unwrap().0)).await.unwrap();
        drop(sender);
        server.await.unwrap().unwrap();
        let mut connection = Some(before);
        let connector = tower::service_fn(move |_| {
            let connection = connection.take().ok_or(io::ErrorKind::ConnectionRefused);
            let connection = connection.map(hyper_util::rt::TokioIo::new);
            std::future::ready(connection.map_err(io::Error::from))
        });
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap().policy(policy);
        let channel = endpoint.connect_with_connector(connector).await.unwrap();
        assert_eq!(greet(&channel).await.unwrap(), greeting(path));
    }
    // Each server's listeners and tasks end with its last connection. A few tasks belong to the
    // runtime.
    let metrics = tokio::runtime::Handle::current().metrics();
    let mut looks = 0;
    while metrics.num_alive_tasks() >= ROUNDS {
        looks += 1;
        assert!(looks < 10_000, "{} tasks are left", metrics.num_alive_tasks());
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// A server with a signal shuts down when the stream ends, whatever its clients keep open.
#[tokio::test]
async fn a_server_with_a_signal_drains() {
    for (policy, path) in BOTH {
        let (listener, addr, sender, incoming) = incoming().await;
        let signal = std::future::pending();
        let server = tokio::spawn(router().serve_with_incoming_shutdown(incoming, signal));
        let accept = async { sender.send(Ok(listener.accept().await.unwrap().0)).await.unwrap() };
        let (channel, ()) = tokio::join!(connect(addr, policy), accept);
        assert_eq!(greet(&channel).await.unwrap(), greeting(path));
        drop((sender, listener));
        server.await.unwrap().unwrap();
        greet(&channel).await.unwrap_err();
    }
}
