//! Facts that a handler learns about its peer.

use std::net::SocketAddr;

use tonic::{Request, Response};
use tonic_rdma_tests::harness::TestEnv;
use tonic_rdma_tests::pb::Script;

cases![handlers_see_both_addresses, clients_differ];

fn describing() -> Request<tonic_rdma_tests::pb::Message> {
    Request::new(Script { describe: true, ..Script::default() }.into())
}

fn address<T>(response: &Response<T>, key: &str) -> SocketAddr {
    let value = response.metadata().get(key);
    value.unwrap_or_else(|| unreachable!("no {key}")).to_str().unwrap().parse().unwrap()
}

async fn handlers_see_both_addresses(env: &TestEnv) {
    let (server, mut client) = env.pair().await;
    let unary = client.unary(describing()).await.unwrap();
    assert_eq!(address(&unary, "seen-local-addr"), server.addr());
    let remote = address(&unary, "seen-remote-addr");
    assert_eq!(remote.ip(), server.addr().ip());
    assert_ne!(remote.port(), 0);
    let streamed = client.download(describing()).await.unwrap();
    assert_eq!(address(&streamed, "seen-remote-addr"), remote);
    assert_eq!(address(&streamed, "seen-local-addr"), server.addr());
}

async fn clients_differ(env: &TestEnv) {
    let server = env.server().await;
    let mut first = env.client(&server).await;
    let mut second = env.client(&server).await;
    let first = first.unary(describing()).await.unwrap();
    let second = second.unary(describing()).await.unwrap();
    assert_ne!(address(&first, "seen-remote-addr"), address(&second, "seen-remote-addr"));
}
