//! A balanced channel with dead endpoints fails no more calls than tonic's in the same run.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::StdError;
use tonic::{Code, Request, Response, Status};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Policy, Server};
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};

/// Answers with its name.
struct Named(&'static str);

#[tonic::async_trait]
impl Greeter for Named {
    async fn say_hello(&self, _: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        Ok(Response::new(HelloReply { message: self.0.into() }))
    }
}

async fn bind(at: SocketAddr) -> (SocketAddr, TcpListener) {
    let listener = TcpListener::bind(at).await.unwrap();
    (listener.local_addr().unwrap(), listener)
}

fn any() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn serve(listener: TcpListener, name: &'static str) -> JoinHandle<Result<(), tonic_rdma::Error>> {
    let router = Server::builder().add_service(GreeterServer::new(Named(name)));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)))
}

fn endpoints(addrs: &[SocketAddr], policy: Policy) -> impl Iterator<Item = Endpoint> {
    let uris = addrs.iter().map(|addr| format!("http://{addr}"));
    uris.map(move |uri| Endpoint::from_shared(uri).unwrap().policy(policy))
}

/// Makes calls one after the other, and returns the number of failures.
async fn failures<T>(channel: T, calls: usize) -> usize
where
    T: GrpcService<Body>,
    T::Error: Into<StdError>,
    T::ResponseBody: tonic::codegen::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as tonic::codegen::Body>::Error: Into<StdError> + Send,
{
    let mut client = GreeterClient::new(channel);
    let mut failed = 0;
    for _ in 0..calls {
        if let Err(status) = client.say_hello(HelloRequest::default()).await {
            assert_eq!(status.code(), Code::Unavailable, "{status:?}");
            failed += 1;
        }
    }
    failed
}

#[tokio::test]
async fn one_of_two_is_dead() {
    const CALLS: usize = 2000;
    let (alive, listener) = bind(any()).await;
    // No process gets the port of a socket that is bound and does not listen.
    let dead = tokio::net::TcpSocket::new_v4().unwrap();
    dead.bind(any()).unwrap();
    let addrs = [alive, dead.local_addr().unwrap()];
    let server = serve(listener, "alive");
    let uris = addrs.map(|addr| format!("http://{addr}"));
    let theirs = uris.map(|uri| tonic::transport::Endpoint::from_shared(uri).unwrap());
    let theirs = tonic::transport::Channel::balance_list(theirs.into_iter());
    let tonics = failures(theirs, CALLS).await;
    for policy in [Policy::Off, Policy::Auto] {
        let ours = failures(Channel::balance_list(endpoints(&addrs, policy)), CALLS).await;
        assert!(ours <= tonics, "{policy:?}: {ours} calls failed, and {tonics} with tonic");
    }
    server.abort();
}

#[tokio::test]
async fn all_are_dead() {
    let (first, second) =
        (tokio::net::TcpSocket::new_v4().unwrap(), tokio::net::TcpSocket::new_v4().unwrap());
    first.bind(any()).unwrap();
    second.bind(any()).unwrap();
    let addrs = [first.local_addr().unwrap(), second.local_addr().unwrap()];
    for policy in [Policy::Off, Policy::Auto] {
        // Every call fails, and none waits for a pause, because 2,000 pauses would take too long.
        let channel = Channel::balance_list(endpoints(&addrs, policy));
        assert_eq!(failures(channel, 2000).await, 2000);
    }
}

#[tokio::test]
async fn one_that_comes_back_is_used_again() {
    for policy in [Policy::Off, Policy::Auto] {
        let (first, listener) = bind(any()).await;
        let absent = tokio::net::TcpSocket::new_v4().unwrap();
        absent.bind(any()).unwrap();
        let addrs = [first, absent.local_addr().unwrap()];
        let server = serve(listener, "first");
        let channel = Channel::balance_list(endpoints(&addrs, policy));
        failures(channel.clone(), 100).await;
        let late = serve(absent.listen(16).unwrap(), "second");
        let mut client = GreeterClient::new(channel);
        loop {
            let reply = client.say_hello(HelloRequest::default()).await;
            if reply.is_ok_and(|reply| reply.get_ref().message == "second") {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        server.abort();
        late.abort();
    }
}
