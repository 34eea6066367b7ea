//! tower's retries and hedged requests around a stub.

use std::collections::HashMap;
use std::future::{Ready, pending, ready};
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::{Code, Request, Response, Status};
use tonic_rdma::{Channel, Server};
use tonic_rdma_ecosystem_tests::Net;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::greeter::{HelloReply, HelloRequest};
use tower::hedge::Hedge;
use tower::retry::Retry;
use tower::{Service, ServiceExt, hedge, retry, service_fn};

/// Fails the first two calls with each name, and answers the third. With `dropped`, the first call
/// with each name is never answered, and the second is.
struct Third {
    calls: Mutex<HashMap<String, u32>>,
    /// Reports that an unanswered call was dropped. If `None`, calls fail instead.
    dropped: Option<mpsc::UnboundedSender<()>>,
}

struct TellsWhenDropped(mpsc::UnboundedSender<()>);

impl Drop for TellsWhenDropped {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[tonic::async_trait]
impl Greeter for Third {
    async fn say_hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        let name = request.into_inner().name;
        let call = {
            let mut calls = self.calls.lock().unwrap();
            let call = calls.entry(name.clone()).or_default();
            *call += 1;
            *call
        };
        match &self.dropped {
            // The server leaves only the first call of a hedged pair unanswered.
            Some(dropped) if call < 2 => {
                let _tells = TellsWhenDropped(dropped.clone());
                pending().await
            }
            None if call < 3 => Err(Status::unavailable(format!("call {call} of {name}"))),
            _ => Ok(Response::new(HelloReply { message: format!("{name}, call {call}") })),
        }
    }
}

async fn start(net: Net, dropped: Option<mpsc::UnboundedSender<()>>) -> Channel {
    let (addr, incoming) = net.listen().await;
    let service = GreeterServer::new(Third { calls: Mutex::default(), dropped });
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    net.connect(addr).await
}

/// A cloneable service that calls the stub with a request message and returns the reply message.
fn by_message(
    channel: Channel,
) -> impl Service<HelloRequest, Response = HelloReply, Error = Status, Future: Send> + Clone + Send
{
    service_fn(move |request: HelloRequest| {
        let mut client = GreeterClient::new(channel.clone());
        async move { client.say_hello(request).await.map(Response::into_inner) }
    })
}

/// Repeats a refused call at most this many more times.
#[derive(Clone)]
struct Again(u32);

impl retry::Policy<HelloRequest, HelloReply, Status> for Again {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut HelloRequest,
        result: &mut Result<HelloReply, Status>,
    ) -> Option<Ready<()>> {
        let refused = result.as_ref().is_err_and(|status| status.code() == Code::Unavailable);
        self.0 = self.0.checked_sub(u32::from(refused))?;
        refused.then(|| ready(()))
    }

    fn clone_request(&mut self, request: &HelloRequest) -> Option<HelloRequest> {
        Some(request.clone())
    }
}

pub(crate) async fn retries_until_it_works(net: Net) {
    let channel = start(net, None).await;
    let retries = Retry::new(Again(2), by_message(channel.clone()));
    let calls = (0..60).map(|n| {
        let retries = retries.clone();
        tokio::spawn(async move {
            let reply = retries.oneshot(HelloRequest { name: format!("name {n}") }).await.unwrap();
            assert_eq!(reply.message, format!("name {n}, call 3"));
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    let once = Retry::new(Again(1), by_message(channel));
    let status = once.oneshot(HelloRequest { name: "impatient".into() }).await.unwrap_err();
    assert_eq!(status.message(), "call 2 of impatient");
}

/// Lets each call be made a second time.
#[derive(Clone)]
struct Twice;

impl hedge::Policy<HelloRequest> for Twice {
    fn clone_request(&self, request: &HelloRequest) -> Option<HelloRequest> {
        Some(request.clone())
    }

    fn can_retry(&self, _: &HelloRequest) -> bool {
        true
    }
}

pub(crate) async fn hedges_and_cancels_the_slow_one(net: Net) {
    let (dropped, mut was_dropped) = mpsc::unbounded_channel();
    let channel = start(net, Some(dropped)).await;
    let minute = Duration::from_secs(60);
    let service = by_message(channel);
    // Calls are expected to take 1 ms, so one that takes longer is repeated.
    let mut hedged = Hedge::new_with_mock_latencies(service, Twice, 10, 0.9, minute, &[1; 20]);
    for n in 0..20 {
        let request = HelloRequest { name: format!("name {n}") };
        let reply = hedged.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(reply.message, format!("name {n}, call 2"));
        // The server drops the handler of the call that lost.
        was_dropped.recv().await.unwrap();
    }
}
