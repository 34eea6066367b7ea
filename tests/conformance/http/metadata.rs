//! Metadata in both directions: ASCII and binary, repeated keys, order, heads and trailers.

use bytes::Bytes;
use tonic::metadata::{KeyAndValueRef, MetadataMap};
use tonic::{Code, Request};
use tonic_rdma_tests::connect;
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::{Entry, Message, Script, Step};
use tonic_rdma_tests::service::append;
use tonic_rdma_tests::service::script::{entries, fail_with, gate, send};

cases![
    ascii_reaches_handler_and_comes_back,
    binary_reaches_handler_and_comes_back,
    repeated_keys_keep_their_order,
    many_entries,
    head_comes_before_messages,
    trailers_of_a_stream,
    trailers_of_a_refusal,
    user_agent_and_reserved_keys,
];

/// The entries whose keys begin with `prefix`, in order, with decoded values.
fn with_prefix(metadata: &MetadataMap, prefix: &str) -> Vec<(String, Bytes)> {
    metadata
        .iter()
        .filter_map(|entry| {
            let (key, value) = match entry {
                KeyAndValueRef::Ascii(key, value) => {
                    (key.as_str(), Bytes::copy_from_slice(value.as_encoded_bytes()))
                }
                KeyAndValueRef::Binary(key, value) => (key.as_str(), value.to_bytes().unwrap()),
            };
            key.starts_with(prefix).then(|| (key.to_owned(), value))
        })
        .collect()
}

/// The values of `key`, in order.
fn values(metadata: &MetadataMap, key: &str) -> Vec<Bytes> {
    with_prefix(metadata, key)
        .into_iter()
        .filter_map(|(found, value)| (found == key).then_some(value))
        .collect()
}

fn request_with(script: Script, metadata: &[Entry]) -> Request<Message> {
    let mut request = Request::new(script.into());
    append(request.metadata_mut(), metadata);
    request
}

fn echoing(steps: Vec<Step>) -> Script {
    Script { echo_metadata: true, steps, ..Script::default() }
}

/// Sends `pairs` in a unary and a streaming call, and checks that both heads return them.
async fn round_trip(env: &TestEnv, pairs: &[(&str, &[u8])]) {
    let (_server, mut client) = env.pair().await;
    let sent = entries(pairs);
    let response = client.unary(request_with(echoing(vec![]), &sent)).await.unwrap();
    let streamed = client.download(request_with(echoing(vec![send(1, 1)]), &sent)).await.unwrap();
    for metadata in [response.metadata(), streamed.metadata()] {
        for (key, _) in pairs {
            let expected: Vec<_> = pairs.iter().filter(|(k, _)| k == key).collect();
            let got = values(metadata, key);
            assert_eq!(got.len(), expected.len(), "{key}");
            for (got, (_, expected)) in got.iter().zip(expected) {
                assert_eq!(&got[..], *expected, "{key}");
            }
        }
        assert_eq!(with_prefix(metadata, "echo-").len(), pairs.len());
    }
}

async fn ascii_reaches_handler_and_comes_back(env: &TestEnv) {
    let printable: Vec<u8> = (b'!'..=b'~').collect();
    let long = vec![b'x'; 4000];
    round_trip(
        env,
        &[
            ("echo-plain", b"value"),
            ("echo-empty", b""),
            ("echo-inner-spaces", b"a b  c"),
            ("echo-printable", &printable),
            ("echo-commas", b"a, b,c"),
            ("echo-percent", b"100%25 %zz"),
            ("echo-long", &long),
            ("echo-a_b.c-1", b"key characters"),
        ],
    )
    .await;
}

async fn binary_reaches_handler_and_comes_back(env: &TestEnv) {
    let every: Vec<u8> = (0..=255).collect();
    let long = vec![0xff; 3000];
    round_trip(
        env,
        &[
            ("echo-empty-bin", b""),
            ("echo-one-bin", b"\0"),
            ("echo-two-bin", b"\xff\xfe"),
            ("echo-three-bin", b"\n\r\0"),
            ("echo-every-bin", &every),
            ("echo-long-bin", &long),
        ],
    )
    .await;
}

async fn repeated_keys_keep_their_order(env: &TestEnv) {
    round_trip(
        env,
        &[
            ("echo-a", b"1"),
            ("echo-b", b"2"),
            ("echo-a", b"3"),
            ("echo-c-bin", b"\x04"),
            ("echo-a", b"1"),
            ("echo-c-bin", b"\x02"),
            ("echo-a", b""),
        ],
    )
    .await;
}

async fn many_entries(env: &TestEnv) {
    let keys: Vec<_> = (0..150).map(|n| format!("echo-key-{n}")).collect();
    let pairs: Vec<_> = keys.iter().map(|key| (key.as_str(), key.as_bytes())).collect();
    round_trip(env, &pairs).await;
}

async fn head_comes_before_messages(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let script = Script {
        head: entries(&[("early", b"yes"), ("early-bin", b"\0\x01")]),
        steps: vec![gate("go"), send(5, 50)],
        ..Script::default()
    };
    let response = client.download(Request::new(script.into())).await.unwrap();
    // The head arrives before the handler has sent a message.
    env.probe().seen("gate:go").await;
    assert_eq!(values(response.metadata(), "early"), [&b"yes"[..]]);
    assert_eq!(values(response.metadata(), "early-bin"), [&b"\0\x01"[..]]);
    env.probe().open("go");
    let mut replies = response.into_inner();
    replies.message().await.unwrap().unwrap().expect(5, 50);
    assert_eq!(replies.message().await.unwrap(), None);
}

const TRAILING: &[(&str, &[u8])] =
    &[("t-one", b"1"), ("t-two", b"a"), ("t-two", b"b"), ("t-raw-bin", b"\0\xff")];

fn check_trailing(metadata: &MetadataMap) {
    assert_eq!(values(metadata, "t-one"), [&b"1"[..]]);
    assert_eq!(values(metadata, "t-two"), [&b"a"[..], &b"b"[..]]);
    assert_eq!(values(metadata, "t-raw-bin"), [&b"\0\xff"[..]]);
}

async fn trailers_of_a_stream(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let script = Script {
        head: entries(&[("h-one", b"head")]),
        steps: vec![send(1, 10), fail_with(Code::Aborted, "enough", b"", TRAILING)],
        ..Script::default()
    };
    let response = client.download(Request::new(script.into())).await.unwrap();
    assert_eq!(values(response.metadata(), "h-one"), [&b"head"[..]]);
    assert_eq!(with_prefix(response.metadata(), "t-"), []);
    let mut replies = response.into_inner();
    replies.message().await.unwrap().unwrap().expect(1, 10);
    let status = replies.message().await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::Aborted, "enough"));
    check_trailing(status.metadata());
    assert_eq!(with_prefix(status.metadata(), "h-"), []);
}

async fn trailers_of_a_refusal(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    let refuse = || Script {
        before: vec![fail_with(Code::NotFound, "none", b"", TRAILING)],
        ..Script::default()
    };
    let unary = client.unary(Request::new(refuse().into())).await;
    let streamed = client.download(Request::new(refuse().into())).await;
    for status in [unary.unwrap_err(), streamed.unwrap_err()] {
        assert_eq!((status.code(), status.message()), (Code::NotFound, "none"));
        check_trailing(status.metadata());
    }
}

async fn user_agent_and_reserved_keys(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server, |endpoint| endpoint.user_agent("conformance/1").unwrap());
    let mut client = tonic_rdma_tests::harness::client_of(channel);
    let script = Script { describe: true, ..Script::default() };
    let response = client.unary(Request::new(script.into())).await.unwrap();
    let agent = response.metadata().get("seen-user-agent").unwrap();
    let agent = agent.to_str().unwrap();
    assert!(agent.starts_with("conformance/1"), "{agent}");
    // The caller sees metadata without the protocol's own entries.
    assert_eq!(
        response.metadata().get("content-type").map(|v| v.as_encoded_bytes()),
        Some(&b"application/grpc"[..])
    );
}
