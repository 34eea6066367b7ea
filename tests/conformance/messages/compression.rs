//! Messages that tonic compresses, in either direction.

use bytes::Bytes;
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::codec::CompressionEncoding::Gzip;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::{Message, Script};
use tonic_rdma_tests::serve;
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{echo, echo_all, payload, send, send_many, steps};

cases![both_directions, requests_only, replies_only, streams, not_accepted, large_and_compressible];

async fn both_directions(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).accept_compressed(Gzip).send_compressed(Gzip)));
    let client = env.client(&server).await;
    let mut client = client.send_compressed(Gzip).accept_compressed(Gzip);
    let script = Script { describe: true, steps: vec![echo(1)], ..Script::default() };
    for size in [0, 10, 5000, 200_000] {
        let request = Message::from(script.clone()).with_payload(4, size);
        let response = client.unary(request).await.unwrap();
        let encoding = |key| response.metadata().get(key).unwrap().to_str().unwrap();
        assert_eq!(encoding("seen-encoding"), "gzip");
        assert_eq!(encoding("grpc-encoding"), "gzip");
        response.get_ref().expect(4, size);
    }
}

async fn requests_only(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).accept_compressed(Gzip)));
    let mut client = env.client(&server).await.send_compressed(Gzip);
    let script = Script { describe: true, steps: vec![echo(1)], ..Script::default() };
    let request = Message::from(script).with_payload(4, 5000);
    let response = client.unary(request).await.unwrap();
    assert_eq!(response.metadata().get("seen-encoding").unwrap(), "gzip");
    assert!(response.metadata().get("grpc-encoding").is_none());
    response.get_ref().expect(4, 5000);
}

async fn replies_only(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).send_compressed(Gzip)));
    let plain = env.client(&server).await;
    let mut accepting = plain.clone().accept_compressed(Gzip);
    let response = accepting.unary(steps("", [send(1, 5000)])).await.unwrap();
    assert_eq!(response.metadata().get("grpc-encoding").unwrap(), "gzip");
    response.get_ref().expect(1, 5000);
    // A client that does not accept the encoding gets uncompressed messages.
    let mut plain = plain;
    let response = plain.unary(steps("", [send(1, 5000)])).await.unwrap();
    assert!(response.metadata().get("grpc-encoding").is_none());
    response.get_ref().expect(1, 5000);
}

async fn streams(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).accept_compressed(Gzip).send_compressed(Gzip)));
    let client = env.client(&server).await;
    let mut client = client.send_compressed(Gzip).accept_compressed(Gzip);
    let mut replies =
        client.download(steps("", [send_many(1, 3000, 20)])).await.unwrap().into_inner();
    for seed in 1..=20 {
        replies.message().await.unwrap().unwrap().expect(seed, 3000);
    }
    assert_eq!(replies.message().await.unwrap(), None);
    let sent = (1..=20).map(|seed| payload(seed, 500 * seed as usize));
    let stream = tokio_stream::once(steps("", [echo_all()])).chain(tokio_stream::iter(sent));
    let mut replies = client.chat(stream).await.unwrap().into_inner();
    replies.message().await.unwrap().unwrap().expect(0, 0);
    for seed in 1..=20 {
        let reply = replies.message().await.unwrap().unwrap();
        reply.expect(seed, 500 * seed as usize);
    }
    assert_eq!(replies.message().await.unwrap(), None);
}

async fn not_accepted(env: &TestEnv) {
    let (_server, client) = env.pair().await;
    let mut compressing = client.clone().send_compressed(Gzip);
    let status = compressing.unary(steps("", [send(1, 1)])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    let mut plain = client;
    plain.unary(steps("", [send(1, 1)])).await.unwrap().into_inner().expect(1, 1);
}

async fn large_and_compressible(env: &TestEnv) {
    let server = serve!(env, |server| server
        .add_service(Scripted::server(env.probe()).accept_compressed(Gzip).send_compressed(Gzip)));
    let client = env.client(&server).await;
    let mut client = client.send_compressed(Gzip).accept_compressed(Gzip);
    // The pattern repeats after 65,521 bytes, which is beyond gzip's window, so only the script
    // shrinks.
    let mut request = steps(&"a".repeat(2_000_000), [echo(1)]);
    request = request.with_payload(6, 1000);
    client.unary(request).await.unwrap().into_inner().expect(6, 1000);
    let zeros = Message { payload: Bytes::new(), ..steps("", [send(6, 1 << 20)]) };
    client.unary(zeros).await.unwrap().into_inner().expect(6, 1 << 20);
}
