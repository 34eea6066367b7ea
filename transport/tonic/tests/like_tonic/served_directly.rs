//! `Server::serve` and its variants take a service, like tonic's methods, and add the Offer to it.

use std::net::SocketAddr;

use axum::routing::get;
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::service::InterceptorLayer;
use tonic::{Code, Status};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Path, Policy, ReasonCode, Server};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::GreeterServer;
use tower::{Service, ServiceExt};

async fn listener() -> (SocketAddr, TcpIncoming) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (listener.local_addr().unwrap(), TcpIncoming::from(listener))
}

async fn connect(addr: SocketAddr, policy: Policy) -> Channel {
    Endpoint::from_shared(format!("http://{addr}")).unwrap().policy(policy).connect().await.unwrap()
}

async fn greet<T>(channel: T) -> Result<String, Status>
where
    T: tonic::client::GrpcService<Body>,
    T::Error: Into<tonic::codegen::StdError>,
    T::ResponseBody: tonic::codegen::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as tonic::codegen::Body>::Error: Into<tonic::codegen::StdError> + Send,
{
    let reply = GreeterClient::new(channel).say_hello(HelloRequest { name: "you".into() }).await?;
    Ok(reply.into_inner().message)
}

#[tokio::test]
async fn a_service_on_both_paths() {
    let (addr, incoming) = listener().await;
    let server = Server::builder().serve_with_incoming(GreeterServer::new(Hello), incoming);
    tokio::spawn(server);
    for (policy, path) in [(Policy::Require, Path::Shm), (Policy::Off, Path::Tcp)] {
        let channel = connect(addr, policy).await;
        assert_eq!(greet(channel).await.unwrap(), format!("hello you, you came by {path}"));
    }
    let stock = tonic::transport::Endpoint::from_shared(format!("http://{addr}")).unwrap();
    assert_eq!(greet(stock.connect().await.unwrap()).await.unwrap(), "hello you, you came by tcp");
}

/// axum's types for bodies and errors are not tonic's, and axum itself answers requests for all
/// other paths.
#[tokio::test]
async fn an_axum_router_on_both_paths_until_the_signal() {
    let (addr, incoming) = listener().await;
    let (stop, stopped) = oneshot::channel::<()>();
    let app = axum::Router::new()
        .route("/ready", get(|| async { "yes" }))
        .route_service("/greeter.Greeter/{*method}", GreeterServer::new(Hello));
    let signal = async { drop(stopped.await) };
    let server = Server::builder().serve_with_incoming_shutdown(app, incoming, signal);
    let server = tokio::spawn(server);
    let fast = connect(addr, Policy::Require).await;
    assert_eq!(greet(fast.clone()).await.unwrap(), "hello you, you came by shm");
    let mut tcp = connect(addr, Policy::Off).await;
    let request = Request::builder().uri(format!("http://{addr}/ready")).body(Body::empty());
    let response: Response<Body> = tcp.ready().await.unwrap().call(request.unwrap()).await.unwrap();
    assert_eq!(response.status(), http::StatusCode::OK);
    // axum knows no such route, and the request is not an Offer.
    let other = Request::builder().uri(format!("http://{addr}/other")).body(Body::empty());
    let response = tcp.ready().await.unwrap().call(other.unwrap()).await.unwrap();
    assert_eq!(response.status(), http::StatusCode::NOT_FOUND);
    drop((tcp, fast));
    stop.send(()).unwrap();
    server.await.unwrap().unwrap();
}

/// A layer that refuses calls also refuses the Offer, so there is no way around the layers.
#[tokio::test]
async fn layers_guard_the_offer_too() {
    let (addr, incoming) = listener().await;
    let layer = InterceptorLayer::new(|request: tonic::Request<()>| {
        match request.metadata().contains_key("authorization") {
            true => Ok(request),
            false => Err(Status::unauthenticated("no token")),
        }
    });
    let server = Server::builder().layer(layer);
    tokio::spawn(server.serve_with_incoming(GreeterServer::new(Hello), incoming));
    let channel = connect(addr, Policy::Auto).await;
    let path = channel.path();
    assert_eq!(
        path.reason.as_ref().map(|reason| reason.code()),
        Some(ReasonCode::HandshakeRejected)
    );
    assert_eq!(greet(channel).await.unwrap_err().code(), Code::Unauthenticated);
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    let with_token = endpoint.offer_interceptor(|mut request: tonic::Request<()>| {
        request.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
        Ok(request)
    });
    assert_eq!(with_token.connect().await.unwrap().path().path, Path::Shm);
}

#[tokio::test]
async fn an_address_is_bound_and_given_back() {
    // While `incoming` holds the port, the server fails with an error that names the address. After
    // that, another program could take the port first, and the server would fail again.
    let (addr, incoming) = listener().await;
    let taken = Server::builder().serve(addr, GreeterServer::new(Hello)).await.unwrap_err();
    let cause = tonic_rdma::Cause::of(&taken);
    let bind = matches!(cause, Some(tonic_rdma::Cause::Bind { addr: at, .. }) if *at == addr);
    assert!(bind, "{taken:?}");
    drop(incoming);
    let (stop, stopped) = oneshot::channel::<()>();
    let signal = async { drop(stopped.await) };
    let server = Server::builder().serve_with_shutdown(addr, GreeterServer::new(Hello), signal);
    let server = tokio::spawn(server);
    // The server binds the address when it is first polled.
    tokio::task::yield_now().await;
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap().require_fast_path(true);
    let channel = loop {
        match endpoint.connect().await {
            Ok(channel) => break channel,
            Err(error) => assert!(!server.is_finished(), "{error:?}"),
        }
    };
    assert_eq!(greet(channel).await.unwrap(), "hello you, you came by shm");
    stop.send(()).unwrap();
    server.await.unwrap().unwrap();
}

#[test]
fn addresses_are_refused_with_tonics_error() {
    let ours: http::uri::InvalidUri = Channel::from_shared("http://[").unwrap_err();
    let theirs = tonic::transport::Channel::from_shared("http://[").unwrap_err();
    assert_eq!(ours.to_string(), theirs.to_string());
    assert_eq!(Channel::from_shared("http://10.0.0.1:1").unwrap().uri(), "http://10.0.0.1:1/");
}
