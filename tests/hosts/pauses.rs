//! Processes that pause: a handler that blocks its worker, a client that blocks while it reads, a
//! process that is stopped. Silence does not mean death (R24), so no call is lost. A keep-alive
//! that the program has set ends a call as over tonic's own channel.

use std::time::Duration;

use tonic::{Code, Request};
use tonic_rdma::Context;
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::service::script::{echo, hang, send_many, steps};

use crate::client::{
    Client, SIZES, assert_all_succeed, connect_here, echo_one, echoes, endpoint, one_thread,
    own_path, path_of,
};
use crate::server::{ACT, KEEP_ALIVE, PAUSE, Server, signal};

const SECOND: Duration = Duration::from_secs(1);

/// Checks that no call has left the path, and no connection was lost.
fn assert_kept(fabric: Fabric, channel: &AnyChannel) {
    let path = path_of(channel);
    assert!(path.starts_with(own_path(fabric)), "{path}");
    if let AnyChannel::Rdma(channel) = channel {
        let stats = channel.stats();
        assert_eq!(
            (stats.connections_lost, stats.calls_tcp > 0),
            (0, fabric == Fabric::Tcp),
            "{path}"
        );
    }
}

pub async fn a_handler_that_blocks_its_worker(fabric: Fabric) {
    let server = Server::start(fabric, "", "one-thread").await;
    let (channel, client) = connect_here(fabric, server.at).await;
    echo_one(client.clone(), 10).await.unwrap();
    let mut blocking = Request::new(steps("", [echo(1)]).with_payload(1, 10));
    blocking.metadata_mut().insert(ACT, "block".parse().unwrap());
    let mut blocked = client.clone();
    let blocked = tokio::spawn(async move { blocked.unary(blocking).await });
    // The handler blocks by now, and these calls wait behind it.
    tokio::time::sleep(SECOND).await;
    assert_all_succeed(echoes(&client)).await;
    blocked.await.unwrap().unwrap();
    assert_kept(fabric, &channel);
}

pub async fn a_client_that_blocks_while_it_reads(fabric: Fabric) {
    let server = Server::start(fabric, "", "").await;
    let at = server.at;
    let blocking = move || {
        one_thread().block_on(async {
            let (channel, mut client) = connect_here(fabric, at).await;
            const MESSAGES: u64 = 40;
            let request = steps("", [send_many(0, 300_000, MESSAGES)]);
            let mut replies = client.download(request).await.unwrap().into_inner();
            let calls = echoes(&client);
            for seed in 0..MESSAGES {
                if seed == 3 {
                    std::thread::sleep(PAUSE);
                }
                let reply = with_timeout("a message", replies.message()).await.unwrap();
                reply.unwrap().expect(seed, 300_000);
            }
            assert_eq!(replies.message().await.unwrap().map(|_| ()), None);
            assert_all_succeed(calls).await;
            assert_kept(fabric, &channel);
        });
    };
    // A thread that does not belong to the test's runtime.
    let thread = std::thread::spawn(blocking);
    tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
}

pub async fn a_stopped_server(fabric: Fabric) {
    let server = Server::start(fabric, "", "").await;
    let (channel, client) = connect_here(fabric, server.at).await;
    assert_all_succeed(echoes(&client)).await;
    let running = echoes(&client);
    server.signal("STOP");
    let later = echoes(&client);
    tokio::time::sleep(PAUSE).await;
    server.signal("CONT");
    assert_all_succeed(running).await;
    assert_all_succeed(later).await;
    assert_kept(fabric, &channel);
}

/// With the same settings of the keep-alive, a stopped server ends a call with the same status over
/// every fabric.
pub async fn a_keep_alive_ends_a_pause(fabric: Fabric) {
    let server = Server::start(fabric, "", "").await;
    let channel = if fabric == Fabric::Stock {
        let uri = format!("http://{}", server.at);
        let endpoint = tonic::transport::Endpoint::from_shared(uri).unwrap();
        let endpoint = endpoint.http2_keep_alive_interval(SECOND).keep_alive_timeout(SECOND);
        AnyChannel::Stock(endpoint.connect().await.unwrap())
    } else {
        let endpoint = endpoint(fabric, server.at, &Context::builder().build());
        let endpoint = endpoint.http2_keep_alive_interval(SECOND).keep_alive_timeout(SECOND);
        AnyChannel::Rdma(endpoint.connect().await.unwrap())
    };
    let path = path_of(&channel);
    assert!(path.starts_with(own_path(fabric)), "{path}");
    // A running process answers, so the keep-alive does not end a long call.
    let mut lasting = client_of(channel);
    let mut gated = Box::pin(lasting.unary(steps("", [hang()])));
    let waited = tokio::time::timeout(SECOND * 4, &mut gated).await;
    assert!(waited.is_err(), "{waited:?}");
    server.signal("STOP");
    let status = with_timeout("the end of the call", gated).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    if fabric.fast().is_some() {
        assert!(status.message().contains("timed out"), "the message tells why: {status:?}");
    }
    server.signal("CONT");
}

/// With the same settings of the keep-alive, a server ends the calls of a stopped client over every
/// fabric.
pub async fn a_servers_keep_alive_ends_a_pause(fabric: Fabric) {
    let server = Server::start(fabric, "", "keep-alive").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    client.is_on_its_path().await;
    // A running process answers, so the keep-alive does not end a long call.
    let waited = tokio::time::timeout(KEEP_ALIVE * 4, client.ask("hang")).await;
    assert!(waited.is_err(), "{waited:?}");
    signal(&client.process, "STOP");
    tokio::time::sleep(PAUSE).await;
    signal(&client.process, "CONT");
    // The guide tells which statuses tonic gives the calls of a lost connection.
    let expected: &[_] = match fabric.fast() {
        Some(_) => &["Err(Unavailable)"],
        None => &["Err(Unavailable)", "Err(Unknown)", "Err(Internal)"],
    };
    let status = client.answer().await;
    assert!(expected.contains(&&*status), "{status}");
}

/// A graceful shutdown waits until a client has been told of it, over every fabric.
pub async fn a_shutdown_waits_for_a_stopped_client(fabric: Fabric) {
    let mut server = Server::start(fabric, "", "").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    client.echo(&SIZES).await;
    client.is_on_its_path().await;
    signal(&client.process, "STOP");
    server.shut_down().await;
    let waited = tokio::time::timeout(PAUSE, server.process.read_line()).await;
    assert!(waited.is_err(), "{waited:?}");
    signal(&client.process, "CONT");
    assert_eq!(server.process.read_line().await, "ended");
}
