//! Deadlines: the caller's, the endpoint's and the server's.
//!
//! Stock tonic is the reference: each side ends the call with CANCELLED if the response's head is
//! late. A stream whose head arrived in time continues past its deadline.

use std::future::Future;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status};
use tonic_rdma_tests::harness::{TestEnv, client_of};
use tonic_rdma_tests::pb::Script;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{before, echo, echo_all, gate, hang, payload, send, steps};
use tonic_rdma_tests::{connect, serve};

use crate::expiry::{self, unary};

cases![
    header_reaches_the_handler,
    generous_deadline_changes_nothing,
    expiry_of_each_kind,
    expiry_while_uploading,
    endpoint_timeout,
    shorter_of_endpoint_and_caller,
    server_timeout,
    stream_outlives_its_deadline,
    other_calls_survive_an_expiry,
];

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(3000);

fn within<T>(timeout: Duration, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Parses the value and unit of a `grpc-timeout`.
fn parse(value: &str) -> Duration {
    let (number, unit) = value.split_at(value.len() - 1);
    let number: u64 = number.parse().unwrap();
    match unit {
        "H" => Duration::from_secs(3600 * number),
        "M" => Duration::from_secs(60 * number),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        other => unreachable!("grpc-timeout unit {other:?}"),
    }
}

async fn header_reaches_the_handler(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for timeout in [LONG, Duration::from_millis(59_999)] {
        let script = Script { describe: true, ..Script::default() };
        let response = client.unary(within(timeout, script.into())).await.unwrap();
        let seen = response.metadata().get("seen-timeout").unwrap();
        let seen = parse(seen.to_str().unwrap());
        assert!(seen > Duration::ZERO && seen <= timeout, "{seen:?}");
    }
    let script = Script { describe: true, ..Script::default() };
    let response = client.unary(Request::new(script.into())).await.unwrap();
    assert!(response.metadata().get("seen-timeout").is_none());
}

async fn generous_deadline_changes_nothing(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("", [echo(1)]).with_payload(2, 2000);
    let reply = client.unary(within(LONG, request)).await.unwrap();
    reply.into_inner().expect(2, 2000);
}

/// Like [`expiry::expires`], and checks that each status is the one of a deadline.
async fn expires<T, F: Future<Output = Result<T, Status>>>(
    env: &TestEnv,
    id: &str,
    call: impl Fn() -> F,
) {
    let check = |status: &Status| {
        assert_eq!(status.code(), Code::Cancelled);
        assert_eq!(status.message(), "Timeout expired");
    };
    expiry::expires(env, id, call, check).await;
}

async fn expiry_of_each_kind(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    expires(env, "u", || unary(&client, within(SHORT, before("u", [hang()])))).await;
    expires(env, "d", || {
        let mut client = client.clone();
        async move { client.download(within(SHORT, before("d", [hang()]))).await }
    })
    .await;
    expires(env, "c", || {
        let mut client = client.clone();
        let stream = tokio_stream::once(before("c", [hang()]));
        async move { client.chat(within(SHORT, stream)).await }
    })
    .await;
}

async fn expiry_while_uploading(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    expires(env, "u", || {
        let mut client = client.clone();
        async move {
            let (sender, receiver) = mpsc::channel(1);
            sender.send(before("u", [hang()])).await.unwrap();
            let reply = client.upload(within(SHORT, ReceiverStream::new(receiver))).await;
            // The caller's request stream has also been dropped.
            sender.closed().await;
            reply
        }
    })
    .await;
}

async fn endpoint_timeout(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server, |endpoint| endpoint.timeout(SHORT));
    let client = client_of(channel);
    expires(env, "u", || unary(&client, before("u", [hang()]))).await;
}

async fn shorter_of_endpoint_and_caller(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server, |endpoint| endpoint.timeout(LONG));
    let client = client_of(channel);
    expires(env, "a", || unary(&client, within(SHORT, before("a", [hang()])))).await;
    let channel = connect!(env, server, |endpoint| endpoint.timeout(SHORT));
    let client = client_of(channel);
    expires(env, "b", || unary(&client, within(LONG, before("b", [hang()])))).await;
}

async fn server_timeout(env: &TestEnv) {
    let server =
        serve!(env, |server| server.timeout(SHORT).add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    // Without a caller's deadline, or with a longer one, the server's applies.
    let unbounded = client.unary(before("a", [hang()])).await.unwrap_err();
    let with_timeout = client.unary(within(LONG, before("b", [hang()]))).await;
    for status in [unbounded, with_timeout.unwrap_err()] {
        assert_eq!(status.code(), Code::Cancelled);
        assert_eq!(status.message(), "Timeout expired");
    }
    env.probe().seen("dropped:a").await;
    env.probe().seen("dropped:b").await;
}

async fn stream_outlives_its_deadline(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let deadline = Duration::from_millis(500);
    let (sender, mut replies) = loop {
        let (sender, receiver) = mpsc::channel(1);
        let script = steps("c", [send(1, 10), gate("late"), echo_all()]);
        sender.send(script.with_payload(0, 0)).await.unwrap();
        match client.chat(within(deadline, ReceiverStream::new(receiver))).await {
            Ok(replies) => break (sender, replies.into_inner()),
            // On a busy machine, the head may be late.
            Err(status) => assert_eq!(status.code(), Code::Cancelled),
        }
    };
    replies.message().await.unwrap().unwrap().expect(1, 10);
    // A later call with the same deadline has expired, so the stream is past its own.
    let status = client.unary(within(deadline, before("x", [hang()]))).await.unwrap_err();
    assert_eq!(status.code(), Code::Cancelled);
    env.probe().open("late");
    replies.message().await.unwrap().unwrap().expect(0, 0);
    sender.send(payload(2, 20)).await.unwrap();
    replies.message().await.unwrap().unwrap().expect(2, 20);
    drop(sender);
    assert_eq!(replies.message().await.unwrap(), None);
    env.probe().seen("finished:c").await;
}

async fn other_calls_survive_an_expiry(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let mut other = client.clone();
    let waiting = tokio::spawn(async move {
        other.unary(steps("w", [gate("open"), echo(1)]).with_payload(4, 400)).await
    });
    env.probe().seen("gate:open").await;
    for n in 0..10 {
        let request = within(Duration::from_millis(20), before("x", [hang()]));
        let status = client.unary(request).await.unwrap_err();
        assert_eq!(status.code(), Code::Cancelled, "call {n}");
    }
    env.probe().open("open");
    let reply = waiting.await.unwrap().unwrap().into_inner();
    reply.expect(4, 400);
    let request = steps("", [echo(1)]).with_payload(5, 500);
    client.unary(request).await.unwrap().into_inner().expect(5, 500);
}
