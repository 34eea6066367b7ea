//! tower-http's layers, around the server and around the channel.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::routing::get;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING};
use http::{HeaderValue, Request};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::sync::Semaphore;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Response, Status};
use tonic_rdma::Server;
use tonic_rdma_ecosystem_tests::{Net, greet};
use tonic_rdma_example_services::Hello;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};
use tower::ServiceBuilder;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::classify::GrpcFailureClass;
use tower_http::compression::CompressionLayer;
use tower_http::metrics::InFlightRequestsLayer;
use tower_http::request_id::{
    MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer,
};
use tower_http::sensitive_headers::SetSensitiveRequestHeadersLayer;
use tower_http::trace::TraceLayer;
use tracing::Span;

/// Numbers the requests.
#[derive(Clone, Default)]
struct Numbered(Arc<AtomicU64>);

impl MakeRequestId for Numbered {
    fn make_request_id<B>(&mut self, _: &Request<B>) -> Option<RequestId> {
        let number = self.0.fetch_add(1, Relaxed);
        Some(RequestId::new(HeaderValue::from(number)))
    }
}

/// Behaves as the name in the request says.
#[derive(Clone)]
struct Told(Arc<Semaphore>);

#[tonic::async_trait]
impl Greeter for Told {
    async fn say_hello(
        &self,
        request: tonic::Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        let message = request.into_inner().name;
        match &message[..] {
            "wait" => self.0.acquire().await.unwrap().forget(),
            "fail" => return Err(Status::data_loss("as told")),
            "panic" => panic!("as told"),
            _ => {}
        }
        Ok(Response::new(HelloReply { message }))
    }
}

fn told(what: &str) -> HelloRequest {
    HelloRequest { name: what.into() }
}

pub(crate) async fn traces_counts_and_marks_calls(net: Net) {
    let (in_flight, counter) = InFlightRequestsLayer::pair();
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let failures = Arc::<Mutex<Vec<Code>>>::default();
    let (requested, failed) = (requests.clone(), failures.clone());
    let traced = TraceLayer::new_for_grpc()
        .on_request(move |request: &Request<Body>, _: &Span| {
            requested.lock().unwrap().push(request.uri().path().to_owned());
        })
        .on_failure(move |class: GrpcFailureClass, _: Duration, _: &Span| {
            if let GrpcFailureClass::Status(status) = class {
                failed.lock().unwrap().push(Code::from_i32(status.code_raw()));
            }
        });
    let layers = ServiceBuilder::new()
        .layer(SetRequestIdLayer::x_request_id(Numbered::default()))
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(in_flight)
        .layer(traced);
    let gate = Arc::new(Semaphore::new(0));
    let (addr, incoming) = net.listen().await;
    let routes =
        Server::builder().layer(layers).add_service(GreeterServer::new(Told(gate.clone())));
    tokio::spawn(routes.serve_with_incoming(incoming));

    let channel = ServiceBuilder::new()
        .layer(SetSensitiveRequestHeadersLayer::new([AUTHORIZATION]))
        .layer(TraceLayer::new_for_grpc())
        .service(net.connect(addr).await);
    let mut client = GreeterClient::new(channel);
    let mut ids = Vec::new();
    for _ in 0..3 {
        let reply = client.say_hello(told("answer")).await.unwrap();
        ids.push(reply.metadata().get("x-request-id").unwrap().to_str().unwrap().to_owned());
    }
    ids.dedup();
    assert_eq!(ids.len(), 3, "each call has a number of its own: {ids:?}");
    let calls = || {
        let requests = requests.lock().unwrap();
        requests.iter().filter(|path| *path == "/greeter.Greeter/SayHello").count()
    };
    assert_eq!(calls(), 3);

    // No call is counted for longer than it takes, and no Offer is counted.
    until(|| counter.get() == 0).await;
    let mut waits = client.clone();
    let waiting = tokio::spawn(async move { waits.say_hello(told("wait")).await });
    until(|| calls() == 4).await;
    assert_eq!(counter.get(), 1);
    gate.add_permits(1);
    waiting.await.unwrap().unwrap();
    until(|| counter.get() == 0).await;

    let status = client.say_hello(told("fail")).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::DataLoss, "as told"));
    until(|| *failures.lock().unwrap() == [Code::DataLoss]).await;
    until(|| counter.get() == 0).await;
}

/// Waits for a layer's action after a response has ended. If it never comes, the runner's limit
/// ends the test.
async fn until(done: impl Fn() -> bool) {
    while !done() {
        tokio::task::yield_now().await;
    }
}

/// The layer's default does not compress gRPC. A compressed body could not be read as messages.
pub(crate) async fn compresses_pages_but_no_calls(net: Net) {
    let page = "a page that is long enough to be compressed ".repeat(50);
    let length = page.len();
    let app = Routes::new(GreeterServer::new(Hello)).into_axum_router();
    let app = app.route("/page", get(async move || page));
    let (addr, incoming) = net.listen().await;
    let mut server = Server::builder().accept_http1(true).layer(CompressionLayer::new());
    let routes = server.add_routes(Routes::from(app));
    tokio::spawn(routes.serve_with_incoming(incoming));
    assert_eq!(greet(net.connect(addr).await).await.unwrap(), net.greeting());

    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let request = Request::get(format!("http://{addr}/page")).header(ACCEPT_ENCODING, "gzip");
    let response = client.request(request.body(Body::empty()).unwrap()).await.unwrap();
    assert_eq!(response.headers()[CONTENT_ENCODING], "gzip");
    let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    assert!(body.len() < length / 4, "{} of {length} bytes", body.len());
}

pub(crate) async fn a_handler_that_panics_fails_its_call_only(net: Net) {
    let (addr, incoming) = net.listen().await;
    let mut server = Server::builder().layer(CatchPanicLayer::new());
    let routes = server.add_service(GreeterServer::new(Told(Arc::new(Semaphore::new(0)))));
    tokio::spawn(routes.serve_with_incoming(incoming));
    let mut client = GreeterClient::new(net.connect(addr).await);
    let mut beside = client.clone();
    let waiting = tokio::spawn(async move { beside.say_hello(told("wait")).await });
    for _ in 0..3 {
        // The layer answers with status 500 and a text, which is not a message, as with tonic.
        let status = client.say_hello(told("panic")).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal, "{status}");
        assert!(status.message().contains("500"), "{status}");
        let reply = client.say_hello(told("answer")).await.unwrap();
        assert_eq!(reply.into_inner().message, "answer");
    }
    assert!(!waiting.is_finished(), "a call next to those that failed goes on");
    waiting.abort();
}
