//! A build without RDMA and shared memory, as on systems other than Linux. Calls go over TCP, and
//! every request for more is refused with the reason `platform`.

use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic_rdma::{Endpoint, Path, Policy, Reason, ReasonCode, Server, diagnose};

/// The reason of an error, which must say what to do.
fn reason(error: &(dyn std::error::Error + 'static)) -> ReasonCode {
    let reason = Reason::of(error).unwrap_or_else(|| panic!("no reason: {error:?}"));
    assert!(reason.cure().contains("Linux"), "{reason:?}");
    reason.code()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let found = diagnose().await.expect("a diagnosis");
    assert!(!found.rdma && !found.library.found, "{found:?}");
    assert_eq!(found.reason.expect("a reason").code(), ReasonCode::Platform);

    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let url = format!("http://{}", incoming.local_addr().expect("an address"));
    let server = Server::builder().add_routes(Routes::default());
    tokio::spawn(server.serve_with_incoming(incoming));
    let endpoint = || Endpoint::from_shared(url.clone()).expect("a URL");

    let channel = endpoint().connect().await.expect("a channel");
    let path = channel.path();
    assert_eq!(path.path, Path::Tcp);
    assert_eq!(path.reason.expect("a reason").code(), ReasonCode::Platform);

    for policy in [Policy::Require, Policy::RequireVerbs] {
        let error = endpoint().policy(policy).connect().await.expect_err("a refusal");
        assert_eq!(reason(&error), ReasonCode::Platform, "client, {policy:?}");
        let mut server = Server::builder().policy(policy);
        let serving = server.add_routes(Routes::default()).serve(([127, 0, 0, 1], 0).into());
        let error = serving.await.expect_err("a refusal");
        assert_eq!(reason(&error), ReasonCode::Platform, "server, {policy:?}");
    }
}
