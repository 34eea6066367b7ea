//! Header blocks with sizes near the limits.

use tonic::metadata::MetadataMap;
use tonic::{Code, Request};
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::{Entry, Message, Script};
use tonic_rdma_tests::service::script::{before, entries, fail_with, send, steps};
use tonic_rdma_tests::service::{Scripted, append};
use tonic_rdma_tests::{connect, serve};

cases![
    eight_kibibytes_by_default,
    sixty_kibibytes_up,
    sixty_kibibytes_down,
    sixty_kibibytes_of_trailers,
    one_large_value,
    over_the_limit_fails_one_call,
];

/// Entries that total about `bytes` as HTTP/2 counts a header block: each entry adds 32 bytes.
fn about(bytes: usize, each: usize) -> Vec<Entry> {
    let value = vec![b'v'; each];
    let one = "echo-00000".len() + each + 32;
    let keys: Vec<_> = (0..bytes / one).map(|n| format!("echo-{n:05}")).collect();
    let pairs: Vec<_> = keys.iter().map(|key| (key.as_str(), &value[..])).collect();
    entries(&pairs)
}

fn check(metadata: &MetadataMap, expected: &[Entry]) {
    let got = metadata.keys().filter(|key| match key {
        tonic::metadata::KeyRef::Ascii(key) => key.as_str().starts_with("echo-"),
        tonic::metadata::KeyRef::Binary(_) => false,
    });
    assert_eq!(got.count(), expected.len());
    for entry in expected {
        let got = metadata.get(&entry.key).unwrap();
        assert_eq!(got.as_encoded_bytes(), &entry.value[..], "{}", entry.key);
    }
}

fn echoing() -> Message {
    Script { echo_metadata: true, ..Script::default() }.into()
}

async fn eight_kibibytes_by_default(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for each in [10, 100, 1000] {
        let sent = about(8 << 10, each);
        let mut request = Request::new(echoing());
        append(request.metadata_mut(), &sent);
        let response = client.unary(request).await.unwrap();
        check(response.metadata(), &sent);
    }
}

/// A server and a client that accept blocks of 64 KiB.
async fn roomy(
    env: &TestEnv,
) -> (tonic_rdma_tests::harness::Server, tonic_rdma_tests::harness::Client) {
    let server = serve!(env, |server| server
        .http2_max_header_list_size(64 << 10)
        .add_service(Scripted::server(env.probe())));
    let channel = connect!(env, server, |endpoint| endpoint.http2_max_header_list_size(64 << 10));
    (server, tonic_rdma_tests::harness::client_of(channel))
}

async fn sixty_kibibytes_up(env: &TestEnv) {
    let (_server, mut client) = roomy(env).await;
    for each in [20, 2000] {
        let sent = about(60 << 10, each);
        let mut request = Request::new(steps("", [send(1, 1)]));
        append(request.metadata_mut(), &sent);
        client.unary(request).await.unwrap().into_inner().expect(1, 1);
        // The entries that come back equal those that were sent.
        let mut request = Request::new(echoing());
        append(request.metadata_mut(), &sent);
        let response = client.unary(request).await.unwrap();
        check(response.metadata(), &sent);
    }
}

async fn sixty_kibibytes_down(env: &TestEnv) {
    let (_server, mut client) = roomy(env).await;
    for each in [20, 2000] {
        let head = about(60 << 10, each);
        let script = Script { head: head.clone(), steps: vec![send(1, 100)], ..Script::default() };
        let response = client.unary(Request::new(script.clone().into())).await.unwrap();
        check(response.metadata(), &head);
        response.into_inner().expect(1, 100);
        let response = client.download(Request::new(script.into())).await.unwrap();
        check(response.metadata(), &head);
        let mut replies = response.into_inner();
        replies.message().await.unwrap().unwrap().expect(1, 100);
        assert_eq!(replies.message().await.unwrap(), None);
    }
}

async fn sixty_kibibytes_of_trailers(env: &TestEnv) {
    let (_server, mut client) = roomy(env).await;
    for each in [20, 2000] {
        let trailing = about(60 << 10, each);
        let pairs: Vec<_> = trailing.iter().map(|e| (e.key.as_str(), &e.value[..])).collect();
        let fail = fail_with(Code::Aborted, "large", b"", &pairs);
        let status = client.unary(before("", [fail.clone()])).await.unwrap_err();
        assert_eq!(status.code(), Code::Aborted);
        check(status.metadata(), &trailing);
        let request = steps("", [send(1, 100), fail]);
        let mut replies = client.download(request).await.unwrap().into_inner();
        replies.message().await.unwrap().unwrap().expect(1, 100);
        let status = replies.message().await.unwrap_err();
        assert_eq!(status.code(), Code::Aborted);
        check(status.metadata(), &trailing);
    }
}

async fn one_large_value(env: &TestEnv) {
    let (_server, mut client) = roomy(env).await;
    let sent = entries(&[("echo-large", &vec![b'x'; 50_000])]);
    let mut request = Request::new(echoing());
    append(request.metadata_mut(), &sent);
    let response = client.unary(request).await.unwrap();
    check(response.metadata(), &sent);
}

async fn over_the_limit_fails_one_call(env: &TestEnv) {
    let (_server, mut client) = roomy(env).await;
    for _ in 0..3 {
        let mut request = Request::new(steps("over", [send(1, 1)]));
        append(request.metadata_mut(), &about(100 << 10, 1000));
        let status = client.unary(request).await.unwrap_err();
        assert_ne!(status.code(), Code::Ok);
        assert_eq!(env.probe().count("began:over"), 0);
        let reply = client.unary(steps("", [send(2, 2)])).await.unwrap();
        reply.into_inner().expect(2, 2);
    }
}
