//! Limits that endpoints and servers set on how many calls run.

use std::time::Duration;

use tokio::task::JoinSet;
use tonic::Code;

use crate::harness::{Bed, Client, Server, client_of};
use crate::pb::Message;
use crate::script::{before, gate, send, steps};
use crate::service::Scripted;

cases![
    endpoint_concurrency_limit,
    endpoint_rate_limit,
    endpoint_buffer_size,
    server_concurrency_limit,
    server_load_shed,
    server_max_concurrent_streams,
];

/// Starts more calls than may run, all of which wait at one gate, and checks how many get there.
async fn check_runs_exactly(bed: &Bed, server: &Server, client: &Client, limit: u64) {
    let mut calls = JoinSet::new();
    for n in 0..limit + 3 {
        let mut client = client.clone();
        calls.spawn(async move { client.unary(before(&format!("{n}"), [gate("all")])).await });
    }
    bed.probe().seen_times("gate:all", limit).await;
    others_had_their_chance(bed, server).await;
    assert_eq!(bed.probe().count("gate:all"), limit);
    bed.probe().open("all");
    while let Some(done) = calls.join_next().await {
        done.unwrap().unwrap();
    }
    assert_eq!(bed.probe().count("gate:all"), limit + 3);
}

/// Calls on a second channel go all the way. Whatever could begin meanwhile has begun.
async fn others_had_their_chance(bed: &Bed, server: &Server) {
    let mut other = bed.client(server).await;
    for seed in 0..10 {
        let reply = other.unary(steps("", [send(seed, 10)])).await.unwrap();
        reply.into_inner().expect(seed, 10);
    }
}

async fn endpoint_concurrency_limit(bed: &Bed) {
    let server = bed.server().await;
    let channel = connect!(bed, server, |endpoint| endpoint.concurrency_limit(3));
    check_runs_exactly(bed, &server, &client_of(channel), 3).await;
}

async fn endpoint_rate_limit(bed: &Bed) {
    let server = bed.server().await;
    let period = Duration::from_millis(50);
    let channel = connect!(bed, server, |endpoint| endpoint.rate_limit(2, period));
    let mut client = client_of(channel);
    let begin = std::time::Instant::now();
    for seed in 0..7 {
        let reply = client.unary(steps("", [send(seed, 10)])).await.unwrap();
        reply.into_inner().expect(seed, 10);
    }
    // Seven calls at two a period cannot be done before three periods have passed. A lower bound
    // holds on a busy machine too.
    assert!(begin.elapsed() >= 3 * period);
}

async fn endpoint_buffer_size(bed: &Bed) {
    let server = bed.server().await;
    let channel = connect!(bed, server, |endpoint| endpoint.buffer_size(1));
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

async fn server_concurrency_limit(bed: &Bed) {
    let server = serve!(bed, |server| server
        .concurrency_limit_per_connection(3)
        .add_service(Scripted::server(bed.probe())));
    check_runs_exactly(bed, &server, &bed.client(&server).await, 3).await;
}

async fn server_load_shed(bed: &Bed) {
    let server = serve!(bed, |server| server
        .concurrency_limit_per_connection(1)
        .load_shed(true)
        .add_service(Scripted::server(bed.probe())));
    let client = bed.client(&server).await;
    let mut waiting = client.clone();
    let held = tokio::spawn(async move { waiting.unary(before("u", [gate("go")])).await });
    bed.probe().seen("gate:go").await;
    let status = client.clone().unary(steps("", [])).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    bed.probe().open("go");
    held.await.unwrap().unwrap();
    let mut client = client;
    client.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn server_max_concurrent_streams(bed: &Bed) {
    let server = serve!(bed, |server| server
        .max_concurrent_streams(4)
        .add_service(Scripted::server(bed.probe())));
    let mut client = bed.client(&server).await;
    // The limit is known to a caller once the server's settings have come: with the first answer.
    client.unary(steps("", [send(1, 1)])).await.unwrap();
    let mut calls = JoinSet::new();
    for seed in 0..40u64 {
        let mut client = client.clone();
        calls.spawn(async move {
            let request: Message = steps("s", [gate("all"), send(seed, 100)]);
            client.unary(request).await.unwrap().into_inner().expect(seed, 100);
        });
    }
    bed.probe().seen_times("gate:all", 4).await;
    others_had_their_chance(bed, &server).await;
    assert_eq!(bed.probe().count("began:s"), 4);
    bed.probe().open("all");
    calls.join_all().await;
    assert_eq!(bed.probe().count("began:s"), 40);
}
