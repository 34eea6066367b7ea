//! Properties of the fast path only: which operation carries the bytes, and what a peer is denied.

use rcgen::CertifiedKey;
use tonic::service::InterceptorLayer;
use tonic::{Code, Request, Status};
use tonic_rdma::{
    Certificate, ClientTlsConfig, Identity, Path, Policy, ReasonCode, ServerTlsConfig,
};
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::harness::server::stop;
use tonic_rdma_tests::harness::{Server, TestEnv, client_of};
use tonic_rdma_tests::service::Scripted;
use tonic_rdma_tests::service::script::{echo, gate, send, send_many, steps};
use tonic_rdma_tests::{connect, serve};

cases![for Some(Fabric::FAST);
    connections_beyond_the_pool_use_tcp,
    bulk_goes_by_write,
    small_messages_go_by_send,
    header_blocks_have_a_limit,
    offer_passes_through_layers,
    who_is_kept_out_gets_no_fast_path,
    tls_keeps_calls_off_rdma_unless_both_ends_agree,
];

const MIB: usize = 1 << 20;

async fn bulk_goes_by_write(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut client = client_of(channel.clone());
    for seed in 0..4 {
        let request = steps("", [echo(1)]).with_payload(seed, 8 * MIB);
        client.unary(request).await.unwrap().into_inner().expect(seed, 8 * MIB);
    }
    let stats = channel.rdma().stats();
    assert!(stats.bytes_sent_write >= 4 * 8 * MIB as u64, "{stats:?}");
    assert!(stats.bytes_received_write >= 4 * 8 * MIB as u64, "{stats:?}");
    assert!(stats.write_share() >= 0.99, "{stats:?}");
    assert_eq!(
        (stats.calls_fast, stats.bytes_sent_tcp, stats.bytes_received_tcp),
        (4, 0, 0),
        "{stats:?}"
    );
}

async fn connections_beyond_the_pool_use_tcp(env: &TestEnv) {
    env.may_fall_back();
    let server = env.server().await;
    let endpoint = env.endpoint_for_few(server.uri()).policy(Policy::Auto);
    let mut channels = Vec::new();
    let reason = loop {
        let channel = endpoint.connect().await.unwrap();
        let info = channel.path();
        channels.push(channel);
        if let Some(reason) = info.reason {
            break reason;
        }
    };
    assert_eq!(reason.code(), ReasonCode::PoolExhausted, "{reason}");
    assert!(channels.len() > 2, "{}: {reason}", channels.len());
    // All of the connections work, each over its own path.
    for (seed, channel) in (0..).zip(&channels) {
        let mut client = client_of(AnyChannel::Rdma(channel.clone()));
        let request = steps("", [echo(1)]).with_payload(seed, 100_000);
        client.unary(request).await.unwrap().into_inner().expect(seed, 100_000);
    }
    // A closed connection frees its memory for the next one.
    let mut last = channels.pop().unwrap();
    drop(channels);
    while last.path().path == Path::Tcp {
        last.path_changed().await;
    }
}

async fn small_messages_go_by_send(env: &TestEnv) {
    let server = env.server().await;
    let channel = connect!(env, server);
    let mut client = client_of(channel.clone());
    for seed in 0..100 {
        let request = steps("", [echo(1)]).with_payload(seed, 64);
        client.unary(request).await.unwrap().into_inner().expect(seed, 64);
    }
    let stats = channel.rdma().stats();
    assert_eq!((stats.bytes_sent_write, stats.bytes_received_write), (0, 0), "{stats:?}");
    assert!(stats.bytes_sent_send >= 6400 && stats.bytes_received_send >= 6400, "{stats:?}");
    assert_eq!((stats.calls_fast, stats.calls_tcp), (100, 0), "{stats:?}");
}

async fn header_blocks_have_a_limit(env: &TestEnv) {
    let (_server, mut client) = env.pair().await;
    for size in [70_000, 300_000] {
        let mut request = Request::new(steps("over", [send(1, 1)]));
        request.metadata_mut().insert("x-large", "v".repeat(size).parse().unwrap());
        let status = client.unary(request).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        assert_eq!(env.probe().count("began:over"), 0);
    }
    client.unary(steps("", [send(2, 2)])).await.unwrap().into_inner().expect(2, 2);
}

/// Admits only calls that carry the token.
fn guard(request: Request<()>) -> Result<Request<()>, Status> {
    match request.metadata().get("authorization") {
        Some(token) if token == "Bearer ann" => Ok(request),
        _ => Err(Status::unauthenticated("who are you?")),
    }
}

fn with_token(mut request: Request<()>) -> Result<Request<()>, Status> {
    request.metadata_mut().insert("authorization", "Bearer ann".parse().unwrap());
    Ok(request)
}

async fn offer_passes_through_layers(env: &TestEnv) {
    let server = serve!(env, |server| server
        .layer(InterceptorLayer::new(guard))
        .add_service(Scripted::server(env.probe())));
    let endpoint = env.rdma_endpoint(server.uri()).offer_interceptor(with_token);
    let channel = endpoint.connect().await.unwrap();
    env.check_channel(&channel);
    let mut client = client_of(AnyChannel::Rdma(channel));
    let mut request = Request::new(steps("", [send_many(1, 10, 1)]));
    request = with_token(request.map(drop)).unwrap().map(|()| steps("", [send(1, 10)]));
    client.unary(request).await.unwrap().into_inner().expect(1, 10);
    // The ticket does not authenticate calls, so each call is checked.
    let status = client.unary(steps("never", [gate("never")])).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(env.probe().count("began:never"), 0);
}

async fn who_is_kept_out_gets_no_fast_path(env: &TestEnv) {
    let server = serve!(env, |server| server
        .layer(InterceptorLayer::new(guard))
        .add_service(Scripted::server(env.probe())));
    let error = env.rdma_endpoint(server.uri()).connect().await.unwrap_err();
    let text = format!("{error:?} {error}");
    assert!(text.contains("who are you?"), "{text}");
    // With the token, the client gets the fast path.
    let endpoint = env.rdma_endpoint(server.uri()).offer_interceptor(with_token);
    let channel = endpoint.connect().await.unwrap();
    env.check_channel(&channel);
    let mut client = client_of(AnyChannel::Rdma(channel));
    let request = with_token(Request::new(())).unwrap().map(|()| steps("", [send(1, 10)]));
    client.unary(request).await.unwrap().into_inner().expect(1, 10);
}

/// Nothing encrypts what RDMA carries, so calls that TLS would protect take RDMA only if both
/// programs say so. Shared memory leaves no host, and carries them in any case.
async fn tls_keeps_calls_off_rdma_unless_both_ends_agree(env: &TestEnv) {
    env.may_fall_back();
    let CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let identity = Identity::from_pem(cert.pem(), signing_key.serialize_pem());
    let fast = env.fabric().fast().unwrap();
    for (server_agrees, client_agrees) in
        [(false, false), (true, false), (false, true), (true, true)]
    {
        let router = env
            .rdma_server()
            .policy(Policy::Auto)
            .tls_config(ServerTlsConfig::new().identity(identity.clone()))
            .unwrap()
            .plaintext_rdma(server_agrees)
            .layer(env.log().layer())
            .add_service(Scripted::server(env.probe()));
        let (listening, (stop, stopped)) = (env.listen().await, stop());
        let serving = router.serve_with_incoming_shutdown(listening.incoming, stopped);
        let server = Server::spawn(listening.addr, stop, serving);
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(cert.pem()));
        let channel = env
            .rdma_endpoint(format!("https://{}", listening.addr))
            .policy(Policy::Auto)
            .tls_config(tls.domain_name("localhost"))
            .unwrap()
            .plaintext_rdma(client_agrees)
            .connect()
            .await
            .unwrap();
        let info = channel.path();
        if fast == Path::Shm || server_agrees && client_agrees {
            assert_eq!(info.path, fast, "{:?}", info.reason);
        } else {
            assert_eq!(info.path, Path::Tcp);
            let reason = info.reason.unwrap();
            assert_eq!(reason.code(), ReasonCode::NotEncrypted, "{reason}");
        }
        let mut client = client_of(AnyChannel::Rdma(channel.clone()));
        let request = steps("", [echo(1)]).with_payload(1, 300_000);
        client.unary(request).await.unwrap().into_inner().expect(1, 300_000);
        let (stats, is_fast) = (channel.stats(), info.path == fast);
        let calls = (u64::from(is_fast), u64::from(!is_fast));
        assert_eq!((stats.calls_fast, stats.calls_tcp), calls, "{stats:?}");
        drop(server);
    }
}
