//! Unread streams. On the fast path, the heap of both ends stays within its bounds, and small calls
//! continue. Over TCP, as with tonic, the connection's window is used up, and small calls wait
//! until a stream is read or dropped.

use std::time::Duration;

use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::Client as Stub;
use tonic_rdma_tests::load::with_timeout;
use tonic_rdma_tests::service::script::{hang, send_many, steps};

use crate::HEAP;
use crate::client::{Client, Here, connect_here, echo_one};
use crate::server::Server;

const STREAMS: usize = 1000;
/// Maximum bytes of messages that the server creates at the same time: one message for each stream,
/// as with tonic. The limit on unread bytes is lower, and the memory of a guest's process is
/// larger.
const MOST_HELD: usize = 160 << 20;
/// Number of streams over TCP, which is more than is needed to use up the connection's window.
const STREAMS_OF_TCP: usize = 100;
/// Bytes that the server sends on each stream.
const EACH: usize = 4 << 20;
/// Maximum bytes of the client's heap that unread messages take. All streams share 64 MiB, in
/// buffers of 1.5 times that size. Each has a floor of 32 KiB, in buffers of twice that size, and
/// less than 32 KiB for its state.
const fn most_unread(streams: usize) -> usize {
    (96 << 20) + streams * (3 * (32 << 10))
}
/// Maximum server memory for unsent bytes. All streams share 16 MiB. Each stream has a floor of 64
/// KiB, which it may exceed by a message, or by as much as tonic encodes at a time. By then it has
/// taken one more message. The buffers of tonic's encoder are half as long again.
fn most_unsent(streams: usize, size: usize) -> usize {
    let unsent = (16 << 20) + streams * ((64 << 10) + 2 * size.max(32 << 10));
    unsent + unsent / 2
}
/// How long a call waits over TCP.
const A_WHILE: Duration = Duration::from_secs(2);

fn streams(fabric: Fabric, size: usize) -> usize {
    match fabric.fast() {
        Some(_) => STREAMS.min(MOST_HELD / size),
        None => STREAMS_OF_TCP,
    }
}

/// Opens streams of messages of this size without reading them, and then reads the last one.
pub async fn answer(here: &Here, size: usize) -> String {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let fast = here.fabric.fast().is_some();
    let streams = streams(here.fabric, size);
    let (mut client, mut unread) = (here.stub(), Vec::new());
    for seed in 0..streams as u64 {
        let request = steps("", [send_many(seed, size, (EACH / size) as u64)]);
        let call = with_timeout("a head", client.download(request)).await;
        unread.push((seed, call.unwrap().into_inner()));
    }
    if fast {
        for _ in 0..1000 {
            with_timeout("a small call", echo_one(here.stub(), 100)).await.unwrap();
        }
    } else {
        let mut small = Box::pin(echo_one(here.stub(), 100));
        let end = tokio::time::timeout(A_WHILE, &mut small).await;
        assert!(end.is_err(), "a small call has the window to itself: {end:?}");
        unread.truncate(1);
        with_timeout("a small call, with room in the window", small).await.unwrap();
    }
    let grown = HEAP.peak_usage() - before;
    assert!(grown <= most_unread(streams), "{} MiB of heap", grown >> 20);
    // Messages for a waiting reader arrive, whatever the other streams hold.
    let (seed, mut last) = unread.pop().unwrap();
    for n in 0..(EACH / size) as u64 {
        let message = with_timeout("a message", last.message()).await.unwrap();
        message.unwrap().expect(seed + n, size);
    }
    format!("{} MiB of heap at most", grown >> 20)
}

/// Default maximum number of concurrent streams of a connection on the fast path.
const MAX_STREAMS: usize = 1024;

/// If streams are limited, further calls wait until another has ended. Over TCP, as with tonic,
/// they are unlimited.
pub async fn streams_at_a_time(fabric: Fabric) {
    let server = Server::start(fabric, "", "").await;
    let (_channel, client) = connect_here(fabric, server.at).await;
    let open = async |mut client: Stub| client.download(steps("", [hang()])).await.unwrap();
    let mut streams = Vec::new();
    for _ in 0..MAX_STREAMS {
        streams.push(with_timeout("a stream within the limit", open(client.clone())).await);
    }
    let mut next = Box::pin(open(client.clone()));
    if fabric.fast().is_some() {
        let waits = tokio::time::timeout(A_WHILE, &mut next).await;
        assert!(waits.is_err(), "more than {MAX_STREAMS} streams");
        streams.pop();
    }
    with_timeout("one more stream", next).await;
}

async fn nobody_reads(fabric: Fabric, size: usize) {
    let mut server = Server::start(fabric, "", "").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    let heap = client.ask(&format!("unread {size}")).await;
    assert!(heap.ends_with("of heap at most"), "{heap}");
    client.is_on_its_path().await;
    let [_, over_tcp, lost] = client.counts().await;
    assert_eq!((over_tcp > 0, lost), (fabric == Fabric::Tcp, 0));
    let of_server: usize = server.process.ask("heap").await.parse().unwrap();
    let most = most_unsent(streams(fabric, size), size);
    assert!(fabric.fast().is_none() || of_server <= most, "{} MiB of heap", of_server >> 20);
    println!("{fabric}, {size} bytes: {heap}, {} MiB of the server's", of_server >> 20);
}

pub async fn small_messages(fabric: Fabric) {
    nobody_reads(fabric, 4000).await;
}

pub async fn medium_messages(fabric: Fabric) {
    nobody_reads(fabric, 100_000).await;
}

pub async fn large_messages(fabric: Fabric) {
    nobody_reads(fabric, EACH).await;
}
