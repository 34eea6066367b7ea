//! A balanced channel has a path and a pool, and reports changes.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tonic::Status;
use tonic_rdma::channel::Change;
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Context, Endpoint, Path, Policy, ReasonCode, Server};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;

async fn serve() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let router = Server::builder().add_service(GreeterServer::new(Hello));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    addr
}

fn endpoint(addr: SocketAddr, context: &Context, policy: Policy) -> Endpoint {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    endpoint.context(context.clone()).policy(policy)
}

async fn greet(channel: &Channel) -> Result<String, Status> {
    let request = HelloRequest { name: "you".into() };
    Ok(GreeterClient::new(channel.clone()).say_hello(request).await?.into_inner().message)
}

/// Makes calls, so that each endpoint gets some, until the path has changed.
async fn next_path(channel: &mut Channel) -> (Path, Option<ReasonCode>) {
    let calls = channel.clone();
    tokio::select! {
        info = channel.path_changed() => (info.path, info.reason.map(|reason| reason.code())),
        () = async { loop { greet(&calls).await.unwrap(); tokio::task::yield_now().await } } => unreachable!(),
    }
}

#[tokio::test]
async fn the_path_follows_the_endpoints() {
    let (addrs, context) = ([serve().await, serve().await], Context::builder().build());
    let (mut channel, changes) = Channel::balance_channel(4);
    let reason = |channel: &Channel| channel.path().reason.map(|reason| reason.code());
    assert_eq!((channel.path().path, reason(&channel)), (Path::Tcp, Some(ReasonCode::Pending)));
    for (key, addr) in addrs.into_iter().enumerate() {
        changes.send(Change::Insert(key, endpoint(addr, &context, Policy::Require))).await.unwrap();
    }
    // Both endpoints are still connecting, so the reason may be reported first.
    let up = loop {
        match next_path(&mut channel).await {
            (Path::Tcp, Some(ReasonCode::Pending)) => {}
            other => break other,
        }
    };
    assert_eq!((up, channel.path().path), ((Path::Shm, None), Path::Shm));
    assert_eq!(greet(&channel).await.unwrap(), "hello you, you came by shm");
    // The pool belongs to the connections and holds their control memory.
    assert!(channel.pool().stats().control > 0, "{:?}", channel.pool().stats());
    assert!(!channel.context().pool_stats().await.is_empty());

    // With an endpoint that stays on TCP, calls may take TCP.
    changes.send(Change::Insert(9, endpoint(addrs[0], &context, Policy::Off))).await.unwrap();
    assert_eq!(next_path(&mut channel).await, (Path::Tcp, Some(ReasonCode::Policy)));
    assert!(channel.pool().stats().control > 0);
    changes.send(Change::Remove(9)).await.unwrap();
    assert_eq!(next_path(&mut channel).await, (Path::Shm, None));
    // Remove the other endpoints, so that none is left.
    for key in [0, 1] {
        changes.send(Change::Remove(key)).await.unwrap();
    }
    let calls = channel.clone();
    let waits = tokio::spawn(async move { greet(&calls).await });
    assert_eq!(channel.path_changed().await.reason.unwrap().code(), ReasonCode::Pending);
    assert_eq!(channel.pool().stats().control, 0);
    waits.abort();
}
