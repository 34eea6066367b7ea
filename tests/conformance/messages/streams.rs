//! Many concurrent streams, and unread streams.

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::serve;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{
    echo, echo_all, gate, payload, receive_all, send_many, steps, summary,
};

cases![
    thousand_chats_at_once,
    thousand_waiting_unary_calls,
    stalled_downloads_stop_only_themselves,
    stalled_uploads_stop_only_themselves,
    small_calls_beside_bulk,
    many_channels_to_one_server,
    more_at_once_than_pools_hold,
];

const MIB: usize = 1 << 20;

async fn more_at_once_than_pools_hold(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut calls = JoinSet::new();
    for seed in 0..20 {
        let mut client = client.clone();
        calls.spawn(async move {
            let request = steps("", [echo(1)]).with_payload(seed, 4 * MIB);
            let reply = client.unary(request).await.unwrap().into_inner();
            reply.expect(seed, 4 * MIB);
        });
    }
    calls.join_all().await;
}

struct Chat {
    sender: mpsc::Sender<Message>,
    replies: Streaming<Message>,
}

async fn thousand_chats_at_once(env: &TestEnv) {
    let server = serve!(env, |server| server
        .max_concurrent_streams(2000)
        .add_service(Scripted::server(env.probe())));
    let client = env.client(&server).await;
    let mut opening = JoinSet::new();
    for n in 0..1000u64 {
        let mut client = client.clone();
        opening.spawn(async move {
            let (sender, receiver) = mpsc::channel(2);
            let first = steps("c", [echo_all()]).with_payload(n, 100);
            sender.send(first).await.unwrap();
            let response = client.chat(ReceiverStream::new(receiver)).await.unwrap();
            let mut replies = response.into_inner();
            replies.message().await.unwrap().unwrap().expect(n, 100);
            (n, Chat { sender, replies })
        });
    }
    let mut chats = opening.join_all().await;
    // All chats are open, and each has had its first reply.
    assert_eq!(env.probe().count("began:c"), 1000);
    assert_eq!(env.probe().count("ended:c"), 0);
    for (n, chat) in &chats {
        let size = *n as usize * 3;
        chat.sender.send(payload(2 * n, size)).await.unwrap();
    }
    // Read the replies in another order than the messages were sent.
    for (n, chat) in chats.iter_mut().rev() {
        let size = *n as usize * 3;
        let reply = chat.replies.message().await.unwrap().unwrap();
        reply.expect(2 * *n, size);
    }
    assert_eq!(env.probe().count("ended:c"), 0);
    let mut closing = JoinSet::new();
    for (_, mut chat) in chats {
        closing.spawn(async move {
            drop(chat.sender);
            assert_eq!(chat.replies.message().await.unwrap(), None);
        });
    }
    closing.join_all().await;
    env.probe().seen_times("finished:c", 1000).await;
}

async fn thousand_waiting_unary_calls(env: &TestEnv) {
    let server = serve!(env, |server| server
        .max_concurrent_streams(2000)
        .add_service(Scripted::server(env.probe())));
    let client = env.client(&server).await;
    let mut calls = JoinSet::new();
    for seed in 0..1000 {
        let mut client = client.clone();
        calls.spawn(async move {
            let request = steps("", [gate("all"), echo(1)]).with_payload(seed, 2000);
            let reply = client.unary(request).await.unwrap().into_inner();
            reply.expect(seed, 2000);
        });
    }
    env.probe().seen_times("gate:all", 1000).await;
    env.probe().open("all");
    calls.join_all().await;
}

async fn stalled_downloads_stop_only_themselves(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    // Each download is longer than any window, so that the handlers block.
    let mut stalled = Vec::new();
    for n in 0..2 {
        let request = steps("stalled", [send_many(1000 * n, MIB, 48)]);
        stalled.push(client.download(request).await.unwrap().into_inner());
    }
    env.probe().seen_times("sent:stalled", 2).await;
    for seed in 0..100 {
        let size = 600 * seed as usize;
        let request = steps("", [echo(1)]).with_payload(seed, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, size);
    }
    assert_eq!(env.probe().count("finished:stalled"), 0);
    assert!(env.probe().count("sent:stalled") < 96, "somebody buffers without a bound");
    for (n, mut replies) in (0..).zip(stalled) {
        for seed in 1000 * n..1000 * n + 48 {
            replies.message().await.unwrap().unwrap().expect(seed, MIB);
        }
        assert_eq!(replies.message().await.unwrap(), None);
    }
    env.probe().seen_times("finished:stalled", 2).await;
}

async fn stalled_uploads_stop_only_themselves(env: &TestEnv) {
    // By default hyper's server gives a connection the window of one stream. Stock tonic, the
    // reference, needs a larger window.
    let server = serve!(env, |server| server
        .initial_connection_window_size(32 << 20)
        .add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    let mut stalled = Vec::new();
    for n in 0..2u64 {
        let mut client = client.clone();
        let probe = env.probe().clone();
        stalled.push(tokio::spawn(async move {
            let first = steps("stalled", [gate("read"), receive_all(), summary()]);
            let stream = async_stream::stream! {
                yield first;
                for seed in 0..48 {
                    probe.report("offered");
                    yield payload(100 * n + seed, MIB);
                }
            };
            client.upload(stream).await.unwrap().into_inner()
        }));
    }
    env.probe().seen_times("gate:read", 2).await;
    env.probe().seen_times("offered", 2).await;
    for seed in 0..100 {
        let size = 600 * seed as usize;
        let request = steps("", [echo(1)]).with_payload(seed, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, size);
    }
    assert!(env.probe().count("offered") < 96, "somebody buffers without a bound");
    env.probe().open("read");
    for upload in stalled {
        let reply = upload.await.unwrap();
        assert_eq!((reply.count, reply.total), (49, 48 * MIB as u64));
    }
}

async fn small_calls_beside_bulk(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let mut other = client.clone();
    let bulk = tokio::spawn(async move {
        for seed in 0..4 {
            let request = steps("", [echo(1)]).with_payload(seed, 16 * MIB);
            let reply = other.unary(request).await.unwrap().into_inner();
            reply.expect(seed, 16 * MIB);
        }
    });
    let mut beside = 0;
    while !bulk.is_finished() {
        let request = steps("", [echo(1)]).with_payload(beside, 64);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(beside, 64);
        beside += 1;
    }
    bulk.await.unwrap();
    // If small calls were queued behind the bulk, only one would pass for each of its eight
    // transfers.
    assert!(beside > 16, "only {beside} small calls passed beside 128 MiB");
}

async fn many_channels_to_one_server(env: &TestEnv) {
    let server = env.server().await;
    // Each end of a connection has its own control memory. A pool that serves both ends within the
    // usual memlock limit holds fewer connections.
    let channels = match env.fabric() {
        Fabric::SimSmall | Fabric::ShmSmall | Fabric::Verbs => 5,
        _ => 16,
    };
    let mut clients = Vec::new();
    for _ in 0..channels {
        clients.push(env.client(&server).await);
    }
    let mut calls = JoinSet::new();
    for (n, client) in (0..).zip(&clients) {
        for m in 0..8 {
            let mut client = client.clone();
            calls.spawn(async move {
                let (seed, size) = (100 * n + m, 30_000 * m as usize);
                let request = steps("", [echo(1)]).with_payload(seed, size);
                let reply = client.unary(request).await.unwrap().into_inner();
                reply.expect(seed, size);
            });
        }
    }
    calls.join_all().await;
}
