//! Rare ends of calls. They have the same code and order as in stock tonic, which runs here as one
//! of the fabrics.

use std::error::Error as _;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use tonic_rdma_tests::connect;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{Client, TestEnv, client_of};
use tonic_rdma_tests::service::script::{
    before, gate, hang, panic, payload, receive_all, send, send_many, steps,
};

use crate::expiry::{expires, unary};

cases![
    errors_have_tonics_type,
    messages_over_the_callers_own_limit,
    request_that_fails_midway_is_no_whole_one,
    handler_panics_before_the_head,
    handler_panics_behind_the_head,
    handler_panics_behind_messages,
    requests_go_on_without_a_reader_of_replies,
];

const LIMIT: usize = 10_000;
/// Length of a payload whose message exceeds the limit.
const TOO_LONG: usize = LIMIT + 1;

async fn errors_have_tonics_type(env: &TestEnv) {
    let server = env.server().await;
    let timeout = Duration::from_millis(100);
    let channel = connect!(env, server, |endpoint| endpoint.timeout(timeout));
    let client = client_of(channel);
    let check = |status: &Status| {
        assert_eq!(status.code(), Code::Cancelled, "{status:?}");
        match env.fabric() {
            // The timeout is set on the tonic-rdma channel behind the channel of tonic's type.
            Fabric::ShmTonic => assert!(status.source().is_none(), "{status:?}"),
            _ => assert!(status.source().unwrap().is::<tonic::transport::Error>(), "{status:?}"),
        }
    };
    expires(env, "u", || unary(&client, before("u", [hang()])), check).await;
}

/// Checks the status of a call with a message over the caller's limit. The call's handler may have
/// begun.
fn check_limit(env: &TestEnv, status: &Status) {
    assert_eq!(status.code(), Code::Internal, "{status:?}");
    if env.fabric().fast().is_some() && !env.fabric().tonic_channel() {
        assert!(status.message().contains("OutOfRange"), "names the cause: {status:?}");
    }
}

async fn limited(env: &TestEnv) -> (tonic_rdma_tests::harness::Server, Client) {
    let server = env.server().await;
    let client = client_of(connect!(env, server)).max_encoding_message_size(LIMIT);
    (server, client)
}

async fn messages_over_the_callers_own_limit(env: &TestEnv) {
    let (_server, mut client) = limited(env).await;
    let long = steps("u", [send(1, 1)]).with_payload(1, TOO_LONG);
    check_limit(env, &client.unary(long.clone()).await.unwrap_err());
    check_limit(env, &client.download(long.clone()).await.unwrap_err());
    let stream = tokio_stream::once(steps("u", [receive_all(), send(1, 1)]));
    let stream = stream.chain(tokio_stream::iter([payload(1, 100), payload(2, TOO_LONG)]));
    check_limit(env, &client.upload(stream).await.unwrap_err());
    // The connection still works.
    client.unary(steps("", [send(3, 30)])).await.unwrap().into_inner().expect(3, 30);
}

async fn request_that_fails_midway_is_no_whole_one(env: &TestEnv) {
    let (_server, mut client) = limited(env).await;
    let (sender, receiver) = mpsc::channel(1);
    sender.send(steps("c", [send(1, 10), receive_all(), send(2, 20)])).await.unwrap();
    let mut replies = client.chat(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    sender.send(payload(1, 100)).await.unwrap();
    env.probe().seen_times("received:c", 2).await;
    sender.send(payload(2, TOO_LONG)).await.unwrap();
    check_limit(env, &replies.message().await.unwrap_err());
    env.probe().seen("ended:c").await;
    assert_eq!(env.probe().count("half-closed:c"), 0, "{:?}", env.probe().events());
}

async fn handler_panics_before_the_head(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let status = client.unary(before("u", [panic("as planned")])).await.unwrap_err();
    assert_eq!(status.code(), Code::Cancelled, "{status:?}");
    client.unary(steps("", [send(3, 30)])).await.unwrap().into_inner().expect(3, 30);
}

/// Returns the number of messages that arrive before the handler's panic, and checks that the call
/// then fails with CANCELLED.
async fn messages_before_a_panic(client: &mut Client, count: u64) -> u64 {
    let sent = (count > 0).then(|| send_many(1, 10, count));
    let script: Vec<_> = sent.into_iter().chain([panic("as planned")]).collect();
    let mut replies = client.download(steps("d", script)).await.unwrap().into_inner();
    let mut received = 0;
    loop {
        match replies.message().await {
            Ok(Some(message)) => {
                received += 1;
                message.expect(received, 10);
            }
            Ok(None) => panic!("a panic is no end of a stream"),
            Err(status) => {
                assert_eq!(status.code(), Code::Cancelled, "{status:?}");
                return received;
            }
        }
    }
}

async fn handler_panics_behind_the_head(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    assert_eq!(messages_before_a_panic(&mut client, 0).await, 0);
    client.unary(steps("", [send(3, 30)])).await.unwrap().into_inner().expect(3, 30);
}

async fn handler_panics_behind_messages(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    // Sent messages may be lost with the stream, as with HTTP/2, but the head is not lost.
    for count in [1, 5, 100] {
        let received = messages_before_a_panic(&mut client, count).await;
        assert!(received <= count, "{received} of {count}");
    }
    client.unary(steps("", [send(3, 30)])).await.unwrap().into_inner().expect(3, 30);
}

async fn requests_go_on_without_a_reader_of_replies(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let (sender, receiver) = mpsc::channel(1);
    let script = [send(1, 10), gate("on"), receive_all(), hang()];
    sender.send(steps("c", script)).await.unwrap();
    let mut replies = client.chat(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    env.probe().seen("gate:on").await;
    drop(replies);
    // When this call ends, the drop has reached the server, if the server is told of it.
    client.unary(steps("", [send(3, 30)])).await.unwrap().into_inner().expect(3, 30);
    env.probe().open("on");
    for (n, size) in [10, 3000, 200_000].into_iter().enumerate() {
        sender.send(payload(n as u64, size)).await.unwrap();
        env.probe().seen_times("received:c", n as u64 + 2).await;
    }
    // Dropping the other half as well ends the call.
    drop(sender);
    env.probe().seen("dropped:c").await;
}
