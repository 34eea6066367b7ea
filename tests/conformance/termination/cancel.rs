//! Cancellation and half-close from either side.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Code;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::probe::{Guard, Probe};
use tonic_rdma_tests::service::script::{
    before, drop_inbound, echo, echo_all, fail, gate, hang, payload, receive, receive_all, send,
    send_many, steps,
};

cases![
    caller_drops_a_unary_call,
    caller_drops_an_upload,
    caller_drops_a_download_midway,
    caller_drops_a_download_unread,
    caller_drops_a_chat,
    caller_drops_many_calls,
    caller_drops_before_sending,
    dropped_channel_ends_nothing_in_flight,
    handler_answers_while_caller_streams,
    handler_fails_while_caller_streams,
    handler_ends_a_chat_while_caller_streams,
    handler_lets_go_of_the_requests,
    caller_half_closes_first,
    connection_is_whole_after_cancels,
];

/// An endless stream of messages of `size` bytes that reports when it is dropped.
struct Endless {
    seed: u64,
    size: usize,
    first: Option<Message>,
    _guard: Guard,
}

impl Endless {
    fn new(probe: &Probe, id: &str, first: Message, size: usize) -> Self {
        Self { seed: 0, size, first: Some(first), _guard: probe.guard(id) }
    }
}

impl Stream for Endless {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Message>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(first));
        }
        self.seed += 1;
        Poll::Ready(Some(payload(self.seed, self.size)))
    }
}

async fn caller_drops_a_unary_call(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let call = tokio::spawn(async move { client.unary(before("u", [gate("in"), hang()])).await });
    env.probe().seen("gate:in").await;
    call.abort();
    env.probe().seen("dropped:u").await;
}

async fn caller_drops_an_upload(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let first = steps("u", [receive(10), gate("in"), hang()]);
    let stream = Endless::new(env.probe(), "requests", first, 1000);
    let call = tokio::spawn(async move { client.upload(stream).await });
    env.probe().seen("gate:in").await;
    call.abort();
    env.probe().seen("dropped:u").await;
    env.probe().seen("dropped:requests").await;
}

async fn caller_drops_a_download_midway(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("d", [send_many(1, 10_000, 3), hang()]);
    let mut replies = client.download(request).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10_000);
    drop(replies);
    env.probe().seen("dropped:d").await;
}

async fn caller_drops_a_download_unread(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    // More data than fits in any window, so the handler blocks until the drop ends it.
    let request = steps("d", [send_many(1, 1 << 20, 1000)]);
    let replies = client.download(request).await.unwrap();
    env.probe().seen("sent:d").await;
    drop(replies);
    env.probe().seen("dropped:d").await;
    assert!(env.probe().count("sent:d") < 1000);
}

async fn caller_drops_a_chat(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let (sender, receiver) = mpsc::channel(1);
    sender.send(steps("c", [echo_all()])).await.unwrap();
    let mut replies = client.chat(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 0);
    // Stock tonic ends such a call only when both halves are dropped, in any order.
    drop(replies);
    drop(sender);
    env.probe().seen("ended:c").await;
}

async fn caller_drops_many_calls(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let calls: Vec<_> = (0..100)
        .map(|n| {
            let mut client = client.clone();
            tokio::spawn(async move {
                // Calls of every size are cancelled, including while their bytes are in flight.
                let request = before("m", [gate("all"), hang()]).with_payload(n, 1000 * n as usize);
                client.unary(request).await
            })
        })
        .collect();
    env.probe().seen_times("gate:all", 100).await;
    for call in calls {
        call.abort();
    }
    env.probe().seen_times("dropped:m", 100).await;
}

async fn caller_drops_before_sending(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    // A call dropped while its first bytes are in flight may or may not reach the handler. It must
    // not affect later calls.
    for seed in 0..200 {
        let mut other = client.clone();
        let mut call = Box::pin(async move {
            let request = steps("", [echo(1)]).with_payload(seed, 100_000);
            other.unary(request).await
        });
        let polls = seed % 4;
        std::future::poll_fn(|cx| {
            for _ in 0..polls {
                if call.as_mut().poll(cx).is_ready() {
                    break;
                }
            }
            Poll::Ready(())
        })
        .await;
        drop(call);
        let request = steps("", [echo(1)]).with_payload(seed, 10);
        client.unary(request).await.unwrap().into_inner().expect(seed, 10);
    }
}

async fn dropped_channel_ends_nothing_in_flight(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut last = client;
    let request = steps("d", [send(1, 10), gate("later"), send(2, 20)]);
    let mut replies = last.download(request).await.unwrap().into_inner();
    drop(last);
    replies.message().await.unwrap().unwrap().expect(1, 10);
    env.probe().open("later");
    replies.message().await.unwrap().unwrap().expect(2, 20);
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn handler_answers_while_caller_streams(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let first = steps("u", [receive(5), send(9, 90)]);
    let stream = Endless::new(env.probe(), "requests", first, 5000);
    let reply = client.upload(stream).await.unwrap().into_inner();
    reply.expect(9, 90);
    env.probe().seen("dropped:requests").await;
}

async fn handler_fails_while_caller_streams(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let first = steps("u", [receive(5), fail(Code::DataLoss, "had it")]);
    let stream = Endless::new(env.probe(), "requests", first, 5000);
    let status = client.upload(stream).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::DataLoss, "had it"));
    env.probe().seen("dropped:requests").await;
}

async fn handler_ends_a_chat_while_caller_streams(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let first = steps("c", [echo(3)]);
    let stream = Endless::new(env.probe(), "requests", first, 5000);
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 0);
    replies.message().await.unwrap().unwrap().expect(1, 5000);
    replies.message().await.unwrap().unwrap().expect(2, 5000);
    assert_eq!(replies.message().await.unwrap(), None);
    env.probe().seen("finished:c").await;
    env.probe().seen("dropped:requests").await;
}

async fn handler_lets_go_of_the_requests(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let script = [receive(2), drop_inbound(), gate("on"), send_many(1, 2000, 20)];
    let stream = Endless::new(env.probe(), "requests", steps("c", script), 50_000);
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    env.probe().open("on");
    for seed in 1..=20 {
        replies.message().await.unwrap().unwrap().expect(seed, 2000);
    }
    assert_eq!(replies.message().await.unwrap(), None);
    env.probe().seen("dropped:requests").await;
}

async fn caller_half_closes_first(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let script = [receive_all(), gate("still"), send_many(1, 3000, 10)];
    let stream = tokio_stream::once(steps("c", script));
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    // The half-close alone ends neither the call nor the handler.
    env.probe().seen("half-closed:c").await;
    env.probe().seen("gate:still").await;
    env.probe().open("still");
    for seed in 1..=10 {
        replies.message().await.unwrap().unwrap().expect(seed, 3000);
    }
    assert_eq!(replies.message().await.unwrap(), None);
    env.probe().seen("finished:c").await;
}

async fn connection_is_whole_after_cancels(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for round in 0..50 {
        let size = 1 << (round % 20);
        let request = steps("d", [send_many(1, size, 100), hang()]);
        let mut replies = client.download(request).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap().expect(1, size);
        drop(replies);
        let stream = tokio_stream::once(steps("u", [receive_all(), hang()]))
            .chain(tokio_stream::iter((1..4).map(|seed| payload(seed, 10_000))))
            .chain(tokio_stream::pending());
        let mut other = client.clone();
        let upload = tokio::spawn(async move { other.upload(stream).await });
        env.probe().seen_times("received:u", 4 * (round + 1)).await;
        upload.abort();
    }
    env.probe().seen_times("dropped:d", 50).await;
    env.probe().seen_times("dropped:u", 50).await;
    let request = steps("", [echo(1)]).with_payload(6, 1 << 20);
    let reply = client.unary(request).await.unwrap().into_inner();
    reply.expect(6, 1 << 20);
}
