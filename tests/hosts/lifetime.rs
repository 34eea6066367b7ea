//! A server that is killed and started again, and a server that ends old connections.

use std::collections::BTreeSet;
use std::time::Duration;

use tonic::Request;
use tonic_rdma_tests::fabric::Fabric;
use tonic_rdma_tests::load::poll_until;
use tonic_rdma_tests::pb::Script;

use crate::client::{Client, connect_here};
use crate::server::Server;

/// Calls fail with the status of a lost connection while there is no server. Then they succeed, on
/// the same channel, which returns to its path.
pub async fn killed_and_started_again(fabric: Fabric) {
    let mut server = Server::start(fabric, "", "").await;
    let mut client = Client::start(&server, fabric, "", "").await;
    for _ in 0..5 {
        client.echo(&[10, 300_000]).await;
        server = server.start_again().await;
        let client = tokio::sync::Mutex::new(&mut client);
        let call = || async { client.lock().await.ask("lost 300000").await };
        poll_until("no call succeeds", call, |end| {
            assert!(end == "ok" || end == "lost", "{end}");
            end == "ok"
        })
        .await;
        client.lock().await.returns().await;
    }
    client.is_on_its_path().await;
}

/// A server ends connections because of their age, without failing a call.
pub async fn connections_of_limited_age(fabric: Fabric) {
    let server = Server::start(fabric, "", "ages").await;
    let (_channel, mut client) = connect_here(fabric, server.at).await;
    // Each connection has its own port.
    let mut connections = BTreeSet::new();
    while connections.len() < 4 {
        let describing = Script { describe: true, ..Script::default() };
        let reply = match client.unary(Request::new(describing.into())).await {
            Ok(reply) => reply,
            // A call that meets the end of an HTTP/2 connection may fail.
            Err(status) if fabric.fast().is_none() => {
                println!("{fabric:?}: {status}");
                continue;
            }
            Err(status) => panic!("{status:?}"),
        };
        let from = reply.metadata().get("seen-remote-addr").unwrap();
        connections.insert(from.to_str().unwrap().to_owned());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
