//! Limits of endpoints and servers on concurrent calls.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use tokio::task::JoinSet;
use tonic::Code;
use tonic_rdma_tests::harness::{Client, Server, TestEnv, client_of};
use tonic_rdma_tests::pb::Message;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{before, gate, send, steps};
use tonic_rdma_tests::{connect, serve};

cases![
    endpoint_concurrency_limit,
    endpoint_rate_limit,
    endpoint_buffer_size,
    server_concurrency_limit,
    server_load_shed,
    server_max_concurrent_streams,
    waiting_calls_run_when_their_replies_arrive,
];

/// Starts more calls than `limit`, all of which have to pass one gate. Checks that exactly `limit`
/// calls reach the gate before it opens.
async fn check_runs_exactly(env: &TestEnv, server: &Server, client: &Client, limit: u64) {
    let mut calls = JoinSet::new();
    for n in 0..limit + 3 {
        let mut client = client.clone();
        calls.spawn(async move { client.unary(before(&format!("{n}"), [gate("all")])).await });
    }
    env.probe().seen_times("gate:all", limit).await;
    others_had_their_chance(env, server).await;
    assert_eq!(env.probe().count("gate:all"), limit);
    env.probe().open("all");
    while let Some(done) = calls.join_next().await {
        done.unwrap().unwrap();
    }
    assert_eq!(env.probe().count("gate:all"), limit + 3);
}

/// Completes calls on a second channel. By then, every other call that may start has started.
async fn others_had_their_chance(env: &TestEnv, server: &Server) {
    let mut other = env.client(server).await;
    for seed in 0..10 {
        let reply = other.unary(steps("", [send(seed, 10)])).await.unwrap();
        reply.into_inner().expect(seed, 10);
    }
}

async fn endpoint_concurrency_limit(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server, |endpoint| endpoint.concurrency_limit(3));
    check_runs_exactly(env, &server, &client_of(channel), 3).await;
}

async fn endpoint_rate_limit(env: &TestEnv) {
    let server = env.server().await;
    let period = Duration::from_millis(50);
    let channel = connect!(env, server, |endpoint| endpoint.rate_limit(2, period));
    let mut client = client_of(channel);
    let begin = std::time::Instant::now();
    for seed in 0..7 {
        let reply = client.unary(steps("", [send(seed, 10)])).await.unwrap();
        reply.into_inner().expect(seed, 10);
    }
    // Seven calls at two per period take at least three periods. A lower bound also holds on a busy
    // machine.
    assert!(begin.elapsed() >= 3 * period);
}

async fn endpoint_buffer_size(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server, |endpoint| endpoint.buffer_size(1));
    let client = client_of(channel);
    let mut calls = JoinSet::new();
    for seed in 0..50 {
        let mut client = client.clone();
        calls.spawn(async move {
            let reply = client.unary(steps("", [send(seed, 10)])).await.unwrap();
            reply.into_inner().expect(seed, 10);
        });
    }
    calls.join_all().await;
}

async fn server_concurrency_limit(env: &TestEnv) {
    let server = serve!(env, |server| server
        .concurrency_limit_per_connection(3)
        .add_service(Scripted::server(env.probe())));
    check_runs_exactly(env, &server, &env.client(&server).await, 3).await;
}

async fn server_load_shed(env: &TestEnv) {
    let server = serve!(env, |server| server
        .concurrency_limit_per_connection(1)
        .load_shed(true)
        .add_service(Scripted::server(env.probe())));
    let client = env.client(&server).await;
    let mut waiting = client.clone();
    let held = tokio::spawn(async move { waiting.unary(before("u", [gate("go")])).await });
    env.probe().seen("gate:go").await;
    let status = client.clone().unary(steps("", [])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    env.probe().open("go");
    held.await.unwrap().unwrap();
    let mut client = client;
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn server_max_concurrent_streams(env: &TestEnv) {
    let server = serve!(env, |server| server
        .max_concurrent_streams(4)
        .add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    // The caller learns the limit from the server's settings, which arrive with the first response.
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    let mut calls = JoinSet::new();
    for seed in 0..40u64 {
        let mut client = client.clone();
        calls.spawn(async move {
            let request: Message = steps("s", [gate("all"), send(seed, 100)]);
            client.unary(request).await.unwrap().into_inner().expect(seed, 100);
        });
    }
    env.probe().seen_times("gate:all", 4).await;
    others_had_their_chance(env, &server).await;
    assert_eq!(env.probe().count("began:s"), 4);
    env.probe().open("all");
    calls.join_all().await;
    assert_eq!(env.probe().count("began:s"), 40);
}

/// Calls that wait for other calls are polled when they begin and when their replies arrive, and
/// hardly ever otherwise. Every second waiting call is cancelled. A call that is no longer polled
/// begins nevertheless, and does not delay the others.
async fn waiting_calls_run_when_their_replies_arrive(env: &TestEnv) {
    const CALLS: u64 = 600;
    let server = serve!(env, |server| server
        .max_concurrent_streams(2)
        .add_service(Scripted::server(env.probe())));
    let mut client = env.client(&server).await;
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    let mut held = JoinSet::new();
    for _ in 0..2 {
        let mut client = client.clone();
        held.spawn(async move { client.unary(steps("h", [gate("all"), send(1, 1)])).await });
    }
    env.probe().seen_times("gate:all", 2).await;
    let mut other = client.clone();
    let mut stopped = pin!(other.unary(steps("stopped", [send(7, 100)])));
    assert!(poll_fn(|cx| Poll::Ready(stopped.as_mut().poll(cx))).await.is_pending());
    let polls = Arc::new(AtomicU64::new(0));
    let (mut kept, mut cancelled) = (JoinSet::new(), JoinSet::new());
    for seed in 0..CALLS {
        let (mut client, polls) = (client.clone(), polls.clone());
        let calls = if seed % 2 == 0 { &mut kept } else { &mut cancelled };
        calls.spawn(async move {
            let mut call = pin!(client.unary(steps("w", [send(seed, 100)])));
            let reply = poll_fn(|cx| {
                polls.fetch_add(1, Relaxed);
                call.as_mut().poll(cx)
            });
            reply.await.unwrap().into_inner().expect(seed, 100);
        });
    }
    while polls.load(Relaxed) < CALLS {
        tokio::task::yield_now().await;
    }
    cancelled.shutdown().await;
    env.probe().open("all");
    kept.join_all().await;
    held.join_all().await;
    assert_eq!(env.probe().count("began:w"), CALLS / 2);
    assert_eq!(env.probe().count("began:stopped"), 1);
    stopped.await.unwrap().into_inner().expect(7, 100);
    // A call may also be polled for other reasons.
    let polls = polls.load(Relaxed);
    assert!(polls < 5 * CALLS, "{CALLS} calls ran {polls} times");
}
