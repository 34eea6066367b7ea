//! The four kinds of call, and calls to unknown methods or services.

use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::BinaryMetadataValue;
use tonic::{Code, IntoRequest, Request};
use tonic_rdma_tests::connect;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::service::SCRIPT_KEY;
use tonic_rdma_tests::service::script::{
    echo, echo_all, gate, payload, receive_all, send, send_many, steps, summary,
};

cases![
    unary_echo,
    upload_counts,
    upload_of_nothing,
    download_in_order,
    download_of_nothing,
    chat_ping_pong,
    chat_server_talks_first,
    chat_halves_are_independent,
    chat_answers_after_half_close,
    unknown_method,
    many_sequential_calls,
];

/// A request that carries its script in the metadata, so that the stream may be empty.
fn scripted<T>(message: T, script: Message) -> Request<T> {
    let script = script.script.unwrap().encode_to_vec();
    let mut request = Request::new(message);
    request.metadata_mut().insert_bin(SCRIPT_KEY, BinaryMetadataValue::from_bytes(&script));
    request
}

async fn unary_echo(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("u", [echo(1)]).with_payload(3, 1000);
    let reply = client.unary(request).await.unwrap().into_inner();
    reply.expect(3, 1000);
    assert_eq!(reply.script, None);
    env.probe().seen("finished:u").await;
}

async fn upload_counts(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let first = steps("u", [receive_all(), summary()]).with_payload(1, 10);
    let rest = (2..=50).map(|seed| payload(seed, 10 * seed as usize));
    let stream = tokio_stream::once(first).chain(tokio_stream::iter(rest));
    let reply = client.upload(stream).await.unwrap().into_inner();
    assert_eq!((reply.count, reply.total), (50, (1..=50).map(|n| 10 * n).sum::<u64>()));
}

async fn upload_of_nothing(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request =
        scripted(tokio_stream::empty::<Message>(), steps("u", [receive_all(), summary()]));
    let reply = client.upload(request).await.unwrap().into_inner();
    assert_eq!((reply.count, reply.total), (0, 0));
}

async fn download_in_order(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("d", [send_many(100, 777, 50), send(7, 0), send(8, 1)]);
    let mut replies = client.download(request).await.unwrap().into_inner();
    for seed in 100..150 {
        replies.message().await.unwrap().unwrap().expect(seed, 777);
    }
    replies.message().await.unwrap().unwrap().expect(7, 0);
    replies.message().await.unwrap().unwrap().expect(8, 1);
    assert_eq!(replies.message().await.unwrap(), None);
    let trailers = replies.trailers().await.unwrap();
    assert!(trailers.is_some(), "a finished stream has trailers");
    env.probe().seen("finished:d").await;
}

async fn download_of_nothing(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let mut replies = client.download(steps("d", [])).await.unwrap().into_inner();
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn chat_ping_pong(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let (sender, receiver) = mpsc::channel(1);
    sender.send(steps("c", [echo_all()]).with_payload(0, 5)).await.unwrap();
    let mut replies = client.chat(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 5);
    for round in 1..200 {
        // Send the next message only after the reply to the last one, because neither end may hold
        // back a message while it waits for more.
        let size = (round * 37) as usize % 3000;
        sender.send(payload(round, size)).await.unwrap();
        replies.message().await.unwrap().unwrap().expect(round, size);
    }
    drop(sender);
    assert_eq!(replies.message().await.unwrap(), None);
    env.probe().seen("half-closed:c").await;
}

async fn chat_server_talks_first(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let (sender, receiver) = mpsc::channel(1);
    let request =
        scripted(ReceiverStream::new(receiver), steps("c", [send_many(1, 64, 10), echo_all()]));
    // The server's head and messages arrive although the caller has sent no message yet.
    let mut replies = client.chat(request).await.unwrap().into_inner();
    for seed in 1..=10 {
        replies.message().await.unwrap().unwrap().expect(seed, 64);
    }
    sender.send(payload(11, 64)).await.unwrap();
    replies.message().await.unwrap().unwrap().expect(11, 64);
    drop(sender);
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn chat_halves_are_independent(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let (sender, receiver) = mpsc::channel(1);
    let script = [gate("talk"), send_many(1, 100, 20), gate("listen"), receive_all(), summary()];
    let request = scripted(ReceiverStream::new(receiver), steps("c", script));
    let mut replies = client.chat(request).await.unwrap().into_inner();
    // The caller sends while the handler does not read.
    for seed in 0..10 {
        sender.send(payload(seed, 100)).await.unwrap();
    }
    // The handler, which has not read anything yet, sends while the caller is idle.
    env.probe().open("talk");
    for seed in 1..=20 {
        replies.message().await.unwrap().unwrap().expect(seed, 100);
    }
    // The handler then reads the messages that the caller sent first.
    env.probe().open("listen");
    for seed in 10..20 {
        sender.send(payload(seed, 100)).await.unwrap();
    }
    drop(sender);
    let reply = replies.message().await.unwrap().unwrap();
    assert_eq!((reply.count, reply.total), (20, 2000));
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn chat_answers_after_half_close(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let script = [receive_all(), summary(), send_many(1, 5000, 30)];
    let stream = tokio_stream::once(steps("c", script).with_payload(9, 9));
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    assert_eq!(replies.message().await.unwrap().unwrap().total, 9);
    for seed in 1..=30 {
        replies.message().await.unwrap().unwrap().expect(seed, 5000);
    }
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn unknown_method(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    for path in [
        "/tonic_rdma.conformance.v1.Conformance/Missing",
        "/tonic_rdma.conformance.v1.Missing/Unary",
    ] {
        let mut grpc = tonic::client::Grpc::new(channel.clone());
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<Message, Message>::default();
        let status = grpc
            .unary(
                Message::default().into_request(),
                http::uri::PathAndQuery::from_static(path),
                codec,
            )
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
    }
}

async fn many_sequential_calls(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for seed in 0..5000 {
        let size = seed as usize % 100;
        let request = steps("", [echo(1)]).with_payload(seed, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, size);
    }
    assert_eq!(env.probe().count("finished:"), 5000);
}
