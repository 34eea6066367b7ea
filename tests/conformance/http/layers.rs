//! Interceptors and tower layers at both ends, and the requests and responses that they see.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::service::InterceptorLayer;
use tonic::{Code, Request, Status};
use tonic_rdma_tests::channel::{AnyChannel, BoxError};
use tonic_rdma_tests::harness::{TestEnv, client_of};
use tonic_rdma_tests::pb::conformance_client::ConformanceClient;
use tonic_rdma_tests::pb::{Message, Script};
use tonic_rdma_tests::service::script::{before, gate, hang, send, steps};
use tonic_rdma_tests::service::{Scripted, Tag};
use tonic_rdma_tests::{connect, serve};
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceBuilder, ServiceExt};

use crate::expiry::expires;

cases![
    server_interceptor_adds_and_refuses,
    server_interceptor_as_a_layer,
    server_layer_counts_and_adds_headers,
    server_layer_refuses,
    client_interceptor_adds_and_refuses,
    client_layers,
    two_services_and_optional_ones,
    routes_built_apart,
    timeout_layer,
    load_shed_layer,
    retry_layer,
    balance,
    buffered_and_shared,
];

fn describing() -> Message {
    Script { describe: true, ..Script::default() }.into()
}

/// Admits calls with a known token, and tags them with its owner.
fn guard(mut request: Request<()>) -> Result<Request<()>, Status> {
    let token = request.metadata().get("authorization").cloned();
    match token.as_ref().map(|t| t.as_encoded_bytes()) {
        Some(b"Bearer ann") => {
            request.extensions_mut().insert(Tag("ann".into()));
            Ok(request)
        }
        Some(_) => Err(Status::permission_denied("not you")),
        None => {
            let mut status = Status::unauthenticated("who are you?");
            status.metadata_mut().insert("www-authenticate", "Bearer".parse().unwrap());
            Err(status)
        }
    }
}

fn with_token(token: &str) -> Request<Message> {
    let mut request = Request::new(describing());
    request.metadata_mut().insert("authorization", token.parse().unwrap());
    request
}

async fn check_guarded(client: &mut tonic_rdma_tests::harness::Client) {
    let response = client.unary(with_token("Bearer ann")).await.unwrap();
    assert_eq!(response.metadata().get("seen-tag").unwrap(), "ann");
    let status = client.unary(with_token("Bearer bob")).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::PermissionDenied, "not you"));
    let status = client.unary(Request::new(describing())).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Unauthenticated, "who are you?"));
    assert_eq!(status.metadata().get("www-authenticate").unwrap(), "Bearer");
    let status = client.download(Request::new(describing())).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    // The call is refused before the request stream is read.
    let stream = tokio_stream::pending::<Message>();
    let status = client.chat(stream).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

async fn server_interceptor_adds_and_refuses(env: &TestEnv) {
    let service =
        tonic::service::interceptor::InterceptedService::new(Scripted::server(env.probe()), guard);
    let server = serve!(env, |server| server.add_service(service));
    let mut client = env.client(&server).await;
    check_guarded(&mut client).await;
}

async fn server_interceptor_as_a_layer(env: &TestEnv) {
    // The layer sees every call to the server, and must admit the transport's own calls.
    let tagging = |mut request: Request<()>| {
        request.extensions_mut().insert(Tag("layered".into()));
        Ok(request)
    };
    let server = serve!(env, |server| server
        .layer(InterceptorLayer::new(tagging))
        .add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    let response = client.unary(describing()).await.unwrap();
    assert_eq!(response.metadata().get("seen-tag").unwrap(), "layered");
}

async fn server_layer_counts_and_adds_headers(env: &TestEnv) {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let layer = ServiceBuilder::new()
        .map_request(move |mut request: http::Request<Body>| {
            if request.uri().path().contains(".conformance.") {
                counter.fetch_add(1, Ordering::Relaxed);
            }
            request.extensions_mut().insert(Tag("mapped".into()));
            request
        })
        .map_response(|mut response: http::Response<_>| {
            response.headers_mut().insert("x-layer", http::HeaderValue::from_static("was here"));
            response
        })
        .into_inner();
    let server =
        serve!(env, |server| server.layer(layer).add_service(Scripted::server(env.probe())));
    let mut first = env.client(&server).await;
    let mut second = env.client(&server).await;
    for client in [&mut first, &mut second] {
        for _ in 0..3 {
            let response = client.unary(describing()).await.unwrap();
            assert_eq!(response.metadata().get("x-layer").unwrap(), "was here");
            assert_eq!(response.metadata().get("seen-tag").unwrap(), "mapped");
        }
    }
    let mut replies = first.download(steps("", [send(1, 1)])).await.unwrap();
    assert_eq!(replies.metadata().get("x-layer").unwrap(), "was here");
    replies.get_mut().message().await.unwrap().unwrap().expect(1, 1);
    assert_eq!(calls.load(Ordering::Relaxed), 7);
}

async fn server_layer_refuses(env: &TestEnv) {
    let layer = ServiceBuilder::new()
        .filter(|request: http::Request<Body>| {
            if request.headers().contains_key("x-refuse") {
                Err(BoxError::from(Status::out_of_range("by a layer")))
            } else {
                Ok(request)
            }
        })
        .into_inner();
    let server =
        serve!(env, |server| server.layer(layer).add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    let mut request = Request::new(steps("never", [send(1, 1)]));
    request.metadata_mut().insert("x-refuse", "yes".parse().unwrap());
    let status = client.unary(request).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::OutOfRange, "by a layer"));
    assert_eq!(env.probe().count("began:never"), 0);
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn client_interceptor_adds_and_refuses(env: &TestEnv) {
    let service =
        tonic::service::interceptor::InterceptedService::new(Scripted::server(env.probe()), guard);
    let server = serve!(env, |server| server.add_service(service));
    let channel = connect!(env, server);
    let mut client = ConformanceClient::with_interceptor(channel, |mut request: Request<()>| {
        if request.metadata().contains_key("x-stop") {
            return Err(Status::cancelled("stopped at home"));
        }
        request.metadata_mut().insert("authorization", "Bearer ann".parse().unwrap());
        Ok(request)
    });
    let response = client.unary(describing()).await.unwrap();
    assert_eq!(response.metadata().get("seen-tag").unwrap(), "ann");
    let calls = env.log().entries().len();
    let mut request = Request::new(describing());
    request.metadata_mut().insert("x-stop", "yes".parse().unwrap());
    let status = client.unary(request).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Cancelled, "stopped at home"));
    assert_eq!(env.log().entries().len(), calls, "a refused call must not leave the client");
}

async fn client_layers(env: &TestEnv) {
    let server = env.server().await;
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let stack = ServiceBuilder::new()
        .map_request(move |mut request: http::Request<Body>| {
            counter.fetch_add(1, Ordering::Relaxed);
            let value = http::HeaderValue::from_static("from a layer");
            request.headers_mut().insert("echo-layer", value);
            request
        })
        .concurrency_limit(4)
        .service(connect!(env, server));
    let mut client = ConformanceClient::new(stack);
    let script = Script { echo_metadata: true, steps: vec![send(1, 10)], ..Script::default() };
    for _ in 0..3 {
        let response = client.unary(Request::new(script.clone().into())).await.unwrap();
        assert_eq!(response.metadata().get("echo-layer").unwrap(), "from a layer");
    }
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

async fn two_services_and_optional_ones(env: &TestEnv) {
    use crate::http::raw::Silent;
    let present = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()))
        .add_optional_service(Some(Silent)));
    let absent = serve!(env, |server| server
        .add_optional_service(None::<Silent>)
        .add_service(Scripted::server(env.probe())));
    for (server, expected) in [(present, Code::Aborted), (absent, Code::Unimplemented)] {
        let channel = connect!(env, server);
        let request = http::Request::post("/tonic_rdma.conformance.v1.Silent/Any")
            .header("content-type", "application/grpc")
            .body(Body::empty())
            .unwrap();
        let response = channel.clone().oneshot(request).await.unwrap();
        let status = Status::from_header_map(response.headers()).unwrap();
        assert_eq!(status.code(), expected);
        let reply = client_of(channel).unary(steps("", [send(1, 1)])).await.unwrap();
        reply.into_inner().expect(1, 1);
    }
}

async fn routes_built_apart(env: &TestEnv) {
    let routes = tonic::service::Routes::new(Scripted::server(env.probe()));
    let server = serve!(env, |server| server.add_routes(routes));
    let mut client = env.client(&server).await;
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn timeout_layer(env: &TestEnv) {
    let server = env.server().await;
    let stack =
        ServiceBuilder::new().timeout(Duration::from_millis(100)).service(connect!(env, server));
    let client = ConformanceClient::new(stack);
    let call = || {
        let mut client = client.clone();
        async move { client.unary(before("u", [hang()])).await }
    };
    let check = |status: &Status| assert!(status.message().contains("timed out"), "{status:?}");
    expires(env, "u", call, check).await;
}

async fn load_shed_layer(env: &TestEnv) {
    let server = env.server().await;
    let stack =
        ServiceBuilder::new().load_shed().concurrency_limit(1).service(connect!(env, server));
    let client = ConformanceClient::new(stack);
    let mut waiting = client.clone();
    let held = tokio::spawn(async move { waiting.unary(before("u", [gate("go")])).await });
    env.probe().seen("gate:go").await;
    let status = client.clone().unary(steps("", [])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    env.probe().open("go");
    held.await.unwrap().unwrap();
}

/// Retries a refused call while attempts remain.
#[derive(Clone)]
struct Again(u32);

impl tower::retry::Policy<Vec<u8>, http::Response<Body>, Status> for Again {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Vec<u8>,
        result: &mut Result<http::Response<Body>, Status>,
    ) -> Option<Self::Future> {
        let refused = result
            .as_ref()
            .is_ok_and(|r| r.headers().get("grpc-status").is_some_and(|s| s == "10"));
        (refused && self.0 > 0).then(|| {
            self.0 -= 1;
            std::future::ready(())
        })
    }

    fn clone_request(&mut self, request: &Vec<u8>) -> Option<Vec<u8>> {
        Some(request.clone())
    }
}

async fn retry_layer(env: &TestEnv) {
    let left = Arc::new(AtomicU64::new(2));
    let counter = left.clone();
    let service = tonic::service::interceptor::InterceptedService::new(
        Scripted::server(env.probe()),
        move |request: Request<()>| {
            let tried =
                counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            if tried.is_ok() { Err(Status::aborted("again")) } else { Ok(request) }
        },
    );
    let server = serve!(env, |server| server.add_service(service));
    let retrying = ServiceBuilder::new()
        .retry(Again(5))
        .map_request(|framed: Vec<u8>| {
            http::Request::post("/tonic_rdma.conformance.v1.Conformance/Unary")
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(Body::new(http_body_util::Full::new(bytes::Bytes::from(framed))))
                .unwrap()
        })
        .service(connect!(env, server));
    // An empty message, framed.
    let response = retrying.oneshot(vec![0; 5]).await.unwrap();
    assert_eq!(response.headers().get("grpc-status"), None);
    assert_eq!(left.load(Ordering::Relaxed), 0);
    assert_eq!(env.log().entries().iter().filter(|e| e.method.ends_with("/Unary")).count(), 3);
}

type Shared = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// The service behind a buffer, which makes it cloneable.
fn buffer<S>(service: S) -> Shared
where
    S: Service<http::Request<Body>, Response = http::Response<Body>> + Send + 'static,
    S::Error: Into<BoxError> + Send + Sync,
    S::Future: Send,
{
    let buffer = tower::buffer::Buffer::new(service, 8);
    BoxCloneSyncService::new(buffer.map_err(Status::from_error))
}

async fn balance(env: &TestEnv) {
    let servers = [env.server().await, env.server().await];
    let mut channels = Vec::new();
    for server in &servers {
        let channel: AnyChannel = connect!(env, server);
        channels.push(tower::load::Constant::new(channel, 1u32));
    }
    let discover = tower::discover::ServiceList::new(channels);
    let balance = tower::balance::p2c::Balance::new(discover);
    let mut client = ConformanceClient::new(buffer(balance));
    let mut ports = std::collections::HashSet::new();
    for _ in 0..64 {
        let response = client.unary(describing()).await.unwrap();
        let local = response.metadata().get("seen-local-addr").unwrap();
        ports.insert(local.to_str().unwrap().to_owned());
    }
    assert_eq!(ports.len(), 2, "{ports:?}");
}

async fn buffered_and_shared(env: &TestEnv) {
    let server = env.server().await;
    let buffered = buffer(connect!(env, server));
    let mut calls = JoinSet::new();
    for seed in 0..100 {
        let mut client = ConformanceClient::new(buffered.clone());
        calls.spawn(async move {
            let reply = client.unary(steps("", [send(seed, 1000)])).await.unwrap();
            reply.into_inner().expect(seed, 1000);
        });
    }
    calls.join_all().await;
    // A channel is an ordinary tower service, so it must be ready before a call.
    let mut channel = connect!(env, server);
    let ready = channel.ready().await.unwrap();
    let request = http::Request::post("/none/None").body(Body::empty()).unwrap();
    let response = ready.call(request).await.unwrap();
    assert_eq!(response.headers().get("grpc-status").unwrap(), "12");
}
