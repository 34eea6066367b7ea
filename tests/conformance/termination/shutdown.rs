//! The end of servers and channels with calls in flight, and handlers that fail.

use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::{Client, TestEnv, any_port, client_of};
use tonic_rdma_tests::load::LIMIT;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{
    before, echo, echo_all, gate, hang, panic, payload, receive, send, send_many, steps,
};
use tonic_rdma_tests::{connect, serve};

cases![
    graceful_end_waits_for_calls,
    graceful_end_waits_for_bulk,
    graceful_end_when_idle,
    calls_after_the_end_are_unavailable,
    channel_outlives_its_server,
    dropped_clients_end_their_handlers,
    killed_server_fails_calls_in_flight,
    killed_client_ends_its_handlers,
    panic_fails_one_call,
    panic_in_a_stream_fails_one_call,
];

async fn graceful_end_waits_for_calls(env: &TestEnv) {
    let (mut server, client) = env.pair().await;
    let mut unary = client.clone();
    let unary = tokio::spawn(async move {
        let request = steps("u", [gate("go"), echo(1)]).with_payload(1, 100);
        unary.unary(request).await
    });
    let mut streaming = client.clone();
    let request = steps("d", [send(1, 10), gate("go"), send_many(2, 5000, 5)]);
    let mut replies = streaming.download(request).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    let (sender, receiver) = mpsc::channel(1);
    sender.send(steps("c", [echo_all()])).await.unwrap();
    let mut chatting = client.clone();
    let mut chat = chatting.chat(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    chat.message().await.unwrap().unwrap().expect(0, 0);
    env.probe().seen_times("gate:go", 2).await;

    server.stop();
    // The chat continues while the server drains.
    for seed in 1..20 {
        sender.send(payload(seed, 1000)).await.unwrap();
        chat.message().await.unwrap().unwrap().expect(seed, 1000);
    }
    env.probe().open("go");
    unary.await.unwrap().unwrap().into_inner().expect(1, 100);
    for seed in 2..7 {
        replies.message().await.unwrap().unwrap().expect(seed, 5000);
    }
    assert_eq!(replies.message().await.unwrap(), None);
    drop(sender);
    assert_eq!(chat.message().await.unwrap(), None);
    server.ended().await;
}

async fn graceful_end_waits_for_bulk(env: &TestEnv) {
    let (mut server, client) = env.pair().await;
    // Keep one small call open until the bulk has arrived, because hyper closes an idle connection.
    // If the caller then sends more, TCP discards data that the caller has not read yet.
    let mut last = client.clone();
    let last = tokio::spawn(async move { last.unary(before("last", [gate("last")])).await });
    let mut calls = JoinSet::new();
    for seed in 0..4 {
        let mut client = client.clone();
        calls.spawn(async move {
            let request = steps("b", [echo(1)]).with_payload(seed, 8 << 20);
            let reply = client.unary(request).await.unwrap().into_inner();
            reply.expect(seed, 8 << 20);
        });
    }
    env.probe().seen_times("began:b", 4).await;
    env.probe().seen("gate:last").await;
    server.stop();
    calls.join_all().await;
    env.probe().open("last");
    last.await.unwrap().unwrap();
    server.ended().await;
}

async fn graceful_end_when_idle(env: &TestEnv) {
    let (mut server, mut client) = env.pair().await;
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    server.stop();
    // The idle client does not delay the server's end.
    server.ended().await;
    drop(client);
}

/// Waits until calls to the ended server fail with UNAVAILABLE. Until then a call may fail with
/// another code: hyper has several for a connection that is closing. The calls run at the same
/// time, because each may wait for the path that it requires.
async fn becomes_unavailable(client: &mut Client) {
    loop {
        let calls = [(); 3].map(|()| {
            let mut client = client.clone();
            async move { client.unary(steps("", [send(1, 1)])).await.unwrap_err().code() }
        });
        let [a, b, c] = calls;
        let codes = tokio::join!(a, b, c);
        if codes == (Code::Unavailable, Code::Unavailable, Code::Unavailable) {
            return;
        }
    }
}

async fn calls_after_the_end_are_unavailable(env: &TestEnv) {
    env.loses_server();
    let (mut server, mut client) = env.pair().await;
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    server.stop();
    server.ended().await;
    becomes_unavailable(&mut client).await;
}

async fn channel_outlives_its_server(env: &TestEnv) {
    env.loses_server();
    let (mut server, mut client) = env.pair().await;
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    let addr = server.addr();
    env.may_fall_back();
    server.stop();
    server.ended().await;
    client.unary(steps("", [send(1, 1)])).await.unwrap_err();
    let listening = env.listen_at(addr).await;
    let _server =
        serve!(env, listening, |server| server.add_service(Scripted::server(env.probe())));
    // A connection attempt that began while no server was listening may still fail, but calls
    // succeed again soon.
    loop {
        if let Ok(reply) = client.unary(steps("", [send(2, 2000)])).await {
            break reply.into_inner().expect(2, 2000);
        }
    }
}

async fn dropped_clients_end_their_handlers(env: &TestEnv) {
    let server = env.server().await;
    let mut calls = Vec::new();
    for _ in 0..3 {
        let mut client = env.client(&server).await;
        calls.push(tokio::spawn(async move {
            let request = steps("d", [send(1, 1), hang()]);
            let mut replies = client.download(request).await.unwrap().into_inner();
            replies.message().await.unwrap().unwrap().expect(1, 1);
            replies.message().await
        }));
    }
    env.probe().seen_times("began:d", 3).await;
    for call in calls {
        call.abort();
    }
    env.probe().seen_times("dropped:d", 3).await;
    let mut client = env.client(&server).await;
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

async fn killed_server_fails_calls_in_flight(env: &TestEnv) {
    env.loses_server();
    let doomed = runtime();
    let server = if env.fabric() == Fabric::ShmTwo {
        env.server().await
    } else {
        let _inside = doomed.enter();
        let listening = env.listen_now(any_port());
        serve!(env, listening, |server| server.add_service(Scripted::server(env.probe())))
    };
    let client = env.client(&server).await;
    let mut calls = JoinSet::new();
    for size in [10, 100_000, 8 << 20] {
        let (mut unary, mut streaming) = (client.clone(), client.clone());
        let probe = env.probe().clone();
        calls.spawn(async move {
            let request = steps("u", [gate("never"), echo(1)]).with_payload(1, size);
            unary.unary(request).await.unwrap_err()
        });
        calls.spawn(async move {
            let request = steps("d", [send(1, size), gate("never")]);
            let mut replies = streaming.download(request).await.unwrap().into_inner();
            replies.message().await.unwrap().unwrap().expect(1, size);
            probe.report("heard");
            replies.message().await.unwrap_err()
        });
    }
    env.probe().seen_times("gate:never", 6).await;
    env.probe().seen_times("heard", 3).await;
    if let Some(process) = server.process() {
        process.kill();
    }
    doomed.shutdown_background();
    while let Some(status) = calls.join_next().await {
        let status = status.unwrap();
        match env.fabric().fast() {
            // The code is CANCELLED if the runtime dropped the handler before the connection.
            Some(_) => {
                assert!([Code::Unavailable, Code::Cancelled].contains(&status.code()), "{status:?}")
            }
            // hyper reports this with several codes.
            None => assert_ne!(status.code(), Code::Ok, "{status:?}"),
        }
    }
    let mut client = client;
    becomes_unavailable(&mut client).await;
}

async fn killed_client_ends_its_handlers(env: &TestEnv) {
    env.loses_server();
    let server = env.server().await;
    let doomed = runtime();
    let channel = {
        let channel = async { connect!(env, server) };
        // The channel spawns its tasks on the runtime that is going to be killed.
        tokio::task::block_in_place(|| doomed.block_on(channel))
    };
    let mut streaming = client_of(channel.clone());
    doomed.spawn(async move {
        let request = steps("d", [send(1, 100), hang()]);
        let mut replies = streaming.download(request).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap().expect(1, 100);
        replies.message().await
    });
    env.probe().seen("began:d").await;
    match env.fabric().fast() {
        Some(_) => doomed.shutdown_background(),
        // One in 200 requests here reaches the queue of tonic's channel while the task that serves
        // the queue is being dropped. The request then stays in the queue (tower's Buffer, on a
        // channel of tokio).
        None => tokio::task::block_in_place(|| doomed.shutdown_timeout(LIMIT)),
    }
    env.probe().seen("dropped:d").await;
    // A channel without its runtime must return an error rather than hang.
    let mut orphan = client_of(channel);
    orphan.unary(steps("", [send(1, 1)])).await.unwrap_err();
    let mut other = env.client(&server).await;
    other.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

/// Over HTTP/2 the stream of a handler that panicked is reset, which the caller reads as CANCELLED.
/// The call must fail, and with a code that does not invite a retry.
fn check_panic(status: &Status) {
    let codes = [Code::Cancelled, Code::Internal, Code::Unknown];
    assert!(codes.contains(&status.code()), "{status:?}");
}

async fn panic_fails_one_call(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let mut other = client.clone();
    let held = tokio::spawn(async move {
        other.unary(steps("w", [gate("go"), echo(1)]).with_payload(1, 70_000)).await
    });
    env.probe().seen("gate:go").await;
    let status = client.unary(before("p", [panic("on purpose")])).await.unwrap_err();
    check_panic(&status);
    let stream = tokio_stream::once(steps("p", [receive(2), panic("on purpose")]))
        .chain(tokio_stream::iter([payload(1, 10)]));
    check_panic(&client.upload(stream).await.unwrap_err());
    env.probe().open("go");
    held.await.unwrap().unwrap().into_inner().expect(1, 70_000);
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn panic_in_a_stream_fails_one_call(env: &TestEnv) {
    let server = env.server().await;
    let mut client = client_of(connect!(env, server));
    let mut other = client.clone();
    let mut beside = other
        .download(steps("w", [send(1, 10), gate("go"), send(2, 70_000)]))
        .await
        .unwrap()
        .into_inner();
    beside.message().await.unwrap().unwrap().expect(1, 10);
    let request = steps("p", [send(1, 10), gate("panic"), panic("on purpose")]);
    let mut replies = client.download(request).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    env.probe().open("panic");
    let status = replies.message().await.unwrap_err();
    check_panic(&status);
    env.probe().open("go");
    beside.message().await.unwrap().unwrap().expect(2, 70_000);
    assert_eq!(beside.message().await.unwrap(), None);
}
