//! A channel of tonic's type that calls through ours: `Channel::into_tonic`. The conformance suite
//! makes all kinds of calls over it (`shm-tonic`).

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use tokio::net::TcpListener;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::server::TcpIncoming;
use tonic_rdma::{Channel, Endpoint, Policy, Server};
use tonic_rdma_example_services::greeter::HelloReply;
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;
use tonic_rdma_example_services::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_example_services::numbers::Number;
use tonic_rdma_example_services::numbers::numbers_client::NumbersClient;
use tonic_rdma_example_services::numbers::numbers_server::{Numbers, NumbersServer};

/// Answers with the path, the user agent and the length of the metadata `long`. Echoes long names.
struct Tells;

#[tonic::async_trait]
impl Greeter for Tells {
    async fn say_hello(
        &self,
        request: Request<HelloRequest>,
    ) -> Result<Response<HelloReply>, Status> {
        let path = tonic_rdma::connect_info(&request).path;
        let text = |name| {
            request.metadata().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
        };
        if request.get_ref().name == "fail" {
            let mut status = Status::failed_precondition("as asked: 100 %");
            status.metadata_mut().insert("why", "asked".parse().unwrap());
            return Err(status);
        }
        if request.get_ref().name.len() > 1000 {
            return Ok(Response::new(HelloReply { message: request.into_inner().name }));
        }
        let message = format!("{path}, {}, {}", text("user-agent"), text("long").len());
        Ok(Response::new(HelloReply { message }))
    }
}

/// Counts the messages that are taken from its endless stream.
struct Endless(Arc<AtomicU64>);

type Replies = Pin<Box<dyn Stream<Item = Result<Number, Status>> + Send>>;

#[tonic::async_trait]
impl Numbers for Endless {
    type CountStream = Replies;
    type DoubleStream = Replies;

    async fn count(&self, _: Request<Number>) -> Result<Response<Replies>, Status> {
        let taken = self.0.clone();
        let numbers =
            std::iter::repeat_with(move || Ok(Number { value: taken.fetch_add(1, SeqCst) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(numbers))))
    }

    async fn sum(&self, _: Request<Streaming<Number>>) -> Result<Response<Number>, Status> {
        std::future::pending().await
    }

    async fn double(&self, _: Request<Streaming<Number>>) -> Result<Response<Replies>, Status> {
        std::future::pending().await
    }
}

/// A server, and the number of messages taken from its streams.
pub(crate) async fn serve() -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let taken = Arc::new(AtomicU64::new(0));
    let router = Server::builder()
        .add_service(GreeterServer::new(Tells))
        .add_service(NumbersServer::new(Endless(taken.clone())));
    tokio::spawn(router.serve_with_incoming(TcpIncoming::from(listener)));
    (addr, taken)
}

fn endpoint(addr: SocketAddr, policy: Policy) -> Endpoint {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap().policy(policy);
    // The time is enough on a busy machine.
    endpoint.fast_path_timeout(std::time::Duration::from_secs(30))
}

async fn connect(addr: SocketAddr, policy: Policy) -> Channel {
    endpoint(addr, policy).connect().await.unwrap()
}

/// Makes a call like a library that accepts only tonic's type.
async fn ask(channel: tonic::transport::Channel) -> Result<String, Status> {
    let request = HelloRequest { name: "you".into() };
    Ok(GreeterClient::new(channel).say_hello(request).await?.into_inner().message)
}

#[tokio::test]
async fn calls_take_our_path_with_our_user_agent() {
    let (addr, _) = serve().await;
    let channel = connect(addr, Policy::Require).await;
    let ours = ask(channel.clone().into_tonic()).await.unwrap();
    assert!(ours.starts_with("shm, tonic/"), "{ours}");
    let named = endpoint(addr, Policy::Require).user_agent("mine/1").unwrap().connect().await;
    let named = ask(named.unwrap().into_tonic()).await.unwrap();
    assert!(named.starts_with("shm, mine/1 tonic/"), "{named}");
    // The same with a concurrency limit, and as an endpoint of a balanced channel.
    let limited = endpoint(addr, Policy::Require).concurrency_limit(1).connect().await.unwrap();
    assert!(ask(limited.into_tonic()).await.unwrap().starts_with("shm, "));
    let balanced = Channel::balance_list([endpoint(addr, Policy::Require)].into_iter());
    assert!(ask(balanced.into_tonic()).await.unwrap().starts_with("shm, "));
    assert_eq!(channel.stats().calls_fast, 1);
}

/// A long reply is copied into the pipe from where it landed, and the transport copies none of it.
#[tokio::test]
async fn replies_are_copied_by_the_pipe_alone() {
    let (addr, _) = serve().await;
    let channel = connect(addr, Policy::Require).await;
    let mut greeter = GreeterClient::new(channel.clone().into_tonic());
    let pattern: String = ('a'..='z').cycle().take(3_000_001).collect();
    for _ in 0..3 {
        let request = HelloRequest { name: pattern.clone() };
        let reply = greeter.say_hello(request).await.unwrap().into_inner();
        assert!(reply.message == pattern, "{} bytes", reply.message.len());
    }
    let copied = channel.stats().copied_fast;
    // The requests, with the header of a message, and the tag and length of its field.
    let sent = 3 * (pattern.len() as u64 + 10);
    assert_eq!(copied.plain_codec + copied.learning + copied.joined, sent, "{copied:?}");
    assert!(copied.pressure < sent / 3, "{copied:?}");
}

/// If the path is permanently TCP, no pipe is in between, and our channel does not see the calls.
#[tokio::test]
async fn over_tcp_for_good_it_is_tonics_own_connection() {
    let (addr, _) = serve().await;
    let channel = connect(addr, Policy::Off).await;
    let tonic = channel.clone().into_tonic();
    assert!(ask(tonic).await.unwrap().starts_with("tcp, "));
    assert_eq!(channel.stats().calls_tcp, 0);
    // With a limit, calls pass through our channel, which applies the limit.
    let limited = endpoint(addr, Policy::Off).concurrency_limit(1).connect().await.unwrap();
    assert!(ask(limited.clone().into_tonic()).await.unwrap().starts_with("tcp, "));
    assert_eq!(limited.stats().calls_tcp, 1);
}

#[tokio::test]
async fn statuses_and_long_metadata_pass() {
    let (addr, _) = serve().await;
    let mut client = GreeterClient::new(connect(addr, Policy::Require).await.into_tonic());
    let status = client.say_hello(HelloRequest { name: "fail".into() }).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert_eq!(status.message(), "as asked: 100 %");
    assert_eq!(status.metadata().get("why").unwrap(), "asked");
    for len in [1_000, 10_000] {
        let mut request = Request::new(HelloRequest { name: "you".into() });
        request.metadata_mut().insert("long", "x".repeat(len).parse().unwrap());
        let reply = client.say_hello(request).await.unwrap().into_inner().message;
        assert!(reply.ends_with(&format!(", {len}")), "{reply}");
    }
}

/// Sixty clients, each with its own clone, and some with their own connection.
#[tokio::test]
async fn sixty_clients() {
    let (addr, _) = serve().await;
    let shared = connect(addr, Policy::Require).await.into_tonic();
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..60 {
        let channel = match n % 3 {
            0 => connect(addr, Policy::Require).await.into_tonic(),
            _ => shared.clone(),
        };
        clients.spawn(async move {
            for _ in 0..20 {
                assert!(ask(channel.clone()).await.unwrap().starts_with("shm, "));
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
}

/// Drops more calls, before and after the server has seen them, than HTTP/2 servers accept from
/// strangers.
#[tokio::test]
async fn calls_that_are_dropped_do_not_end_the_connection() {
    let (addr, _) = serve().await;
    let channel = connect(addr, Policy::Require).await;
    let numbers = NumbersClient::new(channel.clone().into_tonic());
    for _ in 0..30 {
        let calls: Vec<_> = (0..100)
            .map(|_| {
                let mut numbers = numbers.clone();
                tokio::spawn(async move { numbers.sum(tokio_stream::pending()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        calls.iter().for_each(tokio::task::JoinHandle::abort);
    }
    let kept = numbers.clone().count(Number { value: 0 }).await.unwrap();
    drop(kept);
    assert!(ask(channel.into_tonic()).await.unwrap().starts_with("shm, "));
    numbers.clone().count(Number { value: 0 }).await.unwrap();
}

/// Two unread streams make their senders wait, although both always have more to send, and delay no
/// other call.
async fn hold_little(
    mut streams: [Streaming<Number>; 2],
    ask: impl AsyncFn() -> String,
    taken: &AtomicU64,
) {
    // Wait until the senders wait: no message is taken during a hundred calls.
    loop {
        let before = taken.load(SeqCst);
        for _ in 0..100 {
            assert!(ask().await.starts_with("shm, "));
        }
        if taken.load(SeqCst) == before {
            break;
        }
    }
    // Each message takes at least seven bytes. The windows of the fast path, the sender's queue,
    // and 1 MiB behind the pipe hold messages.
    let most = 2 * (8 << 20) / 7;
    assert!(taken.load(SeqCst) < most, "{}", taken.load(SeqCst));
    for stream in &mut streams {
        assert!(stream.message().await.unwrap().unwrap().value < most);
    }
}

#[tokio::test]
async fn streams_that_nobody_reads_hold_little_behind_a_pipe() {
    let (addr, taken) = serve().await;
    let channel = connect(addr, Policy::Require).await.into_tonic();
    let mut numbers = NumbersClient::new(channel.clone());
    let mut count = async || numbers.count(Number { value: 0 }).await.unwrap().into_inner();
    let streams = [count().await, count().await];
    hold_little(streams, async || ask(channel.clone()).await.unwrap(), &taken).await;
}

#[tokio::test]
async fn streams_that_nobody_reads_hold_little() {
    let (addr, taken) = serve().await;
    let channel = connect(addr, Policy::Require).await;
    let mut numbers = NumbersClient::new(channel.clone());
    let mut count = async || numbers.count(Number { value: 0 }).await.unwrap().into_inner();
    let streams = [count().await, count().await];
    let ask = async || {
        let request = HelloRequest { name: "you".into() };
        let reply = GreeterClient::new(channel.clone()).say_hello(request).await;
        reply.unwrap().into_inner().message
    };
    hold_little(streams, ask, &taken).await;
}

#[tokio::test]
async fn when_the_last_clone_is_dropped_the_connection_closes() {
    let (addr, _) = serve().await;
    let tonic = connect(addr, Policy::Require).await.into_tonic();
    ask(tonic.clone()).await.unwrap();
    let metrics = tokio::runtime::Handle::current().metrics();
    let with = metrics.num_alive_tasks();
    drop(tonic);
    for _ in 0..10_000 {
        if metrics.num_alive_tasks() + 3 <= with {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{} tasks of {with} are left", metrics.num_alive_tasks());
}
