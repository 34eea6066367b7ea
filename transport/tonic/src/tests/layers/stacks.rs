//! A channel inside tower stacks.

use std::time::Duration;

use http::{Request, Response};
use tonic::Code;
use tonic::body::Body;
use tower::retry::Policy as Retry;
use tower::util::BoxCloneService;
use tower::{ServiceBuilder, ServiceExt};

use crate::tests::support::echo::Client;
use crate::tests::support::world::World;
use crate::{Change, Channel, Reason, ReasonCode};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

fn is_fit_for_stacks<T: Clone + Send + Sync + std::fmt::Debug + 'static>() {}

#[test]
fn is_clone_send_and_sync() {
    is_fit_for_stacks::<Channel>();
}

fn boxed<S, E>(service: S) -> BoxCloneService<Request<Body>, Response<Body>, BoxError>
where
    S: tower::Service<Request<Body>, Response = Response<Body>, Error = E> + Clone + Send + 'static,
    S::Future: Send,
    E: Into<BoxError> + 'static,
{
    BoxCloneService::new(service.map_err(Into::into))
}

#[tokio::test]
async fn timeout_load_shed_buffer_and_limit() {
    let world = World::new();
    let serving = world.serve().await;
    let channel = world.connect(&serving).await;
    let stack = ServiceBuilder::new()
        .buffer(16)
        .load_shed()
        .concurrency_limit(8)
        .timeout(Duration::from_secs(60))
        .service(channel.clone());
    Client::new(boxed(stack)).all_kinds().await;
    assert_eq!(channel.stats().calls_fast, 5);
}

/// Retries once, with a copy of the request that has no body.
#[derive(Clone)]
struct Once(bool);

impl Retry<Request<Body>, Response<Body>, tonic::transport::Error> for Once {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        result: &mut Result<Response<Body>, tonic::transport::Error>,
    ) -> Option<Self::Future> {
        (result.is_err() && !std::mem::replace(&mut self.0, true)).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, req: &Request<Body>) -> Option<Request<Body>> {
        let mut again = Request::new(Body::empty());
        *again.uri_mut() = req.uri().clone();
        Some(again)
    }
}

#[tokio::test]
async fn retry_sees_errors_as_tower_errors() {
    let world = World::new();
    let serving = crate::tests::support::world::stock().await;
    let required = world.endpoint(&serving).require_rdma(true).connect_lazy();
    let stack = ServiceBuilder::new().retry(Once(false)).service(required);
    let request = Request::builder().uri("/test.Echo/Say").body(Body::empty()).unwrap();
    let error = stack.oneshot(request).await.unwrap_err();
    assert_eq!(Reason::of(&error).unwrap().code(), ReasonCode::PeerNotCapable);
}

#[tokio::test]
async fn a_balanced_channel_reaches_every_endpoint() {
    let world = World::new();
    let (a, b) = (world.serve().await, world.serve().await);
    let channel = Channel::balance_list([world.endpoint(&a), world.endpoint(&b)].into_iter());
    let mut client = Client::new(channel.clone());
    client.all_kinds().await;
    let stats = channel.stats();
    assert_eq!(stats.calls_fast + stats.calls_tcp, 5);
}

#[tokio::test]
async fn endpoints_come_and_go() {
    let world = World::new();
    let serving = world.serve().await;
    let (channel, changes) = Channel::balance_channel(4);
    changes.send(Change::Insert(1, world.endpoint(&serving))).await.unwrap();
    let mut client = Client::new(channel);
    client.all_kinds().await;
    let gone = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        crate::tests::support::world::endpoint(listener.local_addr().unwrap())
    };
    changes.send(Change::Insert(2, gone)).await.unwrap();
    changes.send(Change::Remove(1)).await.unwrap();
    let status = loop {
        match client.say("hello").await {
            Ok(_) => tokio::task::yield_now().await,
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::Unavailable);
}
