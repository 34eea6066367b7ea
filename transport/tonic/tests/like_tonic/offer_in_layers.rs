//! Layers and routes in front of the services handle the Offer. Either the channel stays on TCP
//! with a reason that names the case, or the layer leaves the Offer out.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response, StatusCode};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::{Code, Status};
use tonic_rdma::server::{TcpIncoming, is_offer};
use tonic_rdma::{Channel, Endpoint, Path, Policy, Reason, ReasonCode, Server, Side};
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};
use tower::filter::FilterLayer;

/// Creates an answer to an Offer.
type Answer = fn() -> Response<Body>;

struct Hello;

#[tonic::async_trait]
impl Greeter for Hello {
    async fn say_hello(
        &self,
        _: tonic::Request<HelloRequest>,
    ) -> Result<tonic::Response<HelloReply>, Status> {
        Ok(tonic::Response::new(HelloReply::default()))
    }
}

async fn listener() -> (SocketAddr, TcpIncoming) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (listener.local_addr().unwrap(), TcpIncoming::from(listener))
}

fn endpoint(addr: SocketAddr) -> Endpoint {
    Endpoint::from_shared(format!("http://{addr}")).unwrap()
}

async fn say_hello(channel: &Channel) -> Result<(), Status> {
    GreeterClient::new(channel.clone()).say_hello(HelloRequest::default()).await.map(drop)
}

/// The reason of a channel to a service that answers the Offer with `answer`. If the channel
/// requires the fast path, a call gets the same reason.
async fn reason_for(answer: Answer) -> Reason {
    let addr = serve(answer).await;
    let reason = reason_of_path_to(addr).await;
    let required = endpoint(addr).require_fast_path(true).connect_lazy();
    let status = say_hello(&required).await.unwrap_err();
    assert_eq!((status.code(), Reason::of(&status)), (Code::Unavailable, Some(&reason)));
    reason
}

async fn reason_of_path(answer: Answer) -> Reason {
    reason_of_path_to(serve(answer).await).await
}

/// The reason why calls go over TCP.
async fn reason_of_path_to(addr: SocketAddr) -> Reason {
    let channel = endpoint(addr).connect().await.unwrap();
    say_hello(&channel).await.unwrap();
    let path = channel.path();
    assert_eq!(path.path, Path::Tcp);
    path.reason.unwrap()
}

/// Starts tonic's server with a service that answers the Offer with `answer`.
async fn serve(answer: Answer) -> SocketAddr {
    let (addr, incoming) = listener().await;
    let mut hello = GreeterServer::new(Hello);
    let service = tower::service_fn(move |request: Request<Body>| {
        let call = (!is_offer(&request)).then(|| tower::Service::call(&mut hello, request));
        async move {
            match call {
                Some(call) => call.await,
                None => Ok(answer()),
            }
        }
    });
    tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(service, incoming));
    addr
}

fn http(status: StatusCode, content: &'static str, body: &'static str) -> Response<Body> {
    let body = Body::new(http_body_util::Full::new(bytes::Bytes::from_static(body.as_bytes())));
    Response::builder().status(status).header("content-type", content).body(body).unwrap()
}

#[tokio::test]
async fn a_server_without_the_service_is_not_capable() {
    let reason = reason_for(|| Status::unimplemented("").into_http()).await;
    assert_eq!((reason.code(), reason.side()), (ReasonCode::PeerNotCapable, Side::Local));
}

#[tokio::test]
async fn others_that_answer_are_told_from_it() {
    let cases: [(Answer, &str); 5] = [
        (|| Status::unimplemented("no RDMA for tenant 7").into_http(), "no RDMA for tenant 7"),
        (|| http(StatusCode::NOT_FOUND, "text/plain", "no such page"), "404"),
        (|| http(StatusCode::OK, "text/html", "<html>welcome</html>"), "not gRPC"),
        (|| http(StatusCode::OK, "application/grpc", ""), "not gRPC"),
        (|| http(StatusCode::BAD_GATEWAY, "text/html", "<html>502</html>"), "502"),
    ];
    for (answer, text) in cases {
        let reason = reason_for(answer).await;
        assert_eq!(reason.code(), ReasonCode::OfferIntercepted, "{text}: {reason}");
        assert!(reason.detail().contains(text), "{reason}");
    }
}

/// Credentials are missing, and the server says so in gRPC or in HTTP.
#[tokio::test]
async fn who_refuses_a_client_is_no_other_service() {
    let cases: [Answer; 2] = [
        || Status::unauthenticated("no token").into_http(),
        || http(StatusCode::UNAUTHORIZED, "text/plain", "no token"),
    ];
    for answer in cases {
        let reason = reason_of_path(answer).await;
        assert_eq!(reason.code(), ReasonCode::HandshakeRejected, "{reason}");
        assert!(reason.detail().contains("offer_metadata"), "{reason}");
    }
}

/// A layer counts the calls that it passes on, without the Offer.
#[tokio::test]
async fn a_layer_leaves_the_offer_out() {
    for (policy, path) in [(Policy::Require, Path::Shm), (Policy::Off, Path::Tcp)] {
        let (addr, incoming) = listener().await;
        let (all, calls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (count_all, count_calls) = (all.clone(), calls.clone());
        let counting = FilterLayer::new(move |request: Request<Body>| {
            count_all.fetch_add(1, Ordering::Relaxed);
            if !is_offer(&request) {
                count_calls.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, Status>(request)
        });
        let mut server = Server::builder().layer(counting);
        let router = server.add_service(GreeterServer::new(Hello));
        tokio::spawn(router.serve_with_incoming(incoming));
        let channel = endpoint(addr).policy(policy).connect().await.unwrap();
        assert_eq!(channel.path().path, path);
        for _ in 0..3 {
            say_hello(&channel).await.unwrap();
        }
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        let offers = usize::from(path == Path::Shm);
        assert_eq!(all.load(Ordering::Relaxed), 3 + offers);
    }
}
