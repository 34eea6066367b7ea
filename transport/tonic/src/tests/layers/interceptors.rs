//! Layers and interceptors see the Offer, and each call on either path exactly once.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use http::Request as HttpRequest;
use tonic::service::InterceptorLayer;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Request, Status};
use tower::ServiceBuilder;

use crate::bootstrap::OFFER_PATH;
use crate::tests::support::echo::{Client, Echo};
use crate::tests::support::world::{Serving, World};
use crate::{Path, Policy, ReasonCode, Side};

const SECRET: &str = "Bearer secret";

fn check(request: Request<()>) -> Result<Request<()>, Status> {
    match request.metadata().get("authorization") {
        Some(token) if token == SECRET => Ok(request),
        _ => Err(Status::unauthenticated("no valid token")),
    }
}

fn with_token(mut request: Request<()>) -> Result<Request<()>, Status> {
    request.metadata_mut().insert("authorization", SECRET.parse().unwrap());
    Ok(request)
}

#[tokio::test]
async fn a_layer_with_state_sees_every_call_once() {
    let world = World::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let layer = {
        let seen = seen.clone();
        ServiceBuilder::new()
            .map_request(move |req: HttpRequest<tonic::body::Body>| {
                seen.lock().unwrap().push(req.uri().path().to_owned());
                req
            })
            .into_inner()
    };
    let serving = Serving::start(world.builder().layer(layer).add_service(Echo)).await;
    let fast = world.connect(&serving).await;
    Client::new(fast).say("fast").await.unwrap();
    let tcp = world.endpoint(&serving).policy(Policy::Off).connect().await.unwrap();
    Client::new(tcp).who().await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [OFFER_PATH, "/test.Echo/Say", "/test.Echo/Who"]);
}

#[tokio::test]
async fn who_is_kept_out_of_tcp_gets_no_ticket() {
    let world = World::new();
    let router = world.builder().layer(InterceptorLayer::new(check)).add_service(Echo);
    let serving = Serving::start(router).await;
    let channel = world.endpoint(&serving).connect().await.unwrap();
    let reason = channel.path().reason.unwrap();
    assert_eq!((reason.code(), reason.side()), (ReasonCode::HandshakeRejected, Side::Peer));
    assert!(reason.detail().contains("no valid token"), "{reason}");
    assert!(reason.detail().contains("Endpoint::offer_metadata"), "{reason}");
    let status = Client::new(channel).say("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
}

#[tokio::test]
async fn a_service_with_authentication_keeps_it_on_the_fast_path() {
    let world = World::new();
    let router = world.builder().layer(InterceptorLayer::new(check)).add_service(Echo);
    let serving = Serving::start(router).await;
    let with_metadata = world.endpoint(&serving).offer_metadata(|mut metadata| async move {
        metadata.insert("authorization", SECRET.parse().unwrap());
        Ok(metadata)
    });
    for endpoint in [with_metadata, world.endpoint(&serving).offer_interceptor(with_token)] {
        let channel = endpoint.connect().await.unwrap();
        assert_eq!(channel.path().path, Path::Sim, "{}", channel.path());
        // The fast path alone does not authenticate the call.
        let status = Client::new(channel.clone()).say("hello").await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated);
        Client::new(InterceptedService::new(channel.clone(), with_token)).all_kinds().await;
        assert_eq!(channel.stats().calls_tcp, 0);
    }
}

#[tokio::test]
async fn an_interceptor_of_one_service_works_on_the_fast_path() {
    let world = World::new();
    let service = InterceptedService::new(Echo, check);
    let serving = Serving::start(world.builder().add_service(service)).await;
    let channel = world.connect(&serving).await;
    let status = Client::new(channel.clone()).say("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    Client::new(InterceptedService::new(channel, with_token)).all_kinds().await;
}

#[tokio::test]
async fn trace_fn_sees_calls_of_both_paths() {
    let world = World::new();
    let traced = Arc::new(AtomicUsize::new(0));
    let router = {
        let traced = traced.clone();
        let mut builder = world.builder().trace_fn(move |req| {
            if req.uri().path().starts_with("/test.Echo/") {
                traced.fetch_add(1, Ordering::Relaxed);
            }
            tracing::info_span!("call")
        });
        builder.add_service(Echo)
    };
    let serving = Serving::start(router).await;
    Client::new(world.connect(&serving).await).say("fast").await.unwrap();
    assert_eq!(traced.load(Ordering::Relaxed), 1);
    let tcp = world.endpoint(&serving).policy(Policy::Off).connect().await.unwrap();
    Client::new(tcp).say("tcp").await.unwrap();
    assert_eq!(traced.load(Ordering::Relaxed), 2);
}

/// A service that is not ready for calls while the flag is set.
#[derive(Clone)]
struct Refusing<S>(S, Arc<AtomicBool>);

impl<S> tower::Service<HttpRequest<tonic::body::Body>> for Refusing<S>
where
    S: tower::Service<HttpRequest<tonic::body::Body>>,
    S::Error: Into<tower::BoxError>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = tower::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, tower::BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), tower::BoxError>> {
        match self.1.load(Ordering::Relaxed) {
            true => Poll::Ready(Err(Status::resource_exhausted("full").into())),
            false => self.0.poll_ready(cx).map_err(Into::into),
        }
    }

    fn call(&mut self, request: HttpRequest<tonic::body::Body>) -> Self::Future {
        assert!(!self.1.load(Ordering::Relaxed), "a service that is not ready is called");
        let call = self.0.call(request);
        Box::pin(async move { call.await.map_err(Into::into) })
    }
}

#[tokio::test]
async fn a_service_that_is_not_ready_answers_with_its_error() {
    let world = World::new();
    let refuses = Arc::new(AtomicBool::new(false));
    let layer = {
        let refuses = refuses.clone();
        tower::layer::layer_fn(move |service| Refusing(service, refuses.clone()))
    };
    let serving = Serving::start(world.builder().layer(layer).add_service(Echo)).await;
    let mut client = Client::new(world.connect(&serving).await);
    // The first call spawns a task, which later calls reuse.
    for refused in [true, true, false, false, true] {
        refuses.store(refused, Ordering::Relaxed);
        let said = client
            .say("hello")
            .await
            .map_err(|status| (status.code(), status.message().to_owned()));
        match refused {
            true => assert_eq!(said.unwrap_err(), (Code::ResourceExhausted, "full".to_owned())),
            false => drop(said.unwrap()),
        }
    }
}
