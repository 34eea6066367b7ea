//! Messages of every size in both directions, and the limits on them.

use prost::Message as _;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::conformance_client::ConformanceClient;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{
    echo, echo_all, gate, payload, receive, receive_all, send, steps, summary,
};
use tonic_rdma_tests::{connect, serve};

cases![
    around_powers_of_two,
    around_powers_of_two_streamed,
    every_small_size,
    one_mebibyte,
    sixty_four_mebibytes_up,
    sixty_four_mebibytes_down,
    sixty_four_mebibytes_in_a_chat,
    sixteen_mebibytes_echoed,
    mixed_sizes_in_one_stream,
    exactly_the_limit,
    over_the_callers_limit,
    over_the_handlers_limit,
    over_the_default_limit,
    over_the_encoding_limit,
];

const MIB: usize = 1 << 20;

/// Sizes from 64 bytes to 2 MiB around every power of two. A transport compares its thresholds with
/// more than the payload: framing, tags and headers add a few dozen bytes. So the sweep reaches
/// further below a power of two than above.
fn around_thresholds() -> Vec<usize> {
    let mut sizes = vec![0, 1];
    for k in 6..=21 {
        let power: usize = 1 << k;
        let below: Vec<usize> =
            if k <= 16 { (0..=40).collect() } else { vec![40, 24, 16, 8, 1, 0] };
        sizes.extend(below.into_iter().map(|d| power - d));
        sizes.extend([power + 1, power + 2]);
    }
    sizes
}

async fn around_powers_of_two(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for (seed, size) in (0..).zip(around_thresholds()) {
        let request = steps("", [echo(1)]).with_payload(seed, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, size);
    }
}

async fn around_powers_of_two_streamed(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let sizes = around_thresholds();
    let sent = sizes.clone().into_iter().zip(1..).map(|(size, seed)| payload(seed, size));
    let stream = tokio_stream::once(steps("", [echo_all()])).chain(tokio_stream::iter(sent));
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 0);
    for (size, seed) in sizes.into_iter().zip(1..) {
        replies.message().await.unwrap().unwrap().expect(seed, size);
    }
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn every_small_size(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for size in 0..600 {
        let request = steps("", [echo(1)]).with_payload(size as u64, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(size as u64, size);
    }
}

async fn one_mebibyte(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for seed in 0..10 {
        let request = steps("", [echo(1)]).with_payload(seed, MIB);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, MIB);
    }
}

async fn sixty_four_mebibytes_up(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("", [receive(1), summary()]).with_payload(1, 64 * MIB);
    let reply = client.unary(request).await.unwrap().into_inner();
    assert_eq!((reply.count, reply.total), (1, 64 * MIB as u64));
}

async fn sixty_four_mebibytes_down(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let request = steps("", [send(2, 64 * MIB)]);
    let reply = client.unary(request).await.unwrap().into_inner();
    reply.expect(2, 64 * MIB);
}

async fn sixty_four_mebibytes_in_a_chat(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    // Small, huge, small: a huge message does not disturb the next one.
    let stream = tokio_stream::once(steps("", [echo_all()]))
        .chain(tokio_stream::iter([payload(1, 64 * MIB), payload(2, 3)]));
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 0);
    replies.message().await.unwrap().unwrap().expect(1, 64 * MIB);
    replies.message().await.unwrap().unwrap().expect(2, 3);
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn sixteen_mebibytes_echoed(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for (seed, size) in [(1, 16 * MIB), (2, 16 * MIB - 1), (3, 16 * MIB + 1)] {
        let request = steps("", [echo(1)]).with_payload(seed, size);
        let reply = client.unary(request).await.unwrap().into_inner();
        reply.expect(seed, size);
    }
}

async fn mixed_sizes_in_one_stream(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let sizes = [0, 5 * MIB, 1, 70_000, 2 * MIB, 100, 4096, 0, 65_536, 3 * MIB + 7, 16_384, 12];
    let script = sizes.into_iter().zip(1..).map(|(size, seed)| send(seed, size));
    let request = steps("", script.collect::<Vec<_>>());
    let mut replies = client.download(request).await.unwrap().into_inner();
    for (size, seed) in sizes.into_iter().zip(1..) {
        replies.message().await.unwrap().unwrap().expect(seed, size);
    }
    assert_eq!(replies.message().await.unwrap(), None);
    let sent = sizes.into_iter().zip(1..).map(|(size, seed)| payload(seed, size));
    let stream = tokio_stream::once(steps("", [receive_all(), summary()]))
        .chain(tokio_stream::iter(sent.collect::<Vec<_>>()));
    let reply = client.upload(stream).await.unwrap().into_inner();
    let total: usize = sizes.iter().sum();
    assert_eq!((reply.count, reply.total), (13, total as u64));
}

async fn exactly_the_limit(env: &TestEnv) {
    let limit = 100_000;
    // The encoded reply is exactly as long as the limit.
    let mut size = limit;
    while payload(1, size).encoded_len() > limit {
        size -= 1;
    }
    assert_eq!(payload(1, size).encoded_len(), limit);
    let (_server, client) = env.pair().await;
    let mut client = client.max_decoding_message_size(limit);
    let request = steps("", [send(1, size)]);
    let reply = client.unary(request).await.unwrap().into_inner();
    reply.expect(1, size);
    let request = steps("", [send(1, size + 1)]);
    let status = client.unary(request).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
}

async fn over_the_callers_limit(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut limited = client.clone().max_decoding_message_size(1000);
    for size in [1000, 70_000, 10 * MIB] {
        let status = limited.unary(steps("", [send(1, size)])).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{size}");
        assert!(status.message().contains("the limit is: 1000 bytes"), "{}", status.message());
        let script = [send(1, 10), send(2, size)];
        let mut replies = limited.download(steps("", script)).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap().expect(1, 10);
        let status = replies.message().await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{size}");
    }
    still_works(client).await;
}

async fn over_the_handlers_limit(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).max_decoding_message_size(1000)));
    let mut client = env.client(&server).await;
    for size in [1000, 70_000, 10 * MIB] {
        let request = steps("", [echo(1)]).with_payload(1, size);
        let status = client.unary(request).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{size}");
        assert!(status.message().contains("the limit is: 1000 bytes"), "{}", status.message());
        let stream = tokio_stream::once(steps("", [receive_all()]))
            .chain(tokio_stream::once(payload(2, size)));
        let status = client.upload(stream).await.unwrap_err();
        assert_eq!(status.code(), Code::OutOfRange, "{size}");
    }
    still_works(client).await;
}

async fn over_the_default_limit(env: &TestEnv) {
    let server =
        serve!(env, |server| server.add_service(Scripted::server_with_default_limits(env.probe())));
    let mut client = ConformanceClient::new(connect!(env, server));
    let request = steps("", [receive(1), summary()]).with_payload(1, 4 * MIB);
    let status = client.unary(request).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    let status = client.unary(steps("", [send(1, 4 * MIB)])).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    // A message well below the limit passes both ways.
    let request = steps("", [echo(1)]).with_payload(1, 4 * MIB - 100);
    let reply = client.unary(request).await.unwrap().into_inner();
    reply.expect(1, 4 * MIB - 100);
}

async fn over_the_encoding_limit(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).max_encoding_message_size(1000)));
    let client = env.client(&server).await;
    let mut unlimited = client.clone();
    let status = unlimited.unary(steps("", [send(1, 2000)])).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    let script = [send(1, 10), gate("more"), send(2, 2000)];
    let mut replies = unlimited.download(steps("", script)).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    env.probe().open("more");
    let status = replies.message().await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange);
    // The caller's own limit fails the call before the handler sees a message.
    let mut limited = client.clone().max_encoding_message_size(1000);
    let request = steps("never", [echo(1)]).with_payload(1, 2000);
    limited.unary(request).await.unwrap_err();
    assert_eq!(env.probe().count("began:never"), 0);
    still_works(client).await;
}

async fn still_works(mut client: tonic_rdma_tests::harness::Client) {
    let reply = client.unary(steps("", [send(5, 500)])).await.unwrap();
    reply.into_inner().expect(5, 500);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_sweep_meets_every_edge() {
        let sizes = super::around_thresholds();
        for edge in [0, 1, 63, 64, 65, 4095, 4096, 4097, 65_535, 65_537, (1 << 21) + 1] {
            assert!(sizes.contains(&edge), "{edge}");
        }
    }
}
