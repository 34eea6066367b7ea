//! An endpoint of this crate that is made from tonic's endpoint.

use tonic_rdma::{Endpoint, FabricKind, Policy};
use tonic_rdma_example_services::greeter::HelloRequest;
use tonic_rdma_example_services::greeter::greeter_client::GreeterClient;

use crate::into_tonic::serve;

/// tonic's endpoint does not reveal its settings, so they apply only to TCP.
#[tokio::test]
async fn the_user_agent_of_tonics_endpoint_applies_to_tcp() {
    let (addr, _) = serve().await;
    let uri = format!("http://{addr}");
    let tonics = tonic::transport::Endpoint::from_shared(uri).unwrap();
    let tonics = tonics.user_agent("theirs/1").unwrap();
    for (policy, path, named) in [(Policy::Require, "shm", false), (Policy::Off, "tcp", true)] {
        let endpoint = Endpoint::from(tonics.clone()).policy(policy).fabrics([FabricKind::Shm]);
        let mut client = GreeterClient::new(endpoint.connect().await.unwrap());
        let said = client.say_hello(HelloRequest::default()).await.unwrap().into_inner().message;
        assert!(said.starts_with(path), "{said}");
        assert_eq!(said.contains("theirs/1"), named, "{said}");
    }
}

/// tonic's endpoint does not reveal the path of a Unix socket, but a host in its place.
#[test]
fn the_path_of_a_unix_socket_is_not_taken_over() {
    let tonics = tonic::transport::Endpoint::from_shared("unix:/run/server.sock").unwrap();
    assert_eq!(Endpoint::from(tonics).uri().host(), Some("tonic"));
}
